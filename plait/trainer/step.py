"""One optimizer step, the same in training and in the gradient check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from plait.data.loader import Micro
from plait.model.attention import Documents
from plait.model.gpt import GPT
from plait.parallel.communicator import Communicator
from plait.parallel.gradient_norm import clip_factor
from plait.parallel.sharded_model import Forward, LossOf, ShardedModel, VocabularySplit
from plait.parallel.watched import WATCH
from plait.trainer.auxiliary.losses import AuxiliaryLosses
from plait.trainer.experts.loads import ExpertLoads, largest_load
from plait.trainer.loss import IN_PLACE, sum_of_losses
from plait.trainer.loss_scale import DeviceLossScale
from plait.trainer.optimizer.fused import RunOptimizer
from plait.trainer.optimizer.optim import owned_squares, update
from plait.trainer.score_passes import IGNORED, ScorePasses

Autocast = Callable[[], AbstractContextManager[object]]

WeightCasts = Literal["each micro-batch", "each step"]
"""How often autocast casts a weight; see Note [casts of a step]."""

# Note [casts of a step]: autocast keeps a weight's 16-bit copy until its outermost block ends, and the graph holds the
# copies from a forward to its backward anyway. So one block around a step's micro-batches casts once, with the same
# bits and, where nothing is recomputed or gathered for a while, the same peak of memory. Backward runs without autocast
# as ever, in a block inside that one: products of a gradient must not be rounded because a block is open.

RunMicros = Callable[[Sequence[Micro]], Tensor]
"""Runs forward and backward of this rank's micro-batches. Returns this rank's [sum of losses, counted tokens] in
float64, zeros where another rank reports the same ones; of pairs of answers their number, and then what PairLosses.take
gives. Afterwards each unit's `.grad` is the sum over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """The results of a step, still on the device: the caller decides when to wait for them."""

    totals: Tensor
    """[sum of losses, counted tokens] over all ranks."""
    norm: Tensor
    """Norm of the gradient before clipping."""
    expert_counts: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """Tokens of the step by expert, [layers with experts, experts]."""
    dropped: Tensor = field(default_factory=lambda: torch.full((), float("nan")))
    """Choices of experts that found no room; not a number where experts have no capacity."""
    auxiliary: Tensor = field(default_factory=lambda: torch.zeros(0, 2))
    """[sum of losses, counted tokens] of each auxiliary objective, over all ranks."""
    objective_names: tuple[str, ...] = ()
    pairs: Tensor = field(default_factory=lambda: torch.full((3,), float("nan")))
    """[sum of margins, pairs ranked right, tokens of answers] over all ranks; not numbers where no pairs are learnt
    from, whose number is in `totals` in place of tokens."""
    scale: Tensor = field(default_factory=lambda: torch.full((2,), float("nan")))
    """[scale of the losses' gradients, updates skipped since the run began]; not numbers but in float16."""

    @property
    def expert_load_max(self) -> Tensor:
        """The busiest expert's tokens over the mean, of the layer where that is most; not a number without experts."""
        return largest_load(self.expert_counts)

    @property
    def idle_experts(self) -> Tensor:
        """Experts that no token of the step chose, in all layers together."""
        return (self.expert_counts == 0).sum()


def take_step(
    micros: Sequence[Micro],
    *,
    sharded: ShardedModel,
    run_micros: RunMicros,
    sums: Communicator,
    optimizer: RunOptimizer,
    clip: float | None,
    loads: ExpertLoads | None = None,
    auxiliary: AuxiliaryLosses | None = None,
    scale: DeviceLossScale | None = None,
) -> Scalars:
    """One update from one step's micro-batches; every rank must call it. Never waits for the device.

    See Note [loss is a sum] in loss.py: the one division by the global number of tokens is here. An update whose
    gradient is not finite is skipped on all ranks, so that it cannot reach the weights. Gradients that `scale` has
    multiplied are divided by it here; `norm` and clipping refer to the gradients without the scale.
    """
    totals = run_micros(micros)
    local, of_pairs = totals[:2], totals[2:]
    counts = [] if loads is None else [loads.take(like=local)]
    more = local[:0] if auxiliary is None else auxiliary.take(like=local)
    whole = sums(torch.cat([local, owned_squares(sharded.units, like=local), *counts, more, of_pairs]))
    found, more, of_pairs = whole.split([len(whole) - len(more) - len(of_pairs), len(more), len(of_pairs)])
    loss_sum, tokens, squares = found[:3].unbind()
    count = tokens.clamp(min=1)
    norm = squares.sqrt() / count
    if scale is not None:
        norm, count = norm / scale.factor, count * scale.factor
    with WATCH.work("update"):
        update(optimizer, sharded.units, factor=clip_factor(norm, clip) / count, norm=norm)
        sharded.gradients.publish()
    scalars = Scalars(totals=torch.stack([loss_sum, tokens]), norm=norm)
    if scale is not None:
        scalars = replace(scalars, scale=scale.judge(norm))
    if len(of_pairs):
        scalars = replace(scalars, pairs=of_pairs)
    if auxiliary is not None:
        scalars = replace(scalars, auxiliary=auxiliary.table(more), objective_names=auxiliary.names)
    if loads is None:
        return scalars
    table, dropped = loads.table(found[3:]), loads.dropped(found[3:])
    loads.move_biases(table, norm)
    scalars = replace(scalars, expert_counts=table)
    return scalars if dropped is None else replace(scalars, dropped=dropped)


