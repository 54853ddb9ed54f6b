"""Whether a person's loss is what it promised: a sum over examples, so that halves of a batch add up to the whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from plait.custom.cutting import BatchCut, batch_part, batch_size
from plait.custom.gathering import gathering_nothing
from plait.custom.layouts.copies import copy_program
from plait.custom.program import Program
from plait.custom.seeds import seeded
from plait.custom.stepping.draws import SameDraws
from plait.custom.stepping.evaluate import evaluation_mode
from plait.custom.structure import cloned, mapped, widened
from plait.errors import PlaitError

EXAMPLES = 4
"""Examples that are looked at: enough for two halves of two, cheap beside a step."""
MOST_COPIED = 50_000_000
"""Numbers of weights up to which a copy in float64 is compared by its gradients, too."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative differences that are rounding, by the coarsest numbers in which something was computed."""
SMALL_SHARE = 1e-6
"""Relative to the largest gradient: a weight's gradient below this is taken for zero."""

_FIXED = "return the sum of the losses (reduction='sum') and their count"


def examples_to_check(batch: Any, cut: BatchCut | None) -> int:
    """How many of a batch's examples `check_additive` can look at; 0 where the batch cannot be cut."""
    try:
        return min(EXAMPLES, batch_size(batch, cut))
    except PlaitError:
        return 0


def is_copied(program: Program) -> bool:
    """Whether `check_additive` compares gradients, on a copy in float64."""
    return sum(p.numel() for p in program.named_parameters().values()) <= MOST_COPIED


