"""Compares a program that was stopped and started again with an undisturbed run: where it continues, and with what.

Note [where it continues]: programs do not say from which step they resume. The first weights after the second start
equal the weights that the undisturbed run had before some step; that is where the program continues, even if its own
counter says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.checking.findings import ProgramFinding, ProgramFindingKind
from plait.checking.recorded import Event

_SAME, _SAME_STATE, _SAME_LOSS = 1e-6, 1e-4, 1e-4
"""Relative differences of a weight, an optimizer's state and a loss that count as rounding between two runs."""
_NEAR = 1.0
"""Restored weights that are nearer to a step's weights than this share of the step's update are taken to be those
weights, with something lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The records of one start of a program."""

    folder: Path
    events: Sequence[Sequence[Event]]
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeVerdict:
    """How a second start compares with the undisturbed run."""

    stopped_after: int = 0
    resumed_after: int = 0
    compared: int = 0
    """Steps after the second start that were compared."""
    findings: Sequence[ProgramFinding] = ()
    reasons: Sequence[str] = ()
    """Why it cannot be judged."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """An optimizer step of one rank, with the batches and losses that led to it."""

    inputs: list[str] = field(default_factory=list)
    randoms: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    data_site: str = ""
    forward_site: str = ""
    event: Event = field(default_factory=dict)


def compare_resumed(undisturbed: RecordedRun, stopped: RecordedRun, resumed: RecordedRun) -> ResumeVerdict:
    """Compare the steps after a second start with the same steps of the undisturbed run."""
    whole, first, second = (_steps_by_rank(one) for one in (undisturbed, stopped, resumed))
    stopped_after = steps_taken(stopped)
    if (reason := _not_repeatable(whole, first)) is not None:
        return ResumeVerdict(stopped_after=stopped_after, reasons=(reason,))
    places = [_place(undisturbed, resumed, rank, whole[rank], second[rank][0]) for rank in range(len(whole))]
    resumed_after = places[0].step
    if resumed_after == 0:
        return ResumeVerdict(stopped_after=stopped_after)
    if resumed_after >= len(whole[0]):
        reason = f"the program stopped after {stopped_after} steps, and no later ones were recorded; give more --steps"
        return ResumeVerdict(stopped_after=stopped_after, resumed_after=resumed_after, reasons=(reason,))
    findings = [] if (apart := _weights(places, second[0][0])) is None else [apart]
    if any(one.step != resumed_after for one in places) or resumed_after < 0:
        return ResumeVerdict(
            stopped_after=stopped_after, resumed_after=max(0, resumed_after), compared=1, findings=findings
        )
    pairs = [list(zip(own[resumed_after:], after, strict=False)) for own, after in zip(whole, second, strict=True)]
    checks: Sequence[Callable[[int, Sequence[tuple[_Step, _Step]], Sequence[_Step]], ProgramFinding | None]] = (
        _data, _randoms, _optimizer, _schedule,
    )  # fmt: skip
    for check in checks:
        each = (check(rank, pairs[rank], whole[rank]) for rank in range(len(whole)))
        findings += [one for one in each if one is not None][:1]
    if not findings:
        losses = (_loss(rank, pairs[rank]) for rank in range(len(whole)))
        findings += [one for one in losses if one is not None][:1]
    return ResumeVerdict(
        stopped_after=stopped_after, resumed_after=resumed_after, compared=len(pairs[0]), findings=findings
    )


def steps_taken(run: RecordedRun) -> int:
    """Optimizer steps that all ranks of a run took."""
    return min(sum(one["kind"] in ("step", "light_step") for one in rank) for rank in run.events)


def _steps_by_rank(run: RecordedRun) -> list[list[_Step]]:
    return [_steps(one) for one in run.events]


def _steps(events: Sequence[Event]) -> list[_Step]:
    """The recorded steps of one rank, of all its optimizers, in order."""
    found: list[_Step] = []
    now, data_site = _Step(), ""
    for event in events:
        if event["kind"] == "pass":
            data_site = event["site"]
        elif event["kind"] == "forward" and event["grad"]:
            now.inputs.append(event["inputs"])
            now.randoms.append(event["rng"])
            now.forward_site, now.data_site = event["site"], data_site
        elif event["kind"] == "backward":
            now.losses.append(float(event["loss"]))
        elif event["kind"] == "step":
            now.event = event
            found.append(now)
            now = _Step(data_site=data_site)
    return found


def _not_repeatable(whole: Sequence[Sequence[_Step]], first: Sequence[Sequence[_Step]]) -> str | None:
    for rank, (one, other) in enumerate(zip(whole, first, strict=True)):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            what = "batches" if left.inputs != right.inputs else "losses" if not _alike(left, right) else ""
            if what:
                return (
                    f"two runs of the same command differ even without a stop: rank {rank} has other {what} in step "
                    f"{index + 1}; set all seeds, so that a difference after a stop means something"
                )
    return None


def _alike(left: _Step, right: _Step) -> bool:
    return len(left.losses) == len(right.losses) and all(
        abs(one - other) <= _SAME_LOSS * max(abs(one), abs(other), 1e-12)
        for one, other in zip(left.losses, right.losses, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a rank continues, according to its weights."""

    step: int
    """Steps after which the undisturbed run had these weights; -1 if it never had them."""
    apart: Mapping[str, float]
    """Parameters that differ from those weights, with the relative difference."""


