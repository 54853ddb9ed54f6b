"""Amounts with units, as people write them: "10 minutes", "500 steps", "20M tokens", "3 epochs", "125M"."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor, isfinite, log10
from typing import Literal

from plait.errors import PlaitError

AmountUnit = Literal["seconds", "steps", "tokens", "epochs"]

_SECONDS = {
    "ms": 0.001,
    "millisecond": 0.001,
    "s": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}
_MULTIPLES = {"": 1, "K": 1_000, "M": 1_000_000, "B": 1_000_000_000, "T": 1_000_000_000_000}
LARGEST_AMOUNT = 1e18
"""A million times the tokens of the largest published run."""
_AMOUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*([a-z]+)\s*$")
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of seconds, optimizer steps, tokens, or epochs: passes over the data."""

    value: float
    unit: AmountUnit
    epoch_tokens: int = field(default=0, compare=False)
    """Tokens of the windows of one epoch, once the data are known."""

    def __str__(self) -> str:
        if self.unit == "seconds":
            return format_duration(self.value)
        return f"{format_count(self.value)} {'epoch' if self == Amount(1, 'epochs') else self.unit}"

    @property
    def epochs(self) -> float | None:
        """The number of passes over the data after which they end; None where they are read as long as needed."""
        return self.value if self.unit == "epochs" else None


@dataclass(frozen=True, slots=True)
class Every:
    """How often something recurs: each `value` steps or seconds; `Every(0, "steps")` is "never"."""

    value: float
    unit: Literal["seconds", "steps"]
    cost_share: float | None = None
    """Largest share of the time that it may take, for which it recurs less often; None: it recurs as often as said."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))  # as it is read back from a file

    def __str__(self) -> str:
        return "never" if self.value == 0 else str(Amount(self.value, self.unit))


NEVER = Every(0, "steps")


def part_of(epochs: float, whole: int) -> int:
    """How many of this many things this many passes take, a part of one as a whole one; exact for decimal numbers."""
    return max(1, ceil(Fraction(str(epochs)) * whole))


def parse_amount(text: str) -> Amount:
    """Read "10 minutes", "500 steps", "20M tokens" or "3 epochs"; raises PlaitError on anything else."""
    match = _AMOUNT.match(text)
    if match:
        number, word = _product(match[1], _MULTIPLES[match[2]]), match[3]
        singular = word if word in _SECONDS else word.removesuffix("s")  # "ms" is no plural
        if number > 0 and singular in ("step", "token"):
            return Amount(number, "steps" if singular == "step" else "tokens")
        if number > 0 and not match[2] and singular == "epoch":
            return Amount(number, "epochs")
        if number > 0 and not match[2] and singular in _SECONDS:
            return Amount(number * _SECONDS[singular], "seconds")
    raise PlaitError(
        f'"{text}" is not an amount; write for example "10 minutes", "500 steps", "20M tokens" or "3 epochs"'
    )


def parse_every(text: str) -> Every:
    """Read "10 steps", "5 minutes" or "never"; raises PlaitError on anything else."""
    if text.strip() == "never":
        return Every(0, "steps")
    try:
        amount = parse_amount(text)
    except PlaitError:
        amount = None
    if amount is None or amount.unit in ("tokens", "epochs"):
        raise PlaitError(f'"{text}" is not an interval; write for example "10 steps", "5 minutes" or "never"')
    return Every(amount.value, amount.unit)


def parse_count(text: str) -> int:
    """Read a number of things such as "125M", "4096" or "1.5B"; raises PlaitError on anything else."""
    match = _COUNT.match(text)
    if not match:
        raise PlaitError(f'"{text}" is not a number; write for example 4096, "125M" or "1.5B"')
    return round(_product(match[1], _MULTIPLES[match[2].upper()]))


def _product(digits: str, multiple: int) -> float:
    if (product := float(digits) * multiple) > LARGEST_AMOUNT:
        raise PlaitError(
            f"{digits[:12]}{'…' * (len(digits) > 12)} is too large; write at most {LARGEST_AMOUNT / 1e12:,.0f}T"
        )
    return product


def times_text(factor: float) -> str:
    """2.46 -> "2.5 times", 16147 -> "16,147 times"."""
    return f"{factor:.2g} times" if factor < 10 else f"{factor:,.0f} times"


LEAST_TIMES = 1.05
"""The smallest factor that `times_text` writes as more than "1 times"."""


def as_long_text(factor: float) -> str:
    """2.46 -> "2.5 times as long", 1.03 -> "about as long"; for a time that is no shorter."""
    return f"{times_text(factor)} as long" if factor >= LEAST_TIMES else "about as long"


def times_slower_text(factor: float) -> str:
    """2.46 -> "2.5 times slower", 1.03 -> "3% slower"."""
    return f"{times_text(factor)} slower" if factor >= LEAST_TIMES else f"{factor - 1:.0%} slower"


def slower_text(factor: float) -> str:
    """1.05 -> "5.0% slower", 3.4 -> "3.4 times as slow"."""
    return compared_text(factor, "slower", "faster", digits=1)


_AS_BEFORE = {"slower": "slow", "faster": "fast", "longer": "long", "more": "much"}


def compared_text(ratio: float, more: str, less: str, *, digits: int = 0, than: str = "") -> str:
    """How one amount compares with another, from their ratio: 1.12, "slower", "faster" -> "12% slower", 162 -> "162
    times as slow", 0.25 -> "4 times as fast"; with `than` what it is compared with stands at the end."""
    if ratio >= 2:
        return f"{times_text(ratio)} as {_AS_BEFORE[more]}{than and f' as {than}'}"
    if ratio <= 0.5 and less in _AS_BEFORE:
        return f"{times_text(1 / ratio)} as {_AS_BEFORE[less]}{than and f' as {than}'}"
    return f"{abs(ratio - 1):.{digits}%} {more if ratio > 1 else less}{than and f' than {than}'}"


