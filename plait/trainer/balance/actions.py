"""Keeps shares of the batch, or layers of pipeline stages, in step with the ranks' speeds: measures, obeys, records.

What changes is decided on rank 0 by planner/rebalancing, and is on the disk before the first step that obeys it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path

import torch

from plait.parallel.comm.echo import message_from_before_s
from plait.parallel.mesh import Sums
from plait.planner.plan import Plan
from plait.planner.rebalancing.batch_rebalance import (
    LEAST_STEPS_OBSERVED,
    ShareChange,
    StepObservation,
    ranks_of_replicas,
    rebalance,
    replica_names,
    shard_groups_of,
)
from plait.planner.rebalancing.stage_repartition import repartition, stage_costs_of
from plait.report.shares_file import SharesLine, append_shares, read_shares
from plait.report.straggler import RankTimes, Watch
from plait.report.straggler_words import Shares
from plait.trainer.assemble import Assembly
from plait.trainer.balance.meter import Meter, sees_waits
from plait.trainer.balance.move_layers import most_layers
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars

GATHERED_STEPS = 4
"""Steps whose measurements are gathered at once, so that a step costs next to nothing more."""
LOOKED_AT_STEPS = {"cpu": GATHERED_STEPS, "cuda": 6}
"""At least so often, for a straggler is to be named within twenty steps; a GPU is waited for then."""

MoveLayers = Callable[[tuple[int, ...]], Meter]
"""Moves layers between the pipeline's stages, given the layers of each; returns the meter of the new stages."""
TakeShares = Callable[[TrainState], tuple[TrainState, Scalars]]
_Line = tuple[int, tuple[int, ...], tuple[int, ...]]
"""From a step on: shares of the batch, layers of the stages."""
ShareRow = tuple[float, ...]
"""One rank's seconds of one step: computing, waiting for other parts of the batch, for data, and for others of the same
part; and of a message from the rank before it, where messages were timed."""


