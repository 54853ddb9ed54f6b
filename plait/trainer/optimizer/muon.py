"""Muon (Jordan et al. 2024): momentum whose update of a matrix is orthogonalized as a whole; AdamW for everything that
is not a hidden matrix.

Updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that AdamW's learning rates and weight
decay carry over. In bfloat16 it is torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.parallel.orthogonalize import RMS_OF_ADAMW, orthogonalize
from plait.parallel.sharded_model import OptimizerUnit
from plait.parallel.whole_matrices import MatrixExchange
from plait.trainer.optimizer.fused import FusedAdamW


class MuonWithAdamW:
    """Updates hidden matrices with Muon and all other weights with AdamW, whose learning rate is `adamw_share` of
    Muon's.

    A RunOptimizer. `units` are those of hidden matrices, of which this rank may have pieces; the exchange uses the same
    units. `dtype` is the precision of orthogonalization. A matrix without a gradient counts as one of zeros, as it does
    when ranks sum gradients in buckets. Afterwards the `.grad` of `units` contain the averaged gradients.
    """

    def __init__(
        self,
        units: Sequence[OptimizerUnit],
        exchange: MatrixExchange,
        adamw: FusedAdamW,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        adamw_share: float,
        dtype: torch.dtype,
    ) -> None:
        self.lr, self._adamw, self._adamw_share = lr, adamw, adamw_share
        self._units, self._exchange, self._dtype = list(units), exchange, dtype
        self._momentum, self._weight_decay = momentum, weight_decay
        device = units[0].parameter.device if units else torch.device("cpu")
        # A tensor, so that a recorded step reads the rate that it is replayed with (step_graph.py).
        self._rate = torch.full((), lr, dtype=torch.float64, device=device)
        self.state: dict[Tensor, dict[str, Tensor]] = adamw.state
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def set_lr(self, lr: float) -> None:
        """Use this learning rate, which is that of the matrices, for the next updates."""
        self.lr = lr
        self._rate.fill_(lr)
        self._adamw.set_lr(self._adamw_share * lr)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter. Every rank that has a piece of one of this rank's matrices must call it."""
        self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf
        self._adamw.step()
        if not self._exchange.tasks:
            return
        weights = [unit.parameter for unit in self._units]
        averaged = dict(zip(weights, self._averaged_gradients(), strict=True))
        rate = self._rate if self.found_inf is None else self._rate * (1 - self.found_inf)
        for weight in weights:
            weight.mul_((1 - rate * self._weight_decay).to(weight.dtype))
        places = [(unit, part) for unit in self._units for part in unit.parts]
        pieces = [part.within(averaged[unit.parameter]) for unit, part in places]
        for number, result in self._exchange.results(pieces, orthogonalize, self._dtype):
            unit, part = places[number]
            scale = (rate * RMS_OF_ADAMW * max(part.box.shape) ** 0.5).to(unit.parameter.dtype)
            part.within(unit.parameter).addcmul_(result.to(scale.dtype), scale, value=-1)
            del result  # a view of a whole batch, which would otherwise coexist with the next one

    def _averaged_gradients(self) -> list[Tensor]:
        """Nesterov's: the gradients moved towards their averages, which are updated. If the update is to be skipped,
        they are the averages themselves, which stay unchanged."""
        found: list[Tensor] = []
        for unit in self._units:
            weight = unit.parameter
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradient, average = weight.grad, self.state[weight]["momentum_buffer"]
            if self.grad_scale is not None:
                gradient.div_(self.grad_scale)
            if self.found_inf is not None:
                torch.where(self.found_inf > 0, average, gradient, out=gradient)
            average.lerp_(gradient, 1 - self._momentum)
            found.append(gradient.lerp_(average, self._momentum))
        return found
