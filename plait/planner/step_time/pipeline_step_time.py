"""Pipelines timed by their actual lists of actions with unequal stages, for the layouts that are nearly the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.cluster.cluster import Cluster
from plait.partition.pipeline_schedule import ActionKind
from plait.partition.pipeline_simulation import StageTimes, durations_s
from plait.planner.problem.candidates import SCHEDULES, Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import (
    head_cost_in_layers,
    layers_of_stages,
    messages_each_way,
    micro_batches,
)
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_time import device_time_of
from plait.planner.step_time.step_time import StepTime, step_time

ROUNDS_SIMULATED = 1
"""Rounds of micro-batches (multiples of the pipeline's ranks) that are simulated; each one beyond adds the busiest
rank's time."""
ROUNDS_SIMULATED_WITH_MESSAGES = 8
"""The same where messages take time and the pipeline has at most FEW_RANKS: their waiting takes longer to settle."""
FEW_RANKS = 8


def simulated_s(
    workload: Workload, cluster: Cluster, candidates: Candidates, profile: SoftwareProfile, times: StepTime
) -> Reals:
    """Seconds of a step of each candidate with its pipeline's part simulated in place of `timing`'s closed form.

    `times` are those of the same candidates. Layouts without a pipeline keep their time.
    """
    step_s = times.step_s.copy()
    micros = np.rint(micro_batches(workload, candidates)).astype(np.int64)
    busy = _busy(workload, cluster, candidates, profile, times)
    rounds = (
        np.where(
            (busy.sent > 0.0) & (candidates.pipeline <= FEW_RANKS), ROUNDS_SIMULATED_WITH_MESSAGES, ROUNDS_SIMULATED
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
        spent = _chunks(
            busy, rows, layers_of_stages(workload.layers, ranks * virtual, head, candidates.layer_split), virtual
        )
        slowest = np.add.reduce(list(spent.values())).reshape(virtual, ranks, -1).sum(axis=0).max(axis=0)
        sent = busy.sent[rows]
        whole = durations_s(SCHEDULES[schedule], (ranks, virtual, simulated), spent, sent)
        # In the long run as many micro-batches are under way as there are ranks, and each waits for all work and all
        # messages there and back; two ranks have one wire each way for all chunks' results and gradients.
        round_s = np.add.reduce(list(spent.values())).sum(axis=0) + 2 * (ranks - 1) * sent
        settled = np.maximum(slowest, messages_each_way(ranks, virtual) * sent)
        if virtual == 1 and SCHEDULES[schedule] != "gpipe":
            settled = np.maximum(settled, round_s / ranks)
        whole = whole + (micros[rows] - simulated) * settled
        step_s[rows] += whole / profile.speed - busy.closed_s[rows]
    return step_s


def stage_times_of(w: Workload, cluster: Cluster, one: Candidates, profile: SoftwareProfile) -> StageTimes:
    """Seconds of each stage for one micro-batch of a single candidate, as `simulated_s` takes them."""
    busy = _busy(w, cluster, one, profile, step_time(w, cluster, one, profile))
    virtual = int(one.virtual[0])
    layers = layers_of_stages(w.layers, int(one.pipeline[0]) * virtual, head_cost_in_layers(w), one.layer_split)
    spent = _chunks(busy, np.array([0]), layers, virtual)
    seconds = {kind: tuple(float(s) for s in values[:, 0] / profile.speed) for kind, values in spent.items()}
    return StageTimes(
        forward_s=seconds["forward"],
        backward_input_s=seconds["backward-input"],
        backward_weight_s=seconds["backward-weight"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Busy:
    """Seconds of one micro-batch; arrays over candidates, whose pipelines by the closed form take `closed_s`."""

    layer: Reals
    head: Reals
    other: Reals
    """What every rank spends beside: the host, and what it waits for messages where that is a share of them."""
    sent: Reals
    """One message to a neighbour, where it travels while the next micro-batch is computed."""
    forward: Reals
    """The forward pass' share of a layer's time."""
    weight: Reals
    """The share of the gradients of weights, which a schedule may put off: half of the backward pass' products."""
    closed_s: Reals


def _busy(w: Workload, cluster: Cluster, candidates: Candidates, profile: SoftwareProfile, times: StepTime) -> _Busy:
    micros = micro_batches(w, candidates) / profile.speed
    device = device_time_of(w, cluster, profile)
    layer = device.layer(candidates)
    layers = times.products / micros / (layer.products + layer.products_backward)
    per_rank = times.products + times.scores + times.stream + times.recompute
    per_rank = per_rank + times.tensor + times.context + times.experts
    other = times.host + (times.passes if profile.sends == "by share" else 0.0)
    again = times.recompute / micros / layers
    return _Busy(
        layer=per_rank / micros / layers,
        head=device.head(candidates),
        other=other / micros,
        sent=times.sent,
        forward=layer.forward / (layer.forward + layer.backward + again),
        weight=layer.products_backward / 2 / (layer.forward + layer.backward + again),
        closed_s=per_rank + times.head + times.host + times.passes + times.bubble,
    )


def _chunks(busy: _Busy, rows: Counts, layers: Sequence[int], virtual: int) -> dict[ActionKind, Reals]:
    held = np.array(layers)[:, None]
    whole = held * busy.layer[rows] + busy.other[rows] / virtual
    whole[-1] += busy.head[rows]
    forward, weight = whole * busy.forward[rows], whole * busy.weight[rows]
    return {"forward": forward, "backward-input": whole - forward - weight, "backward-weight": weight}
