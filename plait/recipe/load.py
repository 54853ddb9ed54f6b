"""Loads a recipe file with command-line overrides into a RunConfig; errors are one sentence that says what is wrong."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.errors import PlaitError, check_utf8
from plait.recipe.paths import resolve_paths
from plait.recipe.refusal import refusal_sentence
from plait.recipe.schema import RunConfig
from plait.recipe.values import LONGEST_NAME
from plait.regular_file import SMALL_FILE_BYTES, UnfitFileError, read_regular_text

RecipeOverrides = Sequence[str] | Mapping[str, Any]
"""Settings that replace those of a recipe: texts such as 'train.budget="60 steps"', or a mapping from "train.budget" or
from sections to values."""
RecipeSource = Path | Mapping[str, Any] | RunConfig
"""A recipe's file, its sections as nested mappings, or a recipe that was loaded before."""


_TEXTS = (".txt", ".md", ".jsonl", ".parquet", ".csv", ".tsv")
"""What a recipe learns from, and is none itself."""
_LINE_NUMBER = re.compile(r"\(at line (\d+)")
_UNQUOTED = re.compile(r"""\s*([\w.-]+)\s*=\s*([^\s"'\[{#=][^"'#]*?)\s*(?:#.*)?""")
"""A line of TOML with a value that is no text in quotes, no list and no table."""


def load_recipe(recipe: RecipeSource, overrides: RecipeOverrides = ()) -> RunConfig:
    """Read a recipe and apply `section.key=value` overrides; relative paths become absolute.

    A path in the file is searched beside the recipe, then in the current folder; a path on the command line in the
    current folder first. A run without a name gets that of its recipe's file; without a file, that of the first text
    that it learns from. Raises PlaitError in one sentence.
    """
    with _refusing_depth():
        config = parse_config(_requested(recipe, overrides))
    if config.run.name != "auto":
        return config
    name = run_name_of(recipe if isinstance(recipe, Path) else Path(_first_text(config)))
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def read_saved_recipe(path: Path) -> RunConfig:
    """The recipe that `recipe_text` wrote to a file: its paths are taken as they stand, and nothing is looked for on
    this machine. Raises PlaitError."""
    return parse_config(_read_toml(path))


@contextmanager
def _refusing_depth() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise PlaitError("the recipe is nested too deeply; a value of a recipe is one list deep") from None


def _requested(recipe: RecipeSource, overrides: RecipeOverrides) -> dict[str, Any]:
    """The recipe with its overrides as nested values with absolute paths."""
    requested, here = _nested_values(recipe), Path.cwd()
    beside = recipe.resolve().parent if isinstance(recipe, Path) else here
    resolve_paths(requested, (beside, here))
    for override in _nested_overrides(overrides):
        resolve_paths(override, (here, beside))
        _merge(requested, override)
    return requested


def _nested_overrides(overrides: RecipeOverrides) -> list[dict[str, Any]]:
    """Each override as nested values."""
    if not isinstance(overrides, Mapping):
        return [parse_override(text) for text in overrides]
    return [_below(key.split("."), value) for key, value in _own_copy(overrides).items()]


