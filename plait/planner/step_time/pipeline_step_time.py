"""Pipelines timed by their actual lists of actions with unequal stages, for the layouts that are nearly the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.partition.pipeline_schedule import ActionKind
from plait.partition.pipeline_simulation import StageTimes, durations_s
from plait.planner.problem.candidates import SCHEDULES, Counts, Reals
from plait.planner.problem.stage_partition import (
    head_cost_in_layers,
    layers_of_stages,
    messages_each_way,
    micro_batches_per_step,
)
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import StepTime, estimate_step_time

ROUNDS_SIMULATED = 1
"""Rounds of micro-batches (multiples of the pipeline's ranks) that are simulated; each one beyond adds the busiest
rank's time."""
ROUNDS_SIMULATED_WITH_MESSAGES = 8
"""Rounds simulated where messages take time and the pipeline has at most FEW_PIPELINE_RANKS ranks: the steady state
is reached later."""
FEW_PIPELINE_RANKS = 8


def simulated_step_s(inputs: CostInputs, times: StepTime) -> Reals:
    """Seconds of a step of each candidate, its pipeline simulated action by action in place of the closed form.

    `times` are `estimate_step_time(inputs)`. Layouts without a pipeline keep their time.
    """
    workload, candidates, profile = inputs.workload, inputs.candidates, inputs.profile
    step_s = times.step_s.copy()
    micros = np.rint(micro_batches_per_step(workload, candidates)).astype(np.int64)
    busy = _micro_batch_times(inputs, times)
    rounds = (
        np.where(
            (busy.stage_message_s > 0.0) & (candidates.pipeline <= FEW_PIPELINE_RANKS),
            ROUNDS_SIMULATED_WITH_MESSAGES,
            ROUNDS_SIMULATED,
        )
        * candidates.pipeline
        + micros % candidates.pipeline
    )
    short = np.minimum(micros, rounds)
    keys = np.stack([candidates.schedule, candidates.pipeline, candidates.virtual, short])
    piped, head = candidates.pipeline > 1, head_cost_in_layers(workload)
    for key in np.unique(keys[:, piped], axis=1).T:
        rows = np.flatnonzero((keys == key[:, None]).all(axis=0) & piped)
        schedule, ranks, virtual, simulated = (int(value) for value in key)
        spent = _stage_action_times(
            busy, rows, layers_of_stages(workload.layers, ranks * virtual, head, candidates.layer_split), virtual
        )
        slowest = np.add.reduce(list(spent.values())).reshape(virtual, ranks, -1).sum(axis=0).max(axis=0)
        sent = busy.stage_message_s[rows]
        whole = durations_s(SCHEDULES[schedule], (ranks, virtual, simulated), spent, sent)
        # In the long run as many micro-batches are under way as there are ranks, and each waits for all work and all
        # messages there and back; two ranks have one wire each way for all chunks' results and gradients.
        round_s = np.add.reduce(list(spent.values())).sum(axis=0) + 2 * (ranks - 1) * sent
        settled = np.maximum(slowest, messages_each_way(ranks, virtual) * sent)
        if virtual == 1 and SCHEDULES[schedule] != "gpipe":
            settled = np.maximum(settled, round_s / ranks)
        whole = whole + (micros[rows] - simulated) * settled
        step_s[rows] += whole / profile.speed - busy.closed_form_s[rows]
    return step_s


def stage_times_of(inputs: CostInputs) -> StageTimes:
    """Seconds of each stage for one micro-batch of a single candidate, as `simulated_step_s` uses them."""
    w, candidate, profile = inputs.workload, inputs.candidates, inputs.profile
    busy = _micro_batch_times(inputs, estimate_step_time(inputs))
    virtual = int(candidate.virtual[0])
    layers = layers_of_stages(
        w.layers, int(candidate.pipeline[0]) * virtual, head_cost_in_layers(w), candidate.layer_split
    )
    spent = _stage_action_times(busy, np.array([0]), layers, virtual)
    seconds = {kind: tuple(float(s) for s in values[:, 0] / profile.speed) for kind, values in spent.items()}
    return StageTimes(
        forward_s=seconds["forward"],
        backward_input_s=seconds["backward-input"],
        backward_weight_s=seconds["backward-weight"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatchTimes:
    """Seconds of one micro-batch; arrays over candidates."""

    layer_s: Reals
    head_s: Reals
    overhead_s: Reals
    """Time per rank outside layers and head: host launches, and exposed messages where they are priced by share."""
    stage_message_s: Reals
    """One message to a neighbour, where it travels while the next micro-batch is computed."""
    forward_share: Reals
    """The forward pass' share of a layer's time."""
    weight_gradient_share: Reals
    """The share of the gradients of weights, which a schedule may put off: half of the backward pass' products."""
    closed_form_s: Reals


def _micro_batch_times(inputs: CostInputs, times: StepTime) -> _MicroBatchTimes:
    candidates, profile = inputs.candidates, inputs.profile
    micros = micro_batches_per_step(inputs.workload, candidates) / profile.speed
    layer = inputs.device_time.layer_time(candidates)
    layers = times.products / micros / (layer.products + layer.products_backward)
    per_rank = times.products + times.scores + times.stream + times.recompute
    per_rank = per_rank + times.tensor + times.context + times.experts
    other = times.host + (times.passes if profile.send_model == "by share" else 0.0)
    again = times.recompute / micros / layers
    return _MicroBatchTimes(
        layer_s=per_rank / micros / layers,
        head_s=inputs.device_time.head_s(candidates),
        overhead_s=other / micros,
        stage_message_s=times.stage_message,
        forward_share=layer.forward / (layer.forward + layer.backward + again),
        weight_gradient_share=layer.products_backward / 2 / (layer.forward + layer.backward + again),
        closed_form_s=per_rank + times.head + times.host + times.passes + times.bubble,
    )


def _stage_action_times(
    times: _MicroBatchTimes, rows: Counts, layers: Sequence[int], virtual: int
) -> dict[ActionKind, Reals]:
    held = np.array(layers)[:, None]
    whole = held * times.layer_s[rows] + times.overhead_s[rows] / virtual
    whole[-1] += times.head_s[rows]
    forward, weight = whole * times.forward_share[rows], whole * times.weight_gradient_share[rows]
    return {"forward": forward, "backward-input": whole - forward - weight, "backward-weight": weight}
