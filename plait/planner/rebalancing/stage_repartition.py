"""When to cut a pipeline's stages again while a run goes on: from measured steps to new layers for them, or to none.

Where all ranks work on the same sequences no shares can follow their speeds, but layers can move from stage to stage. A
stage computes for as long as its layers take, and the last one for the head and the loss, too. A new cut needs the same
evidence as new shares of a batch do (batch_rebalance.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from plait.data.micro_sizes import micro_sizes
from plait.planner.heterogeneous.batch_shares import LEAST_GAIN_OF_UNEQUAL_SHARES
from plait.planner.plan import Plan
from plait.planner.problem.stage_partition import balanced_stages_by_speed, head_cost_in_layers
from plait.planner.problem.workload import workload_of
from plait.planner.rebalancing.batch_rebalance import (
    LEAST_STEPS_OBSERVED,
    ShareChange,
    StepObservation,
    change_reason,
    host_names_of_ranks,
    is_confident,
    standard_error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """A pipeline whose layers may move while it runs."""

    names: tuple[str, ...]
    """Host or ranks of each stage, as people call them."""
    ranks: tuple[tuple[int, ...], ...]
    """Ranks of each stage."""
    embedding_cost_in_layers: float
    """Time of the embedding on the first stage, in units of an average layer."""
    head_cost_in_layers: float
    """Time of the head and the loss on the last stage, in units of an average layer."""
    micros: int
    """Micro-batches of a step."""

    def work(self, layers: Sequence[int]) -> list[float]:
        """Work of each stage, in units of an average layer."""
        work = [float(held) for held in layers]
        work[0] += self.embedding_cost_in_layers
        work[-1] += self.head_cost_in_layers
        return work


def stage_costs_of(plan: Plan) -> StageCosts | None:
    """The stages that can be cut again: one on each rank, of a pipeline that works on whole batches; else None.

    With several data-parallel replicas the batch shares are rebalanced instead; both at once would interfere.
    """
    layout = plan.placement.layout
    if layout.pipeline == 1 or layout.virtual_stages > 1 or layout.data_parallel_degree > 1:
        return None
    ranks: list[list[int]] = [[] for _ in range(layout.pipeline)]
    for rank in range(layout.world_size):
        ranks[layout.coordinates(rank)["pipeline"]].append(rank)
    forecast = plan.forecast
    head = forecast.head_cost_in_layers if forecast else None
    if head is None:  # no forecast, or one of an earlier version
        head = head_cost_in_layers(
            workload_of(plan.job.shape, sequence=plan.job.sequence, batch_sequences=plan.job.batch_sequences)
        )
    return StageCosts(
        names=host_names_of_ranks(plan, ranks),
        ranks=tuple(map(tuple, ranks)),
        embedding_cost_in_layers=forecast.embedding_cost_in_layers if forecast else 0.0,
        head_cost_in_layers=head,
        micros=len(
            micro_sizes(plan.sequences_per_replica, plan.placement.micro_limits or (plan.placement.micro_sequences,))[0]
        ),
    )


def repartition(
    layers: Sequence[int], steps: Sequence[StepObservation], stages: StageCosts, most: Sequence[int]
) -> ShareChange | None:
    """The layers to go on with after steps that were all taken with these; None where they should stay.

    `compute_s` of the steps are the stages', and no stage may get more layers than `most` says. The change's shares are
    layers, its speeds layers of a whole step a second.
    """
    if len(steps) < LEAST_STEPS_OBSERVED or sum(most) < sum(layers) or min(most) < 1:
        return None
    work = stages.work(layers)
    seconds = [median(step.compute_s[stage] for step in steps) for stage in range(len(layers))]
    speeds = tuple(done / max(s, 1e-9) for done, s in zip(work, seconds, strict=True))
    new = balanced_stages_by_speed(
        sum(layers), speeds, stages.head_cost_in_layers, stages.embedding_cost_in_layers, most
    )
    if new == tuple(layers):
        return None
    gains = [_gain(step, work, stages.work(new), stages.micros) for step in steps]
    middle = len(steps) // 2
    gain, lasting = median(gains), min(median(gains[:middle]), median(gains[middle:]))
    if min(gain, lasting) <= LEAST_GAIN_OF_UNEQUAL_SHARES or gain <= is_confident(len(layers)) * standard_error(gains):
        return None
    return ShareChange(
        shares=new, speeds=speeds, gain=gain, reason=change_reason(layers, new, speeds, stages.names, "layers")
    )


def _gain(step: StepObservation, old: Sequence[float], new: Sequence[float], micros: int) -> float:
    """Share of the step's time that `new` in place of `old` work per stage would have saved."""
    then = [s * after / before for s, before, after in zip(step.compute_s, old, new, strict=True)]
    return (_trip_s(step.compute_s, micros) - _trip_s(then, micros)) / step.step_s


def _trip_s(seconds: Sequence[float], micros: int) -> float:
    """Seconds of a pipeline whose stages compute for `seconds` in a step, without messages (Huang et al. 2019)."""
    return (sum(seconds) + (micros - 1) * max(seconds)) / micros
