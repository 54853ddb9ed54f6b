"""The real SmolLM2-135M, where `make smollm2` has brought it, computes what it computes in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real_model import BAR, MODEL, compare_losses


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_file(), reason="its weights are not here; make smollm2 brings them")
def test_the_real_model_has_transformers_loss_on_real_text(tmp_path: Path) -> None:
    """Ten kilobytes; benchmarks/results/real-model-*.json has the figures of a hundred."""
    found = compare_losses(MODEL, tmp_path, 10_000)
    assert found.bytes == 10_000 and found.tokens > 2000 and 2 < found.plait < 5
    assert found.difference <= BAR
