"""Machines by ssh: what is typed on them, by this machine's own shell; what they are sent; and a job, played by an ssh
that runs what it is given in a folder, or finds a machine off."""

from __future__ import annotations

import io
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from plait.clusters.job import ClusterJob, NodeGroup, find_record
from plait.clusters.request import SubmitRequest
from plait.clusters.ssh import (
    InputFiles,
    SshPlace,
    end_agent_command,
    follow_command,
    input_files,
    running_command,
    ssh_script,
    start_command,
)
from plait.clusters.submit import submit_or_show
from plait.clusters.submitted import end_job, fetch_job, job_state_line
from plait.errors import PlaitError, RunFailed
from plait.recipe.load import load_recipe
from plait.screen.screen import SilentScreen
from plait.screen.terminal import TerminalScreen

JOB = ClusterJob(name="play", run="play", target=("a.toml",), groups=(NodeGroup(nodes=2, gpus=0),))
QUICK = 'echo "secret of ${#PLAIT_SECRET}, GPUs ${CUDA_VISIBLE_DEVICES:-all}"'
UNTIL_TOLD = "trap 'exit 75' TERM\nwhile :; do sleep 0.05; done"


def typed(command: str, stdin: str = "") -> str:
    done = subprocess.run(["sh", "-c", command], input=stdin, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., None]:
    def run(body: str, gpus: int | None = None) -> None:
        agent = tmp_path / "python"
        agent.write_text(f"#!/bin/sh\n{body}\n")
        agent.chmod(0o755)
        request = SshPlace(machines=("a", "b"), leader="10.0.0.1", folder=str(tmp_path), python=str(agent), gpus=gpus)
        assert typed(start_command(JOB, request, 0), "open sesame\n") == ""

    return run


@pytest.mark.parametrize(("gpus", "sees"), [(None, "all"), (2, "0,1")])
def test_an_agent_has_its_secret_and_its_gpus_and_is_followed_to_its_end(
    gpus: int | None, sees: str, start: Callable[..., None], tmp_path: Path
) -> None:
    start(QUICK, gpus)
    assert typed(follow_command("play", str(tmp_path))) == f"secret of 11, GPUs {sees}"
    assert typed(running_command("play", str(tmp_path), 0)) == "ended with exit code 0"
    assert not [path for path in tmp_path.iterdir() if b"sesame" in path.read_bytes()]


def test_an_agent_is_told_to_end_in_any_shell(start: Callable[..., None], tmp_path: Path) -> None:
    start(UNTIL_TOLD)
    assert typed(running_command("play", str(tmp_path), 0)) == "running"
    typed(end_agent_command("play", str(tmp_path), 0))
    deadline = time.monotonic() + 10
    while (said := typed(running_command("play", str(tmp_path), 0))) == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said == "ended with exit code 75"


def test_another_process_with_the_number_of_one_before_a_reboot_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / "play.node-0.pid").write_text(f"{other.pid}\n")
        for since in (None, "17\n"):
            if since is not None:
                (tmp_path / "play.node-0.since").write_text(since)
            assert typed(running_command("play", str(tmp_path), 0)) == "not running"
            typed(end_agent_command("play", str(tmp_path), 0))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_script_brings_the_wheel_from_any_folder_and_its_versions_with_it() -> None:
    """What --dry-run prints needs no file that is not there."""
    request = SshPlace(machines=("ann", "bob"), leader="10.0.0.1", environment="0123")
    script = ssh_script(JOB, request, "my folder/plait-1-py3-none-any.whl", "torch==2.13.0\n", ("a.toml",))
    assert script.count("scp 'my folder/plait-1-py3-none-any.whl' ") == 2
    assert 'python3 -m venv "$HOME"/.plait/environments/0123; ' in script
    assert "\ntorch==2.13.0\n" in script and script.count("'cat >plait-runs/lock.txt'") == 2
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


SSH = r"""#!/bin/sh
# ssh -G NAME, or ssh [-o OPTION]... NAME COMMAND
here=$(dirname "$0")/..
[ "$1" != -G ] || { echo "hostname 127.0.0.1"; exit; }
while [ "$1" = -o ]; do shift 2; done
echo "$1: $2" >>"$here/calls"
off() { [ ! -e "$here/$1.off" ] || { echo "ssh: connect to host $1 port 22: Connection timed out" >&2; exit 255; }; }
off "$1"
case "$2" in *setsid*) [ ! -e "$here/$1.refuses" ] || { echo "No space left on device" >&2; exit 1; };; esac
cd "$here/$1" && HOME=$PWD sh -c "$2"
code=$?
off "$1"
exit $code
"""
AGENT = r"""#!/bin/sh
[ "$1" != -c ] || { echo "plait-check 3.12"; exit; }
echo "node $PLAIT_NODE_RANK of $*"
trap 'exit 75' TERM
while [ ! -e "$HOME/end" ]; do sleep 0.05; done
"""


