"""One process: its own gradients are the global ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from plait.custom.program import Program
from plait.custom.strands.description import HeldPiece, Releasable, StrandForm


class LocalStrands:
    """The strands of a program in one process; no torch.distributed, no copies."""

    form: StrandForm = "whole"

    def __init__(self, program: Program) -> None:
        self._program = program
        self._trained = [program.trained_by(index) for index in range(len(program.losses))]

    def open(self, index: int) -> None:
        for parameter in self._trained[index].values():
            parameter.grad = None

    def next_pass(self, index: int) -> None:
        """Nothing to do."""

    def arm(self, index: int) -> None:
        """Nothing to begin."""

    def reached(self, index: int) -> Tensor:
        return torch.tensor([p.grad is not None for p in self._trained[index].values()], dtype=torch.float64)

    def close(self, index: int, reached: Sequence[bool]) -> None:
        """Nothing to wait for."""

    def own_seconds(self, passed_s: float) -> float:
        return passed_s

    def squares(self, index: int) -> Tensor:
        return squares_of([p.grad for p in self._trained[index].values() if p.grad is not None])

    def publish(self, index: int) -> None:
        """Nobody else computes with the weights."""

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        return whole_pieces(self._trained[index])

    def full_weights(self) -> dict[str, Tensor]:
        return weights_of(self._program)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        copy_weights(weights, self._program)

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        return {name: p.grad.detach() for name, p in self._trained[index].items() if p.grad is not None}

    def holds(self) -> Sequence[Releasable]:
        """Nothing: the weights were never taken."""
        return ()


def weights_of(program: Program) -> dict[str, Tensor]:
    """Every parameter by its name, where this worker has all of them whole."""
    return {name: parameter.detach() for name, parameter in program.named_parameters().items()}


def copy_weights(weights: Mapping[str, Tensor], program: Program) -> None:
    """Copy these weights, by name, into the program's own."""
    for name, parameter in program.named_parameters().items():
        parameter.detach().copy_(weights[name])


def whole_pieces(trained: dict[str, nn.Parameter]) -> list[HeldPiece]:
    """Every weight as one piece."""
    return [HeldPiece(name=name, first=0, parameter=p) for name, p in trained.items()]


def squares_of(gradients: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """The sum of the squares of all numbers: 0-dim, float64; on this device where there is no gradient. What is summed
    over workers must be of one device on all of them: else one waits in gloo for what the others sum by NCCL."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients), 2)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