def _place(undisturbed: RecordedRun, resumed: RecordedRun, rank: int, whole: Sequence[_Step], first: _Step) -> _Place:
    held = _weights_of(resumed, rank, first)
    found: list[tuple[float, bool, int, Mapping[str, float]]] = []
    for index, step in enumerate(whole):
        if step.event["optimizer"] != first.event["optimizer"]:
            continue
        here = _weights_of(undisturbed, rank, step)
        if [one["name"] for one in step.event["parameters"]] != [one["name"] for one in first.event["parameters"]]:
            continue
        whole_norm = _norm(here.values()) or 1.0
        distance = _norm(held[key] - here[key] for key in here) / whole_norm
        moved = (
            _norm(one - here[key] for key, one in _weights_of(undisturbed, rank, step, "after").items()) / whole_norm
        )
        apart = {
            key: float((held[key] - here[key]).norm()) / (float(here[key].norm()) or 1.0)
            for key in here
            if float((held[key] - here[key]).norm()) > _SAME * float(here[key].norm())
        }
        if distance <= max(_SAME, _NEAR * moved):
            # A warm-up's first step has a rate of zero: then the state tells step 0 from step 1.
            is_empty = bool(step.event["state"]) != bool(first.event["state"])
            found.append((distance if distance > _SAME else 0.0, is_empty, -index, apart))
    if not found:
        return _Place(step=-1, apart={})
    _, _, index, apart = min(found, key=lambda one: one[:3])
    return _Place(step=-index, apart=apart)


def _weights_of(run: RecordedRun, rank: int, step: _Step, when: str = "before") -> dict[str, Tensor]:
    tensors = load_file(str(run.folder / f"rank-{rank}" / step.event["file"]))
    return {about["name"]: tensors[f"{when}/{index}"].double() for index, about in enumerate(step.event["parameters"])}


def _norm(tensors: Any) -> float:
    squares = [float(one.norm()) ** 2 for one in tensors]
    return float(torch.tensor(squares, dtype=torch.float64).sum().sqrt()) if squares else 0.0


def _weights(places: Sequence[_Place], first: _Step) -> ProgramFinding | None:
    steps = [one.step for one in places]
    where = str(first.event["site"])
    if -1 in steps:
        what = f"rank {steps.index(-1)} continues with weights that the undisturbed run had at no step"
        names: Sequence[str] = ()
    elif len(set(steps)) > 1:
        text = ", ".join(f"step {step} on rank {rank}" for rank, step in enumerate(steps))
        what, names = f"ranks continue with weights of different steps: {text}", ()
    else:
        apart = next((one.apart for one in places if one.apart), {})
        if not apart:
            return None
        names = list(apart)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what = f"restored weights differ by {apart[names[0]]:.1g} from step {steps[0]}'s: {names[0]}{more}"
    return ProgramFinding(
        kind="resumed_weights", is_fault=True, where=where, what=f"resume: {what}", step=max(0, steps[0]),
        parameter=names[0] if names else "", parameters=len(names),
        one_process="undisturbed, it continues with the weights of the step before",
    )  # fmt: skip


def _finding(
    kind: ProgramFindingKind, what: str, where: str, step: _Step, undisturbed: str, parameter: str = ""
) -> ProgramFinding:
    return ProgramFinding(
        kind=kind, is_fault=True, where=where, what=f"resume: {what}", step=int(step.event["step"]),
        one_process=f"undisturbed, {undisturbed}", parameter=parameter,
    )  # fmt: skip


