"""Doubts that are said beside a figure which is better than is possible: what it was compared with must be wrong."""

from __future__ import annotations

LEAST_EXCESS = 0.01
"""Efficiency above 1 that is noise: a step's median is not known better."""


def mfu_text(mfu: float) -> str:
    """An MFU in whole per cent, with its doubt in brackets where it is more than the peak."""
    return f"{mfu:.0%}" if mfu <= 1 else f"{mfu:.0%} (more than the peak)"


def mfu_doubt(mfu: float | None) -> str:
    """The error behind an MFU above 1, as the end of a sentence; empty if there is none."""
    if mfu is None or mfu <= 1:
        return ""
    return (
        "; not possible: the peak is too low, probably measured while other programs ran (--replan measures it again)"
    )


def efficiency_doubt(efficiency: float, workers: int) -> str:
    """The error behind a speed-up above the number of workers, as the end of a sentence; empty if there is none."""
    if efficiency <= 1 + LEAST_EXCESS:
        return ""
    return f"; hardly possible with {workers}: one device alone is probably faster than that estimate"
