"""How long a step takes on unequal devices.

Note [the pace of unequal devices]: step_time.py prices every layout as if all devices were the reference device and all
shares equal. Here the arithmetic at each mesh coordinate is divided by its relative speed, and every data-parallel rank
does its own number of sequences. Messages take as long as before. The rank that is done last decides how long the step
takes, and in it the slowest pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plait.cluster.cluster import Cluster
from plait.partition.pipeline_schedule import ActionKind
from plait.partition.pipeline_simulation import StageTimes, durations_s
from plait.planner.heterogeneous.assignment import WorkAssignment
from plait.planner.problem.candidates import SCHEDULES, SHARD_WHAT, Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import messages_each_way, stage_layers
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_time import device_time_of
from plait.planner.step_time.pipeline_step_time import FEW_RANKS, ROUNDS_SIMULATED, ROUNDS_SIMULATED_WITH_MESSAGES
from plait.planner.step_time.step_time import StepTime

COMPUTE_ITEMS = ("products", "scores", "stream", "recompute")
MESSAGE_ITEMS_PER_MICRO_BATCH = ("tensor", "context", "experts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bottleneck:
    """The data-parallel rank and the pipeline stage that are done last; arrays over the candidates of one
    assignment."""

    times: StepTime
    """The step-time items of that stage."""
    n_microbatches: Reals
    """Micro-batches of that data-parallel rank."""
    stages_s: Reals
    """Shape [pipeline, candidates]: seconds of one micro-batch on each pipeline rank, forward and backward."""
    settled_s: Reals
    """Seconds that one micro-batch more takes once the pipeline is full."""
    piped_s: Reals
    """Seconds from the first micro-batch to the end of the last, by a closed form."""
    share_of_rank_time: Reals
    """Shape [stages, candidates]: each stage's share of its rank's time; the first and last stage have the
    embedding, the head and the loss beside their layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Micro:
    """One micro-batch as step_time.py prices it, in seconds; arrays over candidates."""

    candidates: Candidates
    times: StepTime
    count: Reals
    """Micro-batches of a step with equal shares."""
    layers: Reals
    """Layers on the pipeline rank that is priced."""
    computed: Reals
    """Arithmetic of one layer."""
    messages: Reals
    """Messages of one layer."""
    head: Reals
    """The head and the loss."""
    sent: Reals
    """One message to the next stage that travels while ranks compute."""

    def each(self, item: str) -> Reals:
        return getattr(self.times, item) / self.count