def _data(rank: int, pairs: Sequence[tuple[_Step, _Step]], whole: Sequence[_Step]) -> ProgramFinding | None:
    for own, after in pairs:
        if own.inputs == after.inputs:
            continue
        number = whole.index(own)
        drawn = next((index for index, one in enumerate(whole) if one.inputs == after.inputs), None)
        if drawn is None:
            known = {one for step in whole for one in step.inputs}
            repeats = any(one in known for one in after.inputs)
            does = "gets some batches of other steps" if repeats else "gets different batches"
        elif drawn < number:
            does = f"gets the batch of step {drawn + 1} again"
        else:
            skipped = "a step's batch is" if drawn - number == 1 else f"batches of {drawn - number} steps are"
            does = f"gets the batch of step {drawn + 1}, so {skipped} skipped"
        return _finding(
            "resumed_data", f"in step {number + 1} rank {rank} {does}", after.data_site or after.forward_site, own,
            f"step {number + 1} has its own batch",
        )  # fmt: skip
    return None


def _randoms(rank: int, pairs: Sequence[tuple[_Step, _Step]], whole: Sequence[_Step]) -> ProgramFinding | None:
    for own, after in pairs:
        both = [(one, other) for one, other in zip(own.randoms, after.randoms, strict=False) if one and other]
        if any(one != other for one, other in both):
            return _finding(
                "resumed_random",
                f"in step {whole.index(own) + 1} the forward pass on rank {rank} draws different random numbers",
                after.forward_site, own, "dropout continues from the state before the stop",
            )  # fmt: skip
    return None


def _schedule(rank: int, pairs: Sequence[tuple[_Step, _Step]], whole: Sequence[_Step]) -> ProgramFinding | None:
    for own, after in pairs:
        number, where = whole.index(own) + 1, str(after.event["site"])
        rates = [
            (a, b) for a, b in zip(own.event["rates"], after.event["rates"], strict=False) if abs(a - b) > 1e-6 * abs(a)
        ]
        if rates:
            return _finding(
                "resumed_schedule", f"step {number} has a learning rate of {rates[0][1]:.4g}", where, own,
                f"it is {rates[0][0]:.4g}",
            )  # fmt: skip
        at, after_at = ([(s["name"], s["at"]) for s in one.event["schedules"]] for one in (own, after))
        if len(at) == len(after_at) and at != after_at:
            (name, before), (_, now) = next((a, b) for a, b in zip(at, after_at, strict=True) if a != b)
            return _finding(
                "resumed_schedule", f"{name} is at {now} in step {number}", where, own, f"it is at {before}"
            )
    return None


def _optimizer(rank: int, pairs: Sequence[tuple[_Step, _Step]], whole: Sequence[_Step]) -> ProgramFinding | None:
    seen: set[int] = set()
    for own, after in pairs:
        if own.event["optimizer"] in seen:
            continue
        seen.add(own.event["optimizer"])  # later steps follow from the first one's state
        number, where = whole.index(own) + 1, str(after.event["site"])
        for position, facts in own.event["state"].items():
            name = own.event["parameters"][int(position)]["name"]
            restored = after.event["state"].get(position, {})
            for key, values in facts.items():
                if not any(values):
                    continue
                if key not in restored or not any(restored[key]):
                    lost = ", ".join(each for each in facts if not any(restored.get(each, ())))
                    what = f"the optimizer continues without its state ({lost}) for {name} on rank {rank}"
                elif any(
                    abs(a - b) > _SAME_STATE * abs(values[0]) for a, b in zip(values, restored[key], strict=False)
                ):
                    what = f"{key} of {name} on rank {rank} is {restored[key][0]:.4g}"
                else:
                    continue
                return _finding(
                    "resumed_optimizer", f"{what} in step {number}", where, own,
                    f"{key} is {values[0]:.4g}" + (" (norm)" if len(values) > 1 else ""), name,
                )  # fmt: skip
    return None


def _loss(rank: int, pairs: Sequence[tuple[_Step, _Step]]) -> ProgramFinding | None:
    for own, after in pairs:
        if not _alike(own, after):
            return _finding(
                "resumed_loss",
                f"the loss on rank {rank} is {after.losses[0] if after.losses else 0.0:.6g} although weights, batches "
                "and random numbers are the same",
                after.forward_site, own, f"it is {own.losses[0] if own.losses else 0.0:.6g}",
            )  # fmt: skip
    return None
