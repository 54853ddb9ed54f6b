"""`plait submit --on ssh` to a real sshd that plays three machines, each with a home of its own. Run by hand, as root:

.venv/bin/python -m pytest tests/ssh/real_ssh.py
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.command import RECIPE, Ended, Place, ended, wait_until

STEPS = 100
LONGER = RECIPE.replace('budget = "60 steps"', f'budget = "{STEPS} steps"')
EVEN = ("layout.shares=[4, 3]", 'balance.every="never"')
MACHINES = {"ann": "127.37.0.1", "bob": "127.37.0.2", "cy": "127.37.0.3"}
PORT = 2237
SSHD = "/usr/sbin/sshd"

pytestmark = pytest.mark.skipif(
    not Path(SSHD).exists() or shutil.which("ssh") is None or os.geteuid() != 0, reason="needs root and openssh-server"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The homes of the three machines, and where the ssh that knows them is."""

    folder: Path

    def home(self, name: str) -> Path:
        return self.folder / name

    @property
    def path(self) -> str:
        return f"{self.folder}/bin:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(folder=tmp_path_factory.mktemp("machines"))
    folder = made.folder
    for name in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for name in MACHINES:
        made.home(name).mkdir()
    write_configuration(folder)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        for address in MACHINES.values():
            wait_until(lambda address=address: _listens(address), within_s=20)
        yield made
    finally:
        daemon.terminate()
        daemon.wait()


def write_configuration(folder: Path) -> None:
    """Who reaches which address reaches that machine's home; its ssh knows the names."""
    shutil.copy(folder / "client_key.pub", folder / "authorized")
    lines = [f"HostKey {folder}/host_key", f"AuthorizedKeysFile {folder}/authorized", "StrictModes no", "UsePAM no"]
    lines += [f"PidFile {folder}/sshd.pid", "PermitRootLogin yes", "PasswordAuthentication no"]
    lines += [f"ListenAddress {address}:{PORT}" for address in MACHINES.values()]
    for name, address in MACHINES.items():
        shell = f'cd {folder}/{name}; export HOME={folder}/{name}; exec sh -c "$SSH_ORIGINAL_COMMAND"'
        lines += [f"Match LocalAddress {address}", f"    ForceCommand {shell}"]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    key = (folder / "host_key.pub").read_text().split()[:2]
    known = [f"[{address}]:{PORT} {' '.join(key)}" for address in MACHINES.values()]
    (folder / "known_hosts").write_text("\n".join(known) + "\n")
    client = [f"Host {name}\n    HostName {address}" for name, address in MACHINES.items()]
    client += [
        f"Host *\n    Port {PORT}\n    IdentityFile {folder}/client_key\n    UserKnownHostsFile {folder}/known_hosts"
    ]
    (folder / "ssh_config").write_text("\n".join(client) + "\n")
    (folder / "bin").mkdir()
    program = folder / "bin" / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    program.chmod(0o755)


