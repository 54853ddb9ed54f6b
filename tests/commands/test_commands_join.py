"""What `plait join` says while it waits, and when the run ends by an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import pytest

from plait.commands.join import MEASURING, TRAINING, WAITING, WaitingLine, error_to_show
from plait.errors import PlaitError, RunFailed
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
