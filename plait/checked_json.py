"""JSON from files and from other hosts: text into bounded values, and values into dataclasses of the right types, all
of it checked in this one place; and the hash that closes a file which plait writes."""

from __future__ import annotations

import json
import re
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from hashlib import sha256
from math import isfinite
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
SEAL = "sha256"
"""The last key of a sealed object: the hash of the others. Who edits such a file by hand takes this line out."""
LONGEST_NUMBER = 30
"""Most digits of a whole number: Python's float has room for ten times as many."""
DEEPEST = 40
"""Most lists and objects inside each other: above all that plait writes and sends, and far below where Python's own
limit is."""
_COUNTS_BELOW, _WHOLE_BELOW = 1 << 63, 10**LONGEST_NUMBER
_LINE_CHARACTERS, _KEY_CHARACTERS = 2_000, 80
_HARMFUL, _KEPT = {"Cc", "Cs"}, frozenset("\n\t")
# What makes a terminal show text in another order than it is written in.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without control characters, line breaks and tabs apart, and without half characters: a terminal shows it
    and does not obey it, whoever wrote it."""
    if text.isprintable() and text.isascii():
        return text
    return "".join(sign for sign in text if sign in _KEPT or not _is_harmful(sign))


def _is_harmful(sign: str) -> bool:
    return sign in _REORDERING or unicodedata.category(sign) in _HARMFUL


def one_line(text: str) -> str:
    """The text without line breaks, at most 2,000 characters of it."""
    return " ".join(text.split())[:_LINE_CHARACTERS]


SingleLine = Annotated[str, one_line]
"""Text to be printed as a line: `typed_value` takes line breaks out and cuts it to 2,000 characters."""


def sealed_text(values: Mapping[str, Any]) -> str:
    """The text of a file that holds these values and their hash, so that damage is seen."""
    return json.dumps({**values, SEAL: _digest(values)}, indent=2, allow_nan=False) + "\n"


def parse_object(data: bytes | str) -> dict[str, Any]:
    """The object of a file that `sealed_text` wrote, without its hash; raises ValueError, in words, for damage and for
    all that is no object.

    A file without a hash is taken as it is: earlier versions wrote none.
    """
    values = parse_json(data)
    if not isinstance(values, dict):
        raise ValueError("it is not a table of keys and values")
    seal = values.pop(SEAL, None)
    if seal is not None and seal != _digest(values):
        raise ValueError(f'it was changed or damaged: its "{SEAL}" is that of other values')
    return values


def whole_text(text: str) -> str:
    """The text; raises ValueError where half of a character is in it, which can be neither printed nor written."""
    if not text.isascii() and _HALF_CHARACTER.search(text):
        raise ValueError("it has half of a character")
    return text


def parse_json(
    data: bytes | str, *, text: Callable[[str], str] = whole_text, constants: Literal["refused", "kept"] = "refused"
) -> Any:
    """Any JSON value whose numbers and nesting stay within bounds; raises ValueError, in words, for all else.

    `text` looks at each key and each string and returns what is to stand for it. `constants` are NaN and Infinity,
    which Python takes for JSON: kept for readers that name the key of such a value themselves.
    """
    constant = _refuse if constants == "refused" else float
    try:
        values = json.loads(data, parse_int=_bounded_int, parse_float=_finite_float, parse_constant=constant)
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    return _bounded(values, text, DEEPEST)


def typed_value(kind: type[_T], values: object) -> _T:
    """An instance of a dataclass of plain types, nested ones included: the inverse of `dataclasses.asdict` after a
    journey as JSON.

    Raises ValueError that names the first field that is missing, does not fit or is not known. A number must be finite,
    a count below 2^63. What the dataclass itself refuses is raised as it is.
    """
    return _read_fields(kind, values, "")


def _read_fields(kind: Any, values: object, where: str) -> Any:
    """`where` is the dotted path of the object that is read, with a dot at its end unless it is empty."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.removesuffix('.') or 'it'} should be a table of keys and values")
    given: dict[str, Any] = {}
    for name, (wanted, is_needed) in _fields_of(kind).items():
        if name in values:
            given[name] = _read(wanted, values[name], f"{where}{name}")
        elif is_needed:
            raise ValueError(f"{where}{name} should be given")
    for key in values:
        if key not in given:
            raise ValueError(f"{where}{_shown(key)} is not known")
    return kind(**given)


