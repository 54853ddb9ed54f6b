"""Pipelines timed by their actual lists of actions with unequal stages, for the layouts that are nearly the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.partition.pipeline_schedule import ActionKind
from plait.partition.pipeline_simulation import StageTimes, durations_s
from plait.planner.problem.candidates import SCHEDULES, Counts, Reals
from plait.planner.problem.stage_partition import heads_of_stages, messages_each_way, micro_batches_per_step, stages_of
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.stage_messages import hop_shares, slowest_hop_wait_s
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
    piped = candidates.pipeline > 1
    for key in np.unique(keys[:, piped], axis=1).T:
        rows = np.flatnonzero((keys == key[:, None]).all(axis=0) & piped)
        schedule, ranks, virtual, simulated = (int(value) for value in key)
        layers = stages_of(workload, ranks * virtual, candidates.layer_split)
        spent = _stage_action_times(inputs, busy, rows, layers)
        slowest = np.add.reduce(list(spent.values())).reshape(virtual, ranks, -1).sum(axis=0).max(axis=0)
        sent = busy.stage_message_s[rows]
        whole = durations_s(SCHEDULES[schedule], (ranks, virtual, simulated), spent, sent)
        # In the long run as many micro-batches are under way as there are ranks, and each waits for all work and all
        # messages there and back; two ranks have one wire each way for all chunks' results and gradients.
        round_s = np.add.reduce(list(spent.values())).sum(axis=0) + 2 * (ranks - 1) * sent
        settled = np.maximum(slowest, messages_each_way(ranks, virtual) * busy.slowest_message_s[rows])
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
    layers = stages_of(w, int(candidate.pipeline[0]) * virtual, candidate.layer_split)
    spent = _stage_action_times(inputs, busy, np.array([0]), layers)
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
    """Additional time of every rank: the host's."""
    exposed_s: Reals
    """Time that the rank at the slowest hop waits for messages, if that is a share of them."""
    stage_message_s: Reals
    """One message to a neighbour, where it travels while the next micro-batch is computed, on average over hops."""
    slowest_message_s: Reals
    """One message over the slowest hop."""
    forward_share: Reals
    """The forward pass' share of a layer's time."""
    weight_gradients_s: Reals
    """The gradients of a layer's weights, which a schedule may put off: half of the backward pass' products; of frozen
    layers what the backward pass has more products than the forward pass, its adapters' own."""
    closed_form_s: Reals


def _micro_batch_times(inputs: CostInputs, times: StepTime) -> _MicroBatchTimes:
    candidates, profile = inputs.candidates, inputs.profile
    micros = micro_batches_per_step(inputs.workload, candidates) / profile.speed
    layer = inputs.device_time.layer_time(candidates)
    layers = times.products / micros / (layer.products + layer.products_backward)
    per_rank = times.products + times.scores + times.stream + times.recompute
    per_rank = per_rank + times.tensor + times.context + times.experts
    again = times.recompute / micros / layers
    weights = layer.products_backward / 2
    if inputs.workload.is_frozen:
        weights = np.maximum(layer.products_backward - layer.products, 0.0)
    return _MicroBatchTimes(
        layer_s=per_rank / micros / layers,
        head_s=inputs.device_time.head_s(candidates),
        overhead_s=times.host / micros,
        exposed_s=slowest_hop_wait_s(inputs) * profile.calibration.message_factor("passes"),
        stage_message_s=times.stage_message,
        slowest_message_s=times.slowest_stage_message,
        forward_share=layer.forward / (layer.forward + layer.backward + again),
        weight_gradients_s=weights,
        closed_form_s=per_rank + times.head + times.host + times.passes + times.bubble,
    )


def _stage_action_times(
    inputs: CostInputs, times: _MicroBatchTimes, rows: Counts, layers: Sequence[int]
) -> dict[ActionKind, Reals]:
    """Seconds of each kind of action, shape [stages, rows]; `layers` are those of each stage. A head in the middle is
    computed in the backward pass alone, that of a stage's input (model/prediction_heads.py)."""
    w = inputs.workload
    shares = hop_shares(inputs.with_candidates(inputs.candidates.select(rows)))
    held, rank = np.array(layers)[:, None], np.arange(len(layers)) % len(shares)
    of_rank = len(shares) / len(layers)
    # Each of the three parts launches about as many kernels; both passes wait for one message a hop, and work that is
    # put off waits for none. Were these times shared out like the arithmetic, faster devices would have less to put
    # off.
    launching, waiting = of_rank * times.overhead_s[rows], of_rank * shares[rank] * times.exposed_s[rows]
    computing, weight = held * times.layer_s[rows], held * times.weight_gradients_s[rows]
    behind = 1 + w.predict_ahead  # the model's own head, and prediction ahead
    head_s, ahead = behind * times.head_s[rows], w.layers_and_depths - w.layers
    computing[-1] += head_s + ahead * times.layer_s[rows]
    weight[-1] += ahead * times.weight_gradients_s[rows] + (head_s / 3 if w.head_learns else 0.0)
    forward = computing * times.forward_share[rows] + launching / 3 + waiting / 2
    weight = weight + launching / 3
    middle = np.array(heads_of_stages(w, layers))[:, None] * times.head_s[rows]
    middle[-1] -= head_s
    whole = computing + launching + waiting + middle
    return {"forward": forward, "backward-input": whole - forward - weight, "backward-weight": weight}
