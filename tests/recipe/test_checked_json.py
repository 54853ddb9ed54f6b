"""JSON files that plait writes: what was changed is seen, what does not fit its type is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from plait.checked_json import DEEPEST, SingleLine, parse_json, parse_object, sealed_text, typed_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    size: int
    kind: Literal["wide", "narrow"] = "wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    name: str
    share: float | None
    parts: tuple[Part, ...] = ()
    counts: Mapping[str, int]
    betas: tuple[float, float] = (0.9, 0.95)
    devices: Literal["auto", "cpu"] | tuple[int, ...] = "auto"
    line: SingleLine = ""

    def __post_init__(self) -> None:
        if self.name == "nobody":
            raise ValueError("a whole has a name")


VALUES: dict[str, Any] = {"name": "é", "share": 0.1, "parts": [{"size": 3, "kind": "wide"}], "counts": {"a": 1}}


def test_what_was_written_is_read() -> None:
    whole = Whole(name="é", share=0.1, parts=(Part(size=3),), counts={"a": 1})
    assert typed_value(Whole, parse_object(sealed_text(VALUES))) == whole


@pytest.mark.parametrize(
    ("old", "new"), [("0.1", "0.2"), ('"size": 3', '"size": 4'), ('"a"', '"b"'), ('"wide"', '"narrow"')]
)
def test_a_changed_value_is_seen(old: str, new: str) -> None:
    text = sealed_text(VALUES)
    with pytest.raises(ValueError, match="changed or damaged"):
        parse_object(text.replace(old, new))


def test_who_takes_the_hash_out_may_edit() -> None:
    edited = {key: value for key, value in json.loads(sealed_text(VALUES)).items() if key != "sha256"}
    assert parse_object(json.dumps({**edited, "share": None}))["share"] is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("[]", "not a table"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1e999}', "1e999 is no number"),
        ('{"a": ' + "9" * 400 + "}", "9999999999… is no number"),
        ('{"a": ' + "9" * 9000 + "}", "9999999999… is no number"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_object_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_object(text)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="not text"):
        parse_object(b'{"a": "\xff"}')


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": 3}, "name should be text"),
        ({"share": "much"}, "share should be a number"),
        ({"parts": [{"size": True}]}, r"parts\.0\.size should be a whole number"),
        ({"parts": [{"size": 1, "kind": "odd"}]}, r'parts\.0\.kind should be "wide" or "narrow"'),
        ({"parts": 5}, "parts should be a list"),
        ({"counts": {"a": None}}, r"counts\.a should be a whole number"),
        ({"parts": ["x"]}, r"parts\.0 should be a table of keys and values"),
        ({"counts": {"a": 2**63}}, r"counts\.a should be a smaller whole number"),
        ({"counts": [1]}, "counts should be a table of keys and values"),
        ({"share": float("inf")}, "share should be a finite number"),
        ({"share": 10**400}, "share should be a finite number"),
        ({"share": False}, "share should be a number"),
        ({"betas": [0.9]}, r"betas\.1 should be given"),
        ({"betas": [0.9, "b"]}, r"betas\.1 should be a number"),
        ({"devices": "gpu"}, 'devices should be "auto" or "cpu" or a list'),
        ({"devices": ["a"]}, r"devices\.0 should be a whole number"),
        ({"name": "nobody"}, "^a whole has a name$"),
        ({"other": 1}, "other is not known"),
        ({"": 1}, '"" is not known'),
        ({"\x1b[2J": 1}, r'"\\u001b\[2J" is not known'),
        ({"parts": [{"size": 1, "extra": 2}]}, r"parts\.0\.extra is not known"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        typed_value(Whole, {**VALUES, **change})


def test_each_of_several_types_is_taken() -> None:
    told = typed_value(Whole, {**VALUES, "share": 1, "betas": [0, 1], "devices": [2, 0], "line": "two\n lines" * 999})
    assert (told.share, told.betas, told.devices) == (1.0, (0.0, 1.0), (2, 0))
    assert isinstance(told.share, float) and len(told.line) == 2000 and "\n" not in told.line


@pytest.mark.parametrize("text", [r'{"a": "\ud800"}', r'{"\udfff": 1}', r'[["x\udc80"]]'])
def test_half_characters_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="half of a character"):
        parse_json(text)


def test_as_deep_as_the_bound_and_no_deeper() -> None:
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="counts should be given"):
        typed_value(Whole, {key: value for key, value in VALUES.items() if key != "counts"})
