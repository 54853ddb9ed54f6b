"""From keys to fields: the small tables that describe a format, and the checks shared by all formats."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.run_description import RunDescription
from plait.foreign_configs.syntax import Placeholder
from plait.layout import Layout

Values = Mapping[str, Any]
Convert = Callable[[str, Any], Any]
KeyFields = Mapping[str, tuple[str, Convert]]
"""For each key, the field of RunDescription or degree of its layout that it sets, and the function that reads its
value."""
_DEGREES = ("pipeline", "shard", "context", "tensor", "expert")
_LARGEST = 1 << 50
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFormat:
    """A format of configurations."""

    name: str
    """The name that the program's users know."""
    known: str
    """The list of its keys in known_keys/."""
    marks: tuple[str, ...]
    """Keys that no other format has; one of them is enough to recognize it."""
    describe: Callable[[Values, Values], dict[str, Any]]
    """The fields of a RunDescription and the degrees of its layout, given the values and the fields that the user
    overrides, with the user's values."""
    not_priced: Mapping[str, str]
    """Keys that change memory or time by an amount unknown to the forecast, with their effect."""
    changes: Mapping[str, str]
    """The notation in this format of each change that plait may propose (changes.py); a change "of a pipeline" is how
    that change is written if the run has one."""

    @property
    def known_keys(self) -> frozenset[str]:
        return _known_keys(self.known)


@cache
def _known_keys(name: str) -> frozenset[str]:
    text = (Path(__file__).parent / "known_keys" / f"{name}.txt").read_text(encoding="utf-8")
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


def is_known(key: str, known: Collection[str]) -> bool:
    """Whether a dotted key, or a table that contains it, is one of these."""
    parts = key.split(".")
    inside = {name.rpartition(".")[0] for name in known if "." in name}
    for size in range(len(parts), 0, -1):
        name = ".".join(parts[:size])
        if name in known:
            return True
        if name in inside:
            return False
    return False


def description(one: ConfigFormat, values: Values, overridden: Values) -> RunDescription:
    """The run described by a format's values."""
    known = one.known_keys
    unknown = [key for key in values if not is_known(key, known)]
    without = [f"{key} ({what})" for key, what in one.not_priced.items() if _is_set(values, key)]
    found = one.describe(values, overridden)
    degrees = {axis: found.pop(axis) for axis in _DEGREES if axis in found}
    return RunDescription(
        **{
            **found,
            "layout": Layout(**degrees),
            "shards_over": "layout.shard" if "shard" in degrees else "all data ranks",
            "not_priced": (*found.get("not_priced", ()), *without),
            "unknown": tuple(_named(key, known) for key in unknown),
        }
    )


def _is_set(values: Values, key: str) -> bool:
    found = [value for name, value in values.items() if name == key or name.startswith(f"{key}.")]
    return any(value not in (None, False, "", "false", 0, "none", "disabled", ()) and value != [] for value in found)


def _named(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return f"{key} (is it {near[0]}?)" if near else key


def fields_of_keys(values: Values, fields: KeyFields, overridden: Collection[str] = ()) -> dict[str, Any]:
    """The fields that these keys set; raises PlaitError if two keys contradict each other."""
    found: dict[str, Any] = {}
    source: dict[str, str] = {}
    for key, (name, convert) in fields.items():
        if name in overridden or values.get(key) is None:
            continue
        value = convert(key, values[key])
        if value is None:
            continue
        if name in found and found[name] != value:
            raise PlaitError(
                f"{source[name]} = {values[source[name]]} and {key} = {values[key]} contradict each other; keep one"
            )
        found[name], source[name] = value, key
    return found


def whole(key: str, value: Any) -> int | None:
    """A count; None for "auto" and for -1, with which programs leave the choice to themselves."""
    _refuse_placeholder(key, value)
    if isinstance(value, str) and value.strip().lower() in ("auto", "none", "null"):
        return None
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != number or abs(number) > _LARGEST or number != int(number):
        raise PlaitError(f"{key} = {value!r:.60} is not a whole number; write one")
    if number == -1:
        return None
    if number < 1:
        raise PlaitError(f"{key} = {value!r:.60} is too small; write 1 or more")
    return int(number)


def whole_or_none(key: str, value: Any) -> int | None:
    """A count, or None for 0, which means that a feature is off."""
    return None if value in (0, "0", False, "") else whole(key, value)


def amount(key: str, value: Any) -> float | None:
    """A positive number, such as epochs."""
    _refuse_placeholder(key, value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise PlaitError(f"{key} = {value!r:.60} is not a number; write one") from None
    return number if 0 < number < _LARGEST else None


def true_or_false(key: str, value: Any) -> bool:
    """True or false in the spellings of YAML, JSON and command lines; "auto" is true."""
    _refuse_placeholder(key, value)
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in (*_YES, "auto"):
        return True
    if text in _NO:
        return False
    raise PlaitError(f"{key} = {value!r:.60} is not true or false; write one of them")


def word(key: str, value: Any) -> str:
    """A word in lowercase."""
    _refuse_placeholder(key, value)
    return str(value).strip().lower()


def as_written(key: str, value: Any) -> str:
    """A name or path, unchanged."""
    _refuse_placeholder(key, value)
    return str(value).strip()


def words(key: str, value: Any) -> tuple[str, ...]:
    """A list of words, or a text with commas or spaces."""
    _refuse_placeholder(key, value)
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    if isinstance(value, list | tuple):
        return tuple(str(one) for one in value)
    raise PlaitError(f"{key} = {value!r:.60} is not a list of words; write one")


def _refuse_placeholder(key: str, value: Any) -> None:
    if isinstance(value, Placeholder):
        raise PlaitError(
            f"{key} is {str(value)!r:.80}, which is known only when it runs; write its value there, or give it on "
            "the command line (see the list of names with: plait check --help)"
        )


def is_on(values: Values, key: str) -> bool:
    """Whether a key is present and true."""
    return values.get(key) is not None and true_or_false(key, values[key])


def one_of(values: Values, choices: Mapping[str, Any]) -> Any:
    """The value of the one key that is on, or of the first if all are "auto"; raises PlaitError if several are true."""
    on = [key for key in choices if is_on(values, key)]
    on = [key for key in on if values[key] != "auto"] or on[:1]
    if len({choices[key] for key in on}) > 1:
        raise PlaitError(f"{' and '.join(on)} are both on and contradict each other; keep one")
    return choices[on[0]] if on else None
