"""How far the gradients of 16-bit ranks are from those of one float64 process."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def gradients_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of one process' parts by shard_entries: each weight's whole gradient, by name."""
    return {key.split("|")[1]: value for key, value in found.items() if key.startswith("gradient|")}


def squared_errors(folder: Path, name: str, ranks: int, wanted: dict[str, Tensor]) -> dict[str, float]:
    """The summed squares of what the ranks' owned gradients, left in `folder`, are off, by weight."""
    errors: dict[str, float] = defaultdict(float)
    for rank in range(ranks):
        for key, value in load_file(folder / f"{name}-rank-{rank}.safetensors").items():
            kind, weight, offset, owner = key.split("|") if "|" in key else ("", key, "", "")
            if kind == "gradient" and owner == "owned":
                part = wanted[weight]
                for dim, first in enumerate(map(int, offset.split(","))):
                    part = part.narrow(dim, first, value.shape[dim])
                errors[weight] += float((value - part).square().sum())
                assert value.dtype == torch.float32
    return errors
