"""A step as the plan means it: its schedule's list of actions, with the times of the plan's forecast.

The list is the one that the ranks carry out (partition/pipeline_schedule.py), and the simulator the one that priced it.
A plan keeps its forecast as items of the busiest rank, so that is what the times are made from: a stage takes as long
as its layers, embedding and head, the backward of a layer twice as long as its forward, and messages between stages
what the forecast has left. All ends when the forecast's step does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from plait.data.micro_sizes import micro_sizes
from plait.layout import Layout
from plait.partition.pipeline_schedule import ActionLists, schedule_actions
from plait.partition.pipeline_simulation import StageTimes, simulate
from plait.planner.calibration.factors import StepItems
from plait.planner.plan import Plan
from plait.report.step_timeline import (
    MessageKind,
    RankTimeline,
    StepTimeline,
    StepWork,
    TimelineSpan,
    with_stage_messages,
)

FORWARD_SHARES = {"none": 1 / 3, "selective": 0.3, "full": 1 / 4}
"""A forward's share of a layer's forward and backward, by what is recomputed."""
_LEAST_WAIT_SHARE = 1e-6
_HALVINGS = 40


def planned_timeline(plan: Plan, first_step: int, steps: int) -> StepTimeline | None:
    """This many planned steps, all of the same length; None if the plan has no forecast of items."""
    items = plan.forecast.items if plan.forecast else None
    if items is None:
        return None
    step_s = items.step_s
    one = [_rank_spans(plan, items, rank) for rank in range(plan.world_size)]
    ranks = tuple(
        RankTimeline(
            rank=rank,
            spans=tuple(_moved(span, number * step_s, first_step + number) for number in range(steps) for span in own),
        )
        for rank, own in enumerate(one)
    )
    bounds = tuple((number * step_s, (number + 1) * step_s) for number in range(steps))
    return with_stage_messages(StepTimeline(source="planned", first_step=first_step, bounds_s=bounds, ranks=ranks))


def _moved(span: TimelineSpan, by_s: float, step: int) -> TimelineSpan:
    return replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s, step=step)


def _rank_spans(plan: Plan, items: StepItems, rank: int) -> list[TimelineSpan]:
    """One step of one rank, beginning at 0."""
    layout = plan.placement.layout
    passes_s = items.compute_s + items.within_s + items.bubble_s
    spans = list(_piped(plan, items, rank) if layout.pipeline > 1 else _in_turn(plan, items, rank))
    if _gathers_in_passes(layout):
        passes_s += items.messages_s
    elif items.messages_s > 0:
        spans.append(_work("gradients", passes_s, passes_s + items.messages_s))
        spans.append(_wait("gradient sum", passes_s, passes_s + items.messages_s))
        passes_s += items.messages_s
    if items.optimizer_s > 0:
        spans.append(_work("update", passes_s, passes_s + items.optimizer_s))
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def _gathers_in_passes(layout: Layout) -> bool:
    """Whether gradients are summed, and weights gathered, in each pass instead of once a step."""
    return layout.gathers_weights and layout.shard_what != "master-weights" and layout.pipeline == 1


def _work(kind: StepWork, start_s: float, end_s: float, *, stage: int = -1, micro: int = -1) -> TimelineSpan:
    return TimelineSpan(lane="work", kind=kind, step=0, start_s=start_s, end_s=end_s, stage=stage, micro=micro)


def _wait(kind: MessageKind, start_s: float, end_s: float) -> TimelineSpan:
    return TimelineSpan(lane="wait", kind=kind, step=0, start_s=start_s, end_s=end_s)


# Without a pipeline: one micro-batch after the other.


def _in_turn(plan: Plan, items: StepItems, rank: int) -> Iterator[TimelineSpan]:
    """Forward and backward of each micro-batch, in proportion to its sequences; shares follow the ranks' speeds, so
    that all finish together."""
    sizes = [size or 1 for size in _micro_sizes_of(plan, rank)]
    layout, start_s = plan.placement.layout, 0.0
    # Weights for each forward and each backward, and a sum after that, of about as many bytes; or sums alone.
    messages_s = items.messages_s if _gathers_in_passes(layout) else 0.0
    third_s = messages_s / 3 if layout.shard_what == "parameters" else 0.0
    gathers: dict[StepWork, list[tuple[MessageKind, float]]] = {
        "forward": [("weights", third_s)],
        "backward": [("weights", third_s), ("gradient sum", messages_s - 2 * third_s)],
    }
    for number, size in enumerate(sizes):
        share = size / sum(sizes)
        for passed, part in _pass_shares(plan):
            waits = [*gathers[passed], (_within_kind(layout), part * items.within_s)]
            waits_s = share * sum(spent_s for _, spent_s in waits)
            end_s = start_s + share * part * (items.compute_s + items.bubble_s) + waits_s
            yield _work(passed, start_s, end_s, micro=number)
            wait_s = end_s - waits_s
            for kind, spent_s in waits:
                if spent_s > 0:
                    yield _wait(kind, wait_s, wait_s + share * spent_s)
                    wait_s += share * spent_s
            start_s = end_s


def _pass_shares(plan: Plan) -> tuple[tuple[StepWork, float], tuple[StepWork, float]]:
    forward = FORWARD_SHARES[plan.placement.layout.recompute]
    return ("forward", forward), ("backward", 1 - forward)


def _micro_sizes_of(plan: Plan, rank: int) -> Sequence[int]:
    """Sequences of each micro-batch of one rank, as its loader divides them."""
    layout, counts = plan.placement.layout, plan.sequences_per_replica
    part = layout.data_parallel_rank(rank)
    limits = plan.placement.micro_limits or (plan.placement.micro_sequences,) * len(counts)
    together = layout.replicas_in_lockstep(part)
    sizes = micro_sizes(counts[together.start : together.stop], limits[together.start : together.stop])
    return sizes[part - together.start]


def _within_kind(layout: Layout) -> MessageKind:
    """The waits of ranks that share samples; a forecast has one number for all of them."""
    if layout.tensor > 1:
        return "tensor rows"
    return "keys and values" if layout.context > 1 else "expert tokens"


# With a pipeline.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """A pipeline's list of actions with the seconds of each stage, for one micro-batch."""

    lists: ActionLists
    times: StageTimes
    message_s: float


