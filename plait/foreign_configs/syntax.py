"""Parses a configuration into flat values by dotted key: YAML, TOML and JSON; Python source and shell scripts have
their own files. Nothing is executed, and no YAML tag creates an object."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeGuard

import yaml

from plait.checked_json import parse_json
from plait.errors import PlaitError

MOST_VALUES = 20_000
"""Most values of one configuration; a few lines of YAML with aliases can stand for billions."""
DEEPEST_KEY, MOST_BITS = 30, 256


class Placeholder(str):
    """Text that a shell, a template or a program would replace with the actual value."""

    __slots__ = ()


def yaml_values(text: str, where: str) -> dict[str, Any]:
    """Flat values of one YAML document."""
    try:
        values = yaml.load(text, Loader=_OneOfEachKey)
    except RecursionError:
        raise PlaitError(f"{where} is nested too deeply to be a configuration") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:  # a date, number or boolean that is invalid
        raise PlaitError(f"{where} has a value that YAML cannot read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        why = str(getattr(error, "problem", None) or error).replace("\n", " ")
        if "constructor for the tag" in why:
            tag = why.rpartition("tag ")[2]
            why = f"the tag {tag} would create an object; write a plain value instead"
        elif "expected a single document" in str(error):
            why = "it contains several documents; keep one"
        raise PlaitError(f"{where}{at} is not valid YAML: {why}") from None
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
    """Values of nested tables by dotted key; lists stay whole. Raises PlaitError if `values` is not a table, or is an
    endless one."""
    if not isinstance(values, Mapping) or not values:
        raise PlaitError(f"{where} contains no keys; a configuration is a table of keys and values")
    _refuse_endless(values, where)
    found: dict[str, Any] = {}
    for key, value in _leaves(values, "", 0, where):
        if len(found) >= MOST_VALUES:
            raise PlaitError(f"{where} stands for more than {MOST_VALUES:,} values; no configuration has that many")
        found[key] = _marked(value)
    return found


def _refuse_endless(values: object, where: str) -> None:
    """Raise PlaitError for lists and tables that stand for too many values, as YAML's aliases can, and for integers of
    thousands of digits, which Python refuses to print."""
    count, left = 0, [values]
    while left:
        one = left.pop()
        if is_endless(one):
            raise PlaitError(f"{where} has a number of {one.bit_length():,} bits; no configuration has one as large")
        inner = list(one.values()) if isinstance(one, Mapping) else one if isinstance(one, list) else []
        count += len(inner)
        if count > MOST_VALUES:
            raise PlaitError(f"{where} stands for more than {MOST_VALUES:,} values; no configuration has that many")
        left += inner


def is_endless(value: object) -> TypeGuard[int]:
    """Whether it is a whole number that is far too large for a configuration."""
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def _leaves(values: Mapping[Any, Any], before: str, depth: int, where: str) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST_KEY:
        raise PlaitError(f"{where} is nested more than {DEEPEST_KEY} levels deep; no configuration is")
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
    """PyYAML's safe loader, which refuses duplicate keys in a table."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names, and keep the last of each key: merges of merges would double them without end."""
        super().flatten_mapping(node)
        last = {
            (key.tag, key.value) if isinstance(key.value, str) else id(key): (key, value) for key, value in node.value
        }
        node.value = list(last.values())


def _table(loader: _OneOfEachKey, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice; keep one", key.start_mark
                )
            seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_OneOfEachKey.add_constructor("tag:yaml.org,2002:map", _table)