def check_additive(
    program: Program, index: int, batch: Any, cut: BatchCut | None, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Raise PlaitError where two halves of the batch's first examples, two at least, do not add up to the whole.

    The models are in the person's own modes, but for BatchNorm, and random draws are one number everywhere.
    Gradients are compared in float64, on copies that begin with `weights` (whole, by name) or the program's own; of
    large models, and of those that cannot be copied, the losses alone. Where a loss is random in another way (noise by
    numpy), nothing is found. Generators and buffers are left as they were.
    """
    size = examples_to_check(batch, cut)
    edges = [(0, size), (0, size // 2), (size // 2, size)]
    copied = _copied(program, weights)
    # A loss may write into its batch, as into a state that goes from batch to batch.
    few = [cloned(batch_part(batch, first, end, cut)) for first, end in edges]
    parts = few if copied is None else [mapped(one, widened) for one in few]
    with nullcontext() if copied is not None else torch.no_grad():
        runs = _runs(copied or program, index, parts)
    if runs is not None:
        _compare(*runs, runs[0].tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A loss of some examples: its sums, counts and gradients by name, and its parts on the way: what computed each
    number that depends on weights, and where in the person's program."""

    losses: Sequence[float]
    counts: Sequence[float]
    gradients: Mapping[str, Tensor]
    terms: Sequence[tuple[str, float]]
    tolerance: float


def _compare(whole: _Run, first: _Run, second: _Run, tolerance: float) -> None:
    if not len(whole.losses) == len(first.losses) == len(second.losses):
        raise PlaitError(
            "loss_sum returns another number of pairs for parts of a batch; return as many for each, with 0 and a "
            "count of 0 where there is nothing"
        )
    for term in range(len(whole.losses)):
        _compare_term(whole, first, second, term, "", tolerance)
    if worst := _worst_gradient(whole, first, second, tolerance):
        _compare_term(whole, first, second, 0, worst, tolerance)


def _compare_term(whole: _Run, first: _Run, second: _Run, term: int, worst: str, tolerance: float) -> None:
    loss, one, other = (run.losses[term] for run in (whole, first, second))
    count, of_one, of_other = (run.counts[term] for run in (whole, first, second))
    both, allowed = one + other, tolerance * max(abs(loss), abs(one) + abs(other), 1e-12)
    if abs(loss - both) > allowed or worst:
        if abs(2 * loss - both) <= 2 * allowed:
            raise PlaitError(
                f"loss_sum returns a mean: the losses of two halves of a batch add up to twice that of all; {_FIXED}"
            )
        if abs(loss * count - one * of_one - other * of_other) <= allowed * max(1.0, count):
            raise PlaitError(
                f"loss_sum returns a mean: it is not the sum of the losses of two halves of a batch; {_FIXED}"
            )
        differs = f"the losses of two halves of a batch add up to {both:.6g}, that of all is {loss:.6g}"
        if abs(loss - both) <= allowed:
            differs = f"the gradients of two halves of a batch do not add up to that of all in {worst}"
        raise PlaitError(
            f"{differs}{_term_text(whole, first, second, tolerance)}: a mean or a constant in it counts once for each "
            "part, or examples depend on each other (a norm over the batch, a contrastive loss: gather its rows by "
            f'run.gather and give additive="no"), so a batch cannot be shared; {_FIXED}, each term multiplied by the '
            "count where it is a mean, or as a pair of its own, (sum, count), where it has another count"
        )
    if abs(count - of_one - of_other) > 1e-6 * max(count, 1.0):
        raise PlaitError(
            f"the counts of two halves of a batch add up to {of_one + of_other:g}, that of all is {count:g}; return "
            "how many losses were summed, not a constant"
        )


def _worst_gradient(whole: _Run, first: _Run, second: _Run, tolerance: float) -> str:
    """The name of the weight whose gradients of halves are farthest from that of the whole; empty where all add up."""
    errors: dict[str, tuple[float, float]] = {}
    for name, gradient in whole.gradients.items():
        halves = [one.gradients[name] for one in (first, second)]
        scale = float(gradient.norm()) + sum(float(one.norm()) for one in halves)
        errors[name] = float((gradient - halves[0] - halves[1]).norm()), scale
    largest = max((scale for _, scale in errors.values()), default=0.0)
    over = {
        name: error / max(scale, SMALL_SHARE * largest)
        for name, (error, scale) in errors.items()
        if error > tolerance * max(scale, SMALL_SHARE * largest)
    }
    return max(over, key=lambda name: over[name]) if over else ""


def _term_text(whole: _Run, first: _Run, second: _Run, tolerance: float) -> str:
    """The first number of the loss that does not add up, in words; empty where the parts ran other operations."""
    rows = [[text for text, _ in run.terms] for run in (whole, first, second)]
    if rows[0] != rows[1] or rows[0] != rows[2]:
        return ""
    for (text, all_of_it), (_, one), (_, other) in zip(whole.terms, first.terms, second.terms, strict=True):
        if abs(all_of_it - one - other) > tolerance * max(abs(all_of_it), abs(one) + abs(other), 1e-12):
            return f" (first by {text})"
    return ""


def _copied(program: Program, weights: Mapping[str, Tensor] | None) -> Program | None:
    """The program in float64 over separate tensors; None where it is too large, or cannot be copied."""
    if not is_copied(program) or (program.skeletons and weights is None):
        return None
    try:
        return replace(copy_program(program, dtype=torch.float64, weights=weights), precision="float32")
    except Exception:  # whatever a module's own deepcopy raises
        return None


def _runs(program: Program, index: int, parts: Sequence[Any]) -> tuple[_Run, _Run, _Run] | None:
    """The whole and its halves; None where the models cannot be run so, or are random in a way that stays unknown."""
    # In training mode each example of a batch changes what BatchNorm makes of the others.
    norms = [one for model in program.models for one in model.modules() if isinstance(one, _BatchNorm)]
    with torch.compiler.set_stance("force_eager"), evaluation_mode(*norms):
        try:
            whole, first, second = (_run(program, index, part, seed=1) for part in parts)
            again = _run(program, index, parts[0], seed=2)
        except PlaitError:
            raise
        except Exception:
            return None  # a few examples may be too few for a model; the step itself will tell
    if whole is None or first is None or second is None or again is None:
        return None
    if any(abs(a - b) > whole.tolerance * abs(a) for a, b in zip(whole.losses, again.losses, strict=False)):
        return None
    return whole, first, second


def _run(program: Program, index: int, part: Any, seed: int) -> _Run | None:
    """One loss; None where something was drawn that is not the same for each example. The seed changes what does not
    go through torch."""
    trained, gradients = program.trained_by(index), dict[str, Tensor]()
    with seeded(seed), program.buffers_kept(), gathering_nothing(), SameDraws() as draws, _Terms() as terms:
        found = program.loss_sum(index, part)
        learn = [total for total in found.totals if total.requires_grad]
        if learn:
            for parameter in trained.values():
                parameter.grad = None
            torch.autograd.backward(learn)
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
    if draws.unknown:
        return None
    return _Run(
        losses=found.sums.tolist(),
        counts=found.counts.tolist(),
        gradients=gradients,
        terms=[(text, float(value)) for text, value in terms.found],
        tolerance=TOLERANCES[draws.digits],
    )


class _Terms(TorchFunctionMode):
    """Notes every single number that depends on weights, and which line of the person's program computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not found.dim() and found.requires_grad and found.is_floating_point():
            name = getattr(func, "__name__", str(func))
            self.found.append((f"{name} in {_line_of_program()}", found.detach().clone()))
        return found


def _line_of_program() -> str:
    """File and line of the innermost call that is neither torch's nor plait's."""
    frame: Any = sys._getframe(2)
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
