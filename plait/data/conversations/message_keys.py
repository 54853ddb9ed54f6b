"""What stands in a conversation beside roles and texts: what tells that an answer is only read, and what would change
the meaning if it were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from plait.data.documents import Record
from plait.errors import PlaitError

Use = Literal["learnt", "read"]

_BESIDE_MESSAGES = ("tools", "functions")
_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_LEARNT = ("weight", "train", "training", "trainable", "loss")
_HIDDEN = ("mask", "masked")
_NOTHING = ("", "[]", "{}", "null")


def refuse_columns(record: Record) -> None:
    """Raise PlaitError for a column that the answers of a chat depend on and no message holds."""
    if key := _first_said(record.values, _BESIDE_MESSAGES):
        raise PlaitError(
            f'{record.place} has "{key}", which would not be learnt; leave such records out, or write what the model '
            "is to read of it into the system message"
        )


def refuse_message_keys(place: str, turn: Mapping[Any, Any]) -> None:
    """Raise PlaitError for a key of a message that says more than its content."""
    if key := _first_said(turn, _BESIDE_CONTENT):
        raise PlaitError(
            f'{place} has "{key}", which would not be learnt; leave such records out, or write it into the content'
        )


def use_of_answer(place: str, turn: Mapping[Any, Any]) -> Use:
    """Whether an answer is learnt, or only read as those of the user are: "weight" is 0 then, or "train" is false.
    Raises PlaitError for anything between."""
    uses = [_use(place, key, turn.get(key), (1, 0)) for key in _LEARNT]
    uses += [_use(place, key, turn.get(key), (0, 1)) for key in _HIDDEN]
    return "read" if "read" in uses else "learnt"


def _use(place: str, key: str, value: object, numbers: tuple[int, int]) -> Use:
    """What a value means, of which `numbers` are those for "learnt" and "read"; true is 1 and false is 0."""
    if not isinstance(value, bool | int | float):
        if not _says_something(value):
            return "learnt"
    elif value in numbers:
        return "learnt" if value == numbers[0] else "read"
    raise PlaitError(
        f'{place} has "{key}": {ascii(value)[:40]}, and an answer is learnt as a whole or not at all; write '
        f"{numbers[0]} to learn it, {numbers[1]} only to read it, or leave such records out"
    )


def _first_said(values: Mapping[Any, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if _says_something(values.get(key))), None)


def _says_something(value: object) -> bool:
    """Not so of null and of what is empty, also as JSON in a text; a table's rows have such values in every column."""
    if isinstance(value, str):
        return value.strip() not in _NOTHING
    if isinstance(value, Mapping):
        return any(map(_says_something, value.values()))
    if isinstance(value, Sequence):
        return any(map(_says_something, value))
    return value is not None and value is not False
