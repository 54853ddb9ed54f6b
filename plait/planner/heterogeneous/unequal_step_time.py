"""How long a step takes on unequal devices.

Note [the pace of unequal devices]: step_time.py prices every layout as if all devices were the reference device and all
shares equal. Here the arithmetic at each mesh coordinate is divided by its relative speed, and every data-parallel rank
does its own number of sequences. Messages take as long as before. The rank that is done last decides how long the step
takes, and in it the slowest pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from plait.planner.heterogeneous.assignment import WorkAssignment
from plait.planner.problem.candidates import SCHEDULES, Candidates, Counts, Reals
from plait.planner.problem.stage_partition import messages_each_way, rank_layers
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.stage_messages import hop_shares, slowest_hop_wait_s
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
    """Seconds that one more micro-batch adds once the pipeline is full."""
    piped_s: Reals
    """Seconds from the first micro-batch to the end of the last, by a closed form."""
    share_of_rank_time: Reals
    """Shape [stages, candidates]: each stage's share of its rank's time; the first and last stage have the
    embedding, the head and the loss beside their layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MicroBatchTimes:
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
    """The head and the loss, and what else stands behind the last layer."""
    waited: Reals
    """Time that the rank at the slowest hop waits for messages."""
    sent: Reals
    """One message to the next stage that travels while ranks compute, on average over the pipeline's hops."""
    slowest_sent: Reals
    """One message over the slowest hop."""
    hop_shares: Reals
    """Shape [pipeline, candidates]: what each rank waits for messages, as a share of the rank at the slowest hop."""

    def each(self, item: str) -> Reals:
        return getattr(self.times, item) / self.count


