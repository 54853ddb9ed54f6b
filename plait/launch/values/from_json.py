"""Frozen values out of JSON that another host sent: every key and every type is checked, in this one place."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_NUMBERS_BELOW = 1 << 63
_LINE_CHARACTERS = 2_000
SingleLine = Annotated[str, "one line"]
"""Text to be printed as a line; from another host it comes without line breaks and is cut to 2,000 characters."""


def from_json(kind: type[_T], values: object) -> _T:
    """The inverse of `dataclasses.asdict` after a journey as JSON, for a dataclass of plain types.

    Raises ValueError, which names the key, for a missing or unknown key, another type, a number that is not finite or
    is beyond 64 bits, and whatever the dataclass itself refuses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} is no object")
    hints = get_type_hints(kind, include_extras=True)
    if unknown := values.keys() - hints.keys():
        raise ValueError(f"{kind.__name__} has no {min(unknown)[:80]!r}")
    given: dict[str, Any] = {}
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass, as the docstring says
        if one.name in values:
            given[one.name] = _checked(hints[one.name], values[one.name], f"{kind.__name__}.{one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{kind.__name__} lacks {one.name!r}")
    return kind(**given)


def one_line(text: str) -> str:
    """The text without line breaks, at most 2,000 characters of it."""
    return " ".join(text.split())[:_LINE_CHARACTERS]


def _checked(wanted: Any, value: Any, where: str) -> Any:
    """The value, which `where` names in errors, if it is of the wanted type."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):  # this type, or None
        return None if value is None else _checked(arguments[0], value, where)
    if is_dataclass(wanted):
        return from_json(wanted, value)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_checked(arguments[0], item, where) for item in value)
    if origin is Annotated and isinstance(value, str):
        return one_line(value)
    is_right = (
        (origin is Literal and isinstance(value, str) and value in arguments)
        or (origin is Mapping and isinstance(value, dict))
        or (wanted is float and isinstance(value, int | float) and _is_usable(value))
        or (wanted is int and isinstance(value, int) and _is_usable(value))
        or (wanted in (str, bool) and isinstance(value, wanted))
    )
    if not is_right:
        raise ValueError(f"{where} is not what it should be")
    return value


def _is_usable(number: float) -> bool:
    if isinstance(number, float):
        return math.isfinite(number)
    return not isinstance(number, bool) and abs(number) < _NUMBERS_BELOW
