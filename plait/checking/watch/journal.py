"""Records what a watched rank does: a line of JSON for each event, and a safetensors file for each optimizer step."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EVENTS = "events.jsonl"
SAMPLED = 65_536
"""Most elements of a tensor that are kept; a larger one is sampled."""


class Journal:
    """One rank's file of events, flushed line by line: the process may be killed after any of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = (folder / EVENTS).open("a", encoding="utf-8")
        self.count = 0

    def write(self, kind: str, **values: Any) -> int:
        """Write an event; returns its number within this rank."""
        number = self.count
        self.count += 1
        self._file.write(json.dumps({"kind": kind, "number": number, "s": time.monotonic(), **values}) + "\n")
        self._file.flush()
        return number

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        """Write a step's tensors; returns the name of their file."""
        unfinished = self._folder / f"{name}.unfinished"
        save_file({key: one.contiguous() for key, one in tensors.items()}, str(unfinished))
        unfinished.rename(self._folder / f"{name}.safetensors")
        return f"{name}.safetensors"


def sampled(tensor: Tensor) -> Tensor:
    """A flat copy of a tensor, or of `SAMPLED` elements of a large one, the same ones for each shape. A sparse tensor,
    such as a sparse embedding's gradient, counts with its zeros."""
    flat = as_dense(tensor.detach()).reshape(-1)
    if flat.numel() <= SAMPLED:
        return flat.clone()
    steps = torch.arange(SAMPLED, dtype=torch.int64)
    stride = flat.numel() // SAMPLED
    # An odd step inside each stretch, so that columns of a matrix are not left out.
    return flat[steps * stride + (steps * 40_503) % stride].clone()


def as_dense(tensor: Tensor) -> Tensor:
    """The tensor, made dense if it is sparse."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
