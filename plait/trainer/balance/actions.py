"""Adapts the ranks' shares of the batch, or the layers of pipeline stages, to the ranks' measured speeds.

Each change is decided on rank 0 by planner/rebalancing, and is on disk before the first step that applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path

import torch

from plait.devices import DEVICE_TRAITS, DevicePlace
from plait.parallel.collectives import message_from_before_s
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import agree_on_any, first_ones, gather_json
from plait.planner.plan import Plan
from plait.planner.rebalancing.stage_repartition import stage_costs_of
from plait.report.shares_file import SharesLine, append_shares, read_shares
from plait.trainer.assemble import Assembly
from plait.trainer.balance.meter import Meter, measures_waits
from plait.trainer.balance.move_layers import max_stage_layers
from plait.trainer.balance.step_history import StepHistory
from plait.trainer.state import TrainState

GATHERED_STEPS = 4
"""Measurements of this many steps are gathered at once, so that they add next to nothing to a step."""
MAX_STEPS_BETWEEN_GATHERS: Mapping[DevicePlace, int] = {"host": GATHERED_STEPS, "accelerator": 6}
"""Largest number of steps between two gathers, since a straggler is to be named within twenty steps; each gather waits
for an accelerator's queue."""

MoveLayers = Callable[[tuple[int, ...]], Meter]
"""Moves layers between the pipeline's stages, given the number of layers of each stage; returns the meter of the new
stages."""
RecordRankTimes = Callable[[int, Sequence[Sequence[Sequence[float]]]], None]
"""Takes the last of some steps, and each rank's rows of seconds, one per step."""
_Line = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A recorded change: first step, sequences per data-parallel rank, layers per stage."""


def _record_nothing(last_step: int, rows_of_ranks: Sequence[Sequence[Sequence[float]]]) -> None:
    pass


class Rebalancer:
    """One rank's part in rebalancing. Every rank must make one, and call the same methods in the same order.

    Recorded changes are applied even where the plan never rebalances. Only rank 0 reads and writes `file`, and passes
    the times of its own steps to `report`, and those of all ranks to `record`.
    """

    def __init__(
        self,
        assembly: Assembly,
        meter: Meter,
        file: Path,
        world: Communicator,
        report: Callable[..., None],
        move_layers: MoveLayers | None = None,
        record: RecordRankTimes = _record_nothing,
    ) -> None:
        """Without `move_layers` the stages keep their layers."""
        self._tell, self._move_layers, self._record = report, move_layers, record
        self._assembly, self._meter, self._world, self._file = assembly, meter, world, file
        self._every = assembly.plan.cadence.balance_every_steps
        self._sequences = assembly.plan.sequences_per_replica
        self._times_links = False
        self._layers = assembly.plan.placement.layout.stage_layers
        self._stages = stage_costs_of(assembly.plan) if move_layers else None
        self._lines = _recorded_changes(file, world, assembly.plan)
        self._history = StepHistory(assembly.plan) if is_watched(assembly.plan) and world.index == 0 else None

    def before_step(self, state: TrainState) -> None:
        """Apply the shares and stages that are recorded for the step after `state`. Every rank must call it."""
        sequences, layers = self._due_at(state.step + 1)
        if layers != self._layers and self._move_layers is not None:
            self._meter = self._move_layers(layers)
            self._layers = layers
            if self._history is not None:
                self._history.layers_moved(layers)
        if sequences != self._sequences:
            self._assembly.set_sequences_per_replica(sequences)
            self._sequences = sequences

    def after_step(self, _: TrainState) -> None:
        self._meter.record_data_wait(self._assembly.loader.wait_s)

    def rebalance_if_due(self, state: TrainState) -> list[str]:
        """Gather measurements on rank 0 and decide on a change, each where it is due; call it after steps whose scalars
        were fetched.

        Returns lines for the log, on rank 0. Every rank must call it after the same steps; blocks.
        """
        plan = self._assembly.plan
        watched = is_watched(plan)
        due = watched and self._every > 0 and state.step % self._every == 0 and state.step != plan.job.steps
        if watched and not due and self._meter.steps < GATHERED_STEPS and state.step != plan.job.steps:
            return []
        own = self._meter.read()
        if self._world.index == 0 and measures_waits(plan):
            for step, times in enumerate(own, start=state.step - len(own) + 1):
                self._tell(step=step, **asdict(times))
        if not watched:
            if plan.world_size == 1:
                self._record(state.step, [[astuple(times) for times in own]])
            return []
        link_s = message_from_before_s() if self._times_links else 0.0
        rows = torch.tensor([(*astuple(times), link_s) for times in own], dtype=torch.float64).reshape(-1, 5)
        gathered = [part.tolist() for part in self._world.gather(rows)]
        lines: list[str] = []
        if self._history is not None:
            self._record(state.step, gathered)
            lines = self._history.record(state.step, gathered, self._sequences)
        if self._world.size > 2:  # of two hosts' one cable everybody knows which it is
            requested = self._history is not None and self._history.needs_link_times
            self._times_links = agree_on_any(self._world, requested)
        recorded = any(step > state.step for step, *_ in self._lines)
        return lines + (self._decide(state.step + 1) if due and not recorded else [])

    def _decide(self, step: int) -> list[str]:
        """Agree with all ranks on the shares, or the stages, from `step` on. Returns lines for the log."""
        max_layers = self._max_layers_per_stage()
        change = (
            self._history.propose_change(self._sequences, self._every, max_layers)
            if self._history is not None
            else None
        )
        wanted: list[Sequence[int]] = []
        if change is not None:
            sequences, layers = (self._sequences, change.shares) if self._stages else (change.shares, self._layers)
            append_shares(
                self._file,
                SharesLine(
                    step=step,
                    shares=sequences,
                    reason=change.reason,
                    speeds=tuple(float(f"{speed:.4g}") for speed in change.speeds),
                    stage_layers=layers if self._stages else (),
                ),
            )
            wanted = [sequences, layers]
        if agreed := gather_json(wanted, self._world)[0]:
            self._lines.append((step, tuple(agreed[0]), tuple(agreed[1])))
        return [f"balance  from step {step} on, {change.reason}"] if change is not None else []

    def _max_layers_per_stage(self) -> list[int]:
        """Number of layers that each stage could hold; empty where stages cannot change."""
        if self._stages is None:
            return []
        own = max_stage_layers(self._assembly, self._assembly.plan.workers_beside(self._world.index))
        rooms = [int(one) for one in self._world.gather(torch.tensor([own]))]
        return [min(rooms[rank] for rank in ranks) for ranks in self._stages.ranks]

    def _due_at(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sequences per data-parallel rank, and layers per stage, that apply at a step."""
        plan = self._assembly.plan
        lines = [(sequences, layers) for first, sequences, layers in self._lines if first <= step]
        sequences, layers = lines[-1] if lines else (plan.sequences_per_replica, self._layers)
        return sequences, layers if any(layers) else self._layers


