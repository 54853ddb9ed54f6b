"""Rank 0's record of all ranks' step times: what it finds in them is a straggler to name, or a change to propose."""

from __future__ import annotations

from collections.abc import Sequence

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
from plait.report.straggler import RankTimes, Watch
from plait.report.straggler_words import Shares

StepTimesRow = tuple[float, ...]
"""One rank's seconds of one step: computing; waiting for other data-parallel ranks; for data; for other ranks of the
same replica; and a message from the previous rank, 0 where messages were not timed."""


class StepHistory:
    """Rank 0's record of all ranks' step times since the shares or the stages last changed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages, self._layers = stage_costs_of(plan), plan.placement.layout.stage_layers
        self._names, self._ranks = replica_names(plan), ranks_of_replicas(plan.placement.layout)
        self._part_of = [plan.placement.layout.data_parallel_rank(rank) for rank in range(plan.world_size)]
        self._sequences = plan.sequences_per_replica
        self._steps: list[StepObservation] = []
        self._warm = False
        self._watch = Watch(_hosts(plan), shares=_shares_in_words(plan))

    @property
    def needs_link_times(self) -> bool:
        """Whether timed messages between ranks would help to name a slow link."""
        return self._watch.asks_for_links

    def record(
        self, last_step: int, rows_of_ranks: Sequence[Sequence[StepTimesRow]], sequences: tuple[int, ...]
    ) -> list[str]:
        """Record the steps up to `last_step`, which ran with these `sequences`; returns a sentence for each
        straggler that is found.

        `rows_of_ranks` holds each rank's rows, one per step.
        """
        if sequences != self._sequences:
            self._sequences = sequences
            self._steps.clear()
        steps = list(zip(*rows_of_ranks, strict=True))
        lines: list[str] = []
        for step, rows in enumerate(steps, start=last_step - len(steps) + 1):
            if not self._warm:  # the first step of a process also makes room, and fills caches
                self._warm = True
                continue
            self._steps.append(self._measured(rows))
            lines += self._watched(step, rows)
        del self._steps[: -2 * max(self._plan.cadence.balance_every_steps, LEAST_STEPS_OBSERVED)]
        return lines

    def layers_moved(self, layers: tuple[int, ...]) -> None:
        """Set the layers of the stages from now on, and discard the record of earlier steps."""
        self._layers, self._warm = layers, False
        self._steps.clear()

    def propose_change(
        self, sequences: tuple[int, ...], every: int, max_layers: Sequence[int] = ()
    ) -> ShareChange | None:
        """The change that the last two windows of `every` steps justify, or None: of the stages where `max_layers`
        gives the layers that each can hold, else of the shares."""
        steps = self._steps[-2 * max(every, LEAST_STEPS_OBSERVED // 2) :]
        if self._stages is not None and max_layers:
            return repartition(self._layers, steps, self._stages, max_layers)
        return rebalance(sequences, steps, self._names, shard_groups_of(self._plan))

    def _measured(self, rows: Sequence[StepTimesRow]) -> StepObservation:
        if self._stages is not None:  # stages wait for each other, which is no work
            seconds = [max(rows[rank][0] for rank in ranks) for ranks in self._stages.ranks]
        else:
            seconds = [max(rows[rank][0] + rows[rank][3] for rank in ranks) for ranks in self._ranks]
        return StepObservation(compute_s=tuple(seconds), step_s=max(sum(row[:4]) for row in rows))

    def _watched(self, step: int, rows: Sequence[StepTimesRow]) -> list[str]:
        times = [
            RankTimes(rank=rank, compute_s=compute, wait_s=wait + inside, data_s=data, link_s=link)
            for rank, (compute, wait, data, inside, link) in enumerate(rows)
        ]
        work = [self._sequences[part] for part in self._part_of]
        for layers, ranks in zip(self._layers, self._stages.ranks if self._stages else (), strict=False):
            for rank in ranks:
                work[rank] *= layers
        finding = self._watch.observe(step, times, work)
        return [finding.sentence] if finding else []


def _shares_in_words(plan: Plan) -> Shares:
    """How a slow rank could be relieved while the run goes on, as a key for the straggler's sentence."""
    if plan.placement.layout.data_parallel_degree > 1:
        return "balanced" if plan.cadence.balance_every_steps else "fixed"
    if stage_costs_of(plan) is not None:
        return "recut" if plan.cadence.balance_every_steps else "uncut"
    return "stages" if plan.placement.layout.pipeline > 1 else "same"


def _hosts(plan: Plan) -> list[str]:
    """Name of the host of each rank."""
    named = [host.name for host in plan.machines.hosts for _ in range(host.workers)]
    return named or ["this machine"] * plan.world_size
