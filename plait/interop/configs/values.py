"""Values of config.json, each read with its check; all raise PlaitError naming the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError

ConfigValues = Mapping[str, Any]


def count_of(values: ConfigValues, key: str) -> int:
    """A whole number above 0."""
    value = values.get(key)
    if value is None:
        raise PlaitError(f"config.json lacks {key}; use the one that came with the weights")
    if type(value) is not int or not 0 < value < 2**40:
        raise PlaitError(f"{key} in config.json is {value!r:.40}; it should be a whole number above 0")
    return value


def number_of(values: ConfigValues, key: str) -> float:
    """A number above 0."""
    value = values.get(key)
    if value is None:
        raise PlaitError(f"config.json lacks {key}; use the one that came with the weights")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise PlaitError(f"{key} in config.json is {value!r:.40}; it should be a number above 0")
    return float(value)


def flag_of(values: ConfigValues, key: str, *, default: bool = False) -> bool:
    """True or false, or `default` if the key is missing. transformers takes any other value, such as the text "false",
    to be true."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise PlaitError(f"{key} in config.json is {value!r:.40}; it should be true or false")
    return value


def require(values: ConfigValues, key: str, known: tuple[object, ...]) -> None:
    """Refuse a value that plait does not compute; the first one is the default of a missing key."""
    value = values.get(key, known[0])
    if not any(type(value) is type(one) and value == one for one in known):
        named = " or ".join(str(one) for one in known if one is not None)
        fix = f"and plait computes {named}; use such a model" if named else "and plait computes no model with it"
        raise PlaitError(f"{key} in config.json is {values[key]!r:.40}, {fix}")