def is_watched(plan: Plan) -> bool:
    """Whether rank 0 observes the step times of all ranks: wherever there are several ranks and their waits can be
    measured."""
    return plan.world_size > 1 and measures_waits(plan)


def watch_every_steps(plan: Plan) -> int:
    """Largest number of steps between two looks at all ranks' step times; 0: never."""
    return MAX_STEPS_BETWEEN_GATHERS[DEVICE_TRAITS[plan.machines.device].place] if is_watched(plan) else 0


def plan_at(plan: Plan, step: int, file: Path, world: Communicator) -> Plan:
    """The plan with the layers that the stages had at a step, by what rank 0 finds recorded in `file`: a state that was
    copied there lies where they were. Every rank must call it."""
    layout = plan.placement.layout
    due = [layers for first, _, layers in _recorded_changes(file, world, plan) if first <= step and any(layers)]
    return (
        replace(plan, placement=replace(plan.placement, layout=replace(layout, stage_layers=due[-1]))) if due else plan
    )


def _recorded_changes(file: Path, world: Communicator, plan: Plan) -> list[_Line]:
    """The changes that rank 0 finds recorded in `file`, on every rank; layers are 0 where none were recorded."""
    unmoved = (0,) * len(plan.placement.layout.stage_layers)
    lines = first_ones(
        lambda: [(line.step, line.shares, line.stage_layers or unmoved) for line in read_shares(file)], world
    )
    return [(step, tuple(shares), tuple(layers)) for step, shares, layers in lines]
