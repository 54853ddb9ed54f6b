"""The paths in a recipe: relative ones become absolute, below the folder where they match something."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.errors import PlaitError

_NAMED_TOKENIZERS = ("auto", "bpe", "gpt2")
_TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")
"""A chat template without one of these, and without a folder, is named and not a file."""


def resolve_paths(values: dict[str, Any], bases: Sequence[Path]) -> None:
    """Make the paths in a recipe's values absolute, in place: each below the first of the folders where it matches
    something. Raises PlaitError for a home that nobody here has."""
    model, report = values.get("model"), values.get("report")
    source = model.get("from") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(source, str) and source and not source.startswith("hub:"):
        model["from"] = _absolute(source, bases)
    if isinstance(report, dict) and isinstance(report.get("choices"), str):
        report["choices"] = _absolute(report["choices"], bases)
    data = values.get("data")
    if not isinstance(data, dict):
        return
    files, tokenizer = data.get("files"), data.get("tokenizer")
    if isinstance(files, str):
        data["files"] = _absolute(files, bases)
    elif isinstance(files, list):
        data["files"] = [_resolve_source(item, bases) for item in files]
    if isinstance(tokenizer, str) and tokenizer not in _NAMED_TOKENIZERS:
        data["tokenizer"] = _absolute(tokenizer, bases)
    template = data.get("chat_template")
    if isinstance(template, str) and ("/" in template or template.endswith(_TEMPLATE_SUFFIXES)):
        data["chat_template"] = _absolute(template, bases)


def _resolve_source(item: object, bases: Sequence[Path]) -> object:
    if isinstance(item, str):
        return _absolute(item, bases)
    if isinstance(item, dict) and isinstance(item.get("path"), str):
        return {**item, "path": _absolute(item["path"], bases)}
    return item


def _absolute(text: str, bases: Sequence[Path]) -> str:
    """The path below the first base where it matches something; where nothing does, below the first base.

    "hf:" names that are folders become absolute; other "hf:" names are names on the hub and stay unchanged.
    """
    prefix = "hf:" if text.startswith("hf:") else ""
    bare, colon, parts = text.removeprefix("hf:").partition(":") if prefix else (text, "", "")
    try:
        places = [str(base / Path(bare).expanduser()) for base in bases]
    except RuntimeError:
        raise PlaitError(f'"{text}" names the home of a user who is not here; write the whole path') from None
    found = next((place for place in places if _matches(place)), None)
    return f"{prefix}{found}{colon}{parts}" if found else (text if prefix else places[0])


def _matches(place: str) -> bool:
    """Whether there is such a file or folder, or one that fits such a pattern, which this user may see."""
    try:
        if Path(place).exists():
            return True
        return glob.has_magic(place) and next(glob.iglob(place, recursive=True), None) is not None  # noqa: PTH207  Path.glob takes no absolute one
    except (OSError, ValueError, re.error):
        return False