class Machines:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("bin/ssh", SSH), ("bin/agent", AGENT)):
            program = folder / name
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(text)
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        for name in ("ann", "bob"):
            (folder / name).mkdir()

    def mark(self, name: str) -> None:
        (self.folder / name).touch()

    def submit(self) -> str:
        told = io.StringIO()
        request = SubmitRequest(
            target=("play.py",), scheduler="ssh", cluster="2x(1xserver)", machines=("ann", "bob"),
            options=(f"python={self.folder}/bin/agent",),
        )  # fmt: skip
        screen = TerminalScreen(Console(file=told, width=100))
        submit_or_show(request, deed="send", out=None, screen=screen, show=lambda text: None)
        return told.getvalue()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    made = Machines(tmp_path / "machines")
    monkeypatch.setenv("PATH", f"{made.folder}/bin:/usr/bin:/bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("play.py").write_text("import plait\n")
    yield made
    for name in ("ann", "bob"):
        made.mark(f"{name}/end")


def wait_for_state(says: str) -> None:
    deadline = time.monotonic() + 10
    while says not in (state := job_state_line("play") or ""):
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def test_where_one_agent_cannot_be_started_the_others_do_not_wait_for_it(machines: Machines) -> None:
    machines.mark("bob.refuses")
    with pytest.raises(PlaitError, match=r"bob: ssh says: No space left on device; its disk is full"):
        machines.submit()
    with pytest.raises(PlaitError, match='no job "play" was submitted'):
        find_record("play")
    code = machines.folder / "ann" / "plait-runs" / "play.node-0.code"
    deadline = time.monotonic() + 10
    while not code.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert code.read_text() == "75\n"


def test_a_machine_that_is_off_hides_neither_the_run_nor_the_others(machines: Machines) -> None:
    """The first goes while it is followed: nobody knows then whether the run goes on, and that is said."""
    machines.mark("ann/end")
    machines.mark("bob/end")
    machines.submit()
    wait_for_state("ann ended with exit code 0, bob ended with exit code 0")
    machines.mark("bob.off")
    state = job_state_line("play") or ""
    assert "ann ended with exit code 0, bob: ssh says: " in state and state.endswith("(bob does not answer)")
    with pytest.raises(PlaitError, match="bob: ssh says"):
        end_job("play")
    assert "ann: cd plait-runs && " in (machines.folder / "calls").read_text().splitlines()[-2]


def test_a_lost_connection_is_not_taken_for_the_runs_end(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.mark("ann/end")
    machines.mark("bob/end")
    agent = machines.folder / "bin" / "agent"
    agent.write_text(agent.read_text().replace("trap", f'touch "{machines.folder}/ann.off"\ntrap'))
    with pytest.raises(RunFailed, match=r"ann: ssh says: .*If ann lives, the run goes on: plait status play says so"):
        machines.submit()
    assert find_record("play").machines == ("ann", "bob")


TAR = r"""#!/bin/sh
/bin/tar "$@" || exit 2
[ "$1" != -c ] || { echo "tar: metrics.jsonl: file changed as we read it" >&2; exit 1; }
"""


def test_a_run_that_goes_on_is_fetched_and_a_copy_that_broke_off_is_no_run_of_its_own(machines: Machines) -> None:
    machines.mark("ann/end")
    machines.mark("bob/end")
    machines.submit()
    with pytest.raises(PlaitError, match="ann does not give runs/play"):
        fetch_job("play", SilentScreen())
    assert not Path("runs/play").exists()
    run = machines.folder / "ann" / "plait-runs" / "runs" / "play"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    tar = machines.folder / "bin" / "tar"
    tar.write_text(TAR)
    tar.chmod(0o755)
    for _ in range(2):
        with pytest.raises(PlaitError, match="play has not begun to train: ann ended with exit code 0"):
            fetch_job("play", SilentScreen())  # there is no plan yet; what is there was copied
        assert Path("runs/play/metrics.jsonl").read_text() == "{}\n"
        Path("runs/play/metrics.jsonl").write_text("half of it")


def inputs(folder: Path, *settings: str) -> InputFiles:
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("Who is there?\n")
    (folder / "model").mkdir(exist_ok=True)
    (folder / "questions.jsonl").write_text("{}\n")
    (folder / "tokenizer.json").write_text("{}\n")
    recipe = folder / "a.toml"
    recipe.write_text('[data]\nfiles = "texts/a.txt"\n')
    return input_files((str(recipe), *settings), load_recipe(recipe, settings))


def test_every_file_that_a_recipe_reads_is_sent_and_found_over_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sent = inputs(tmp_path, "data.tokenizer=tokenizer.json", "report.choices=questions.jsonl")
    assert [path.name for path in sent.paths] == ["a.toml", "a.txt", "tokenizer.json", "questions.jsonl"]
    (tmp_path / "there").mkdir()
    for path in sent.paths:
        (tmp_path / "there" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path / "there")
    config = load_recipe(Path("a.toml"), sent.settings)
    read = (config.data.files, config.data.tokenizer, config.report.choices)
    there = tmp_path / "there"
    assert read == ((str(there / "a.txt"),), str(there / "tokenizer.json"), str(there / "questions.jsonl"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("model.from=model",), r"model\.from is the folder .*add model\.from=/ITS/PLACE/THERE"),
        (("data.tokenizer=model",), r"data\.tokenizer is the folder"),
        (("data.files=texts",), "is not a single file"),
        (('data.files=["texts/a.txt", "a.txt"]',), "have the same name"),
    ],
)
def test_what_cannot_be_sent_is_said(
    settings: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("another\n")
    with pytest.raises(PlaitError, match=says):
        inputs(tmp_path, *settings)


def test_a_model_whose_place_over_there_is_typed_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent = inputs(tmp_path, f"model.from={tmp_path}/model")
    assert [path.name for path in sent.paths] == ["a.toml", "a.txt"]
