"""A value that a recipe left open, and why it is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Generic[_T]):
    """A value with the sentences that a plan says of its choice; none where the recipe named it."""

    value: _T
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings that are always shown before a run."""