def run_micros_in_turn(
    micros: Sequence[Micro],
    *,
    sharded: ShardedModel,
    forward: Forward,
    loss_of: LossOf,
    casts: WeightCasts = "each micro-batch",
) -> Tensor:
    """RunMicros without a pipeline: micro-batches run one after another, and their gradients accumulate."""
    (model,) = sharded.chunks
    device = micros[0].inputs.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    sharded.gradients.open()
    with _autocast_block(device, casts):
        for number, micro in enumerate(micros):
            if micro is micros[-1]:
                sharded.gradients.arm(0)
            with WATCH.work("forward", micro=number):
                loss = loss_of(forward(model, micro, None), model, micro)
            with WATCH.work("backward", micro=number), _backward_block(device, casts):
                loss.backward()
            totals += torch.stack([loss.detach().double(), counted_tokens(micro)])
    with WATCH.work("gradients"):
        sharded.gradients.close()
    return totals * sharded.reports


def _autocast_block(device: torch.device, casts: WeightCasts) -> AbstractContextManager[object]:
    """The context of a step's micro-batches: see Note [casts of a step]."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if casts == "each step" else nullcontext()


def _backward_block(device: torch.device, casts: WeightCasts) -> AbstractContextManager[object]:
    """What encloses a backward pass: operations in their own precision. Where no block encloses the step there is none
    here either: within one, casts of layers that are computed again would be kept to its end."""
    return torch.autocast(device.type, enabled=False) if casts == "each step" else nullcontext()


def evaluate_in_turn(micros: Iterable[Micro], *, sharded: ShardedModel, forward: Forward, loss_of: LossOf) -> Tensor:
    """[sum of losses, counted tokens] of this rank's micro-batches, forward only, without a pipeline."""
    (model,) = sharded.chunks
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    with torch.no_grad():
        for micro in micros:
            loss = loss_of(forward(model, micro, None), model, micro)
            totals += torch.stack([loss.double(), counted_tokens(micro)])
    return totals * sharded.reports


def make_forward(autocast: Autocast, auxiliary: AuxiliaryLosses | None = None) -> Forward:
    """A function that runs a micro-batch through one chunk of the model in the given precision; its backward pass is
    that of the auxiliary losses, too."""

    def forward(chunk: GPT, micro: Micro, stream_nd: Tensor | None) -> Tensor:
        documents = None if micro.lengths is None else Documents(lengths=micro.lengths, ends=micro.ends)
        mixes, adapter = chunk.shape.mixture is not None, chunk.shape.adapter
        asked = mixes or (adapter is not None and adapter.dropout > 0)
        # Only where a layer asks for them: they would live until the backward pass.
        numbers_n = micro.numbers.flatten() if asked and micro.numbers is not None else None
        counted_n = (micro.targets != IGNORED).flatten() if mixes else None
        more = None if auxiliary is None else auxiliary.of(micro)
        with autocast():
            return chunk(
                micro.inputs,
                micro.positions,
                documents,
                stream_nd=stream_nd,
                counted_n=counted_n,
                numbers_n=numbers_n,
                objectives=more,
            )

    return forward


def make_loss(
    autocast: Autocast,
    vocabulary: VocabularySplit,
    passes: ScorePasses = IN_PLACE,
    scale: DeviceLossScale | None = None,
) -> LossOf:
    """A function that returns the sum of a micro-batch's token losses from the hidden states after the final norm;
    `passes` are how it goes over the logits, `scale` is what its gradients are multiplied by."""

    def loss_of(hidden_nd: Tensor, chunk: GPT, micro: Micro) -> Tensor:
        with autocast():
            every_nd = vocabulary.enter(hidden_nd, micro.targets.numel())
            factor = None if scale is None else scale.factor
            return sum_of_losses(every_nd, chunk.head_weight(), micro.targets.flatten(), vocabulary, passes, factor)

    return loss_of


def counted_tokens(micro: Micro) -> Tensor:
    """What a micro-batch adds to the number by which the sum of losses is divided: its tokens that enter the loss, or
    its pairs of answers; a float64 scalar on the device."""
    return micro.counted
