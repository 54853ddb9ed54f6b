"""Checks that each rank's update follows from its gradients, and that all ranks have the same weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.checking.findings import ProgramFinding
from plait.checking.recorded import CheckedStep, Event

_MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
_ELEMENTWISE: Mapping[str, _MakeOptimizer] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
                 torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta)
}  # fmt: skip
"""torch's optimizers that update each element from its own gradients alone, so a sample of elements suffices."""
_KINDS = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that change how an update is computed, but not its result."""
_UPDATE_TOLERANCE, _ROUNDING = 2e-3, 3e-7
"""Relative differences that count as float32's rounding: of an update, and of the weights that it changes."""
_ROUNDING_16 = 8e-3
_APART = 1e-6
_LET_DRIFT = ("never_summed", "missing_sum", "unexplained", "lost_micro_batches", "uneven_ranks", "clipping_before_sum",
              "partial_clipping", "rates_apart", "update")  # fmt: skip
"""Findings that explain why weights drift apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateVerdict:
    """Findings about updates, and notes on those that were not recomputed."""

    findings: Sequence[ProgramFinding]
    notes: Sequence[str]


def judge_updates(steps: Sequence[CheckedStep]) -> UpdateVerdict:
    """Recompute all updates in float64 from the gradients that the optimizers got."""
    notes: list[str] = []
    for optimizer in sorted({step.optimizer for step in steps}):
        own = [step for step in steps if step.optimizer == optimizer]
        kind = str(own[0].ranks[0].event["optimizer_kind"])
        if kind not in _ELEMENTWISE:
            compared = (
                "its weights were compared between ranks"
                if len(own) > 1
                else "its weights are compared between ranks from the second step on, so take more --steps"
            )
            notes.append(f"the update rule {_short(kind)} was not recomputed; {compared}")
            continue
        if any(rank.event["resumed"] for rank in own[0].ranks):
            notes.append(
                f"{_short(kind)} had state before its first step, as after loading, so its updates were not recomputed"
            )
            continue
        if (finding := _first_wrong(own, _ELEMENTWISE[kind])) is not None:
            return UpdateVerdict(findings=(finding,), notes=notes)
    return UpdateVerdict(findings=(), notes=notes)


def _short(kind: str) -> str:
    """ "AdamW" for torch's own, "train.AdamW" for one that the program defines."""
    return kind.rpartition(".")[2] if kind.startswith("torch.") else kind.replace("__main__", "the program's own")


def _first_wrong(steps: Sequence[CheckedStep], kind: _MakeOptimizer) -> ProgramFinding | None:
    for rank in range(len(steps[0].ranks)):
        weights: list[Tensor] = []
        optimizer: torch.optim.Optimizer | None = None
        for step in steps:
            held = step.ranks[rank]
            before = [held.tensor("before", one) for one in range(len(step.parameters))]
            if optimizer is None:
                weights = [torch.nn.Parameter(one.clone()) for one in before if one is not None]
                if len(weights) != len(before):
                    return None
                optimizer = kind(_groups(kind, held.event["groups"], weights))
            for index, weight in enumerate(weights):
                start = before[index]
                assert start is not None, "a step has all weights before and after it"
                weight.data.copy_(start)
                weight.grad = held.tensor("gradient", index)
            for group, about, rate in zip(
                optimizer.param_groups, held.event["groups"], held.event["rates"], strict=False
            ):
                group.update({key: about[key] for key in group if key in about and key not in ("params", *_KINDS)})
                group["lr"] = rate
            optimizer.step()
            for index, weight in enumerate(weights):
                after, start = held.tensor("after", index), before[index]
                assert after is not None and start is not None, "as above"
                wanted = weight.data - start
                rounding = _ROUNDING if str(step.parameters[index]["dtype"]) in ("float32", "float64") else _ROUNDING_16
                allowed = _UPDATE_TOLERANCE * float(wanted.norm()) + rounding * float(start.norm()) + 1e-12
                if float((after - start - wanted).norm()) > allowed:
                    return _finding(step, rank, index, after - start, wanted)
    return None