class Rebalancer:
    """One rank's part in rebalancing. Every rank must make one, and call the same methods in the same order.

    Recorded changes are obeyed also where shares never change by themselves. Only rank 0 reads and writes `file`, and
    reports the times of its own steps.
    """

    def __init__(
        self,
        assembly: Assembly,
        meter: Meter,
        file: Path,
        world: Sums,
        report: Callable[..., None],
        restage: MoveLayers | None = None,
    ) -> None:
        """Without `restage` stages stay as they are."""
        self._tell, self._restage = report, restage
        self._assembly, self._meter, self._world, self._file = assembly, meter, world, file
        self._every = assembly.plan.balance_every_steps
        self._parts = assembly.plan.sequences_per_replica
        self._times_links = False
        self._layers = assembly.plan.layout.stage_layers
        self._stages = stage_costs_of(assembly.plan) if restage else None
        self._lines = _told_lines(file, world, len(self._parts), len(self._layers))
        self._ledger = BalanceLedger(assembly.plan) if is_watched(assembly.plan) and world.index == 0 else None

    def step(self, take: TakeShares, state: TrainState) -> tuple[TrainState, Scalars]:
        """Take the step after `state` with the shares, and the stages, that are recorded for it."""
        parts, layers = self._due_at(state.step + 1)
        if layers != self._layers and self._restage is not None:
            self._meter = self._restage(layers)
            self._layers = layers
            if self._ledger is not None:
                self._ledger.restaged(layers)
        if parts != self._parts:
            self._assembly.take_shares(parts)
            self._parts = parts
        result = take(state)
        self._meter.fetched(self._assembly.loader.wait_s)
        return result

    def rebalance_if_due(self, state: TrainState) -> list[str]:
        """After steps whose scalars were fetched: bring measurements to rank 0 and decide where that is due.

        Answers what there is to say, on rank 0. Every rank must call it after the same steps; blocks.
        """
        plan = self._assembly.plan
        watched = is_watched(plan)
        due = watched and self._every > 0 and state.step % self._every == 0 and state.step != plan.steps
        if watched and not due and self._meter.steps < GATHERED_STEPS and state.step != plan.steps:
            return []
        own = self._meter.read()
        if self._world.index == 0 and sees_waits(plan):
            for step, times in enumerate(own, start=state.step - len(own) + 1):
                self._tell(step=step, **asdict(times))
        if not watched:
            return []
        link_s = message_from_before_s() if self._times_links else 0.0
        rows = torch.tensor([(*astuple(times), link_s) for times in own], dtype=torch.float64).reshape(-1, 5)
        gathered = [part.tolist() for part in self._world.gather(rows)]
        lines: list[str] = []
        if self._ledger is not None:
            lines = self._ledger.note(state.step, gathered, self._parts)
        if self._world.size > 2:  # of two hosts' one cable everybody knows which it is
            requested = self._ledger is not None and self._ledger.asks_for_links
            self._times_links = bool(self._world.largest(torch.tensor([int(requested)]))[0])
        recorded = any(step > state.step for step, *_ in self._lines)
        return lines + (self._decide(state.step + 1) if due and not recorded else [])

    def _decide(self, step: int) -> list[str]:
        """Agree on the shares, or the stages, from `step` on."""
        room = self._room()
        change = self._ledger.change(self._parts, self._every, room) if self._ledger is not None else None
        wanted = torch.zeros(len(self._parts) + len(self._layers), dtype=torch.int64)
        if change is not None:
            parts, layers = (self._parts, change.shares) if self._stages else (change.shares, self._layers)
            append_shares(
                self._file,
                SharesLine(
                    step=step,
                    shares=parts,
                    reason=change.reason,
                    speeds=tuple(float(f"{speed:.4g}") for speed in change.speeds),
                    stage_layers=layers if self._stages else (),
                ),
            )
            wanted = torch.tensor((*parts, *layers))
        agreed = tuple(self._world(wanted).tolist())
        if any(agreed):
            self._lines.append((step, agreed[: len(self._parts)], agreed[len(self._parts) :]))
        return [f"balance  from step {step} on, {change.reason}"] if change is not None else []

    def _room(self) -> list[int]:
        """Layers that each stage could hold; empty where stages cannot change."""
        if self._stages is None:
            return []
        own = most_layers(self._assembly, self._assembly.plan.workers_beside(self._world.index))
        rooms = [int(one) for one in self._world.gather(torch.tensor([own]))]
        return [min(rooms[rank] for rank in ranks) for ranks in self._stages.ranks]

    def _due_at(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shares and the stages of a step."""
        plan = self._assembly.plan
        lines = [(parts, layers) for first, parts, layers in self._lines if first <= step]
        parts, layers = lines[-1] if lines else (plan.sequences_per_replica, self._layers)
        return parts, layers if any(layers) else self._layers


class BalanceLedger:
    """Rank 0's book of all ranks' steps, since the shares or the stages last changed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages, self._layers = stage_costs_of(plan), plan.layout.stage_layers
        self._names, self._ranks = replica_names(plan), ranks_of_replicas(plan.layout)
        self._part_of = [plan.layout.data_parallel_rank(rank) for rank in range(plan.world_size)]
        self._parts = plan.sequences_per_replica
        self._steps: list[StepObservation] = []
        self._warm = False
        self._watch = Watch(_hosts(plan), shares=_shares_in_words(plan))

    @property
    def asks_for_links(self) -> bool:
        """Whether timed messages would help to name a slow link."""
        return self._watch.asks_for_links

    def note(self, last_step: int, rows_of_ranks: Sequence[Sequence[ShareRow]], parts: tuple[int, ...]) -> list[str]:
        """Take in the steps up to `last_step`, which were taken with these shares; says who holds the run up."""
        if parts != self._parts:
            self._parts = parts
            self._steps.clear()
        steps = list(zip(*rows_of_ranks, strict=True))
        lines: list[str] = []
        for step, rows in enumerate(steps, start=last_step - len(steps) + 1):
            if not self._warm:  # the first step of a process also makes room, and fills caches
                self._warm = True
                continue
            self._steps.append(self._measured(rows))
            lines += self._watched(step, rows)
        del self._steps[: -2 * max(self._plan.balance_every_steps, LEAST_STEPS_OBSERVED)]
        return lines

    def restaged(self, layers: tuple[int, ...]) -> None:
        """Note that stages have these layers from now on."""
        self._layers, self._warm = layers, False
        self._steps.clear()

    def change(self, parts: tuple[int, ...], every: int, room: Sequence[int] = ()) -> ShareChange | None:
        """The change that the last two windows of `every` steps justify: of stages, where `room` says how many
        layers each can hold, else of shares."""
        steps = self._steps[-2 * max(every, LEAST_STEPS_OBSERVED // 2) :]
        if self._stages is not None and room:
            return repartition(self._layers, steps, self._stages, room)
        return rebalance(parts, steps, self._names, shard_groups_of(self._plan))

    def _measured(self, rows: Sequence[ShareRow]) -> StepObservation:
        if self._stages is not None:  # stages wait for each other, which is no work
            seconds = [max(rows[rank][0] for rank in ranks) for ranks in self._stages.ranks]
        else:
            seconds = [max(rows[rank][0] + rows[rank][3] for rank in ranks) for ranks in self._ranks]
        return StepObservation(compute_s=tuple(seconds), step_s=max(sum(row[:4]) for row in rows))

    def _watched(self, step: int, rows: Sequence[ShareRow]) -> list[str]:
        times = [
            RankTimes(rank=rank, compute_s=compute, wait_s=wait + inside, data_s=data, link_s=link)
            for rank, (compute, wait, data, inside, link) in enumerate(rows)
        ]
        work = [self._parts[part] for part in self._part_of]
        for layers, ranks in zip(self._layers, self._stages.ranks if self._stages else (), strict=False):
            for rank in ranks:
                work[rank] *= layers
        finding = self._watch.observe(step, times, work)
        return [finding.sentence] if finding else []


def is_watched(plan: Plan) -> bool:
    """Whether rank 0 looks at what all ranks do: wherever there are several, and their waits can be seen."""
    return plan.world_size > 1 and sees_waits(plan)


def watch_every_steps(plan: Plan) -> int:
    """How often it does so at least; 0: never."""
    return LOOKED_AT_STEPS[plan.device] if is_watched(plan) else 0


def _shares_in_words(plan: Plan) -> Shares:
    """What can be done about a slow rank while the run goes on."""
    if plan.layout.data_parallel_degree > 1:
        return "balanced" if plan.balance_every_steps else "fixed"
    if stage_costs_of(plan) is not None:
        return "recut" if plan.balance_every_steps else "uncut"
    return "stages" if plan.layout.pipeline > 1 else "same"


def _hosts(plan: Plan) -> list[str]:
    """The host of each rank."""
    named = [host.name for host in plan.hosts for _ in range(host.workers)]
    return named or ["this machine"] * plan.world_size


def _told_lines(file: Path, world: Sums, parts: int, stages: int) -> list[_Line]:
    """What rank 0 finds recorded, on every rank; layers are 0 where none were named."""
    lines = read_shares(file) if world.index == 0 else ()
    count = int(world(torch.tensor([len(lines)]))[0])
    table = torch.zeros(count, 1 + parts + stages, dtype=torch.int64)
    for row, line in zip(table, lines, strict=False):
        row[:] = torch.tensor([line.step, *line.shares, *(line.stage_layers or (0,) * stages)])
    rows = world(table).tolist() if count else []
    return [(row[0], tuple(row[1 : 1 + parts]), tuple(row[1 + parts :])) for row in rows]