def bottleneck(
    workload: Workload,
    cluster: Cluster,
    candidates: Candidates,
    profile: SoftwareProfile,
    assignment: WorkAssignment,
    times: StepTime,
    numbers: Counts | None = None,
) -> Bottleneck:
    """Find the bottleneck of each candidate of one assignment; `times` are those of equal devices (Note [the pace of
    unequal devices]).

    `numbers` are the micro-batches of ranks that gather parameters in each of them, where they are more than the
    largest share needs.
    """
    micro = _micro(workload, cluster, candidates, profile, times)
    numbers = -(-max(assignment.sequences_per_replica) // candidates.micro_sequences) if numbers is None else numbers
    table = np.vstack([assignment.relative_speed, assignment.sequences_per_replica])
    _, distinct = np.unique(table, axis=1, return_index=True)
    parts = [_part(micro, assignment, int(part), numbers) for part in distinct]
    here = np.arange(len(candidates))
    last = np.stack([part.piped_s for part in parts]).argmax(axis=0)
    micros, settled, piped = (
        np.stack([getattr(part, name) for part in parts])[last, here] for name in ("micros", "settled_s", "piped_s")
    )
    stages = np.stack([part.stages_s for part in parts])[last, :, here].T
    rank = stages.argmax(axis=0)
    speed = assignment.relative_speed[rank, distinct[last]]
    found = _items(micro, assignment, (micros, rank, speed, piped), numbers)
    parts = _parts(micro, assignment)
    return Bottleneck(
        times=found, n_microbatches=micros, stages_s=stages, settled_s=settled, piped_s=piped, share_of_rank_time=parts
    )


def simulated_unequal_s(
    workload: Workload,
    cluster: Cluster,
    c: Candidates,
    profile: SoftwareProfile,
    assignment: WorkAssignment,
    times: StepTime,
    numbers: Counts | None = None,
) -> Reals:
    """Seconds of a step with the pipeline simulated action by action in place of `bottleneck`'s closed form."""
    pace = bottleneck(workload, cluster, c, profile, assignment, times, numbers)
    step_s = pace.times.step_s.copy()
    ranks, virtual = assignment.ranks, len(assignment.stage_layers) // assignment.ranks
    sent, micros = pace.times.sent / profile.speed, pace.n_microbatches.astype(np.int64)
    rounds = (
        np.where((sent > 0.0) & (ranks <= FEW_RANKS), ROUNDS_SIMULATED_WITH_MESSAGES, ROUNDS_SIMULATED) * ranks
        + micros % ranks
    )
    short = np.minimum(micros, rounds)
    spent = _spent(workload, cluster, c, profile, assignment, pace)
    keys = np.stack([c.schedule, short])
    for key in np.unique(keys, axis=1).T:
        rows = np.flatnonzero((keys == key[:, None]).all(axis=0))
        schedule, simulated = SCHEDULES[int(key[0])], int(key[1])
        few: dict[ActionKind, Reals] = {kind: values[:, rows] for kind, values in spent.items()}
        whole = durations_s(schedule, (ranks, virtual, simulated), few, sent[rows])
        step_s[rows] += whole + (micros[rows] - simulated) * pace.settled_s[rows] - pace.piped_s[rows]
    return step_s


def unequal_stage_times(
    workload: Workload,
    cluster: Cluster,
    one: Candidates,
    profile: SoftwareProfile,
    assignment: WorkAssignment,
    times: StepTime,
) -> tuple[StageTimes, int]:
    """Seconds of each stage for one micro-batch of a single candidate, as `simulated_unequal_s` takes them; and the
    micro-batches of the data-parallel rank that is done last."""
    pace = bottleneck(workload, cluster, one, profile, assignment, times)
    spent = _spent(workload, cluster, one, profile, assignment, pace)
    seconds = {kind: tuple(float(s) for s in values[:, 0]) for kind, values in spent.items()}
    stages = StageTimes(
        forward_s=seconds["forward"],
        backward_input_s=seconds["backward-input"],
        backward_weight_s=seconds["backward-weight"],
    )
    return stages, round(float(pace.n_microbatches[0]))


def _micro(w: Workload, cluster: Cluster, c: Candidates, profile: SoftwareProfile, t: StepTime) -> _Micro:
    held = stage_layers(w, c)
    layers = np.where(t.head > 0, held.last, held.most)  # as step_time.py found the busiest rank
    count = np.ceil(w.batch_sequences / (c.data_parallel_degree * c.micro_sequences))
    computed, messages = (
        np.add.reduce([getattr(t, item) for item in items]) / count / layers
        for items in (COMPUTE_ITEMS, MESSAGE_ITEMS_PER_MICRO_BATCH)
    )
    return _Micro(
        candidates=c,
        times=t,
        count=count,
        layers=layers,
        computed=computed,
        messages=messages,
        head=device_time_of(w, cluster, profile).head(c) / profile.speed,
        sent=t.sent / profile.speed,
    )


def _parts(micro: _Micro, assignment: WorkAssignment) -> Reals:
    """Each stage's share of its rank's time for a micro-batch."""
    layers = np.array(assignment.stage_layers, dtype=np.float64)
    virtual, rank = len(layers) // assignment.ranks, np.arange(len(layers)) % assignment.ranks
    work = layers[:, None] * (micro.computed + micro.messages) + micro.each("host") / virtual
    work[0] += assignment.embedding_cost_in_layers * micro.computed
    work[-1] += micro.head
    return work / np.add.reduce(work.reshape(virtual, assignment.ranks, -1))[rank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    micros: Reals
    stages_s: Reals
    settled_s: Reals
    piped_s: Reals


def _part(micro: _Micro, assignment: WorkAssignment, part: int, numbers: Counts) -> _Part:
    """One part of the batch: its micro-batches and its way through the stages.

    Where it meets others in each of theirs, of which the part that takes most has so many, it computes one sequence at
    least in every one.
    """
    c, ranks = micro.candidates, assignment.ranks
    work = assignment.layers_per_rank[:, None] * micro.computed + micro.each("host")
    work[0] += assignment.embedding_cost_in_layers * micro.computed
    work[-1] += micro.head
    stages = (
        work / assignment.relative_speed[:, [part]]
        + assignment.layers_per_rank[:, None] * micro.messages
        + micro.each("passes")
    )
    computed, meets = (
        np.full(len(c), assignment.sequences_per_replica[part]),
        c.shard_what == SHARD_WHAT.index("parameters"),
    )
    for size in np.unique(c.shard[meets]):
        first = part - part % size
        most = max(assignment.sequences_per_replica[first : first + size])
        fewest = numbers if most == max(assignment.sequences_per_replica) else -(-most // c.micro_sequences)
        computed = np.where(meets & (c.shard == size), np.maximum(computed, fewest), computed)
    micros = computed / c.micro_sequences
    if ranks == 1:  # a last micro-batch that is not full takes less
        return _Part(micros=micros, stages_s=stages, settled_s=stages[0], piped_s=micros * stages[0])
    micros = np.ceil(micros)
    slowest, whole, way = stages.max(axis=0), stages.sum(axis=0), 2 * (ranks - 1) * micro.sent
    wait = (whole - slowest) / c.virtual / np.where(c.schedule == SCHEDULES.index("zero-bubble"), 3, 1)
    wire_s = messages_each_way(ranks, c.virtual) * micro.sent
    settled = np.maximum(slowest, wire_s)
    at_once = (c.virtual == 1) & (c.schedule != SCHEDULES.index("gpipe"))  # as many under way as there are ranks
    settled = np.where(at_once, np.maximum(settled, (whole + way) / ranks), settled)
    piped = np.maximum(slowest + wait + way + (micros - 1) * settled, micros * wire_s)
    return _Part(micros=micros, stages_s=stages, settled_s=settled, piped_s=piped)


def _items(
    micro: _Micro, assignment: WorkAssignment, pacing: tuple[Reals, Counts, Reals, Reals], numbers: Counts
) -> StepTime:
    """The step's items, of which those that come with each micro-batch are of the given rank of the pacing part."""
    micros, rank, speed, piped_s = pacing
    t, c, held = micro.times, micro.candidates, assignment.layers_per_rank
    more = held[rank] / micro.layers * micros / micro.count
    items = {item: getattr(t, item) * more / speed for item in COMPUTE_ITEMS}
    items |= {item: getattr(t, item) * more for item in MESSAGE_ITEMS_PER_MICRO_BATCH}
    items["head"] = np.where(rank == assignment.ranks - 1, micro.head * micros / speed, 0.0)
    items |= {"host": micro.each("host") * micros / speed, "passes": micro.each("passes") * micros}
    items["bubble"] = piped_s - np.add.reduce(list(items.values()))
    # Sharded parameters are gathered for each micro-batch, and all ranks have as many.
    meetings = np.where(c.shard_what == SHARD_WHAT.index("parameters"), numbers / micro.count, 1.0)
    items |= {"parameters": t.parameters * meetings, "gradients": t.gradients * meetings}
    updated = (held[:, None] / assignment.relative_speed).max() / held.max()
    items["optimizer"] = t.optimizer * updated
    step_s = np.add.reduce(list(items.values()))
    items["waiting"] = t.waiting * step_s / (t.step_s - t.waiting)
    return replace(t, **items, step_s=step_s + items["waiting"])


def _spent(
    w: Workload, cluster: Cluster, c: Candidates, profile: SoftwareProfile, assignment: WorkAssignment, pace: Bottleneck
) -> dict[ActionKind, Reals]:
    """Seconds of each kind of action, (stages, candidates)."""
    layer = device_time_of(w, cluster, profile).layer(c)
    both = pace.times.products + pace.times.scores + pace.times.stream
    again = (layer.forward + layer.backward) * pace.times.recompute / both
    all_s = layer.forward + layer.backward + again
    whole = pace.share_of_rank_time * pace.stages_s[np.arange(len(assignment.stage_layers)) % assignment.ranks]
    forward, weight = whole * (layer.forward / all_s), whole * (layer.backward / 2 / all_s)
    return {"forward": forward, "backward-input": whole - forward - weight, "backward-weight": weight}
