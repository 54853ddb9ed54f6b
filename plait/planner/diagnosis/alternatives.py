"""Other ways in which a planned layout may run unasked: computing again, other portions, another precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.planner.diagnosis.priced_layout import PricedLayout
from plait.planner.problem.candidates import RECOMPUTE, Candidates
from plait.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Something that may run in another way than was planned."""

    name: str
    scene: PricedLayout
    look: str


def alternatives(scene: PricedLayout) -> Iterator[Alternative]:
    """Other ways to run the layout that fit in memory, and each was seen to happen unasked."""
    capacity = min(island.device.memory_bytes for island in scene.cluster.islands)
    for swap in _swaps(scene):
        if swap.scene.bytes_per_device <= capacity:
            yield swap


def _swaps(scene: PricedLayout) -> Iterator[Alternative]:
    row = scene.layout.row(0)
    for recompute in RECOMPUTE:
        if recompute != row["recompute"]:
            yield _by_memory(scene, f'recompute "{recompute}" in place of "{row["recompute"]}"', recompute=recompute)
    part = scene.workload.batch_sequences // int(scene.layout.data_parallel_degree[0])
    micro = int(row["micro_sequences"])
    for other in dict.fromkeys((1, micro // 2, 2 * micro)):
        if other not in (0, micro) and part % other == 0:
            many = f"{other} sequence{'s' if other > 1 else ''} at a time in place of {micro}"
            yield _by_memory(scene, many, micro_sequences=other)
    if row["schedule"] in ("interleaved", "zero-bubble"):
        plain = replace(scene, layout=Candidates.from_rows([{**row, "schedule": "1f1b", "virtual": 1}], "balanced"))
        yield Alternative(name=f'schedule "1f1b" in place of "{row["schedule"]}"', scene=plain, look=SETTINGS_TO_CHECK)
    w = scene.workload
    if w.precision in ("bf16", "fp16", "fp8"):
        yield Alternative(
            name=f"products in float32 in place of {w.precision}",
            scene=replace(scene, workload=replace(w, precision="float32")),
            look=SETTINGS_TO_CHECK,
        )
    if w.attention == "flash":
        unfused = replace(scene, workload=replace(w, attention="unfused"))
        yield Alternative(
            name="attention in single products, not in one fused kernel", scene=unfused, look=_bytes(scene, unfused)
        )


SETTINGS_TO_CHECK = "the run's first lines and its plan.json name it"


def _by_memory(scene: PricedLayout, name: str, **knobs: int | str) -> Alternative:
    layout = Candidates.from_rows([{**scene.layout.row(0), **knobs}], scene.layout.layer_split)
    other = replace(scene, layout=layout)
    return Alternative(name=name, scene=other, look=_bytes(scene, other))


def _bytes(here: PricedLayout, there: PricedLayout) -> str:
    told, planned = format_bytes(there.bytes_per_device), format_bytes(here.bytes_per_device)
    return f"a device would have {told} of memory in use, not {planned}" if told != planned else SETTINGS_TO_CHECK
