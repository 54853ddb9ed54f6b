"""Batch normalization over the whole batch of all workers, also where their shares are unequal."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from plait.arguments import with_known_keywords
from plait.custom.message_order import MessageOrder
from plait.errors import PlaitError

# Note [two messages a layer]: forward, each worker tells its mean, variance and count, from which everybody computes
# the whole batch's by the rule of Chan, Golub and LeVeque (1979); sums of squares would lose the variance of values
# that are far from 0. Backward, the sums of the gradient and of its product with the normalized input are added up.
# A weight's gradient stays a worker's own sum, because gradients of weights are summed later, with all the others.

StatisticsOf = Literal["all workers", "this worker"]
"""Whose samples a layer's mean and variance are computed from while it trains."""

CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The layers that are converted; a subclass of them may compute something else."""


class StatisticsGroup:
    """The process group of a model's statistics; made at the first use, which is at the same place on every worker.

    It is not the group of the gradients: their messages begin whenever a bucket is full, and gloo needs the same order
    of messages on every worker of a group.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self.waited_s = 0.0
        """Seconds that this worker has spent in messages and in waiting for them so far; on a GPU only in beginning
        them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StatisticsGroup:
        """A copied model talks over the same connections."""
        return self

    def spans_workers(self) -> bool:
        """Whether there are several workers. Every worker must call it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return False
        if self._group is None:
            made = dist.new_group()
            assert isinstance(made, dist.ProcessGroup)
            self._group = made
        return True

    def gather(self, values: Tensor) -> Tensor:
        """Every worker's values [workers, …]. Every worker must call it; blocks."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self._group))]
        began = time.perf_counter()
        dist.all_gather(parts, values, group=self._group)
        self.waited_s += time.perf_counter() - began
        return torch.stack(parts)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all workers, in place. Every worker must call it; blocks."""
        began = time.perf_counter()
        dist.all_reduce(values, group=self._group)
        self.waited_s += time.perf_counter() - began
        return values


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d whose mean and variance are those of the whole batch, on every device.

    Input [samples, channels, …]; a worker may have any number of samples, none included. In training every worker must
    run the layer as often as all others; it blocks for two small messages, one forward and one backward. Running
    statistics are equal to the bit on all workers. With one worker, and in evaluation, it is PyTorch's own layer.
    """

    def __init__(self, channels: int, group: StatisticsGroup, *, eps: float, momentum: float | None) -> None:
        super().__init__(channels, eps=eps, momentum=momentum, affine=False, track_running_stats=False)
        self.group = group
        self.statistics_of: StatisticsOf = "all workers"
        self.announce: Callable[[], None] = lambda: None
        """Called before this worker waits for the others' statistics."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, normalized by channel."""
        if input.dim() < 2:
            raise PlaitError(f"BatchNorm takes [samples, channels, …], not {list(input.shape)}; add the dim that lacks")
        together = self.training and self.statistics_of == "all workers" and self.group.spans_workers()
        uses_batch = self.training or self.running_mean is None
        if not together:
            rate = self._count_batch() if self.training else 0.0
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, rate, self.eps
            )
        began = time.perf_counter()
        self.announce()
        self.group.waited_s += time.perf_counter() - began
        mean, variance, count = _whole_batch(input, self.group)
        if input.numel() < 2 * input.shape[1] and count < 2:
            raise PlaitError("BatchNorm needs two values a channel to train; take a larger batch, or call model.eval()")
        self._follow(mean, variance, count)
        return _Normalize.apply(input, self.weight, self.bias, mean, variance, count, self.eps, self.group)  # type: ignore

    def _count_batch(self) -> float:
        """Count this batch; returns the weight of its statistics among the running ones."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics, whose variance is the unbiased one, towards those of this batch."""
        if self.running_mean is None or self.running_var is None:
            return
        rate = self._count_batch()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), rate)


def announce_norms(models: Iterable[tuple[str, nn.Module]], order: MessageOrder) -> bool:
    """Have the layers of these models, given with the beginning of their names, compared with other workers' before
    they wait; answers whether there are any. Every worker must call it."""
    norms = [
        (f"{prefix}{name}", module)
        for prefix, model in models
        for name, module in model.named_modules()
        if isinstance(module, GlobalBatchNorm)
    ]
    for name, norm in norms:
        begin = order.message(f"the statistics of {name}")
        norm.group.spans_workers()  # makes the group here, where all workers are, and not at a layer's first call
        norm.announce = lambda begin=begin: begin(0)[1]()
    return bool(norms)


