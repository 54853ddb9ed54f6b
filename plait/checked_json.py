"""JSON from files and from other hosts: text into bounded values, and values into dataclasses of the right types, all
of it checked in this one place; and the hash that closes a file which plait writes."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from math import isfinite
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from plait.units import plain_number

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

_T = TypeVar("_T")
SEAL = "sha256"
"""The last key of a sealed object: the hash of the others. Who edits such a file by hand takes this line out."""
LONGEST_NUMBER = 40
"""Most digits of a whole number: transformers writes one of 31 for a tokenizer without a longest text (int(1e30)), and
Python's float has room for seven times as many."""
DEEPEST = 40
"""Most lists and objects inside each other: above all that plait writes and sends, and far below where Python's own
limit is."""
_LARGEST_COUNT = (1 << 63) - 1
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


class _OneLine:
    """Has pydantic make a line of a text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(one_line, handler(source))


SingleLine = Annotated[str, _OneLine()]
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
    from pydantic_core import ValidationError

    try:
        [value] = _validator(kind).validate_json(json.dumps([values]))
        return value
    except ValidationError as error:
        raise ValueError(_refusal(values, error.errors(include_url=False))) from None


@cache
def _validator(kind: type) -> SchemaValidator:
    # pydantic takes a moment to import, which a process that reads no file need not wait for.
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    # A dataclass of ours has no configuration, and takes that of the tuple around it.
    around: Any = GenericAlias(tuple, (kind,))
    adapter = TypeAdapter[Any](around, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
    return SchemaValidator(_with_bounded_counts(adapter.core_schema))


def _with_bounded_counts(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_bounded_counts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "int":
        return {"ge": -_LARGEST_COUNT, "le": _LARGEST_COUNT, **schema}
    return {key: _with_bounded_counts(one) for key, one in schema.items()}


def _refusal(values: object, errors: Sequence[Found]) -> str:
    """The first thing that does not fit, with its place; where one of several types would do, what each of them is."""
    placed = [(_place(values, error), error) for error in errors]
    first = placed[0][0]
    place = max((place for place, _ in placed if place[: len(first)] == first), key=len)
    about = [error for own, error in placed if own == place]
    if sentence := own_sentence(about[0]):
        return sentence
    where = ".".join(_shown(str(part)) for part in place) or "it"
    if about[0]["type"] == "unexpected_keyword_argument":
        return f"{where} is not known"
    return f"{where} should be {' or '.join(dict.fromkeys(map(wanted_value, about)))}"


def _place(values: Any, error: Found) -> tuple[str | int, ...]:
    """The location of an error in the values, without the names of types that pydantic inserts."""
    place: list[str | int] = []
    for part in error["loc"][1:]:
        inner = dict(enumerate(values)) if isinstance(values, list) else values
        is_there = isinstance(inner, dict) and part in inner
        if is_there or (error["type"] == "missing" and part == error["loc"][-1]):
            place.append(part)
        values = inner[part] if is_there else values
    return tuple(place)


Found = Mapping[str, Any]
"""One entry of pydantic's `ValidationError.errors()`."""


def own_sentence(found: Found) -> str | None:
    """The sentence of a validator of ours; None where pydantic itself refused the value."""
    return found["msg"].removeprefix("Value error, ") if found["type"] == "value_error" else None


def wanted_value(found: Found) -> str:
    """The expected value in words: a whole number, at most 10,000, "cosine" or "wsd"."""
    wanted = _WANTED.get(found["type"], found["msg"].removeprefix("Input should be "))
    return wanted if isinstance(wanted, str) else wanted(found.get("ctx", {}))


def _bound(value: float) -> str:
    """A bound to its last digit."""
    return f"{value:,}" if isinstance(value, int) else plain_number(value, digits=12)


_WANTED: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_unicode": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table of keys and values",
    "mapping_type": "a table of keys and values",
    "model_type": "a table of keys and values",
    "dataclass_type": "a table of keys and values",
    "string_too_short": "text that is not empty",
    "missing": "given",
    "too_short": lambda context: f"{context['min_length']} values or more",
    "too_long": lambda context: f"{context['max_length']} values or fewer",
    "literal_error": lambda context: context["expected"].replace("'", '"'),
    "greater_than_equal": lambda context: f"at least {_bound(context['ge'])}",
    "greater_than": lambda context: f"more than {_bound(context['gt'])}",
    "less_than_equal": lambda context: (
        "a smaller whole number" if context["le"] == _LARGEST_COUNT else f"at most {_bound(context['le'])}"
    ),
    "less_than": lambda context: f"less than {_bound(context['lt'])}",
}


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
