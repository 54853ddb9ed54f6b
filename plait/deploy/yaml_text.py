"""Values as YAML: block style, keys in the order given, every text quoted that YAML would read as something else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+=-]*(?::[A-Za-z0-9_./@+=-]+)*")
_OTHER_MEANING = re.compile(r"y|n|yes|no|on|off|true|false|null|\.inf|\.nan|\.[0-9_].*|\.+", re.IGNORECASE)


def yaml_document(value: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """One document, its comments first, without the line that separates it from others."""
    return "".join(f"{line}\n" for line in (*(f"# {comment}" for comment in comments), *_lines(value)))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner)
    else:
        for inner in value:
            yield from _item(inner)


def _entry(head: str, inner: Any) -> Iterator[str]:
    if isinstance(inner, str) and _is_block(inner):
        yield f"{head} |"
        yield from (f"  {line}" if line else "" for line in inner.splitlines())
    elif _is_nested(inner):
        yield head
        yield from (f"  {line}" if line else "" for line in _lines(inner))
    else:
        yield f"{head} {_scalar(inner)}"


def _item(inner: Any) -> Iterator[str]:
    if _is_nested(inner):
        for at, line in enumerate(_lines(inner)):
            yield f"- {line}" if at == 0 else f"  {line}" if line else ""
    else:
        yield f"- {_scalar(inner)}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _is_block(text: str) -> bool:
    """Whether a text of several lines can stand as it is: YAML takes the first line's indent as the block's."""
    ends_once = text.endswith("\n") and not text.endswith("\n\n")
    return (
        ends_once
        and text.count("\n") > 1
        and not text[0].isspace()
        and all(sign.isprintable() or sign == "\n" for sign in text)
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and not _OTHER_MEANING.fullmatch(value)
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{}"
    return "[]" if isinstance(value, list | tuple) else json.dumps(value)