def counted(number: int, what: str, form: str = "") -> str:
    """2, "core" -> "2 cores", 1, "core" -> "1 core"; `form` is how the number is written: "," groups its digits."""
    return f"{number:{form}} {what if number == 1 else _plural(what)}"


def _plural(what: str) -> str:
    return (
        f"{what[:-1]}ies"
        if re.search("[^aeiou]y$", what)
        else f"{what}es"
        if what.endswith(("ch", "ss"))
        else f"{what}s"
    )


def more_or_less(difference: float, digits: int = 1) -> str:
    """A relative difference in words: 0.647 -> "64.7% more", -0.03 -> "3.0% less"."""
    return f"{abs(difference):.{digits}%} {'less' if difference < 0 else 'more'}"


def plain_number(value: float, digits: int = 3) -> str:
    """48_213 -> "48,200", 0.0000123 -> "0.0000123": this many significant digits, and never an exponent."""
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - floor(log10(abs(rounded))))
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def power_of_ten(value: float) -> str:
    """3.1e18 -> "3.1 × 10^18": for amounts that no usual prefix reaches."""
    factor, _, exponent = f"{value:.1e}".partition("e")
    return f"{factor} × 10^{int(exponent)}"


def format_count(value: float) -> str:
    """1_566_000 -> "1.57M": three significant digits."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size * 0.9995:
            return f"{plain_number(value / size)}{suffix}"
    return plain_number(value)


def format_si(value: float, unit: str) -> str:
    """2_920_000_000, "bit/s" -> "2.92 Gbit/s": three significant digits and the prefix that goes with the unit."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9995:
            return f"{plain_number(value / size)} {prefix}{unit}"
    return f"{plain_number(value)} {unit}"


def format_bytes(value: float) -> str:
    """1_572_864 -> "1.5 MiB"."""
    for suffix, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= 999.5 * size / 1024:  # it would round to 1000 of the smaller unit
            return f"{plain_number(value / size)} {suffix}"
    return f"{value:.0f} B"


def format_duration(seconds: float) -> str:
    """95 -> "1 min 35 s"; below a minute three significant digits, below a tenth of a millisecond in µs."""
    if 0 < seconds < 1e-4:
        return f"{plain_number(seconds * 1e6)} µs"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def format_days(seconds: float) -> str:
    """The time of a whole run: "3.1 days" where it takes two or more, else as format_duration has it."""
    days = seconds / 86400
    return f"{days:.1f} days" if days >= 2 else format_duration(seconds)
