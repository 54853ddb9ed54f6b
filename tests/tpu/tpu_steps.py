"""Whole training steps on the device "tpu", by Google's backend for torch on a processor: `make test-tpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait_tpu_without_chip import compilations

from tests.tpu.kinds import KINDS, take_steps

ROUNDING = 2e-2
"""bf16 has 8 bits of mantissa; a sum of losses over some layers agrees to about two of its units."""


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_on_the_processor_and_compile_nothing_after_the_second(kind: str, tmp_path: Path) -> None:
    here = take_steps(kind, tmp_path / "here", "cpu", "float32")
    there = take_steps(kind, tmp_path / "there", "tpu", "float32", compilations=compilations)
    assert there.losses == pytest.approx(here.losses, rel=1e-5)
    assert there.norms == pytest.approx(here.norms, rel=1e-4)
    assert there.gradients.keys() == here.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in here.gradients.values())
    for name, gradient in here.gradients.items():  # a bias of keys has none, but for rounding
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((there.gradients[name] - gradient).abs().max()) <= 1e-5 * scale, name
    assert len(set(here.losses)) == len(here.losses)
    assert_nothing_compiled_late(there.compilations)


@pytest.mark.parametrize("kind", ["dense", "latent attention", "experts"])
def test_bf16_differs_from_the_processors_by_its_rounding(kind: str, tmp_path: Path) -> None:
    here = take_steps(kind, tmp_path / "here", "cpu", "float32")
    there = take_steps(kind, tmp_path / "there", "tpu", "bf16", compilations=compilations)
    assert there.losses != here.losses
    assert there.losses == pytest.approx(here.losses, rel=ROUNDING)
    assert_nothing_compiled_late(there.compilations)


def assert_nothing_compiled_late(compiled: list[int]) -> None:
    """`compiled`: how many programs there were after each step."""
    assert compiled[0] > 0
    assert compiled[1:] == [compiled[1]] * (len(compiled) - 1)