def _piped(plan: Plan, items: StepItems, rank: int) -> Iterator[TimelineSpan]:
    """One rank's actions, and its waits for other stages before and between them."""
    layout = plan.placement.layout
    found = _pipeline(plan, items, len(_micro_sizes_of(plan, rank)))
    spans = simulate(found.lists, found.times, found.message_s).ranks[layout.coordinates(rank)["pipeline"]]
    free_s, whole_s = 0.0, items.compute_s + items.within_s + items.bubble_s
    least_s = _LEAST_WAIT_SHARE * items.step_s
    for span in spans:
        action = span.action
        # Waiting is the beginning of the pass that waits, as it is where ranks carry out the list.
        yield _work(action.kind, free_s, span.end_s, stage=action.stage, micro=action.micro)
        if span.start_s - free_s > least_s:
            yield _wait("stage message", free_s, span.start_s)
        free_s = span.end_s
    if whole_s - free_s > least_s:  # until the last stage is done: where ranks add up the step's numbers
        yield _wait("step numbers", free_s, whole_s)


def _pipeline(plan: Plan, items: StepItems, micros: int) -> _Pipeline:
    """The pipeline, scaled so that its passes take as long as the forecast: time missing after all stages have
    computed is messages between them, and passes that take longer without messages are shortened."""
    layout = plan.placement.layout
    lists = schedule_actions(layout.schedule, ranks=layout.pipeline, virtual=layout.virtual_stages, micros=micros)
    whole_s = items.compute_s + items.within_s + items.bubble_s
    cost = _stage_costs(plan)
    busiest = max(sum(cost[place :: layout.pipeline]) for place in range(layout.pipeline))
    times = _stage_times(cost, (items.compute_s + items.within_s) / micros / busiest, layout)
    alone_s = simulate(lists, times).duration_s
    if alone_s >= whole_s:
        times = _stage_times(cost, (items.compute_s + items.within_s) / micros / busiest * whole_s / alone_s, layout)
        return _Pipeline(lists=lists, times=times, message_s=0.0)
    low_s, high_s = 0.0, whole_s
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (
            (middle_s, high_s) if simulate(lists, times, middle_s).duration_s < whole_s else (low_s, middle_s)
        )
    return _Pipeline(lists=lists, times=times, message_s=low_s)


def _stage_costs(plan: Plan) -> list[float]:
    """The cost of each stage in layers. On unequal machines, layers follow their speed and all ranks take equally
    long."""
    layout, forecast = plan.placement.layout, plan.forecast
    cost = [float(layers) for layers in layout.stage_layers]
    if forecast is not None:
        cost[0] += forecast.embedding_cost_in_layers
        cost[-1] += forecast.head_cost_in_layers or 0.0
    if len({(host.machine, host.threads) for host in plan.machines.hosts}) > 1:
        held = [sum(cost[place :: layout.pipeline]) for place in range(layout.pipeline)]
        cost = [one / held[stage % layout.pipeline] for stage, one in enumerate(cost)]
    return cost


def _stage_times(cost: Sequence[float], layer_s: float, layout: Layout) -> StageTimes:
    forward = FORWARD_SHARES[layout.recompute]
    weight = (1 - forward) / 2
    return StageTimes(
        forward_s=tuple(layer_s * one * forward for one in cost),
        backward_input_s=tuple(layer_s * one * (1 - forward - weight) for one in cost),
        backward_weight_s=tuple(layer_s * one * weight for one in cost),
    )
