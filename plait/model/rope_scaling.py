"""Rotary frequencies stretched for longer sequences than a model was first trained on: linear, llama3, yarn, longrope
and dynamic; and those of which the slow pairs stand still: proportional.

Names and numbers are those of `rope_parameters` in Hugging Face's config.json. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log, pi
from typing import Any, Literal, get_args

from plait.errors import PlaitError

RopeKind = Literal["linear", "llama3", "yarn", "longrope", "dynamic", "proportional"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How frequencies are divided by `factor`: all of them ("linear", Chen et al. 2023), the slow ones ("llama3",
    Llama 3.1), those of the slow pairs along a ramp ("yarn", Peng et al. 2023), or each by a factor of its own
    ("longrope", Ding et al. 2024). "dynamic" divides none within the longest sequence of a model, and plait takes no
    longer ones; "proportional" divides all, and of each head turns the fast pairs alone (Gemma 4). Raises PlaitError
    for numbers that cannot be."""

    kind: RopeKind
    factor: float
    original_sequence: int = 0
    """Longest sequence before the stretching; llama3, yarn and longrope need it."""
    low_frequency: float = 1.0
    """llama3: pairs that turn less often than this within `original_sequence` are slow."""
    high_frequency: float = 4.0
    """llama3: pairs that turn more often than this stay as they are."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this stay as they are."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are divided by the whole factor."""
    whole_pairs: Literal["yes", "no"] = "yes"
    """yarn: whether the ramp begins and ends at whole numbers of pairs."""
    table_scale: float = 1.0
    """yarn and longrope: what cosines and sines are multiplied by."""
    short_factors: tuple[float, ...] = ()
    """longrope: what each pair's frequency is divided by where no sequence is longer than `original_sequence`."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same where sequences may be longer."""
    rotated_share: float = 1.0
    """proportional: the share of a head's pairs that turn."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise PlaitError(
                f"rotary positions cannot be stretched by {self.kind!r}; choose " + ", ".join(get_args(RopeKind))
            )
        numbers = {"factor": self.factor, "table_scale": self.table_scale, "high_frequency": self.high_frequency}
        if self.kind not in ("linear", "dynamic", "proportional"):
            numbers["original_sequence"] = self.original_sequence
        for name, value in numbers.items():
            if not 0 < value < inf:
                raise PlaitError(f"the {name} of {self.kind} rotary positions is {value}; choose a number above 0")
        if not 0 < self.rotated_share <= 1 or (self.rotated_share != 1 and self.kind != "proportional"):
            raise PlaitError(
                f"the rotated_share of {self.kind} rotary positions is {self.rotated_share}; choose a share of at most "
                "1, which proportional ones alone may have below that"
            )
        if self.kind == "llama3" and not self.low_frequency < self.high_frequency:
            raise PlaitError(
                f"llama3's low_frequency is {self.low_frequency} and its high_frequency {self.high_frequency}; "
                "choose a larger high_frequency"
            )

        factors = (*self.short_factors, *self.long_factors)
        unlike = len(self.short_factors) != len(self.long_factors) or bool(factors) != (self.kind == "longrope")
        if unlike or not all(0 < one < inf for one in factors):
            raise PlaitError(
                "longrope has two lists of factors, both of one number above 0 for each pair that is rotated; correct "
                "short_factor and long_factor"
            )

    def stretch(self, frequencies: Sequence[float], theta: float, sequence: int) -> list[float]:
        """The frequencies (radians per position) of all pairs of a head after stretching, for sequences of up to
        `sequence` tokens."""
        if self.kind == "dynamic":
            return list(frequencies)
        if self.kind == "longrope":
            factors = self.long_factors if sequence > self.original_sequence else self.short_factors
            return [frequency / factor for frequency, factor in zip(frequencies, factors, strict=True)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in frequencies]
        if self.kind == "proportional":
            turned = int(self.rotated_share * 2 * len(frequencies) // 2)
            return [frequency / self.factor if pair < turned else 0.0 for pair, frequency in enumerate(frequencies)]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in frequencies]
        return self._yarn(frequencies, theta)

    def _llama3(self, frequency: float) -> float:
        turns = self.original_sequence * frequency / (2 * pi)
        if turns > self.high_frequency:
            return frequency
        if turns < self.low_frequency:
            return frequency / self.factor
        kept = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        return (1 - kept) * frequency / self.factor + kept * frequency

    def _yarn(self, frequencies: Sequence[float], theta: float) -> list[float]:
        pairs = len(frequencies)
        first, last = self._pair_turning(self.beta_fast, pairs, theta), self._pair_turning(self.beta_slow, pairs, theta)
        if self.whole_pairs == "yes":
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        length = last - first or 0.001
        divided = [min(1.0, max(0.0, (pair - first) / length)) for pair in range(pairs)]
        return [f * (1 - part) + f / self.factor * part for f, part in zip(frequencies, divided, strict=True)]

    def _pair_turning(self, turns: float, pairs: int, theta: float) -> float:
        """The number of the pair that turns so often within `original_sequence`, as a fraction."""
        return pairs * log(self.original_sequence / (turns * 2 * pi)) / log(theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRope:
    """Rotary positions of the layers with a window, where they differ from the other layers' (Gemma 3, OLMo 3)."""

    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not 0 < self.theta < inf:
            raise PlaitError(f"the theta of layers with a window is {self.theta}; choose a number above 0")


def scaling_from(values: Mapping[str, Any]) -> RopeScaling:
    """The scaling from what JSON made of it."""
    lists = {name: tuple(values[name]) for name in ("short_factors", "long_factors") if name in values}
    return RopeScaling(**{**values, **lists})


def window_rope_from(values: Mapping[str, Any]) -> WindowRope:
    """The rotary positions of layers with a window from what JSON made of them."""
    scaling = values.get("scaling")
    return WindowRope(**{**values, "scaling": scaling_from(scaling) if scaling else None})


def yarn_table_scale(factor: float) -> float:
    """Yarn's default factor of cosines and sines."""
    return 0.1 * log(factor) + 1.0 if factor > 1 else 1.0