def _below(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """The value inside one mapping for each key, the first key outermost."""
    for key in reversed(keys):
        value = {key: value}
    return value


def _nested_values(recipe: RecipeSource) -> dict[str, Any]:
    """The recipe as nested dicts of our own, which may be changed."""
    if isinstance(recipe, Path):
        return _read_toml(recipe)
    values = requested_values(recipe) if isinstance(recipe, RunConfig) else recipe
    return _own_copy(values)


def _own_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        if unnamed := [key for key in value if not isinstance(key, str)]:
            raise PlaitError(f"{unnamed[0]!r} is not the name of a key: write the keys of a recipe as texts")
        return {key: _own_copy(inner) for key, inner in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_own_copy(one) for one in value] if isinstance(value, list | tuple) else value


def _first_text(config: RunConfig) -> str:
    files = config.data.files
    first = files if isinstance(files, str) else files[0] if files else ""
    return first if isinstance(first, str) else first.path


def run_name_of(recipe: Path) -> str:
    """The name of a run after its recipe's file: small letters and digits without accents, "-" for all else;
    where that leaves nothing, a name of its own for each file name."""
    letters = unicodedata.normalize("NFKD", recipe.stem.lower())
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    name = re.sub(r"[^a-z0-9._-]+", "-", plain).strip("._-")[:LONGEST_NAME].rstrip("._-")
    return name or f"run-{sha256(os.fsencode(recipe.stem)).hexdigest()[:8]}"


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Check nested values against the schema; raises PlaitError that names the first bad key and how to correct it."""
    with _refusing_depth():
        for text in _texts(values):
            check_utf8(text)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise PlaitError(refusal_sentence(error)) from None
    if config.finetune.method != "auto" and config.model.from_ is None:
        raise PlaitError(
            f'finetune.method = "{config.finetune.method}" tunes a model that is trained already; name it, for example '
            'model.from = "smollm2", or take [finetune] out'
        )
    _check_pairs(config)
    return config


def _check_pairs(config: RunConfig) -> None:
    """Raise PlaitError unless [finetune] and [data] agree on whether pairs of answers are learned from."""
    data, pairs = config.data, config.finetune.learns_pairs
    if pairs and data.format not in ("auto", "preference"):
        raise PlaitError(
            f'finetune.objective = "{config.finetune.objective}" learns from pairs and data.format = "{data.format}" '
            'has none; write data.format = "preference", or take objective out'
        )
    if not pairs and data.format == "preference":
        raise PlaitError(
            'data.format = "preference" is learned from by finetune.objective = "dpo", "orpo" or "simpo"; write one of '
            "them in [finetune]"
        )
    if pairs and data.overlong == "cut":
        raise PlaitError(
            'data.overlong = "cut" would compare answers without their ends; write "drop" (or "refuse") for pairs'
        )


def parse_recipe(text: str, where: str) -> RunConfig:
    """The recipe that `recipe_text` wrote; `where` names it in errors. Raises PlaitError."""
    return parse_config(_parse_toml(text, where))


def recipe_text(config: RunConfig) -> str:
    """The recipe as TOML with every key written out, as it is saved with a run."""
    return str(config)


def requested_values(config: RunConfig) -> dict[str, Any]:
    """The recipe as plain nested values; keys that are None are left out."""
    return config.model_dump(mode="json", exclude_none=True, by_alias=True)


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
    except RecursionError:
        raise PlaitError(f"{key.strip()} is nested too deeply; a value of a recipe is one list deep") from None
    except ValueError:
        parsed = value.strip()
    return _below(parts, parsed)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        if path.suffix in _TEXTS and path.is_file():
            raise PlaitError(
                f'"{path}" is a text, not a recipe; plait new NAME --text {path} writes one that learns from it'
            )
        return _parse_toml(read_regular_text(path, SMALL_FILE_BYTES), f'the recipe "{path}"')
    except FileNotFoundError:
        raise PlaitError(f'there is no recipe "{path}"{_near_recipe(path)}') from None
    except IsADirectoryError:
        raise PlaitError(f'"{path}" is a folder; give the path of a recipe file in it') from None
    except UnfitFileError as error:
        raise PlaitError(f'the recipe "{path}" cannot be read: {error}') from None
    except UnicodeDecodeError:
        raise PlaitError(f'the recipe "{path}" is not UTF-8 text; save it as UTF-8') from None
    except ValueError:  # a NUL, or a character that no path can hold
        raise PlaitError(f"{str(path)!r} is no path; give the path of a .toml file") from None
    except OSError as error:
        raise PlaitError(f'the recipe "{path}" cannot be read ({error.strerror}); check its path and rights') from None


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise PlaitError(f"{where} is nested too deeply; a value of a recipe is one list deep") from None
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        raise PlaitError(f"{where} is not valid TOML: {error}; {_toml_advice(text, error)}") from None


def _toml_advice(text: str, error: ValueError) -> str:
    """What to fix: where the line's value is a text without quotes, that line with them."""
    found = _LINE_NUMBER.search(str(error))
    lines = text.split("\n")  # as tomllib counts them
    line = lines[int(found[1]) - 1] if found and int(found[1]) <= len(lines) else ""
    unquoted = _UNQUOTED.fullmatch(line)
    if unquoted and unquoted[2].isprintable():
        quote = "'" if "\\" in unquoted[2] else '"'
        return f"a text stands in quotes: {unquoted[1]} = {quote}{unquoted[2]}{quote}"
    return 'a text stands in quotes: files = "my.txt"' if "Invalid value" in str(error) else "correct that line"


def _near_recipe(path: Path) -> str:
    shipped = Path(__file__).parents[1] / "examples" / path.name
    if shipped.is_file():
        return f"; plait brings one of that name: {shipped}"
    if path.suffix != ".toml" and path.with_name(f"{path.name}.toml").is_file():
        return f'; did you mean "{path}.toml"?'
    try:
        near = difflib.get_close_matches(path.name, [p.name for p in sorted(path.parent.glob("*.toml"))], n=1)
    except OSError:  # a folder that this user may not look into
        near = []
    return f'; did you mean "{path.parent / near[0]}"?' if near else "; give the path of a .toml file"


def _merge(base: dict[str, Any], change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _texts(values: object) -> Iterator[str]:
    """Every text of nested values, keys included."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield key
            yield from _texts(value)
    elif isinstance(values, Sequence):
        for value in values:
            yield from _texts(value)
