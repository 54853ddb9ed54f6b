"""A person's program as a value: models, optimizers, and one loss for each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from plait.errors import PlaitError
from plait.units import counted

LossSum = Callable[[Any, Any], Any]
"""Called with the model (or the tuple of models) and a batch; returns the sum of the losses of what it counts (0-dim)
and their count, or several such pairs, each divided by its own count."""
BeforeUpdate = Callable[[dict[str, Tensor]], None]
"""Called with the whole gradients of the mean, by name, before they are clipped; changes them in place."""
ProgramPrecision = Literal["float32", "bf16", "fp16"]
"""Arithmetic of forward and backward: "float32" is the modules' own numbers, the others are torch's autocast."""

_SUM_ADVICE = "return (sum of losses, count), for example F.cross_entropy(…, reduction='sum'), len(labels)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss found in some examples: sums, each 0-dim and with its graph, and their counts [terms], float64. The
    loss of a whole batch is the sum of all terms, each divided by its global count."""

    totals: Sequence[Tensor]
    counts: Tensor

    @property
    def sums(self) -> Tensor:
        """The sums without their graphs [terms], float64."""
        return torch.stack([total.detach().to(self.counts.device, torch.float64) for total in self.totals])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is trained and how: each optimizer has the loss of its number, or all of them the only loss. `single` says
    that the person gave one model, which losses get, and not a tuple."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    losses: tuple[LossSum, ...]
    schedulers: tuple[Any, ...] = ()
    single: bool = True
    clip: float | None = None
    accumulate: int = 1
    precision: ProgramPrecision = "float32"
    seed: int = 0
    additive: Literal["yes", "no"] = "yes"
    """Whether the losses of parts of a batch add up to that of the whole; if not, losses see other workers' examples by
    `run.gather`."""
    before_update: BeforeUpdate | None = None
    trained_names: tuple[tuple[str, ...], ...] = ()
    """For each loss the weights that its optimizers update and that want a gradient, in the models' order: found at the
    start, since an optimizer may later be given parts of them."""
    group_names: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """For each optimizer the weights in each of its groups: found at the start, too."""
    skeletons: tuple[nn.Module, ...] = ()
    """The models as they were, on the meta device, where a layout changes the modules themselves."""

    def __post_init__(self) -> None:
        if not self.trained_names:
            names = tuple(tuple(self._names_of(self.optimizers_of(index))) for index in range(len(self.losses)))
            object.__setattr__(self, "trained_names", names)
            object.__setattr__(self, "group_names", tuple(map(self._names_of_groups, self.optimizers)))

    def optimizers_of(self, index: int) -> tuple[Optimizer, ...]:
        """The optimizers that update by this loss's gradients: all of them where it is the only loss."""
        return self.optimizers if len(self.losses) == 1 else self.optimizers[index : index + 1]

    def loss_of(self, number: int) -> int:
        """The loss by whose gradients this optimizer updates."""
        return number if len(self.losses) > 1 else 0

    def _names_of(self, optimizers: Sequence[Optimizer]) -> Iterator[str]:
        held = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        for name, parameter in self.named_parameters().items():
            if id(parameter) in held and parameter.requires_grad:
                yield name

    def _names_of_groups(self, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        groups = getattr(optimizer, "param_groups", ())
        return tuple(tuple(names[id(p)] for p in group["params"] if id(p) in names) for group in groups)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, in the models' order; of several models under "0.", "1." and so on."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, model in self.prefixed_models():
            for name, parameter in model.named_parameters():
                found.setdefault(id(parameter), (prefix + name, parameter))
        return dict(found.values())

    def named_buffers(self) -> dict[str, Tensor]:
        """Every buffer once, named as the parameters are."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, model in self.prefixed_models():
            for name, buffer in model.named_buffers():
                found.setdefault(id(buffer), (prefix + name, buffer))
        return dict(found.values())

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Buffers that are changed or reassigned within the block are restored after it."""
        modules = [module for model in self.models for module in model.modules()]
        kept = [
            (module, name, buffer, buffer.clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in kept:
                    buffer.copy_(value)
                    setattr(module, name, buffer)

    def prefixed_models(self) -> list[tuple[str, nn.Module]]:
        """The models, each with what its names begin with in this program."""
        return [("" if self.single else f"{number}.", model) for number, model in enumerate(self.models)]

    def trained_by(self, index: int) -> dict[str, nn.Parameter]:
        """The parameters that are updated by this loss's gradients, in the models' order."""
        named = self.named_parameters()
        return {name: named[name] for name in self.trained_names[index]}

    def loss_sum(self, index: int, batch: Any) -> LossTerms:
        """A loss of a batch, as sums and counts. Raises PlaitError for what is neither a pair nor several."""
        with self._autocast():
            result = self.losses[index](self.models[0] if self.single else self.models, batch)
        return checked_sums(result)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        device = next((p.device.type for model in self.models for p in model.parameters()), "cpu")
        return torch.autocast(device, torch.bfloat16 if self.precision == "bf16" else torch.float16)


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """All parameters of an optimizer, group by group."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def checked_sums(result: Any) -> LossTerms:
    """The user's loss as sums and counts; raises PlaitError if it is neither."""
    several = isinstance(result, tuple | list) and len(result) > 0 and isinstance(result[0], tuple | list)
    pairs = [_checked_pair(one) for one in (result if several else [result])]
    device = pairs[0][0].device
    return LossTerms(totals=[total for total, _ in pairs], counts=torch.stack([c.to(device) for _, c in pairs]))


def _checked_pair(result: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise PlaitError(f"loss_sum returned {_described(result)}; {_SUM_ADVICE}")
    total, count = result
    if not isinstance(total, Tensor) or not total.is_floating_point():
        raise PlaitError(f"loss_sum returned {_described(total)} as the sum of losses; {_SUM_ADVICE}")
    if total.dim():
        raise PlaitError(f"loss_sum returned losses of shape {tuple(total.shape)}, not their sum; add .sum()")
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise PlaitError(f"loss_sum returned a count of shape {tuple(count.shape)}; add .sum()")
        # On a GPU it is not waited for.
        if count.device.type == "cpu" and not 0 <= float(count.detach()) < float("inf"):
            raise PlaitError(f"loss_sum returned {float(count.detach()):g} as the count; {_SUM_ADVICE}")
        return total, count.detach().reshape(()).to(total.device, torch.float64)
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < float("inf"):
        shown = count if isinstance(count, int | float) else _described(count)
        raise PlaitError(f"loss_sum returned {shown} as the count; {_SUM_ADVICE}")
    return total, torch.tensor(float(count), dtype=torch.float64, device=total.device)


def check_program(program: Program) -> None:
    """Raise PlaitError, in one sentence, for a program that cannot be carried out exactly."""
    if len(program.losses) not in (1, len(program.optimizers)):
        raise PlaitError(
            f"{counted(len(program.optimizers), 'optimizer')} and {len(program.losses)} losses; give one loss for each "
            "optimizer, "
            "as tuples in the same order, or one loss for all"
        )
    _check_numbers(program)
    for model in program.models:
        _check_model(model)
    _check_optimizers(program)


def _check_numbers(program: Program) -> None:
    if program.clip is not None and not program.clip > 0:
        raise PlaitError(f"clip = {program.clip} is no length of a gradient; give a positive number, or leave it out")
    if program.before_update is not None and not callable(program.before_update):
        raise PlaitError(f"before_update is {_described(program.before_update)}; give a function of gradients by name")
    if program.accumulate < 1:
        raise PlaitError(f"accumulate = {program.accumulate}; give 1 or more parts of a batch")
    if not 0 <= program.seed < 2**63:
        raise PlaitError(f"seed = {program.seed}; give a number from 0 to 2**63 - 1")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PlaitError(f"{_described(model)} is no torch.nn.Module; give the model, or a tuple of models")
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        raise PlaitError(f"the model is wrapped in {type(model).__name__}; give the module inside of it: model.module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise PlaitError(f"{name} has no shape yet (a lazy module); run the model on one batch before plait.spread")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise PlaitError(
                f"{name} has sparse gradients, which cannot be summed in buckets; build it with sparse=False"
            )


def _check_optimizers(program: Program) -> None:
    names = {id(parameter): name for name, parameter in program.named_parameters().items()}
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(program.optimizers):
        if not isinstance(optimizer, Optimizer):
            raise PlaitError(
                f"{_described(optimizer)} is no torch.optim.Optimizer; give the optimizer, or a tuple of them"
            )
        kind = type(optimizer).__name__
        if kind in ("LBFGS", "SparseAdam"):
            why = "calls the loss several times a step" if kind == "LBFGS" else "needs sparse gradients"
            raise PlaitError(f"{kind} {why}; take an optimizer that reads .grad once, such as SGD or AdamW")
        for parameter in parameters_of(optimizer):
            if id(parameter) not in names:
                raise PlaitError(
                    f"optimizer {index} updates a tensor of shape {tuple(parameter.shape)} that no model has; make it "
                    "from the parameters of the models that you give to plait.spread"
                )
            if owner.setdefault(id(parameter), index) != index:
                raise PlaitError(f"{names[id(parameter)]} is in two optimizers; let one of them update it")


def check_renormed(program: Program) -> None:
    """Raise PlaitError for embeddings whose forward pass shortens the rows of a worker's own examples: workers' weights
    would drift apart."""
    for prefix, model in program.prefixed_models():
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise PlaitError(
                    f"{prefix}{name} has max_norm = {module.max_norm:g}, with which each worker would shorten only "
                    "the rows of its own examples; leave max_norm out and shorten all rows after run.step: with "
                    "torch.no_grad(): weight.copy_(weight.renorm(2, 0, max_norm))"
                )


def check_gradient_hooks(program: Program) -> None:
    """Raise PlaitError where a trained parameter has a hook of the person's on its gradient, which would see a part of
    it: that of one worker or of one accumulated part."""
    for name, hooks in gradient_hooks(program).items():
        if any(not is_plaits_own(hook) for hook in hooks):
            raise PlaitError(
                f"{name} has a hook on its gradient (register_hook, register_post_accumulate_grad_hook), which would "
                "see the part of one worker or of one accumulated part; change whole gradients by "
                "before_update= of plait.spread instead"
            )


def gradient_hooks(program: Program) -> dict[str, list[Callable[..., Any]]]:
    """The hooks on the gradient of each trained parameter."""
    trained = [program.trained_by(index).items() for index in range(len(program.losses))]
    return {
        name: [
            *(p._backward_hooks or {}).values(),  # pyright: ignore[reportPrivateUsage]
            *(p._post_accumulate_grad_hooks or {}).values(),  # pyright: ignore[reportPrivateUsage]
        ]
        for name, p in chain.from_iterable(trained)
    }


def is_plaits_own(hook: Callable[..., Any]) -> bool:
    """Whether plait, or torch's FSDP2 for it, has put a hook on a parameter."""
    return getattr(hook, "__module__", "").startswith(("plait.", "torch."))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
