"""Loads a recipe file with command-line overrides into a RunConfig; errors are one sentence that says what is wrong."""

from __future__ import annotations

import difflib
import glob
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from plait.errors import PlaitError
from plait.recipe.schema import RESERVED, RunConfig, SourceSection

_NAMED_TOKENIZERS = ("auto", "bpe", "gpt2")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply `section.key=value` overrides; relative paths become absolute.

    A path in the file is searched beside the recipe, then in the current folder; a path on the command line in the
    current folder first. Raises PlaitError in one sentence.
    """
    requested = _read_toml(path)
    beside, here = path.resolve().parent, Path.cwd()
    _resolve_paths(requested, (beside, here))
    for text in overrides:
        override = parse_override(text)
        _resolve_paths(override, (here, beside))
        _merge(requested, override)
    run = requested.setdefault("run", {})
    if isinstance(run, dict) and run.get("name", "auto") == "auto":
        run["name"] = path.stem.lower()
    return parse_config(requested)


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check nested values against the schema; raises PlaitError that names the first bad key and how to correct it."""
    for key in _keys(values):
        if key in RESERVED:
            raise PlaitError(f"{key} comes with a later version of plait; remove it from the recipe for now")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise PlaitError(_sentence(error)) from None


def recipe_text(config: RunConfig) -> str:
    """The recipe as TOML with every key written out, as it is saved with a run."""
    return tomli_w.dumps(requested_values(config))


def requested_values(config: RunConfig) -> dict[str, Any]:
    """The recipe as plain nested values; keys that are None are left out."""
    return config.model_dump(mode="json", exclude_none=True)


def flat_values(config: RunConfig) -> dict[str, Any]:
    """The recipe as one flat mapping from "section.key" to value."""
    values = requested_values(config)
    return {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}


def parse_override(text: str) -> dict[str, Any]:
    """Parse "section.key=value" into nested mappings; the value is TOML, or bare text where it is not valid TOML.
    Raises PlaitError."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise PlaitError(f'"{text}" is not an override; write section.key=value, for example train.budget="60 steps"')
    try:
        parsed: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(parts):
        parsed = {part: parsed}
    return parsed


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in sorted(path.parent.glob("*.toml"))], n=1)
        hint = f'; did you mean "{path.parent / near[0]}"?' if near else "; give the path of a .toml file"
        raise PlaitError(f'there is no recipe "{path}"{hint}') from None
    except IsADirectoryError:
        raise PlaitError(f'"{path}" is a folder; give the path of a recipe file in it') from None
    except UnicodeDecodeError:
        raise PlaitError(f'the recipe "{path}" is not UTF-8 text; save it as UTF-8') from None
    except OSError as error:
        raise PlaitError(f'the recipe "{path}" cannot be read ({error.strerror}); check its permissions') from None
    except tomllib.TOMLDecodeError as error:
        raise PlaitError(f'the recipe "{path}" is not valid TOML: {error}; mend that line') from None


def _merge(base: dict[str, Any], change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _resolve_paths(values: dict[str, Any], bases: Sequence[Path]) -> None:
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
    places = [str(base / Path(bare).expanduser()) for base in bases]
    found = next(
        (place for place in places if (glob.has_magic(place) and _matches(place)) or Path(place).exists()), None
    )
    return f"{prefix}{found}{colon}{parts}" if found else (text if prefix else places[0])


def _matches(pattern: str) -> bool:
    return next(glob.iglob(pattern, recursive=True), None) is not None  # noqa: PTH207  Path.glob takes no absolute one


def _keys(values: Mapping[str, Any]) -> Iterator[str]:
    for section, keys in values.items():
        if isinstance(keys, Mapping):
            yield from (f"{section}.{key}" for key in keys)


def _sentence(error: ValidationError) -> str:
    """The first validation error as one sentence with its correction; an unknown key comes before all other errors."""
    complaints = error.errors(include_url=False)
    first = next((c for c in complaints if c["type"] == "extra_forbidden"), complaints[0])
    location = _names(first["loc"])
    section, name = _section(location)
    if first["type"] == "extra_forbidden":
        inside = SourceSection if location[:2] == ["data", "files"] else section
        return _unknown(".".join(location), location[-1], inside)
    if first["type"] == "missing" and len(first["loc"]) <= 2:
        return f'the recipe does not say {".".join(location)}; add for example files = "my-text.txt" under [data]'
    key = ".".join(location[: 2 if name else 1])
    why = [_complaint(c["type"], c["msg"]) for c in complaints if _names(c["loc"])[:2] == location[:2]]
    complaint = next((text.removeprefix("Value error, ") for text in why if text.startswith("Value error, ")), None)
    wanted = " or ".join(dict.fromkeys(text.removeprefix("Input should be ") for text in why))
    return f"{key} is not usable: {complaint or f'it should be {wanted}'}{_describe(section, name)}"


def _complaint(kind: str, text: str) -> str:
    return "given in full" if kind == "missing" else text


def _names(loc: Sequence[int | str]) -> list[str]:
    """The keys in a pydantic location, without list positions and the names of union members."""
    return [part for part in loc if isinstance(part, str) and part.islower() and "[" not in part]


def _section(location: Sequence[str]) -> tuple[type[BaseModel], str | None]:
    """The schema section that contains a location, and the name of its field at that location, or None."""
    field = RunConfig.model_fields.get(location[0])
    if field is None or not isinstance(field.annotation, type):
        return RunConfig, None
    known = field.annotation
    name = location[1] if len(location) > 1 and location[1] in known.model_fields else None
    return known, name


def _unknown(key: str, word: str, section: type[BaseModel]) -> str:
    names = list(section.model_fields)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    everywhere = [f"{top}.{word}" for top, f in RunConfig.model_fields.items() if word in _fields(f.annotation)]
    if everywhere:
        return f"{key} is not a key of the recipe; did you mean {everywhere[0]}?"
    if near:
        path = key.rpartition(".")[0]
        return f"{key} is not a key of the recipe; did you mean {f'{path}.' if path else ''}{near[0]}?"
    return f"{key} is not a key of the recipe; known here are {', '.join(names)}"


def _fields(annotation: object) -> Mapping[str, object]:
    return getattr(annotation, "model_fields", {})


def _describe(section: type[BaseModel], name: str | None) -> str:
    text = section.model_fields[name].description if name else None
    return f" ({text.rstrip('.')})" if text else ""
