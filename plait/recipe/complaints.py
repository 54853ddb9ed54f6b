"""What pydantic finds wrong with a value of a recipe, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Found = Mapping[str, Any]
"""One entry of `ValidationError.errors()`."""

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
    "missing": "given",
    "too_short": lambda context: f"{context['min_length']} values or more",
    "too_long": lambda context: f"{context['max_length']} values or fewer",
    "literal_error": lambda context: context["expected"],
}


def wanted_value(found: Found) -> str:
    """What the value should be: "a whole number", "greater than 0", "'cosine' or 'wsd'"."""
    wanted = _WANTED.get(found["type"], found["msg"].removeprefix("Input should be "))
    return wanted if isinstance(wanted, str) else wanted(found.get("ctx", {}))


def own_sentence(found: Found) -> str | None:
    """The sentence of a validator of ours; None where pydantic itself refused the value."""
    return found["msg"].removeprefix("Value error, ") if found["type"] == "value_error" else None
