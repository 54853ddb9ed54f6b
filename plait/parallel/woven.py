"""A model with its strands woven in: what each stage takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from plait.model.gpt import GPT


class Gradients(Protocol):
    """What makes a step's local gradients global; every rank of the mesh calls the same methods in the same order."""

    buckets: list[Tensor]
    """Flat tensors that hold gradients from step to step; empty where there are none."""

    def open(self) -> None:
        """Begin a step: forget the last one's gradients."""
        ...

    def arm(self) -> None:
        """The next backward is the step's last."""
        ...

    def close(self) -> None:
        """Block until every parameter's `.grad` is the sum over all ranks."""
        ...


class LocalGradients:
    """One process: its own sums are the global ones."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.buckets: list[Tensor] = []

    def open(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self) -> None:
        """Nobody waits for the last backward."""

    def close(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woven:
    """The model of this rank, and how its gradients become everybody's."""

    model: GPT
    gradients: Gradients