@cache
def _fields_of(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """For each field of a dataclass its type, and whether it must be given."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        one.name: (hints[one.name], one.default is MISSING and one.default_factory is MISSING) for one in fields(kind)
    }


def _read(wanted: Any, value: Any, where: str) -> Any:
    """The value, which `where` names in errors, as the wanted type has it."""
    if wanted is float and type(value) is float and isfinite(value):  # most values are
        return value
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return _read_one_of(arguments, value, where)
    if is_dataclass(wanted):
        return _read_fields(wanted, value, f"{where}.")
    if origin is Annotated:
        return arguments[1](_read(arguments[0], value, where))
    if origin in (tuple, Sequence) and isinstance(value, list):
        is_open = origin is Sequence or arguments[-1] is ...
        kinds = [arguments[0]] * len(value) if is_open else arguments
        if len(value) != len(kinds):
            raise ValueError(f"{where} should be {len(kinds)} values")
        items = [_read(kinds[place], item, f"{where}.{place}") for place, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is Mapping and isinstance(value, dict):
        keys = [_read(arguments[0], key, f"{where}.{_shown(key)}") for key in value]
        return {key: _read(arguments[1], value[key], f"{where}.{_shown(key)}") for key in keys}
    if not _fits(wanted, value):
        raise ValueError(f"{where} should be {_words(wanted, value)}")
    return float(value) if wanted is float else value


def _read_one_of(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """The value as the first of these types that it fits; None is one of them where it is allowed."""
    if value is None and types.NoneType in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not types.NoneType]
    if len(kinds) == 1:  # its own error says more
        return _read(kinds[0], value, where)
    for kind in kinds:
        try:
            return _read(kind, value, where)
        except ValueError:
            continue
    raise ValueError(f"{where} should be {' or '.join(_words(kind, value) for kind in kinds)}")


def _fits(wanted: Any, value: Any) -> bool:
    if wanted is Any:
        return True
    if get_origin(wanted) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(wanted))
    if type(value) is int:
        return (wanted is float and abs(value) < _WHOLE_BELOW) or (wanted is int and abs(value) < _COUNTS_BELOW)
    if wanted is float:
        return type(value) is float and isfinite(value)
    return wanted in (str, bool) and type(value) is wanted


def _words(wanted: Any, value: Any) -> str:
    """What a value should be, in plain words."""
    if get_origin(wanted) is Literal:
        *others, last = map(repr, get_args(wanted))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(wanted) in (tuple, Sequence):
        return "a list"
    if wanted is int and type(value) is int:
        return "a smaller whole number"
    if wanted is float and type(value) in (int, float):
        return "a finite number"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", bytes: "left out"}
    return names.get(wanted, "a table of keys and values")


def _shown(key: str) -> str:
    """A key as it stands in the file, in quotes where it is empty or has signs that a terminal would obey."""
    return (key if key and key.isprintable() else json.dumps(key))[:_KEY_CHARACTERS]


def _bounded(value: Any, text: Callable[[str], str], depth: int) -> Any:
    """The value with its texts looked at; raises ValueError where more than `depth` lists or objects are inside each
    other."""
    if isinstance(value, str):
        return text(value)
    if not isinstance(value, list | dict):
        return value
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_bounded(item, text, depth - 1) for item in value]
    return {text(key): _bounded(item, text, depth - 1) for key, item in value.items()}


def _digest(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bounded_int(digits: str) -> int:
    return int(digits) if len(digits) <= LONGEST_NUMBER else _refuse(f"{digits[:10]}…")


def _finite_float(digits: str) -> float:
    return value if isfinite(value := float(digits)) else _refuse(digits[:20])


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number that plait writes")
