"""A run that changes its workers 4 → 2 → 3 → 4 while it goes on takes the samples of one that never did, and learns the
same from them. Here on one machine; over hosts in tests/end_to_end/test_end_elastic.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from plait.commands.monitoring.training import TrainingEnd, run_training
from plait.launch.local.run import ForkServer
from plait.launch.values.copies import CopiesByStep
from plait.launch.values.failure import FailureFacts
from plait.launch.values.job import Job, JobResult, Message
from plait.layout import Layout
from plait.planner.plan import Plan
from plait.report.incidents import read_incidents, read_starts
from plait.report.metrics import read_metrics
from plait.run_files.account import LedgerLine, ledger_of
from plait.run_folder import RunFolder
from plait.screen.screen import SilentScreen
from plait.units import NEVER, Every
from plait.workers import ENTRIES, ForkedWorkers, OnMessage, Renewed
from plait.working_folder import WorkingFolder
from tests.trainer.tiny import make_tiny

STEPS, LIKE = 48, 1e-5
How = Literal["lost", "paused"]


class Changing:
    """Forked workers: after the given steps it has another number of them, as ranks are lost or paused."""

    may_shrink = True

    def __init__(self, server: ForkServer, folder: Path, changes: Mapping[int, tuple[How, int]]) -> None:
        self._server, self._changes = server, changes
        self._forked = ForkedWorkers(server, WorkingFolder(folder))
        self.working_folder, self.fixed_workers = self._forked.working_folder, None
        self._next: tuple[How, int] | None = None

    @property
    def workers(self) -> Changing:
        return self

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        def hear(message: Message) -> None:
            on_message(message)
            change = self._changes.get(message.values["step"]) if message.kind == "step" else None
            if change is not None and self._next is None and change[1] != job.world_size:
                self._next = change
                ranks = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children").read_text().split()
                for rank in ranks[:1] if change[0] == "lost" else ranks:
                    os.kill(int(rank), signal.SIGKILL if change[0] == "lost" else signal.SIGTERM)

        result = self._forked.run(job, hear)
        return replace(result, how="paused") if self._next else result

    def copied_steps(self, lineage: int) -> Sequence[int]:
        return self._forked.copied_steps(lineage)

    def copies(self, lineage: int) -> CopiesByStep:
        return self._forked.copies(lineage)

    def renewed(self, plan: Plan, failure: FailureFacts | None) -> Renewed | None:
        if self._next is None:
            return None
        (how, count), self._next = self._next, None
        assert (failure is None) == (how == "paused")
        other = replace(plan, placement=replace(plan.placement, layout=Layout(replicate=count), shares=()))
        return Renewed(plan=other, subject="hosts", who="hosts changed")


class Said(SilentScreen):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines += text.splitlines()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(ENTRIES, threads=1, working_folder=tmp_path_factory.mktemp("work")) as made:
        yield made


def trained(
    server: ForkServer,
    folder: Path,
    workers: int,
    changes: Mapping[int, tuple[How, int]],
    *,
    save_every: str = "4 steps",
    copy_every: Every = NEVER,
) -> tuple[TrainingEnd, RunFolder, list[str]]:
    folder.mkdir()
    asked = (f"checkpoint.every={save_every}", f"train.budget={STEPS} steps", "report.evaluate=never")
    config, plan = make_tiny(folder, *asked, layout=Layout(replicate=workers), deterministic=True)
    plan = replace(plan, cadence=replace(plan.cadence, copy_every=copy_every))
    for name in ("recipe.toml", "plan.json"):
        (folder / name).unlink()
    screen, run = Said(), RunFolder(folder)
    workers = Changing(server, folder, changes)
    end = run_training(config, run, workers, plan, screen, is_replanned=False, require_present=lambda: None)
    return end, run, screen.lines


def without_generations(run: RunFolder) -> list[LedgerLine]:
    return [replace(line, generation=0) for line in ledger_of(run)]


def test_a_lost_place_costs_a_step_where_copies_in_memory_hold_the_state(server: ForkServer, tmp_path: Path) -> None:
    """They are of the layout before, so that they become a checkpoint, which any layout reads."""
    changes: dict[int, tuple[How, int]] = {9: ("lost", 1)}
    copied = Every(1, "steps")
    end, run, said = trained(server, tmp_path / "run", 2, changes, save_every="100 steps", copy_every=copied)
    assert end.stopped_by == "finished"
    [first, again] = read_starts(run.starts)
    (incident,), _ = read_incidents(run.incidents)
    assert first.steps_done == 0 and again.steps_done >= 8, "the step at hand alone is done again"
    [resumed] = [line for line in said if line.startswith("resume   ")]
    assert resumed.startswith(f"resume   from step-{again.steps_done} of {STEPS}")
    assert incident.from_copies and incident.steps_lost <= 1
    assert len(ledger_of(run)) == STEPS and len(read_metrics(run.metrics)[0]) == STEPS


@pytest.mark.slow
def test_four_workers_become_two_three_and_four_again(server: ForkServer, tmp_path: Path) -> None:
    _, fixed, _ = trained(server, tmp_path / "fixed", 4, {})
    changes: dict[int, tuple[How, int]] = {6: ("lost", 2), 11: ("paused", 3), 16: ("paused", 4)}
    end, run, said = trained(server, tmp_path / "changing", 4, changes)
    assert end.stopped_by == "finished" and end.receipt is not None
    told = [line for line in said if line.startswith("hosts ")]
    assert [line.partition(": ")[2].partition(",")[0] for line in told] == [
        "2 copies in place of 4", "3 copies in place of 2", "4 copies in place of 3",
    ]  # fmt: skip
    starts = read_starts(run.starts)
    assert [line.generation for line in starts] == [1, 2, 3, 4]
    lost, paused, again = (line.steps_done for line in starts[1:])
    assert lost in (0, 4) and 11 <= paused < again, "what was lost is done again, what was paused is not"
    (incident,), _ = read_incidents(run.incidents)
    assert incident.cause == "killed" and incident.decision == "started again", "a pause is no failure"
    assert without_generations(run) == without_generations(fixed) and len(ledger_of(run)) == STEPS
    losses, fixed_losses = ([one.loss for one in read_metrics(which.metrics)[0]] for which in (run, fixed))
    assert len(losses) == STEPS and losses != fixed_losses, "sums in another order"
    assert losses == pytest.approx(fixed_losses, rel=LIKE)
    assert [path.name for path in tmp_path.glob("changing/plan-*.json")] and run.saved_plan().world_size == 4