def _listens(address: str) -> bool:
    with socket.socket() as one:
        return one.connect_ex((address, PORT)) == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The laptop that submits."""
    return Place(tmp_path_factory.mktemp("laptop"), LONGER)


def submit(place: Place, machines: Machines, name: str, *more: str, names: str = "ann,bob") -> subprocess.Popen[str]:
    words = ("submit", "tiny.toml", f"run.name={name}", *EVEN, "--on", "ssh", "--machines", names)
    python = ("--with", f"python={sys.executable}")
    return place.start(*words, *python, *more, environment=environment(machines))


def environment(machines: Machines) -> dict[str, str]:
    return {"PATH": machines.path}


def type_(place: Place, machines: Machines, *words: str) -> Ended:
    return place.run(*words, environment=environment(machines))


def test_two_machines_train_and_their_files_come_back(place: Place, machines: Machines) -> None:
    told = ended(submit(place, machines, "two"), within_s=400)
    assert told.code == 0 and "started  node 1: bob" in told.out and "over" in told.out, told
    assert (machines.home("ann") / "plait-runs" / "runs" / "two" / "receipt.json").exists()
    assert not (machines.home("bob") / "plait-runs" / "play.txt").exists()  # node 0 sends what the others need
    fetched = type_(place, machines, "fetch", "two")
    assert fetched.code == 0 and place.checkpoints("two")[-1] == STEPS, fetched
    alone = place.train("here", "layout.replicate=2", *EVEN)
    assert alone.code == 0 and place.manifest("here", STEPS) == place.manifest("two", STEPS)
    assert place.numbers("here") == place.numbers("two")


def test_it_goes_on_when_the_laptop_sleeps(place: Place, machines: Machines) -> None:
    following = submit(place, machines, "asleep")
    run = machines.home("ann") / "plait-runs" / "runs" / "asleep"
    wait_until((run / "metrics.jsonl").exists, within_s=300)
    assert_secret_is_nowhere(machines, place)
    following.kill()
    ended(following)
    again = ended(submit(place, machines, "asleep"), within_s=100)
    assert again.code == 2 and "plait stop asleep" in again.sentence()
    wait_until((run / "receipt.json").exists, within_s=300)
    assert type_(place, machines, "fetch", "asleep").code == 0
    assert place.numbers("asleep") == place.numbers("two")


def test_a_machine_that_reboots_costs_nothing_when_it_is_submitted_again(place: Place, machines: Machines) -> None:
    following = submit(place, machines, "reboots")
    run = machines.home("ann") / "plait-runs" / "runs" / "reboots"
    wait_until(lambda: any((run / "checkpoints").glob("step-*")), within_s=300)
    for pid in running_in(machines.home("bob")):
        os.kill(pid, 9)
    lost = ended(following, within_s=100)
    assert lost.code == 1 and "ended with exit code 1" in lost.sentence(), lost
    wait_until(lambda: "ended with exit code 1" in type_(place, machines, "status", "reboots").out, within_s=60)
    assert ended(submit(place, machines, "reboots"), within_s=400).code == 0
    assert type_(place, machines, "fetch", "reboots").code == 0
    assert place.numbers("reboots") == place.numbers("two")


def assert_secret_is_nowhere(machines: Machines, place: Place) -> None:
    """While a run goes on: in no file, and in no program's arguments; only who may read a program's memory finds it."""
    [agent, *_] = [pid for pid in running_in(machines.home("ann")) if b"PLAIT_SECRET=" in variables_of(pid)]
    secret = variables_of(agent).split(b"PLAIT_SECRET=")[1].split(b"\0")[0]
    assert len(secret) > 20
    for path in (*machines.folder.rglob("*"), *place.folder.rglob("*")):
        assert not path.is_file() or secret not in path.read_bytes(), path
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret not in entry.read_bytes(), entry


def variables_of(pid: int) -> bytes:
    """A program's variables as it was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


def running_in(folder: Path) -> list[int]:
    """All processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder):  # noqa: PTH115  Path.resolve would follow
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("names", "more", "says"),
    [
        ("ann,nobody", (), "no such name is known here"),
        ("ann,cy", ("--with", "python=/nowhere/python"), "ann has no /nowhere/python"),
        ("ann,cy", ("--with", "folder=/proc/plait"), "that folder cannot be written"),
    ],
)
def test_what_a_machine_lacks_is_one_sentence(
    names: str, more: tuple[str, ...], says: str, place: Place, machines: Machines
) -> None:
    words = ("submit", "tiny.toml", "run.name=no", *EVEN, "--on", "ssh", "--machines", names, *more)
    told = type_(
        place, machines, *words, *(() if "python" in " ".join(more) else ("--with", f"python={sys.executable}"))
    )
    assert told.code == 2 and says in told.sentence(), told


def test_a_host_key_that_changed_is_said(place: Place, machines: Machines) -> None:
    known = machines.folder / "known_hosts"
    before = known.read_text()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(machines.folder / "other")], check=True)
    other = (machines.folder / "other.pub").read_text().split()[1]
    known.write_text("\n".join(f"{line.rsplit(' ', 1)[0]} {other}" for line in before.splitlines()) + "\n")
    try:
        told = ended(submit(place, machines, "changed"), within_s=60)
        assert told.code == 2 and "ssh-keygen -R" in told.sentence()
    finally:
        known.write_text(before)
