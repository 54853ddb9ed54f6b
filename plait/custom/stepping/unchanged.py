"""Whether the models are still those that were spread: layers that a program adds or replaces later would train
alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from plait.custom.group import Workers
from plait.custom.layouts.arrivals import Arrivals
from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.program import Program, check_gradient_hooks, gradient_hooks, is_plaits_own
from plait.errors import PlaitError

EVERY_STEPS = 50
"""Steps between two looks, beside one after the first step."""
DRIFT = 1e-4
"""Relative to a weight's absolute sum: the allowed difference between two workers' sums."""


class ModelWatch:
    """Knows the parameters that a program began with, which of them are frozen, and the hooks on their gradients."""

    def __init__(self, program: Program, workers: Workers) -> None:
        self._program, self._names = program, list(program.named_parameters())
        self._frozen = [(name, p) for name, p in program.named_parameters().items() if not p.requires_grad]
        self._held = _held_counts(program)
        self._dtypes = [(name, *where, one.dtype) for name, where, one in _places(program)] if workers.size > 1 else []
        self._workers, self._sees_parts = workers, workers.size > 1 or program.accumulate > 1

    def look(self, parallel: ParallelProgram, step: int) -> None:
        """Raise PlaitError where parameters are trained that were not at the start, and, now and then, where some have
        come, gone or been replaced, or have got a hook on their gradient; `step` counts from 0."""
        self._look_at_dtypes()
        self._look_at_trained()
        if step != 1 and step % EVERY_STEPS:
            return
        if self._sees_parts:
            check_gradient_hooks(self._program)
            self._look_for_another_run()
        if parallel.form == "whole":
            self._look_for_drift()
        now = self._program.named_parameters()
        changed = sorted(set(now) ^ set(self._names))
        if not changed and parallel.form == "whole":
            pieces = [piece for index in range(len(self._program.losses)) for piece in parallel.pieces(index)]
            changed = [piece.name for piece in pieces if now[piece.name] is not piece.parameter]
        if changed:
            raise PlaitError(
                f"{changed[0]} has been added, removed or replaced since plait.spread: the other workers and the "
                "optimizer do not know of it; change the model first, and call plait.spread then"
            )

    def _look_at_dtypes(self) -> None:
        for name, module, own_name, dtype in self._dtypes:
            now = module._parameters.get(own_name)
            if now is not None and now.dtype != dtype:
                raise PlaitError(
                    f"{name} was {dtype} at plait.spread and is {now.dtype} now, as after model.half() or "
                    "model.to(torch.bfloat16); convert the model before plait.spread, which holds its weights' memory, "
                    'or leave them as they are and take precision="bf16"'
                )

    def _look_for_another_run(self) -> None:
        for name, hooks in gradient_hooks(self._program).items():
            if sum(hook.__module__ == Arrivals.__module__ for hook in hooks if is_plaits_own(hook)) > 1:
                raise PlaitError(
                    f"{name} is trained by two runs of plait.spread at once; give all losses to one "
                    "(plait.spread(models, (first, second), loss_sum=(…, …))), or end the other by run.close()"
                )

    def _look_for_drift(self) -> None:
        """Raise PlaitError where a weight, of which every worker has its own, is not the same on all. Unlike machines
        may round an update otherwise, and that adds up."""
        named = self._program.named_parameters()
        if self._workers.size == 1 or not named:
            return
        with torch.no_grad():
            sums = [torch.stack(_sums(p.detach())) for p in named.values()]
        everybody = torch.stack(self._workers.sums.gather(torch.stack(sums).cpu()))  # [workers, weights, 2]
        apart = (everybody[..., 0].amax(0) - everybody[..., 0].amin(0)) > DRIFT * everybody[..., 1].amax(0)
        if bool(apart.any()):
            name = list(named)[int(apart.nonzero()[0])]
            raise PlaitError(
                f"{name} is no longer the same on all workers: something other than run.step changes it, on one worker "
                "alone or by a worker's own examples or random numbers (in the model's forward pass, too); change "
                "weights alike on all workers, after run.step"
            )

    def _look_at_trained(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise PlaitError(
                    f"{name} requires a gradient now and did not at plait.spread, which workers would "
                    "not sum; call run.close(), make an optimizer that has it, and call plait.spread again"
                )
        if _held_counts(self._program) != self._held:
            raise PlaitError(
                "an optimizer has gained or lost parameters since plait.spread, and their gradients are not summed; "
                "give it all of them before plait.spread"
            )


def _sums(weight: Tensor) -> list[Tensor]:
    real = torch.view_as_real(weight) if weight.is_complex() else weight
    return [real.sum(dtype=torch.float64), real.abs().sum(dtype=torch.float64)]


def _places(program: Program) -> Iterator[tuple[str, tuple[nn.Module, str], nn.Parameter]]:
    """Each parameter with its name, and where it is found after it has been replaced: its module and its name there."""
    for prefix, model in program.prefixed_models():
        for path, module in model.named_modules(prefix=prefix.rstrip(".")):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path}.{name}" if path else name, (module, name), parameter


def _held_counts(program: Program) -> list[list[int]]:
    """How many parameters are in each group of each optimizer."""
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in program.optimizers]
