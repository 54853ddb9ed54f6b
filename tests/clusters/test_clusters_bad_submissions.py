"""Each way in which a submission can be refused is one sentence with what helps, and exit code 2; nothing is kept of
it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli import app
from plait.process_exit import exit_with_sentence

SINFO = "n1|main*|idle|4|(null)\nn2|main*|idle|4|(null)\n"
HOST_KEY = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\n"
QUOTA = 'Error from server (Forbidden): pods "x" is forbidden: exceeded quota: gpus, requested: 8, limited: 8\n'
SLURM = ("--on", "slurm", "--nodes", "2")
KUBERNETES = ("--on", "kubernetes", "--nodes", "2", "--cluster", "4x(1xserver)", "--with", "image=a:1")
SSH = ("--on", "ssh", "--machines", "ann,bob", "--with", "python=python3", "--with", "address=10.0.0.1")
CHECKED = "plait-check 3.12\nenvironment\n4\n"

Tools = dict[str, str]
"""A program's name, and what its shell does."""


def says(text: str, code: int = 1) -> str:
    return f"cat >&2 <<'END'\n{text}END\nexit {code}"


def answers(text: str) -> str:
    return f"cat <<'END'\n{text}END"


def by_word(word: str, then: str, otherwise: str) -> str:
    """What a program does where its arguments have a word, and else."""
    return f'case "$*" in *"{word}"*) {then}\n;; *) {otherwise}\n;; esac'


CASES: dict[str, tuple[tuple[str, ...], Tools, str]] = {
    "no scheduler": (
        SLURM, {}, "sinfo is not on this machine, so nothing can be asked or sent; log in where Slurm is, or describe "
        "the machines instead, for example --cluster 4x(8xH100)",
    ),
    "no sbatch": (
        (*SLURM, "--cluster", "2x(1xserver)"), {}, "sbatch is not on this machine, so nothing can be asked or sent",
    ),
    "no kubectl": (
        KUBERNETES, {}, "kubectl is not on this machine, so nothing can be asked or sent; install it, or describe the "
        "machines instead",
    ),
    "no ssh": (SSH, {}, "ssh is not on this machine"),
    "an unknown partition": (
        (*SLURM, "--with", "partition=fast"), {"sinfo": answers("")}, "partition fast has no nodes; name another",
    ),
    "more nodes than exist": (
        ("--on", "slurm", "--nodes", "5"), {"sinfo": answers(SINFO)}, "Slurm has 2 nodes; ask for as many or fewer",
    ),
    "all nodes down": (
        SLURM, {"sinfo": answers("n1|main*|down*|4|(null)\n")}, "all nodes of Slurm are down*; sinfo -R says why",
    ),
    "a quota of Slurm's": (
        SLURM,
        {"sinfo": answers(SINFO), "sbatch": says("sbatch: error: Job violates accounting/QOS policy (limits)\n")},
        "it is more than your account may have: ask for fewer nodes or less time",
    ),
    "no controller": (
        SLURM, {"sinfo": says("slurm_load_partitions: Unable to contact slurm controller (connect failure)\n")},
        "slurmctld does not answer: scontrol ping shows whether it runs",
    ),
    "a quota of Kubernetes": (
        KUBERNETES, {"kubectl": by_word("apply", says(QUOTA), "true")}, "kubectl describe quota shows it, ask for less",
    ),
    "a cluster that does not answer": (
        ("--on", "kubernetes", "--nodes", "2", "--with", "image=a:1"),
        {"kubectl": says("The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?\n")},
        "the cluster does not answer: kubectl cluster-info shows which one is meant",
    ),
    "no rights": (
        KUBERNETES, {"kubectl": by_word("create", says('secrets is forbidden: User "x" cannot create\n'), "true")},
        "you may not do that in this namespace: kubectl auth can-i shows what you may",
    ),
    "two submits of one run in Kubernetes": (
        KUBERNETES, {"kubectl": by_word("get jobset", answers("jobset.jobset.x-k8s.io/play\n"), "true")},
        "play is in the cluster already; end it first: plait stop play",
    ),
    "a host key that changed": (SSH, {"ssh": says(HOST_KEY, 255)}, "then type ssh-keygen -R NAME"),
    "an unknown host key": (SSH, {"ssh": says("Host key verification failed.\n", 255)}, "log in once by ssh, and "
    "compare"),
    "no key of ours": (SSH, {"ssh": says("a@b: Permission denied (publickey).\n", 255)}, "put your public key there"),
    "a machine that is off": (
        SSH, {"ssh": says("ssh: connect to host ann port 22: Connection timed out\n", 255)}, "check that it is on",
    ),
    "a read-only home": (
        SSH, {"ssh": says("mkdir: cannot create 'plait-runs': Read-only file system\n")}, "--with folder=FOLDER",
    ),
    "an old Python": (
        SSH, {"ssh": answers("plait-check 3.9\nnothing\n4\n")}, "ann has Python 3.9, and plait needs 3.11 or newer",
    ),
    "a login that talks": (SSH, {"ssh": answers("Welcome!\n")}, "ann gives an unexpected answer"),
    "two submits of one run by ssh": (
        SSH, {"ssh": by_word("node-0.since", answers("running\n"), answers(CHECKED))}, "plait stop play",
    ),
}  # fmt: skip


@pytest.fixture
def type_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Type a command where only some programs are, and say its one sentence."""

    def run(words: tuple[str, ...], tools: Tools) -> str:
        bin_ = tmp_path / "bin"
        bin_.mkdir()
        for name, body in tools.items():
            (bin_ / name).write_text(f"#!/bin/sh\n{body}\n")
            (bin_ / name).chmod(0o755 | stat.S_IXUSR)
        for name in ("cat", "sh", "true"):
            (bin_ / name).symlink_to(f"/bin/{name}")
        monkeypatch.setenv("PATH", str(bin_))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "play.py").write_text("import plait\n")
        with pytest.raises(SystemExit) as ended:
            exit_with_sentence(
                lambda: app(["submit", "play.py", *words], prog_name="plait", standalone_mode=False) or 0
            )
        said = capfd.readouterr().err
        assert ended.value.code == 2 and said.startswith("plait: ") and said.count("\n") == 1, said
        return said

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_is_one_sentence(case: str, type_: Callable[..., str], tmp_path: Path) -> None:
    words, tools, helps = CASES[case]
    said = type_(words, tools)
    assert helps in said and "Traceback" not in said
    assert not (tmp_path / ".plait" / "submitted").exists()
