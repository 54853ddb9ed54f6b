"""How a step's tokens were shared out among experts, and the biases that follow from it.

Note [bias once a step]: b_i += rate × sign(mean - n_i), with n_i the tokens that chose expert i in the whole step, over
all micro-batches and all ranks that saw different tokens (Wang et al. 2024, 2408.15664, algorithm 1). It happens after
the update, so that a step computes with one bias, and not where the update was skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.model.gpt import mixtures_of
from plait.model.mixture import Mixture
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import ShardedModel
from plait.trainer.loss_scale import DeviceLossScale


class ExpertLoads:
    """A rank's mixtures, among those of the whole model; of a model without experts it does nothing. The gradients of
    their losses are multiplied by `scale`, if there is one."""

    def __init__(self, sharded: ShardedModel, shape: ModelShape, scale: DeviceLossScale | None = None) -> None:
        self.layers = tuple(layer for layer in range(shape.all_layers) if shape.mixture_of(layer))
        self.shape = shape
        self.own: dict[int, Mixture] = {
            layer: one for chunk in sharded.chunks for layer, one in mixtures_of(chunk).items()
        }
        for one in self.own.values():
            one.meter.loss_scale = None if scale is None else lambda: scale.factor

    @property
    def counts_first(self) -> bool:
        """Whether a loss needs the counts of the whole step before its first backward pass."""
        return self.shape.mixture is not None and self.shape.mixture.counts_first

    def take(self, like: Tensor) -> Tensor:
        """This rank's counts since the last call, flat [layers with experts × what is counted of each], zeros where
        another rank has the layer; dtype and device of `like`."""
        counts = like.new_zeros(len(self.layers), self.shape.size_of("experts") + self._drops)
        for place, layer in enumerate(self.layers):
            if layer in self.own and (found := self.own[layer].meter.take()) is not None:
                counts[place] = found
        return counts.flatten()

    @property
    def _drops(self) -> int:
        """How many counts of a layer are not an expert's: where there is a capacity, one of choices without room."""
        return int(self.shape.mixture is not None and self.shape.mixture.capacity is not None)

    def table(self, counts: Tensor) -> Tensor:
        """The tokens by expert of flat counts, [layers with experts, experts]."""
        return self._by_layer(counts)[:, : self.shape.size_of("experts")]

    def dropped(self, counts: Tensor) -> Tensor | None:
        """How many choices of flat counts found no room, a scalar; None where the mixture has no capacity."""
        return self._by_layer(counts)[:, -1].sum() if self._drops else None

    def _by_layer(self, counts: Tensor) -> Tensor:
        return counts.view(len(self.layers), -1) if self.layers else counts.view(0, 0)

    def count_first(self, run_forward: Callable[[], object], sums: Callable[[Tensor], Tensor], like: Tensor) -> None:
        """Count the tokens of a step by a pass without gradients, for losses that need them before the first backward
        pass. Every rank must call it."""
        for one in self.own.values():
            one.meter.when = "forward"
        run_forward()
        table = self.table(sums(self.take(like)))
        for place, layer in enumerate(self.layers):
            if layer in self.own:
                self.own[layer].step_counts_e = table[place]
                self.own[layer].meter.when = "backward"

    @torch.no_grad()
    def move_biases(self, table: Tensor, norm: Tensor) -> None:
        """See Note [bias once a step]; nothing moves where the gradient's norm was not finite."""
        mixture = self.shape.mixture
        if mixture is None or not mixture.has_bias:
            return
        rate = mixture.balance_rate * torch.isfinite(norm)
        for place, layer in enumerate(self.layers):
            if layer in self.own:
                balance = self.own[layer].router.balance
                counts = table[place]
                balance += (rate * torch.sign(counts.mean() - counts)).to(balance.dtype)


def largest_load(table: Tensor) -> Tensor:
    """The busiest expert's tokens over the mean of its layer, of the layer where that is most; a scalar, not a number
    where there are no experts."""
    if not table.numel():
        return table.new_full((), float("nan"))
    return (table.amax(dim=1) / table.mean(dim=1).clamp(min=1e-9)).amax()
