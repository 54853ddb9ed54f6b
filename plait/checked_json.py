"""Files of one JSON object: closed by a hash where plait writes them, checked against a type where it reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from math import isfinite
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from plait.complaints import wanted_value

SEAL = "sha256"
"""The last key of a sealed object: the hash of the others. Who edits such a file by hand takes this line out."""
LONGEST_NUMBER = 30
"""Most digits of a whole number: Python's float has room for ten times as many."""
DEEPEST = 40
"""Most lists and objects inside each other: above every file of plait's, and far below where Python's own limit is."""


def sealed_text(values: Mapping[str, Any]) -> str:
    """The text of a file that holds these values and their hash, so that damage is seen."""
    return json.dumps({**values, SEAL: _digest(values)}, indent=2, allow_nan=False) + "\n"


def parse_object(data: bytes | str) -> dict[str, Any]:
    """The object of a file that `sealed_text` wrote, without its hash; raises ValueError, in words, for damage and for
    all that is no object.

    A file without a hash is taken as it is: earlier versions wrote none.
    """
    values = parse_json(data, parse_constant=_refuse)
    if not isinstance(values, dict):
        raise ValueError("it is not a table of keys and values")
    seal = values.pop(SEAL, None)
    if seal is not None and seal != _digest(values):
        raise ValueError(f'it was changed or damaged: its "{SEAL}" is that of other values')
    return values


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """Any JSON value whose numbers and nesting stay within bounds; raises ValueError, in words, for all else."""
    try:
        values = json.loads(data, parse_int=_bounded_int, parse_float=_finite_float, **hooks)
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if _depth(values) > DEEPEST:
        raise ValueError("it is nested too deeply")
    return values


def typed_value(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a dataclass from the values of its fields, nested ones included; raises ValueError that names the
    first field that does not fit. Keys that the type does not know are an error as well."""
    adapter = _adapter(kind)
    try:
        value = adapter.validate_json(json.dumps(values, allow_nan=False), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where or 'it'} should be {wanted_value(first)}") from None
    if unknown := next(_unknown_keys(values, adapter.dump_python(value)), None):
        raise ValueError(f"{unknown} is not known")
    return value


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown_keys(given: Any, known: Any, where: str = "") -> Iterator[str]:
    """The keys that were not read, each with the keys that lead to it."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            if key in known:
                yield from _unknown_keys(value, known[key], f"{where}{key}.")
            else:
                yield f"{where}{key}"
    elif isinstance(given, list):
        for place, (value, there) in enumerate(zip(given, known, strict=True)):
            yield from _unknown_keys(value, there, f"{where}{place}.")


def _depth(values: Any, so_far: int = 0) -> int:
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    return max((_depth(one, so_far + 1) for one in inner), default=so_far) if so_far <= DEEPEST else so_far


def _digest(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bounded_int(digits: str) -> int:
    return int(digits) if len(digits) <= LONGEST_NUMBER else _refuse(f"{digits[:10]}…")


def _finite_float(digits: str) -> float:
    return value if isfinite(value := float(digits)) else _refuse(digits[:20])


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number that plait writes")
