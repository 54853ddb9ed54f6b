"""The smallest change of a configuration that makes a run fit, or that makes a run that fits faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plait.errors import PlaitError
from plait.foreign_configs.adapters import ALL_TARGETS
from plait.foreign_configs.forecast import RunForecast, forecast
from plait.foreign_configs.keys import ConfigFormat
from plait.foreign_configs.run_description import RunDescription
from plait.layout import Recompute
from plait.machines.cluster import Cluster
from plait.planner.problem.candidates import SHARDED_STATES, ShardedState

WORTH_SAYING = 0.03
"""A change that saves less than this share of a step's time is not proposed."""
SHORTEST_PROPOSED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A change in the format's own notation, and the run with it."""

    text: str
    keeps_mathematics: bool
    """Whether each step computes the same as before."""
    after: RunForecast


Change = Callable[[RunForecast], RunDescription | None]


def helpful_change(found: RunForecast, machines: Cluster, one: ConfigFormat) -> ConfigChange | None:
    """The smallest change that helps; None if none does.

    If the run does not fit: the fastest single change that makes it fit and keeps the mathematics; else two such
    changes; else one that changes the mathematics. If it fits: the change with the shortest step.
    """
    if found.verdict == "fits":
        faster = [change for change in _tried(found, machines, one, _FASTER) if change.after.verdict == "fits"]
        best = min(faster, key=lambda change: change.after.step_s, default=None)
        return best if best and best.after.step_s < found.step_s * (1 - WORTH_SAYING) else None
    smaller = list(_tried(found, machines, one, _SMALLER))
    pairs = (
        _both(first, second)
        for first in smaller
        for second in _tried(first.after, machines, one, _SMALLER)
        if first.text != second.text
    )
    for changes in (smaller, pairs, _tried(found, machines, one, _OTHER_MATHEMATICS)):
        fitting = [change for change in changes if change.after.verdict == "fits"]
        if fitting:
            return min(fitting, key=lambda change: change.after.step_s)
    return None


def _both(first: ConfigChange, second: ConfigChange) -> ConfigChange:
    return replace(second, text=f"{first.text}, and {second.text}")


def _tried(
    found: RunForecast, machines: Cluster, one: ConfigFormat, changes: dict[str, tuple[Change, ...]]
) -> Iterator[ConfigChange]:
    for name, ways in changes.items():
        if name not in one.changes:
            continue
        for way in ways:
            run = way(found)
            if run is None:
                continue
            try:
                after = forecast(run, machines)
            except PlaitError:  # this change is not possible here
                continue
            piped = one.changes.get(f"{name} of a pipeline") if run.layout.pipeline > 1 else None
            words = (piped or one.changes[name]).format(
                micro=after.layout["micro_sequences"],
                accumulation=after.accumulation,
                batch=after.workload.batch_sequences,
                sequence=run.sequence,
                devices=run.devices or machines.n_devices,
            )
            yield ConfigChange(text=words, keeps_mathematics=changes is not _OTHER_MATHEMATICS, after=after)


def _micro(factor: float) -> Change:
    def change(found: RunForecast) -> RunDescription | None:
        micro = int(found.layout["micro_sequences"]) * factor
        whole = int(found.accumulation / factor)
        if micro < 1 or micro != int(micro) or whole < 1 or found.accumulation % max(factor, 1):
            return None
        return replace(
            found.run,
            micro_sequences=int(micro),
            accumulation=None,
            batch_sequences=found.workload.batch_sequences,
        )

    return change


def _no_recompute(found: RunForecast) -> RunDescription | None:
    return None if found.run.recompute == "none" else replace(found.run, recompute="none")


def _more_recompute(how: Recompute) -> Change:
    order = ("none", "selective", "full")

    def change(found: RunForecast) -> RunDescription | None:
        is_more = order.index(how) > order.index(found.run.recompute)
        return replace(found.run, recompute=how) if is_more else None

    return change


def _shard(what: ShardedState) -> Change:
    def change(found: RunForecast) -> RunDescription | None:
        is_more = SHARDED_STATES.index(what) > SHARDED_STATES.index(found.layout["shard_what"])
        if not is_more or int(found.layout["replicate"]) * int(found.layout["shard"]) == 1:
            return None
        return replace(found.run, sharded=what, shards_over="all data ranks")

    return change


def _shard_less(found: RunForecast) -> RunDescription | None:
    if found.layout["shard_what"] != "parameters":
        return None
    return replace(found.run, sharded="optimizer", shards_over="all data ranks")


def _in_pieces(found: RunForecast) -> RunDescription | None:
    return None if found.run.loss == "in pieces" else replace(found.run, loss="in pieces")


def _sequence_parallel(found: RunForecast) -> RunDescription | None:
    is_new = found.run.layout.tensor > 1 and not found.run.sequence_parallel
    return replace(found.run, sequence_parallel=True) if is_new else None


def _compiled(found: RunForecast) -> RunDescription | None:
    return None if found.run.compiled else replace(found.run, compiled=True)


def _narrow_optimizer(found: RunForecast) -> RunDescription | None:
    if "8bit" in found.run.optimizer or "adam" not in found.run.optimizer:
        return None
    return replace(found.run, optimizer="adamw_bnb_8bit")


def _narrow_weights(found: RunForecast) -> RunDescription | None:
    return replace(found.run, weights="16 bits") if found.run.weights == "float32" else None


def _quantized(found: RunForecast) -> RunDescription | None:
    if not found.run.adapter_rank or found.run.quantized_bits == 4:
        return None
    return replace(found.run, quantized_bits=4)


def _offloaded(found: RunForecast) -> RunDescription | None:
    return None if found.run.offloads_optimizer else replace(found.run, offloads_optimizer=True)


def _adapters(found: RunForecast) -> RunDescription | None:
    if found.run.adapter_rank:
        return None
    return replace(found.run, adapter_rank=16, adapter_targets=ALL_TARGETS)


def _shorter(parts: int) -> Change:
    def change(found: RunForecast) -> RunDescription | None:
        sequence = (found.run.sequence or 0) // parts
        return replace(found.run, sequence=sequence) if sequence >= SHORTEST_PROPOSED else None

    return change


_SMALLER: dict[str, tuple[Change, ...]] = {
    "smaller micro-batch": tuple(_micro(1 / factor) for factor in (2, 4, 8, 16, 32)),
    "selective recompute": (_more_recompute("selective"),),
    "recompute": (_more_recompute("full"),),
    "loss in pieces": (_in_pieces,),
    "shard optimizer": (_shard("optimizer"),),
    "shard gradients": (_shard("gradients"),),
    "shard parameters": (_shard("parameters"),),
    "sequence parallel": (_sequence_parallel,),
    "offload optimizer": (_offloaded,),
}
_OTHER_MATHEMATICS: dict[str, tuple[Change, ...]] = {
    "8-bit optimizer": (_narrow_optimizer,),
    "16-bit weights": (_narrow_weights,),
    "quantize": (_quantized,),
    "shorter sequence": tuple(_shorter(parts) for parts in (2, 4, 8)),
    "adapters": (_adapters,),
}
_FASTER: dict[str, tuple[Change, ...]] = {
    "no recompute": (_no_recompute,),
    "larger micro-batch": tuple(_micro(float(factor)) for factor in (2, 4, 8, 16)),
    "compile": (_compiled,),
    "shard less": (_shard_less,),
}
