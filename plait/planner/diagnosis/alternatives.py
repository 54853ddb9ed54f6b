"""Other ways in which a planned layout may have run unasked: recomputation, other micro-batches, another precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.planner.diagnosis.priced_layout import PricedLayout
from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates
from plait.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Something that may run in another way than was planned."""

    name: str
    priced: PricedLayout
    look: str


def alternatives(priced: PricedLayout) -> Iterator[Alternative]:
    """Other ways to run the layout that fit in memory, and each was seen to happen unasked."""
    capacity = min(island.device.memory_bytes for island in priced.cluster.islands)
    for swap in _swaps(priced):
        if swap.priced.bytes_per_device <= capacity:
            yield swap


def _swaps(priced: PricedLayout) -> Iterator[Alternative]:
    row = priced.layout.row(0)
    for recompute in RECOMPUTE_MODES:
        if recompute != row["recompute"]:
            yield _by_memory(priced, f'recompute "{recompute}" in place of "{row["recompute"]}"', recompute=recompute)
    part = priced.workload.batch_sequences // int(priced.layout.data_parallel_degree[0])
    micro = int(row["micro_sequences"])
    for other in dict.fromkeys((1, micro // 2, 2 * micro)):
        if other not in (0, micro) and part % other == 0:
            many = f"{other} sequence{'s' if other > 1 else ''} at a time in place of {micro}"
            yield _by_memory(priced, many, micro_sequences=other)
    if row["schedule"] in ("interleaved", "zero-bubble"):
        plain = replace(priced, layout=Candidates.from_rows([{**row, "schedule": "1f1b", "virtual": 1}], "balanced"))
        yield Alternative(name=f'schedule "1f1b" in place of "{row["schedule"]}"', priced=plain, look=SETTINGS_TO_CHECK)
    w = priced.workload
    if w.precision in ("bf16", "fp16", "fp8"):
        yield Alternative(
            name=f"products in float32 in place of {w.precision}",
            priced=replace(priced, workload=replace(w, precision="float32")),
            look=SETTINGS_TO_CHECK,
        )
    if w.attention == "flash":
        unfused = replace(priced, workload=replace(w, attention="unfused"))
        yield Alternative(
            name="attention in single products, not in one fused kernel", priced=unfused, look=_bytes(priced, unfused)
        )


SETTINGS_TO_CHECK = "the run's first lines and its plan.json name it"


def _by_memory(priced: PricedLayout, name: str, **knobs: int | str) -> Alternative:
    layout = Candidates.from_rows([{**priced.layout.row(0), **knobs}], priced.layout.layer_split)
    other = replace(priced, layout=layout)
    return Alternative(name=name, priced=other, look=_bytes(priced, other))


def _bytes(here: PricedLayout, there: PricedLayout) -> str:
    told, planned = format_bytes(there.bytes_per_device), format_bytes(here.bytes_per_device)
    return f"a device would have {told} of memory in use, not {planned}" if told != planned else SETTINGS_TO_CHECK
