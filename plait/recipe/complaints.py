"""What pydantic finds wrong with a value of a recipe, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.units import plain_number

Found = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""


def _number(value: float) -> str:
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
    "greater_than_equal": lambda context: f"at least {_number(context['ge'])}",
    "greater_than": lambda context: f"more than {_number(context['gt'])}",
    "less_than_equal": lambda context: f"at most {_number(context['le'])}",
    "less_than": lambda context: f"less than {_number(context['lt'])}",
}


def wanted_value(found: Found) -> str:
    """What the value should be: a whole number, at most 10,000, "cosine" or "wsd"."""
    wanted = _WANTED.get(found["type"], found["msg"].removeprefix("Input should be "))
    return wanted if isinstance(wanted, str) else wanted(found.get("ctx", {}))


def own_sentence(found: Found) -> str | None:
    """The sentence of a validator of ours; None where pydantic itself refused the value."""
    return found["msg"].removeprefix("Value error, ") if found["type"] == "value_error" else None
