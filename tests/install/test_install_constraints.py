"""constraints.txt pins whatever comes with plait, and its versions exist for each Python that plait names."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
NOT_PINNED = {"plait", "torch", "setuptools"}
"""torch's build is chosen for the machine, and setuptools comes in the version that this torch asks for."""


def test_all_that_plait_needs_is_pinned_to_one_version() -> None:
    assert all(str(pin.specifier).startswith("==") for pin in PINS)
    needed = {name for name in closure("plait", {"dev"}) if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert needed - {canonicalize_name(pin.name) for pin in PINS} == NOT_PINNED


def closure(name: str, extras: set[str]) -> set[str]:
    """Names of a distribution and of all that it needs here."""
    found: dict[str, set[str]] = {}
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        key = canonicalize_name(name)
        if key in found and extras <= found[key]:
            continue
        found[key] = found.get(key, set()) | extras
        for requirement in map(Requirement, metadata.requires(name) or []):
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in {"", *extras}):
                waiting.append((requirement.name, requirement.extras))
    return set(found)
