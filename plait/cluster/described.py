"""Devices and links as a cluster.json describes them: by name, like another one, or by all their values."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, fields
from typing import Any, get_args

from plait.cluster.catalog import Device, DeviceKind, Link, Shape, find_device, find_link
from plait.cluster.short import parse_network
from plait.errors import PlaitError

_WORDS = {"DeviceKind": get_args(DeviceKind), "Shape": get_args(Shape)}


def device_from_json(value: Any, where: str) -> Device:
    """The device that a cluster.json names or describes; error messages begin with `where`."""
    if isinstance(value, str):
        return find_device(value)
    return Device(**_values(Device, value, where))


def link_from_json(value: Any, where: str) -> Link:
    """The link that a cluster.json names ("nvlink4"), gives as a rate ("+400G", "@1G") or describes."""
    if isinstance(value, str):
        mark, name = (value[0], value[1:].strip()) if value[:1] in ("+", "@") else ("+", value)
        return parse_network(name, mark)
    return Link(**_values(Link, value, where))


def name_or_values(value: Device | Link) -> str | dict[str, Any]:
    """The value that reads back as this device or link: its name where the catalogue has the same values, otherwise
    all of them."""
    try:
        known = find_device(value.name) if isinstance(value, Device) else find_link(value.name)
    except PlaitError:
        return asdict(value)
    return value.name if known == value else asdict(value)


def check_keys(values: Any, needed: set[str], allowed: set[str], where: str) -> None:
    """Raise PlaitError unless `values` is an object that has all `needed` keys and, besides them, only `allowed`
    ones."""
    if not isinstance(values, dict):
        raise PlaitError(f"{where}: {json.dumps(values)} must be an object, with {_listed(needed or allowed)}")
    known = needed | allowed
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise PlaitError(f'{where}: "{key}" is not known; write {near[0] if near else _listed(known)}')
    if missing := needed - set(values):
        raise PlaitError(f"{where}: {_listed(missing)} missing; add it")


def check_value(value: Any, annotation: str, where: str) -> None:
    """Raise PlaitError unless a value of a cluster.json fits the annotation of its field."""
    if not _fits(value, annotation):
        raise PlaitError(f"{where} = {json.dumps(value)} does not fit; write {_wanted(annotation)}")


def _values(kind: type[Device] | type[Link], value: Any, where: str) -> dict[str, Any]:
    """All values of a Device or Link; those left out come from the one that "like" names, or are the defaults."""
    annotations = {field.name: str(field.type) for field in fields(kind)}
    unknown = {name: None for name, annotation in annotations.items() if "None" in annotation}
    like = value.get("like") if isinstance(value, dict) else None
    optional = {*unknown, "axes", "source", "all_reduce_reached"}
    check_keys(value, set() if like else set(annotations) - optional, {"like", *annotations}, where)
    given = {name: value for name, value in value.items() if name != "like"}
    for name, value in given.items():
        check_value(value, annotations[name], f"{where}: {name}")
        if value is not None and "int" in annotations[name]:
            given[name] = int(value)
    if like:
        known = find_device(str(like)) if kind is Device else find_link(str(like))
        return {**asdict(known), "source": f"{where}, like {known.name}", **given}
    usual = {} if kind is Device else {"axes": 1, "all_reduce_reached": given["reached"]}
    return {**unknown, "source": where, **usual, **given}


def _fits(value: Any, annotation: str) -> bool:
    if annotation in _WORDS:
        return value in _WORDS[annotation]
    if value is None or isinstance(value, bool):
        return value is None and "None" in annotation
    if annotation.startswith("Mapping"):
        return isinstance(value, dict) and all(_fits(rate, "float") for rate in value.values())
    if annotation == "str":
        return isinstance(value, str)
    # A count of bytes may be written as 8e10; JSON as Python reads it has Infinity and NaN, which are no amounts.
    number = isinstance(value, int | float) and math.isfinite(value)
    return number and ("int" not in annotation or value == int(value))


def _wanted(annotation: str) -> str:
    if annotation in _WORDS:
        return f"one of {_listed(set(_WORDS[annotation]))}"
    if annotation.startswith("Mapping"):
        return 'FLOP/s by precision, for example {"bf16": 1e15}'
    return "text" if annotation == "str" else "a whole number" if "int" in annotation else "a number"


def _listed(words: set[str]) -> str:
    return ", ".join(sorted(words))
