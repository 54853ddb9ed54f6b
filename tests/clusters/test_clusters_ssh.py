"""Machines by ssh, played by folders of this one: an ssh that runs what it is given there, or finds a machine off."""

from __future__ import annotations

import io
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from plait.clusters.job import find_record
from plait.clusters.request import SubmitRequest
from plait.clusters.submit import submit_or_show
from plait.clusters.submitted import end_job, fetch_job, job_state_line
from plait.errors import PlaitError, RunFailed
from plait.screen.screen import SilentScreen
from plait.screen.terminal import TerminalScreen

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
