"""Other ways in which a planned layout may run unasked: computing again, other portions, another precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.planner.diagnosis.priced_layout import Scene
from plait.planner.problem.candidates import RECOMPUTE, Candidates
from plait.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Something that may run in another way than was planned."""

    name: str
    scene: Scene
    look: str


def swaps(scene: Scene) -> Iterator[Swap]:
    """Other ways to run the layout that fit in memory, and each was seen to happen unasked."""
    capacity = min(island.device.memory_bytes for island in scene.cluster.islands)
    for swap in _swaps(scene):
        if swap.scene.bytes_per_device <= capacity:
            yield swap


def _swaps(scene: Scene) -> Iterator[Swap]:
    row = scene.layout.row(0)
    for recompute in RECOMPUTE:
        if recompute != row["recompute"]:
            yield _by_memory(scene, f'recompute "{recompute}" in place of "{row["recompute"]}"', recompute=recompute)
    part = scene.workload.batch_sequences // int(scene.layout.batch_parts[0])
    micro = int(row["micro_sequences"])
    for other in dict.fromkeys((1, micro // 2, 2 * micro)):
        if other not in (0, micro) and part % other == 0:
            many = f"{other} sequence{'s' if other > 1 else ''} at a time in place of {micro}"
            yield _by_memory(scene, many, micro_sequences=other)
    if row["schedule"] in ("interleaved", "zero-bubble"):
        plain = replace(scene, layout=Candidates.of([{**row, "schedule": "1f1b", "virtual": 1}], "balanced"))
        yield Swap(name=f'schedule "1f1b" in place of "{row["schedule"]}"', scene=plain, look=SETTINGS)
    w = scene.workload
    if w.precision in ("bf16", "fp16", "fp8"):
        yield Swap(
            name=f"products in float32 in place of {w.precision}",
            scene=replace(scene, workload=replace(w, precision="float32")),
            look=SETTINGS,
        )
    if w.attention == "flash":
        unfused = replace(scene, workload=replace(w, attention="unfused"))
        yield Swap(
            name="attention in single products, not in one fused kernel", scene=unfused, look=_bytes(scene, unfused)
        )


SETTINGS = "the run's first lines and its plan.json name it"


def _by_memory(scene: Scene, name: str, **knobs: int | str) -> Swap:
    layout = Candidates.of([{**scene.layout.row(0), **knobs}], scene.layout.dealing)
    other = replace(scene, layout=layout)
    return Swap(name=name, scene=other, look=_bytes(scene, other))


def _bytes(here: Scene, there: Scene) -> str:
    told, planned = format_bytes(there.bytes_per_device), format_bytes(here.bytes_per_device)
    return f"a device would have {told} of memory in use, not {planned}" if told != planned else SETTINGS
