"""The tokens at which a model's text ends, as the files in its folder name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.regular_file import read_regular_file

GENERATION_CONFIG = "generation_config.json"
_LARGEST = 1 << 20


def stored_ends(folder: Path) -> tuple[int, ...]:
    """Ids of the tokens at which transformers' generate() stops, from a folder's generation_config.json; empty if there
    is none. Raises PlaitError for a damaged file."""
    return end_ids(generation_config(folder))


def generation_config(folder: Path) -> dict[str, Any]:
    """A folder's generation_config.json, empty if there is none; raises PlaitError for a damaged file."""
    file = folder / GENERATION_CONFIG
    try:
        values = parse_json(read_regular_file(file, _LARGEST))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} cannot be used ({error}); download it again, or remove it") from None
    if not isinstance(values, dict):
        raise PlaitError(f"{file} is not a table of keys and values; download it again, or remove it")
    return values


def end_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids under "eos_token_id", which is one id or a list of them."""
    named = values.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    return tuple(one for one in listed if type(one) is int and one >= 0)


def one_or_list(ids: Iterable[int]) -> int | list[int]:
    """Ids in the form of config files: each once, and a single one without a list."""
    unique = list(dict.fromkeys(ids))
    return unique[0] if len(unique) == 1 else unique
