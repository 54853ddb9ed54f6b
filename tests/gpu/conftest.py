"""Each test of this folder runs on the processor in `make test`, and on an NVIDIA GPU in `make test-gpu`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The processor, or the first GPU."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def no_graphs_from_before() -> Iterator[None]:
    """Compiled functions of one test say nothing in the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
