"""Whole training steps on the device "tpu", by Google's backend for torch on a processor: `make test-tpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait_tpu_without_chip import compilations

from tests.tpu.kinds import KINDS, take_steps

ROUNDING = 2e-2
"""bf16 has 8 bits of mantissa; a sum of losses over some layers agrees to about two of its units."""


HANGS = pytest.mark.skip(reason="experts' first step never ends in XLA's plugin for processors: docs/log.md")
RUNNING = [pytest.param(kind, marks=HANGS) if "experts" in kind else kind for kind in KINDS]


@pytest.mark.parametrize("kind", RUNNING)
def test_a_step_computes_what_it_does_on_the_processor(kind: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["dense", "latent attention"])
def test_bf16_differs_from_the_processors_by_its_rounding(kind: str, tmp_path: Path) -> None:
    here = take_steps(kind, tmp_path / "here", "cpu", "float32")
    there = take_steps(kind, tmp_path / "there", "tpu", "bf16")
    assert there.losses != here.losses
    assert there.losses == pytest.approx(here.losses, rel=ROUNDING)


@pytest.mark.parametrize("kind", RUNNING)
def test_no_step_after_the_second_compiles_anything(kind: str, tmp_path: Path) -> None:
    taken = take_steps(kind, tmp_path, "tpu", "bf16", count=5, compilations=compilations)
    assert taken.compilations[0] > 0
    assert taken.compilations[1:] == [taken.compilations[1]] * 4
