"""The benchmark for one GPU runs on a processor with a tiny model: every contender, with the flags handed on."""

from __future__ import annotations

import pytest

from benchmarks.one_gpu import CONTENDERS, SMOKE, answer


@pytest.mark.slow
@pytest.mark.parametrize("size", ["125M", "1B"])
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_answers(name: str, size: str) -> None:
    if name == "Trainer":
        pytest.importorskip("accelerate", reason="comes with `make env-bench`")
    found = answer(name, size, [*SMOKE, "--attention", "any", "--peak-flops", "1e9"])
    assert found["step_s"] > 0 and 4.5 < found["first_loss"] < 6.5  # near the logarithm of 256 entries
    flops_per_token = 1e9 * found["mfu"] / found["tokens_per_s"]
    assert 3 * found["parameters"] < flops_per_token < 12 * found["parameters"]