def _finding(step: CheckedStep, rank: int, index: int, got: Tensor, wanted: Tensor) -> ProgramFinding:
    name = step.name(index)
    size = float(wanted.norm())
    if float(got.norm()) == 0:
        what = f"{name} is not updated on rank {rank}, although it has a gradient"
    else:
        factor = float(got @ wanted) / size**2 if size else 0.0
        what = f"the update of {name} on rank {rank} is not the optimizer's ({factor:.3g} times as large)"
    return ProgramFinding(
        kind="update", is_fault=True, where=step.site, parameter=name, step=step.step, parameters=1, what=what,
        one_process="it would take the optimizer's update everywhere",
    )  # fmt: skip


def _groups(kind: _MakeOptimizer, groups: Sequence[Mapping[str, Any]], weights: Sequence[Tensor]) -> Any:
    known = set(inspect.signature(kind).parameters) - {"params"}
    return [
        {
            "params": [weights[one] for one in group["params"]],
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group.items()
                if key in known - set(_KINDS) and key != "params"
            },
        }
        for group in groups
    ]


def step_count_findings(steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]]) -> list[ProgramFinding]:
    """Ranks that took fewer optimizer steps than others by the end of the program."""
    if not steps or not all(any(one["kind"] == "ended" for one in rank) for rank in events):
        return []
    if any(one["kind"] == "join" for rank in events for one in rank):
        return []  # Join lets ranks that run out of data wait for the others
    for optimizer in sorted({step.optimizer for step in steps}):
        taken = [
            sum(one["kind"] in ("step", "light_step") and one["optimizer"] == optimizer for one in rank)
            for rank in events
        ]
        if len(set(taken)) > 1:
            text = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(taken))
            return [
                ProgramFinding(
                    kind="uneven_steps", is_fault=True, where=steps[0].site, parameter=steps[0].name(0),
                    what=f"ranks take different numbers of optimizer steps: {text}",
                    one_process="it would take every step with the data of all ranks",
                )
            ]  # fmt: skip
    return []


def weight_findings(steps: Sequence[CheckedStep], others: Sequence[ProgramFinding]) -> list[ProgramFinding]:
    """Weights that differ between ranks: from the beginning, or later although all ranks got the same gradients."""
    explained = any(one.kind in _LET_DRIFT for one in others)
    for step in steps:
        apart = [index for index in range(len(step.parameters)) if _is_apart(step, index)]
        if not apart:
            continue
        at_first = step.step == 0
        if not at_first and explained:
            return []
        name = step.name(apart[0])
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        when = "before the first step" if at_first else f"after step {step.step}"
        return [
            ProgramFinding(
                kind="weights_apart", is_fault=True, where=step.site, parameter=name, parameters=len(apart),
                step=step.step,
                what=f"the ranks' weights differ {when}: {name}{more}",
                one_process="it would have one set of weights",
            )
        ]  # fmt: skip
    return []


def _is_apart(step: CheckedStep, index: int) -> bool:
    first = step.ranks[0].tensor("before", index)
    others = [rank.tensor("before", index) for rank in step.ranks[1:]]
    if first is None or any(one is None or one.shape != first.shape for one in others):
        return False
    return any(float((one - first).norm()) > _APART * float(first.norm()) for one in others if one is not None)


def rate_findings(steps: Sequence[CheckedStep]) -> list[ProgramFinding]:
    """Learning rates that differ between ranks."""
    for step in steps:
        rates = [rank.event["rates"] for rank in step.ranks]
        if any(one != rates[0] for one in rates):
            text = ", ".join(f"{one[0]:.4g}" for one in rates if one)
            return [
                ProgramFinding(
                    kind="rates_apart", is_fault=True, where=step.site, step=step.step, parameter=step.name(0),
                    what=f"ranks take step {step.step + 1} with different learning rates: {text}",
                    one_process="it would have one learning rate",
                )
            ]  # fmt: skip
    return []
