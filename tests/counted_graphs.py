"""A stand-in for inductor, for tests of what is recompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition


class CountedGraphs:
    """A compiler that needs no C++ compiler, and counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return aot_eager_decomp_partition(graph, inputs)
