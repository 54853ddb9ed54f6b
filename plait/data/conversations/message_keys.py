"""Values in a conversation besides roles and texts: those that a template may read, and whether an answer is
learned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from plait.data.documents import Record
from plait.errors import PlaitError

Use = Literal["learned", "read"]

_REASONING = ("reasoning_content", "reasoning", "thinking")
_OURS = ("role", "content", "from", "value")
_OLDER = {"function_call": "tool_calls", "functions": "tools"}
"""Keys of OpenAI's first form of tools, which no template reads, and what they are called now."""
_LEARNT = ("weight", "train", "training", "trainable", "loss")
_HIDDEN = ("mask", "masked")
_NOTHING = ("", "[]", "{}", "null")


def refuse_columns(record: Record) -> None:
    """Raise PlaitError for a column that the answers of a chat depend on and no template reads."""
    if _says_something(record.values.get("functions")):
        raise _older_form(record.place, "functions")


def tools_of(record: Record) -> object:
    """What the model may call, as the column "tools" says: a list, or one written as JSON; None where it is empty.
    Raises PlaitError for what is no list."""
    tools = record.values.get("tools")
    if not _says_something(tools):
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            tools = None
    if not isinstance(tools, list):
        raise PlaitError(
            f'{record.place}: "tools" is not a list', "write a list of functions, as transformers takes them"
        )
    return tools


def further_keys(place: str, turn: Mapping[Any, Any]) -> dict[str, object]:
    """The keys of a message that a template may read beside role and content; raises PlaitError for the older form of
    calls."""
    if _says_something(turn.get("function_call")):
        raise _older_form(place, "function_call")
    own = (*_OURS, *_LEARNT, *_HIDDEN, *_OLDER)
    return {
        key: value for key, value in turn.items() if isinstance(key, str) and key not in own and _says_something(value)
    }


def reasoning_of(further: Mapping[str, object]) -> Iterator[str]:
    """The reasoning of a message, where it has any."""
    return (text for key in _REASONING if isinstance(text := further.get(key), str))


def texts_in(value: object) -> Iterator[str]:
    """Every text of a value, however deep inside, names of keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for inner in value.values() for text in texts_in(inner))
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in texts_in(inner))


def _older_form(place: str, key: str) -> PlaitError:
    return PlaitError(f'{place} has "{key}", which templates do not read', f'write it as "{_OLDER[key]}"')


def use_of_answer(place: str, turn: Mapping[Any, Any]) -> Use:
    """Whether an answer is learned, or only read as those of the user are: "weight" is 0 then, or "train" is false.
    Raises PlaitError for anything between."""
    uses = [_use(place, key, turn.get(key), (1, 0)) for key in _LEARNT]
    uses += [_use(place, key, turn.get(key), (0, 1)) for key in _HIDDEN]
    return "read" if "read" in uses else "learned"


def _use(place: str, key: str, value: object, numbers: tuple[int, int]) -> Use:
    """The meaning of a value, if `numbers` stand for "learned" and "read"; true is 1 and false is 0."""
    if not isinstance(value, bool | int | float):
        if not _says_something(value):
            return "learned"
    elif value in numbers:
        return "learned" if value == numbers[0] else "read"
    raise PlaitError(
        f'{place} has "{key}": {ascii(value)[:40]}, and an answer is learned as a whole or not at all',
        f"write {numbers[0]} to learn it, {numbers[1]} only to read it, or leave such records out",
    )


def _says_something(value: object) -> bool:
    """Not so of null and of what is empty, also as JSON in a text; a table's rows have such values in every column."""
    if isinstance(value, str):
        return value.strip() not in _NOTHING
    if isinstance(value, Mapping):
        return any(map(_says_something, value.values()))
    if isinstance(value, Sequence):
        return any(map(_says_something, value))
    return value is not None and value is not False
