"""The page's bars of memory: what fills the fullest device, for the chosen layout and the next best ones."""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.explain.report import runners_up
from plait.planner.search.cost_breakdown import MEMORY_NAMES, memory_items
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import layout_text
from plait.units import format_bytes

RUNNERS_UP_SHOWN = 5
LEAST_MEMORY_SHARE_SHOWN = 0.005
"""Share of a device's memory from which an item is drawn by itself in any of the bars."""
ALLOCATOR_ITEM = "the allocator's and the driver's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One kind of content, with its bytes in every bar."""

    name: str
    bytes_per_device: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBars:
    """A bar for each layout, the chosen one first; the items of a bar add up to what its fullest device needs, or where
    memories differ the one that has least room left."""

    layouts: tuple[str, ...]
    items: tuple[MemoryItem, ...]
    capacities: tuple[tuple[str, float], ...]
    """Kinds of devices with their bytes, the smallest first."""
    held_by: float
    """Memory in bytes of the device that the chosen layout's bar is for."""


def memory_bars(found: Search) -> MemoryBars:
    """What the chosen layout and a few others would keep on their fullest device."""
    rows = [found.chosen, *runners_up(found, RUNNERS_UP_SHOWN)]
    needed = [memory_items(found, row) for row in rows]
    names = {**MEMORY_NAMES, "reserve": ALLOCATOR_ITEM}
    least = LEAST_MEMORY_SHARE_SHOWN * max(sum(items.values()) for items in needed)
    seen = [name for name in names if any(items.get(name, 0.0) >= least for items in needed)]
    items = [MemoryItem(name=names[name], bytes_per_device=tuple(each[name] for each in needed)) for name in seen]
    unseen = tuple(sum(size for name, size in each.items() if name not in seen) for each in needed)
    if any(unseen):
        items.append(MemoryItem(name="all else", bytes_per_device=unseen))
    memories = {(island.device.name, float(island.device.memory_bytes)) for island in found.cluster.islands}
    return MemoryBars(
        layouts=tuple(layout_text(found.candidates.row(row)) for row in rows),
        items=tuple(items),
        capacities=tuple(sorted(memories, key=lambda pair: pair[1])),
        held_by=found.capacity_bytes(found.chosen),
    )


def memory_caption(bars: MemoryBars) -> str:
    """What one sees, in words."""
    needed = sum(item.bytes_per_device[0] for item in bars.items)
    largest = max(bars.items, key=lambda item: item.bytes_per_device[0])
    device = next((name for name, size in bars.capacities if size == bars.held_by), bars.capacities[0][0])
    others = ", then the next best ones of other kinds" if len(bars.layouts) > 1 else ""
    unlike = len({size for _, size in bars.capacities}) > 1
    which, line = ("has least room left", "the line of its kind") if unlike else ("is fullest", "the line")
    return (
        f"The chosen layout needs {format_bytes(needed)} of the {format_bytes(bars.held_by)} that one {device} has, "
        f"the largest part for {largest.name}. The first bar is the chosen layout{others}; each shows the device that "
        f"{which}, and none may pass {line}."
    )
