"""What `plait join` says while it waits, and when the run ends by an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import pytest

from plait.commands import join as joining
from plait.commands.join import MEASURING, TRAINING, WAITING, WaitingLine, error_to_show, stay_joined
from plait.errors import PlaitError, RunFailed
from plait.hosts.handshake import new_secret
from plait.hosts.member import LeaderNotReached
from plait.launch.values.job import Job
from plait.screen.screen import ShowProgress, SilentScreen
from plait.workers import PROBE_ENTRY, TRAINING_ENTRY

OWN = PlaitError("this host cannot use /mnt/full (No space left on device); fix that, then join again")


def test_an_error_of_this_host_that_the_leader_passes_on_is_shown_as_its_own() -> None:
    assert error_to_show(OWN, RunFailed(f"on b (10.0.0.2): {OWN}")) is OWN


def test_an_earlier_error_is_not_why_host_0_is_silent() -> None:
    silent = RunFailed("host 0 (10.0.0.1) sent nothing for 60 s; see whether it still runs")
    assert error_to_show(OWN, silent) is silent
    assert error_to_show(None, silent) is silent


class Shown(SilentScreen):
    """A screen that remembers what its moving line said, and that the line went."""

    def __init__(self, columns: int | None) -> None:
        self.columns: int | None = columns
        self.stages: list[str] = []

    @contextmanager
    def progress(self) -> Iterator[ShowProgress]:
        yield lambda done, total, stage: self.stages.append(stage)
        self.stages.append("gone")


@pytest.mark.parametrize(("columns", "meanwhile"), [(80, TRAINING), (None, "gone")])
def test_a_joined_host_says_what_it_waits_for_and_a_log_nothing_while_the_run_trains(
    columns: int | None, meanwhile: str
) -> None:
    screen = Shown(columns)
    with closing(WaitingLine(screen)) as line:
        line.show("looking for host 0")
        for entry in (PROBE_ENTRY, TRAINING_ENTRY):
            job = Job(entry=entry, argument="", world_size=2, threads=1)
            with line.while_running(lambda job: nullcontext(), job):
                pass
    assert screen.stages == ["looking for host 0", MEASURING, WAITING, meanwhile, WAITING, "gone"]


def test_a_host_that_stays_joins_again_until_the_run_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 0 comes late, is lost, stops; a sentence is said once."""
    ends: list[str | PlaitError] = [
        LeaderNotReached("no run there; wait"), LeaderNotReached("no run there; wait"),
        RunFailed("host 0 was lost: gone; start it"), "SIGTERM", "finished",
    ]  # fmt: skip
    monkeypatch.setenv("PLAIT_SECRET", new_secret().text)
    used: list[object] = []

    def once(at: str, address: str, port: int, secret: object, *rest: object) -> str:
        used.append(secret)
        if isinstance(end := ends.pop(0), PlaitError):
            raise end
        return end

    monkeypatch.setattr(joining, "_join_once", once)
    screen, waited = Lines(), list[float]()
    assert stay_joined("a:1", secret_file=None, screen=screen, wait=waited.append) == "finished"
    assert not ends and len(waited) == 4 and len(set(map(id, used))) == 1
    assert screen.lines == [
        "waits    no run there; Ctrl-C leaves",
        "waits    host 0 was lost: gone; this host rejoins by itself, Ctrl-C leaves",
        "waits    until the run continues at a:1; Ctrl-C leaves",
    ]


def test_a_host_that_stays_says_what_it_must_fix_and_leaves_by_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str | PlaitError] = [OWN, "left by SIGINT"]

    def once(*all_of_it: object) -> str:
        if isinstance(end := ends.pop(0), PlaitError):
            raise end
        return end

    monkeypatch.setattr(joining, "_join_once", once)
    monkeypatch.setenv("PLAIT_SECRET", new_secret().text)
    with pytest.raises(PlaitError, match="fix that, then join again"):
        stay_joined("a:1", secret_file=None, screen=Lines())
    monkeypatch.setenv("PLAIT_SECRET", new_secret().text)
    assert stay_joined("a:1", secret_file=None, screen=Lines()) == "SIGINT"


class Lines(SilentScreen):
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)
