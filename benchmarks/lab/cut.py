"""When a turn has told enough: pure judgements on the times of its steps so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any, Literal

WARM_UP = 1
"""plait watches memory in the first step, and everybody's buffers grow in it."""
HOPELESS = 2.0
"""Times the fastest: a first full step longer than this is the only one that is taken."""
PATIENCE = 4.0
"""Times the fastest: a step that has not ended by then is cut off, and counts as longer than it was given."""
LEAST_PATIENCE_S = 3.0
"""A hiccup of the machine is no slow layout."""
FIRST_PATIENCE_S = 90.0
"""On top of it for the first step: all hosts start up, measure each other and plan."""
BEGUN_PATIENCE_S = 10.0
"""The same once they are known to have done that: workers open their links, and the first step makes room."""

QUIET = 0.03
"""Of the machine's processor time: a step during which somebody else took more of it tells little."""
LONGEST = 2
"""Times the steps wanted: so many are taken at the most, to find quiet ones among them."""
FEW = 3
"""Steps after which a slow contender is cut although none of them was quiet."""

Ended = Literal["finished", "cut", "longer", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contender's steps; `seconds` without the warm-up, and of quiet steps where there are enough of them.

    "longer": the one figure is a lower bound.
    """

    seconds: tuple[float, ...]
    ended: Ended
    sentence: str = ""
    """Why it failed."""
    peak_tensor_bytes: int = 0
    """On the fullest rank; 0 where it was not told."""
    peak_rss_bytes: int = 0
    planned_tensor_bytes: int = 0
    """What the run's own plan said of these, as its batch was dealt out; 0 where it said nothing."""
    planned_rss_bytes: int = 0
    processor_s: float = 0.0
    """Of all hosts, a step."""
    sent_bytes: float = 0.0
    """Of the busiest host, a step, on its cable."""
    product_s: tuple[float, ...] = ()
    """What one and the same product took each host's processor meanwhile: see pace.py."""
    others: float = 0.0
    """Share of the machine's processor time that programs outside the lab, or other machines beside this virtual one,
    took during these steps."""

    @property
    def step_s(self) -> float:
        return median(self.seconds)

    def at_pace(self, usual_s: float) -> Turn:
        """The same as if the processors' pace had been this one (pace.py): what was computed, as the processor seconds
        of a host or, where these are not known, all of it, takes in proportion; waiting stays."""
        if not usual_s or not self.product_s or not min(self.product_s):
            return self
        spared = 1 - usual_s / mean(self.product_s)
        computed_s = self.processor_s / len(self.product_s) or float("inf")
        return replace(self, seconds=tuple(s - spared * min(s, computed_s) for s in self.seconds))

    def to_values(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> Turn:
        return Turn(**{**values, **{key: tuple(values.get(key, ())) for key in ("seconds", "product_s")}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """When to end a turn."""

    steps: int
    """Full steps wanted."""
    fastest_s: float
    """Of the contenders so far; infinite for the first."""
    warm_up: int = WARM_UP
    """Steps at the beginning that do not count."""

    def verdict(
        self, seconds: Sequence[float], waiting_s: float, others: Sequence[float] = (), *, allowed_s: float
    ) -> Ended | None:
        """`seconds` of all steps so far, warm-up included; `waiting_s` since the last of them, or, before the first,
        since a moment from which on `allowed_s` are granted for it; what `others` took of the machine during each.
        None: go on."""
        full, quiet = seconds[self.warm_up :], self._quiet(seconds, others)
        # Where no step was quiet, the least of a few speaks for itself.
        telling = quiet[:1] or ((min(full),) if len(full) >= FEW else ())
        if telling and telling[0] > HOPELESS * self.fastest_s:
            return "cut"
        if len(quiet) >= self.steps or len(full) >= LONGEST * self.steps:
            return "finished"
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * self.fastest_s) + (0 if seconds else allowed_s)
        return "longer" if not full and waiting_s > patience_s else None

    def kept(
        self,
        seconds: Sequence[float],
        ended: Ended,
        waiting_s: float,
        others: Sequence[float] = (),
        *,
        allowed_s: float,
    ) -> tuple[float, ...]:
        """The figures that a turn which ended so leaves: of the quiet steps, where they are half of those wanted."""
        full = tuple(seconds[self.warm_up :])
        quiet = self._quiet(seconds, others)
        if ended == "cut":
            return quiet[:1] or (min(full),)
        # The first step's wait holds the start-up too, so that only what its patience leaves out of that is sure.
        sure_s = waiting_s - (0 if seconds else allowed_s)
        if ended == "longer":
            return (max(sure_s, 0.0),)
        return quiet if 2 * len(quiet) >= self.steps else full

    def _quiet(self, seconds: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
        """The full steps during which nobody else took much; all of them where that is not known."""
        if not others:
            return tuple(seconds[self.warm_up :])
        pairs = zip(seconds[self.warm_up :], others[self.warm_up :], strict=True)
        return tuple(s for s, share in pairs if share <= QUIET)
