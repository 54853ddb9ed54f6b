"""Keeps functions out of the graphs of compiled layers."""

from __future__ import annotations

from typing import Any

import torch

from plait.partition.execution import Compile


def outside_graphs(function: Any, compile: Compile) -> Any:
    """The function as compiled layers may call it, where what it does belongs to no graph. Where none are compiled it
    stays as it is: torch's compiler is a second of imports and 75 MB of each worker."""
    return torch.compiler.disable(function) if compile == "blocks" else function
