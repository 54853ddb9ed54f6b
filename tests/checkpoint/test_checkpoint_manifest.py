"""Manifests that nobody honest wrote: every one is refused with a reason, none does harm."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.checkpoint.manifest import (
    Manifest,
    StoredPart,
    check_cover,
    manifest_text,
    parse_manifest,
    safetensors_header,
)
from plait.checkpoint.store import verify_checkpoint
from plait.errors import PlaitError


def part(**changes: object) -> StoredPart:
    values: dict[str, object] = {
        "tensor": "model/w",
        "dtype": "F32",
        "shape": (4, 6),
        "offset": (0, 0),
        "extent": (4, 6),
        "file": "rank-00000.safetensors",
        "key": "model/w",
        "begin": 80,
        "sha256": "0" * 64,
    }
    return StoredPart(**(values | changes))  # type: ignore[arg-type]


def text(*parts: StoredPart) -> bytes:
    """A manifest signed as if plait had written it."""
    return manifest_text(Manifest(step=1, cursor=2, model={}, parts=parts)).encode()


def test_an_honest_manifest_comes_back():
    assert parse_manifest(text(part())).parts == (part(),)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"file": "../../etc/passwd"}, "not one that plait writes"),
        ({"file": "rank-00000.safetensors\n"}, "not one that plait writes"),
        ({"file": "/dev/zero"}, "not one that plait writes"),
        ({"dtype": "O"}, "not one that plait writes"),
        ({"sha256": "0" * 63}, "not one that plait writes"),
        ({"offset": (1, 0)}, "does not lie inside"),
        ({"extent": (4,)}, "does not lie inside"),
        ({"offset": (-1, 0)}, "whole numbers"),
        ({"extent": (4.0, 6.0)}, "whole numbers"),
        ({"shape": (True, 6)}, "whole numbers"),
        ({"begin": -8}, "whole numbers"),
        ({"shape": "46"}, "wrong type"),
        ({"extent": (4, 5)}, "hole"),
    ],
)
def test_a_part_that_does_not_add_up_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        parse_manifest(text(part(**changes)))


def test_overlaps_and_disagreements_are_refused_on_any_dim():
    left, right = part(extent=(4, 3)), part(offset=(0, 3), extent=(4, 3))
    check_cover([left, right])
    with pytest.raises(ValueError, match="overlap"):
        check_cover([part(extent=(4, 4)), right])
    with pytest.raises(ValueError, match="overlap"):
        check_cover([part(shape=(), offset=(), extent=())] * 2)
    with pytest.raises(ValueError, match="disagree"):
        check_cover([left, part(offset=(0, 3), extent=(4, 3), dtype="F64")])
    check_cover([part(extent=(0, 6)), part()])  # a rank that got nothing does no harm


def test_parts_that_point_elsewhere_in_their_file_are_refused(tmp_path):
    header, placed = safetensors_header([part(sha256=sha256(b"\0" * 96).hexdigest())])
    data = header + b"\0" * 96
    (tmp_path / "rank-00000.safetensors").write_bytes(data)
    (tmp_path / "manifest.json").write_bytes(text(*placed))
    verify_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_bytes(text(part(begin=0, sha256=placed[0].sha256)))
    with pytest.raises(PlaitError, match=r"manifest.json is damaged: it misplaces"):
        verify_checkpoint(tmp_path)


def test_two_parts_under_one_key_of_a_file_are_refused(tmp_path):
    zeros = sha256(b"\0" * 96).hexdigest()
    header, placed = safetensors_header([part(tensor="model/v", sha256=zeros), part(sha256=zeros)])
    (tmp_path / "rank-00000.safetensors").write_bytes(header + b"\0" * 192)
    (tmp_path / "manifest.json").write_bytes(text(*placed))
    with pytest.raises(PlaitError, match=r"manifest.json is damaged: it misplaces"):
        verify_checkpoint(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": 2}', b'{"format": 1}'])
def test_what_is_no_manifest_is_refused_with_the_file_named(tmp_path, data):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(PlaitError, match=r"manifest.json is damaged"):
        verify_checkpoint(tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["format", "step", "cursor", "model", "rng", "parts", "sha256"])
ROW_FIELDS = st.sampled_from(list(StoredPart.__slots__))


@settings(deadline=None)
@given(FIELDS, anything)
def test_any_value_in_any_field_is_refused(field, value):
    found = json.loads(text(part()))
    changed = found | {field: value}
    if changed != found:
        with pytest.raises(ValueError):
            parse_manifest(json.dumps(changed).encode())


@settings(deadline=None)
@given(ROW_FIELDS, anything)
def test_any_value_in_any_field_of_a_part_is_refused(field, value):
    found = json.loads(text(part()))
    found["parts"][0][field] = value
    with pytest.raises(ValueError):
        parse_manifest(json.dumps(found).encode())