def norm_waits_s(models: Iterable[nn.Module]) -> float:
    """Seconds that the layers of these models have spent in messages so far."""
    modules = (module for model in models for module in model.modules())
    groups = {id(one.group): one.group for one in modules if isinstance(one, GlobalBatchNorm)}
    return sum(group.waited_s for group in groups.values())


@with_known_keywords()
def convert_batch_norm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm of a model compute over the whole batch of all workers; returns the model.

    Weights and running statistics stay the same tensors, so that optimizers and checkpoints go on as they are. Layers
    are replaced inside the model, which is returned; where the model itself is one layer, the new layer is.
    """
    made: dict[int, nn.Module] = {}
    return _converted(model, StatisticsGroup(), made)


def _converted(module: nn.Module, group: StatisticsGroup, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        made[id(module)] = module
        if type(module) in CONVERTIBLE:
            made[id(module)] = _global(module, group)  # type: ignore[arg-type]
        for name, child in module.named_children():
            new = _converted(child, group, made)
            if new is not child:
                setattr(module, name, new)
    return made[id(module)]


def _global(layer: _BatchNorm, group: StatisticsGroup) -> GlobalBatchNorm:
    made = GlobalBatchNorm(layer.num_features, group, eps=layer.eps, momentum=layer.momentum)
    made.affine, made.track_running_stats = layer.affine, layer.track_running_stats
    made.weight, made.bias = layer.weight, layer.bias
    made.running_mean, made.running_var = layer.running_mean, layer.running_var
    made.num_batches_tracked = layer.num_batches_tracked
    made.train(layer.training)
    made._forward_hooks = copy.copy(layer._forward_hooks)
    made._forward_pre_hooks = copy.copy(layer._forward_pre_hooks)
    return made


def _whole_batch(input: Tensor, group: StatisticsGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance [channels] and values a channel (0-dim), float64, of all workers' samples."""
    channels, own = input.shape[1], input.detach()
    statistics = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if own.numel():
        wide = own if own.dtype == torch.float64 else own.float()
        variance, mean = torch.var_mean(wide, _all_but_channels(own), correction=0)
        statistics[:channels], statistics[channels:-1] = mean, variance
        statistics[-1] = own.numel() // channels
    gathered = group.gather(statistics)
    counts, means, variances = gathered[:, -1:], gathered[:, :channels], gathered[:, channels:-1]
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count.clamp(min=1)
    return mean, variance, count


class _Normalize(torch.autograd.Function):
    """Normalizes by statistics that depend on all workers' inputs, and sends gradients back through them."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *rest: Any
    ) -> Tensor:
        ctx.count, ctx.eps, ctx.group = rest
        mean, variance = mean.to(_kept_dtype(input)), variance.to(_kept_dtype(input))
        ctx.save_for_backward(input, weight, mean, variance)
        if not input.numel():  # torch's own (2.13) divides by its number of samples
            return torch.empty_like(input)
        return F.batch_norm(input, mean, variance, _wide(weight, input), _wide(bias, input), False, 0.0, ctx.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,), (input, weight, mean, variance) = grad_outputs, ctx.saved_tensors
        wide = _wide(weight, input)
        # As if mean and variance were constants; what flows through them is taken off after it.
        if input.numel():
            back, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, input, wide, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        else:
            back, to_weight, to_bias = torch.empty_like(input), torch.zeros_like(mean), torch.zeros_like(mean)
        whole = ctx.group.sum(torch.stack([to_bias, to_weight]).to(torch.float64))
        shift, slope = (whole / ctx.count).to(mean.dtype)
        inverse = (variance + ctx.eps).rsqrt()
        scale = inverse if wide is None else inverse * wide
        through = (input - _by_channel(mean, input)).mul_(_by_channel(slope * scale * inverse, input))
        back = back.sub_(through).sub_(_by_channel(shift * scale, input))
        if weight is None:
            return back, *[None] * 7
        return back, to_weight.to(weight.dtype), to_bias.to(weight.dtype), *[None] * 5


def _kept_dtype(input: Tensor) -> torch.dtype:
    """The numbers in which PyTorch normalizes such an input: float64, or else float32."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _wide(values: Tensor | None, input: Tensor) -> Tensor | None:
    """Values by channel in those numbers."""
    return None if values is None else values.to(_kept_dtype(input))


def _all_but_channels(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _by_channel(values: Tensor, input: Tensor) -> Tensor:
    """Values [channels] in a shape that broadcasts over the input [samples, channels, …]."""
    return values.view(1, -1, *[1] * (input.dim() - 2))