def bottleneck(
    inputs: CostInputs, assignment: WorkAssignment, times: StepTime, n_microbatches: Counts | None = None
) -> Bottleneck:
    """Find the bottleneck of each candidate of one assignment; `times` are those of equal devices (Note [the pace of
    unequal devices]).

    `n_microbatches` are the micro-batches of ranks that gather parameters in each of them, where they are more than the
    largest share needs.
    """
    candidates = inputs.candidates
    micro = _micro_batch_times(inputs, times)
    if n_microbatches is None:
        n_microbatches = -(-max(assignment.sequences_per_replica) // candidates.micro_sequences)
    table = np.vstack([assignment.relative_speed, assignment.sequences_per_replica])
    _, distinct = np.unique(table, axis=1, return_index=True)
    replicas = [_replica_time(micro, assignment, int(replica), n_microbatches) for replica in distinct]
    every = np.arange(len(candidates))
    last = np.stack([replica.piped_s for replica in replicas]).argmax(axis=0)
    micros, settled, piped = (
        np.stack([getattr(replica, name) for replica in replicas])[last, every]
        for name in ("micros", "settled_s", "piped_s")
    )
    stages = np.stack([replica.stages_s for replica in replicas])[last, :, every].T
    rank = stages.argmax(axis=0)
    speed = assignment.relative_speed[rank, distinct[last]]
    found = _step_time_items(micro, assignment, (micros, rank, speed, piped), n_microbatches)
    return Bottleneck(
        times=found,
        n_microbatches=micros,
        stages_s=stages,
        settled_s=settled,
        piped_s=piped,
        share_of_rank_time=_shares_of_rank_time(micro, assignment),
    )


def _micro_batch_times(inputs: CostInputs, t: StepTime) -> _MicroBatchTimes:
    w, c, profile = inputs.workload, inputs.candidates, inputs.profile
    layers = t.busiest_layers
    count = np.ceil(w.batch_sequences / (c.data_parallel_degree * c.micro_sequences))
    computed, messages = (
        np.add.reduce([getattr(t, item) for item in items]) / count / layers
        for items in (COMPUTE_ITEMS, MESSAGE_ITEMS_PER_MICRO_BATCH)
    )
    # `t.passes` is what that wait adds on the rank that sets the pace among equal ones.
    waited = slowest_hop_wait_s(inputs) * profile.calibration.message_factor("passes") / profile.speed
    if profile.send_model != "by share":
        waited = t.passes / count
    return _MicroBatchTimes(
        candidates=c,
        times=t,
        count=count,
        layers=layers,
        computed=computed,
        messages=messages,
        # With prediction ahead behind it; of heads in the middle of a pipeline these prices know nothing.
        head=rank_layers(w, c).last_heads * inputs.device_time.head_s(c) / profile.speed
        + (w.layers_and_depths - w.layers) * computed,
        waited=waited,
        sent=t.stage_message / profile.speed,
        slowest_sent=t.slowest_stage_message / profile.speed,
        hop_shares=hop_shares(inputs),
    )


def _shares_of_rank_time(micro: _MicroBatchTimes, assignment: WorkAssignment) -> Reals:
    """Each stage's share of its rank's time for a micro-batch."""
    layers = np.array(assignment.stage_layers, dtype=np.float64)
    virtual, rank = len(layers) // assignment.ranks, np.arange(len(layers)) % assignment.ranks
    work = layers[:, None] * (micro.computed + micro.messages) + micro.each("host") / virtual
    work[0] += assignment.embedding_cost_in_layers * micro.computed
    work[-1] += micro.head
    return work / np.add.reduce(work.reshape(virtual, assignment.ranks, -1))[rank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ReplicaTime:
    micros: Reals
    stages_s: Reals
    settled_s: Reals
    piped_s: Reals


def _replica_time(
    micro: _MicroBatchTimes, assignment: WorkAssignment, replica: int, n_microbatches: Counts
) -> _ReplicaTime:
    """Micro-batches of one data-parallel rank and their way through its pipeline stages.

    Ranks that gather sharded parameters do so together in every micro-batch, so each has as many micro-batches as the
    rank with the largest share, and computes at least one sequence in each.
    """
    c, ranks = micro.candidates, assignment.ranks
    work = assignment.layers_per_rank[:, None] * micro.computed + micro.each("host")
    work[0] += assignment.embedding_cost_in_layers * micro.computed
    work[-1] += micro.head
    stages = (
        work / assignment.relative_speed[:, [replica]]
        + assignment.layers_per_rank[:, None] * micro.messages
        + micro.hop_shares * micro.waited
    )
    computed, gathers_each = (
        np.full(len(c), assignment.sequences_per_replica[replica]),
        c.gathers_weights,
    )
    for size in np.unique(c.shard[gathers_each]):
        first = replica - replica % size
        most = max(assignment.sequences_per_replica[first : first + size])
        fewest = n_microbatches if most == max(assignment.sequences_per_replica) else -(-most // c.micro_sequences)
        computed = np.where(gathers_each & (c.shard == size), np.maximum(computed, fewest), computed)
    micros = computed / c.micro_sequences
    if ranks == 1:  # a last micro-batch that is not full takes less
        return _ReplicaTime(micros=micros, stages_s=stages, settled_s=stages[0], piped_s=micros * stages[0])
    micros = np.ceil(micros)
    slowest, whole, way = stages.max(axis=0), stages.sum(axis=0), 2 * (ranks - 1) * micro.sent
    wait = (whole - slowest) / c.virtual / np.where(c.schedule == SCHEDULES.index("zero-bubble"), 3, 1)
    wire_s = messages_each_way(ranks, c.virtual) * micro.slowest_sent
    settled = np.maximum(slowest, wire_s)
    at_once = (c.virtual == 1) & (c.schedule != SCHEDULES.index("gpipe"))  # as many under way as there are ranks
    settled = np.where(at_once, np.maximum(settled, (whole + way) / ranks), settled)
    piped = np.maximum(slowest + wait + way + (micros - 1) * settled, micros * wire_s)
    return _ReplicaTime(micros=micros, stages_s=stages, settled_s=settled, piped_s=piped)


def _step_time_items(
    micro: _MicroBatchTimes,
    assignment: WorkAssignment,
    slowest: tuple[Reals, Counts, Reals, Reals],
    n_microbatches: Counts,
) -> StepTime:
    """The items of the step. Those that recur in each micro-batch are those of the slowest pipeline rank of the
    data-parallel rank that is done last."""
    micros, rank, speed, piped_s = slowest
    t, c, held = micro.times, micro.candidates, assignment.layers_per_rank
    more = held[rank] / micro.layers * micros / micro.count
    items = {item: getattr(t, item) * more / speed for item in COMPUTE_ITEMS}
    items |= {item: getattr(t, item) * more for item in MESSAGE_ITEMS_PER_MICRO_BATCH}
    passes = micro.hop_shares[rank, np.arange(len(c))] * micro.waited * micros
    items["head"] = np.where(rank == assignment.ranks - 1, micro.head * micros / speed, 0.0)
    items |= {"host": micro.each("host") * micros / speed, "passes": passes}
    items["bubble"] = piped_s - np.add.reduce(list(items.values()))
    # Sharded parameters are gathered in each micro-batch, and every rank has as many of them.
    gathers = np.where(c.gathers_weights, n_microbatches / micro.count, 1.0)
    # Equal shares on the slowest device would compute for longer, and hide more.
    alike, computed = (
        np.add.reduce(own)
        for own in ([getattr(t, item) for item in COMPUTE_ITEMS], [items[item] for item in COMPUTE_ITEMS])
    )
    bared = t.hidden_sync * np.maximum(1 - computed / alike, 0.0)
    items |= {"parameters": t.parameters * gathers, "gradients": (t.gradients + bared) * gathers}
    updated = (held[:, None] / assignment.relative_speed).max() / held.max()
    items["optimizer"] = t.optimizer * updated
    step_s = np.add.reduce(list(items.values()))
    items["waiting"] = t.waiting * step_s / (t.step_s - t.waiting)
    return replace(t, **items, step_s=step_s + items["waiting"])
