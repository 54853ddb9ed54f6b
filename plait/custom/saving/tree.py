"""Nested values of optimizers and schedulers as plain JSON beside named tensors, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from plait.errors import PlaitError

_TENSOR, _TUPLE, _PAIRS, _NUMBER = "@tensor", "@tuple", "@pairs", "@number"
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_plain(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors go into `tensors` under names that begin with `name`.

    Raises PlaitError for what is neither number, text, tensor, list, tuple nor dict.
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [to_plain(each, f"{name}/{n}", tensors) for n, each in enumerate(value)]}
    if isinstance(value, list):
        return [to_plain(each, f"{name}/{n}", tensors) for n, each in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("@") for key in value):
            return {key: to_plain(each, f"{name}/{key}", tensors) for key, each in value.items()}
        pairs = [[to_plain(key, "", {}), to_plain(each, f"{name}/{key}", tensors)] for key, each in value.items()]
        return {_PAIRS: pairs}
    raise PlaitError(
        f"{name} is a {type(value).__name__}, which cannot be saved without running code on reading; keep numbers, "
        "texts, tensors, lists and dicts in an optimizer's or scheduler's state, or in extra"
    )


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `to_plain`; raises PlaitError where a tensor is missing."""
    if isinstance(plain, list):
        return [from_plain(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        if plain[_TENSOR] not in tensors:
            raise PlaitError(
                f"the saved state names {plain[_TENSOR]}, which no file of it has; resume from another folder"
            )
        return tensors[plain[_TENSOR]]
    if _NUMBER in plain:
        return _NUMBERS[plain[_NUMBER]]
    if _TUPLE in plain:
        return tuple(from_plain(each, tensors) for each in plain[_TUPLE])
    if _PAIRS in plain:
        return {from_plain(key, tensors): from_plain(each, tensors) for key, each in plain[_PAIRS]}
    return {key: from_plain(each, tensors) for key, each in plain.items()}
