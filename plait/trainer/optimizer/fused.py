"""The interface of a run's optimizer; AdamW and SGD with torch's fused kernels, bit for bit the same as `fused=True`.

torch.optim is not used: its first optimizer imports torch._dynamo, more than a second of every start and of every
recovery from a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.accelerator import is_accelerator


@dataclass(slots=True, kw_only=True)
class ParameterGroup:
    """Parameters of one dtype and device that are updated alike."""

    parameters: list[Tensor]
    weight_decay: float


class RunOptimizer(Protocol):
    """Updates a run's parameters in place.

    `state` has each parameter's moments under their names in `torch.optim`, and `step`, the number of updates, if it is
    counted. They exist before the first step. `grad_scale` (a divisor of the gradients; float32, shape []) and
    `found_inf` (1.0 skips the update) may be set before a step; both stay on the device.
    """

    state: dict[Tensor, dict[str, Tensor]]
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def set_lr(self, lr: float) -> None:
        """Use this learning rate for the next updates."""
        ...

    def step(self) -> None:
        """One update of every parameter. Every rank must call it."""
        ...


class FusedOptimizer(ABC):
    """A RunOptimizer in one pass over weights, gradients and moments."""

    def __init__(self, groups: Sequence[ParameterGroup], *, lr: float) -> None:
        self.groups = list(groups)
        device = self.groups[0].parameters[0].device if self.groups else torch.device("cpu")
        # On an accelerator it is a tensor, so that a recorded step reads the rate that it is replayed with
        # (step_graph.py).
        there = is_accelerator(device)
        self.lr: float | Tensor = torch.full((), lr, device=device, dtype=torch.float32) if there else lr
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def set_lr(self, lr: float) -> None:
        """Use this learning rate for the next updates."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.groups:
            gradients = {one: one.grad for one in group.parameters if one.grad is not None}
            if gradients:
                self._update(list(gradients), list(gradients.values()), group.weight_decay)

    @abstractmethod
    def _update(self, parameters: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None: ...

    def _states(self, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
        return [self.state[one][name] for one in parameters]


class FusedAdamW(FusedOptimizer):
    """AdamW (Loshchilov & Hutter 2019) with its usual epsilon, 1e-8."""

    def __init__(self, groups: Sequence[ParameterGroup], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=lr)
        self.betas = betas

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None:
        counts = self._states(parameters, "step")
        torch._foreach_add_(counts, 1)  # pyright: ignore[reportPrivateImportUsage]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            parameters, gradients, self._states(parameters, "exp_avg"), self._states(parameters, "exp_avg_sq"), [],
            counts, amsgrad=False, lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=weight_decay,
            eps=1e-8, maximize=False, grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip
        if self.found_inf is not None:  # a skipped update does not count
            torch._foreach_sub_(counts, [self.found_inf] * len(counts))  # pyright: ignore[reportPrivateImportUsage]


class FusedSGD(FusedOptimizer):
    """SGD, with classical momentum if it is not zero; its weight decay is added to the gradient."""

    def __init__(self, groups: Sequence[ParameterGroup], *, lr: float, momentum: float = 0.0) -> None:
        super().__init__(groups, lr=lr)
        self.momentum = momentum

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None:
        buffers = self._states(parameters, "momentum_buffer") if self.momentum else []
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
            parameters, gradients, buffers, weight_decay=weight_decay, momentum=self.momentum, lr=self.lr,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False, grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )  # fmt: skip
