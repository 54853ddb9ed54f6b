"""How long a step takes on unequal devices when the pipeline is simulated action by action.

`bottleneck` prices many candidates by a closed form; the few that are nearest to the best are simulated here, and the
page draws its pipeline from the same stage times.
"""

from __future__ import annotations

import numpy as np

from plait.partition.pipeline_schedule import ActionKind
from plait.partition.pipeline_simulation import StageTimes, durations_s
from plait.planner.heterogeneous.assignment import WorkAssignment
from plait.planner.heterogeneous.unequal_step_time import Bottleneck, bottleneck
from plait.planner.problem.candidates import SCHEDULES, Counts, Reals
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.pipeline_step_time import (
    FEW_PIPELINE_RANKS,
    ROUNDS_SIMULATED,
    ROUNDS_SIMULATED_WITH_MESSAGES,
)
from plait.planner.step_time.step_time import StepTime


def simulated_unequal_s(
    inputs: CostInputs, assignment: WorkAssignment, times: StepTime, n_microbatches: Counts | None = None
) -> Reals:
    """Seconds of a step with the pipeline simulated action by action in place of `bottleneck`'s closed form."""
    c, profile = inputs.candidates, inputs.profile
    slowest = bottleneck(inputs, assignment, times, n_microbatches)
    step_s = slowest.times.step_s.copy()
    ranks, virtual = assignment.ranks, len(assignment.stage_layers) // assignment.ranks
    sent, micros = slowest.times.stage_message / profile.speed, slowest.n_microbatches.astype(np.int64)
    rounds = (
        np.where((sent > 0.0) & (ranks <= FEW_PIPELINE_RANKS), ROUNDS_SIMULATED_WITH_MESSAGES, ROUNDS_SIMULATED) * ranks
        + micros % ranks
    )
    short = np.minimum(micros, rounds)
    times_s = _action_times_s(inputs, assignment, slowest)
    keys = np.stack([c.schedule, short])
    for key in np.unique(keys, axis=1).T:
        rows = np.flatnonzero((keys == key[:, None]).all(axis=0))
        schedule, simulated = SCHEDULES[int(key[0])], int(key[1])
        few: dict[ActionKind, Reals] = {kind: values[:, rows] for kind, values in times_s.items()}
        whole = durations_s(schedule, (ranks, virtual, simulated), few, sent[rows])
        step_s[rows] += whole + (micros[rows] - simulated) * slowest.settled_s[rows] - slowest.piped_s[rows]
    return step_s


def unequal_stage_times(inputs: CostInputs, assignment: WorkAssignment, times: StepTime) -> tuple[StageTimes, int]:
    """Seconds of each stage for one micro-batch of a single candidate, as `simulated_unequal_s` uses them; and the
    micro-batches of the data-parallel rank that is done last."""
    slowest = bottleneck(inputs, assignment, times)
    times_s = _action_times_s(inputs, assignment, slowest)
    seconds = {kind: tuple(float(s) for s in values[:, 0]) for kind, values in times_s.items()}
    stages = StageTimes(
        forward_s=seconds["forward"],
        backward_input_s=seconds["backward-input"],
        backward_weight_s=seconds["backward-weight"],
    )
    return stages, round(float(slowest.n_microbatches[0]))


def _action_times_s(inputs: CostInputs, assignment: WorkAssignment, slowest: Bottleneck) -> dict[ActionKind, Reals]:
    """Seconds of each kind of action, shape [stages, candidates]."""
    layer = inputs.device_time.layer_time(inputs.candidates)
    both = slowest.times.products + slowest.times.scores + slowest.times.stream
    again = (layer.forward + layer.backward) * slowest.times.recompute / both
    all_s = layer.forward + layer.backward + again
    whole = slowest.share_of_rank_time * slowest.stages_s[np.arange(len(assignment.stage_layers)) % assignment.ranks]
    forward, weight = whole * (layer.forward / all_s), whole * (layer.backward / 2 / all_s)
    return {"forward": forward, "backward-input": whole - forward - weight, "backward-weight": weight}
