"""The text of a configuration into flat values by dotted key: YAML, TOML and JSON; Python's source and shell scripts
are in files of their own. Nothing is executed, and no tag of YAML makes an object."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import yaml

from plait.checked_json import parse_json
from plait.errors import PlaitError

MOST_VALUES = 20_000
"""Values of one configuration; aliases of a few lines of YAML can stand for billions."""
DEEPEST_KEY = 30


class Placeholder(str):
    """Text that a shell, a template or a program would replace before the key has a value."""

    __slots__ = ()


def yaml_values(text: str, where: str) -> dict[str, Any]:
    """Flat values of one YAML document."""
    try:
        values = yaml.load(text, Loader=_OneOfEachKey)
    except RecursionError:
        raise PlaitError(f"{where} is nested too deeply to be a configuration") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # of a date, a number or a truth that is none
        raise PlaitError(f"{where} has a value that YAML cannot read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        why = str(getattr(error, "problem", None) or error).replace("\n", " ")
        if "constructor for the tag" in why:
            tag = why.rpartition("tag ")[2]
            why = f"the tag {tag} would make an object of a program's own; write a plain value in its place"
        elif "expected a single document" in str(error):
            why = "it holds several documents; keep one"
        raise PlaitError(f"{where}{at} is not YAML that can be read: {why}") from None
    return flat(values, where)


def toml_values(text: str, where: str) -> dict[str, Any]:
    """Flat values of a TOML file."""
    try:
        return flat(tomllib.loads(text), where)
    except (ValueError, RecursionError) as error:
        raise PlaitError(f"{where} is not TOML: {error}") from None


def json_values(text: str, where: str) -> dict[str, Any]:
    """Flat values of a JSON object."""
    try:
        return flat(parse_json(text, constants="kept"), where)
    except ValueError as error:
        raise PlaitError(f"{where} is not JSON: {error}") from None


def flat(values: object, where: str) -> dict[str, Any]:
    """Values of nested tables by dotted key; lists stay whole. Raises PlaitError where it is no table, or one without
    end."""
    if not isinstance(values, Mapping) or not values:
        raise PlaitError(f"{where} holds no keys; a configuration is a table of keys and values")
    _refuse_endless(values, where)
    found: dict[str, Any] = {}
    for key, value in _leaves(values, "", 0, where):
        if len(found) >= MOST_VALUES:
            raise PlaitError(f"{where} stands for more than {MOST_VALUES:,} values; no configuration has as many")
        found[key] = _marked(value)
    return found


def _refuse_endless(values: object, where: str) -> None:
    """Raise PlaitError for lists and tables that stand for too many values: YAML's aliases multiply them."""
    count, left = 0, [values]
    while left:
        one = left.pop()
        inner = list(one.values()) if isinstance(one, Mapping) else one if isinstance(one, list) else []
        count += len(inner)
        if count > MOST_VALUES:
            raise PlaitError(f"{where} stands for more than {MOST_VALUES:,} values; no configuration has as many")
        left += inner


def _leaves(values: Mapping[Any, Any], before: str, depth: int, where: str) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST_KEY:
        raise PlaitError(f"{where} is nested more than {DEEPEST_KEY} deep; no configuration is")
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.", depth + 1, where)
        else:
            yield name, value


_REPLACED = re.compile(r"\$\{?\w|\{\{|<[A-Za-z_ ]+>|^env:|\$\(")


def _marked(value: Any) -> Any:
    return Placeholder(value) if isinstance(value, str) and _REPLACED.search(value) else value


class _OneOfEachKey(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that stands twice in one table."""


def _table(loader: _OneOfEachKey, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} stands there twice; keep one", key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_OneOfEachKey.add_constructor("tag:yaml.org,2002:map", _table)
