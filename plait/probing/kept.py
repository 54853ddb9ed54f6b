"""What was measured on a machine, kept for other runs and recipes on it: its arithmetic peak, the rates of matrix
products, and how long steps take. One file for each machine with its software; deleting `.plait/timings` forgets all.

Note [similar sizes]: each figure is kept with the sizes on which it depends, and serves work of similar ones: all
within a factor of SIMILAR. What it depends on otherwise (layout, threads, arithmetic) is in its name and must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf, log
from pathlib import Path
from typing import TypeVar

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.data.preparation.fingerprint import exclusive_lock
from plait.errors import RunFailed
from plait.machines.machine import Machine
from plait.machines.measured import LEAST_UNDISTURBED_SHARE, ProductRates
from plait.private_folder import make_private_folder
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.screen.screen import Log
from plait.working_folder import WorkingFolder

TIMINGS_FORMAT = 1
"""Raised when figures come to mean something else, so that earlier ones are not used."""
SIMILAR = 2.0
MOST_KEPT = 100
"""Figures of each kind that stay in a file, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRates:
    """Speed and error of some work's matrix products on each worker."""

    name: str
    sizes: tuple[int, ...]
    ranks: tuple[ProductRates, ...]

    def __post_init__(self) -> None:
        if not self.ranks or min(self.sizes, default=1) < 1:
            raise ValueError("rates need a worker and sizes of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFactor:
    """A measured ratio, such as that of a timed step to its forecast."""

    name: str
    sizes: tuple[int, ...]
    value: float
    granted: float = 1.0
    """Share of the time in which the workers had their cores meanwhile: less where other programs ran."""

    def __post_init__(self) -> None:
        if not (0 < self.value < inf and 0 <= self.granted <= 1 and min(self.sizes, default=1) >= 1):
            raise ValueError("a ratio must be positive and its sizes at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTimings:
    """All that was measured on a machine, the oldest first."""

    peak_flops: float = 0.0
    """Arithmetic peak of the processor, measured while nothing else ran; 0 where it never was."""
    rates: tuple[KeptRates, ...] = ()
    factors: tuple[KeptFactor, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.peak_flops < inf:
            raise ValueError("the peak must be finite and not negative")


_Kept = TypeVar("_Kept", KeptRates, KeptFactor)


def nearest(entries: Sequence[_Kept], name: str, sizes: Sequence[int]) -> _Kept | None:
    """The entry of this name with the most similar sizes, of equal ones the newest; None where none is similar."""
    fit = [one for one in reversed(entries) if one.name == name and is_similar(one.sizes, sizes)]
    return min(fit, key=lambda one: _distance(one.sizes, sizes), default=None)


def is_similar(one: Sequence[int], other: Sequence[int], within: float = SIMILAR) -> bool:
    """Whether each size is within this factor of the other's: Note [similar sizes]."""
    return len(one) == len(other) and _distance(one, other) <= log(within) + 1e-9


def _distance(one: Sequence[int], other: Sequence[int]) -> float:
    return max((abs(log(a / b)) for a, b in zip(one, other, strict=True)), default=0.0)


def load_timings(working: WorkingFolder, machine: Machine, say: Log = lambda line: None) -> KeptTimings:
    """Earlier measurements of a machine. A file that is damaged or not plait's is ignored, and `say` gets a line."""
    path = _path(working, machine)
    try:
        values = parse_object(read_regular_file(path))
        if values.pop("format", None) != TIMINGS_FORMAT:
            raise ValueError("another version of plait wrote it")
        return typed_value(KeptTimings, values)
    except FileNotFoundError:
        return KeptTimings()
    except (OSError, ValueError, TypeError, RecursionError) as error:
        say(f"measured {path} is not used and will be written again: {error}")
        return KeptTimings()


def keep_timings(
    working: WorkingFolder,
    machine: Machine,
    *,
    peak_flops: float = 0.0,
    rates: Sequence[KeptRates] = (),
    factors: Sequence[KeptFactor] = (),
) -> None:
    """Add to what was measured on a machine, also while other processes do; write errors are ignored, as it can be
    measured again."""
    path = _path(working, machine)
    with suppress(OSError, RunFailed):
        make_private_folder(path.parent)
        with exclusive_lock(path.with_suffix(".lock"), on_wait=lambda: None):
            before = load_timings(working, machine)
            kept = replace(
                before,
                peak_flops=peak_flops or before.peak_flops,
                rates=_with(before.rates, rates),
                factors=_with(before.factors, [one for one in factors if not _is_worse(one, before.factors)]),
            )
            replace_file(path, sealed_text({"format": TIMINGS_FORMAT, **asdict(kept)}).encode())


def _with(before: Sequence[_Kept], new: Sequence[_Kept]) -> tuple[_Kept, ...]:
    same = {(one.name, one.sizes) for one in new}
    return (*(one for one in before if (one.name, one.sizes) not in same), *new)[-MOST_KEPT:]


def _is_worse(new: KeptFactor, before: Sequence[KeptFactor]) -> bool:
    """Whether the same was measured before, while less else ran."""
    same = [one.granted for one in before if (one.name, one.sizes) == (new.name, new.sizes)]
    return new.granted < min(LEAST_UNDISTURBED_SHARE, max(same, default=0.0))


def _path(working: WorkingFolder, machine: Machine) -> Path:
    return working.cache / "timings" / f"{machine.digest()}.json"
