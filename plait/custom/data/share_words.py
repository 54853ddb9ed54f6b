"""Messages about the workers' shares: each one's part of a batch, and the reason."""

from __future__ import annotations

from collections.abc import Sequence

from plait.units import format_duration, times_slower_text

NAMED = 8
"""Workers whose shares are named; of more, the smallest and the largest share are."""
ALIKE = 1.05
"""Ratio of speeds below which a worker is not called slower."""


def measuring_text(steps: int) -> str:
    """Before anything is known: `steps` is when the first decision comes."""
    return f"the workers' speeds are measured in the first {steps} steps; after that, shares of each batch follow them"


def shares_stay_text(names: Sequence[str], seconds: Sequence[float]) -> str:
    """Nothing to gain: the workers' times for their parts of a step."""
    return "shares of each batch stay as they are: no worker waits long for another one (" + _row(names, seconds) + ")"


def worker_shares_text(
    names: Sequence[str], old: Sequence[float], new: Sequence[float], speeds: Sequence[float]
) -> str:
    """New shares with the reason for each, and what a step gains; `speeds` are examples a second of each worker."""
    before, after = (_slowest_s(shares, speeds) for shares in (old, new))
    fastest = max(speeds)
    parts = []
    for name, share, speed in zip(names, new, speeds, strict=True):
        slower = fastest / speed
        why = f" ({times_slower_text(slower)})" if slower > ALIKE else ""
        parts.append((share / sum(new), f"{name} {share / sum(new):.1%}{why}"))
    if len(parts) > NAMED:
        listed = f"{max(parts)[1]}, {min(parts)[1]}, and {len(parts) - 2} others between them"
    else:
        listed = ", ".join(text for _, text in parts)
    return (
        f"shares of each batch follow the measured speeds: {listed}; the slowest worker's part of a step goes from "
        f"{format_duration(before)} to {format_duration(after)}"
    )


def _slowest_s(shares: Sequence[float], speeds: Sequence[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def _row(names: Sequence[str], seconds: Sequence[float]) -> str:
    if len(names) > NAMED:
        return f"{format_duration(min(seconds))} to {format_duration(max(seconds))} for their parts"
    return ", ".join(f"{name} {format_duration(second)}" for name, second in zip(names, seconds, strict=True))
