"""A run's bottleneck and the gain from changes: one value for the page, the terminal and the receipt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.units import times_text

BottleneckCause = Literal[
    "products", "attention", "head", "memory rate", "optimizer", "kernel launches", "recomputation", "micro-batch",
    "memory", "network", "slow host", "pipeline", "data", "start-up",
]  # fmt: skip
"""The cause: the first seven are work that every run must do."""
LEAST_REMEDY_GAIN = 1.05
"""A change that gains less than this factor is no remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that the user can make, and how many times as fast the run would then be, by the fitted cost model."""

    change: str
    gain: float
    setting: str = ""
    """The change as an override of the recipe ("layout.recompute=none"); empty for a change to the machines."""
    factor: float = 1.0
    """The factor on the present rate of a network or disk that the change takes; 1 for other changes."""

    @property
    def text(self) -> str:
        """The change and its gain in words."""
        return f"{self.change}: {times_text(self.gain)} as fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBottleneck:
    """A run's bottleneck; `remedies` are changes that gain 5 % or more, the best first."""

    cause: BottleneckCause
    share: float
    """Share of a step's time; for "start-up", of the run's time."""
    sentence: str
    remedies: tuple[Remedy, ...] = ()


def bottleneck_lines(found: RunBottleneck | None) -> Sequence[str]:
    """The sentence and a line for each remedy; empty if nothing is known."""
    return [] if found is None else [found.sentence, *(remedy.text for remedy in found.remedies)]


def bottleneck_rows(found: RunBottleneck | None) -> Sequence[str]:
    """The same for the aligned lines of a terminal."""
    sentence, *remedies = bottleneck_lines(found) or [""]
    return [f"limits   {sentence}", *(f"         {remedy}" for remedy in remedies)] if sentence else []
