"""From the records of all ranks to what is said about a program: proven, differs, or cannot be judged, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from plait.checking.data_order import data_findings
from plait.checking.findings import CheckReport, ProgramFinding
from plait.checking.gradient_findings import judge_gradients
from plait.checking.recorded import CheckedStep, Event, checked_steps
from plait.checking.rest_findings import (
    norm_findings,
    printed_findings,
    random_findings,
    schedule_findings,
    weight_decay_findings,
)
from plait.checking.updates import judge_updates, rate_findings, weight_findings

ConfirmFactor = Callable[[float], bool | None]
"""Runs the program on another number of workers; says whether a factor follows that number, None where it cannot."""


def judge(
    folder: Path, events: Sequence[Sequence[Event]], *, wall_s: float, follows_workers: ConfirmFactor
) -> CheckReport:
    """Judge what was recorded in `folder`."""
    workers = len(events)
    steps = checked_steps(folder, events)
    changed = tuple(dict.fromkeys(one["what"] for rank in events for one in rank if one["kind"] == "stand_in"))
    reasons = _uncovered(steps, events)
    names = {(step.optimizer, index) for step in steps for index in range(len(step.parameters))}
    if reasons:
        return CheckReport(
            outcome="cannot judge", workers=workers, steps=len(steps), parameters=len(names), largest_error=None,
            reasons=tuple(reasons), changed=changed, wall_s=wall_s, findings=tuple(data_findings(events)),
        )  # fmt: skip
    gradients = judge_gradients(steps, events, follows_workers)
    updates = judge_updates(steps)
    causes = [*gradients.findings, *updates.findings, *rate_findings(steps)]
    findings: list[ProgramFinding] = [
        *weight_findings(steps, causes),
        *causes,
        *data_findings(events),
        *norm_findings(events),
        *random_findings(events),
        *schedule_findings(events, steps),
        *printed_findings(events, steps),
        *weight_decay_findings(steps),
    ]
    findings = _without_consequences(findings)
    notes = (*gradients.notes, *updates.notes)
    differs = any(one.is_fault for one in findings)
    return CheckReport(
        outcome="differs" if differs else "cannot judge" if gradients.unclear else "proven",
        workers=workers,
        steps=len(steps),
        parameters=len(names),
        largest_error=gradients.largest_error,
        findings=tuple(findings),
        reasons=(*gradients.unclear, *notes) if not differs else notes,
        changed=changed,
        wall_s=wall_s,
    )


def _without_consequences(findings: Sequence[ProgramFinding]) -> list[ProgramFinding]:
    """The same batch on two ranks is also one that is drawn twice."""
    is_same = any(one.kind == "same_batch" for one in findings)
    return [one for one in findings if not (is_same and one.kind == "repeated_samples")]


def _uncovered(steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]]) -> list[str]:
    """Why nothing can be said about a program."""
    groups = [next((one for one in rank if one["kind"] == "group"), None) for rank in events]
    if not steps:
        if not any(one["kind"] == "forward" for rank in events for one in rank):
            return ["no model computed anything and no optimizer took a step; name the program that trains"]
        return [
            "the program computed, and no optimizer of torch.optim took a step on all ranks; if it updates weights "
            "itself, or in another library, nothing can be compared"
        ]
    if any(one["kind"] == "fsdp1" for rank in events for one in rank):
        return ["FullyShardedDataParallel (FSDP1) flattens weights, which is not covered; fully_shard (FSDP2) is"]
    if any(_names(rank.event) != _names(step.ranks[0].event) for step in steps for rank in step.ranks):
        return [
            "the ranks' optimizers hold different parameters (a sharded optimizer written by hand), so that their "
            "steps cannot be laid side by side"
        ]
    if any(one is None for one in groups):
        return [
            "the program never calls torch.distributed.init_process_group, so each process trains by itself; a program "
            "for one process has nothing to prove"
        ]
    if any(one is not None and one["size"] != len(events) for one in groups):
        size = next(one["size"] for one in groups if one is not None)
        return [f"the program set up {size} ranks and {len(events)} were started; give --workers {size}"]
    inside = [
        one for rank in events for one in rank if one["kind"] == "message" and one["in_forward"] and not one["norm"]
    ]
    if inside:
        one = inside[0]
        return [
            f"{one['call']} at {one['site']} is called inside of a module's forward pass: tensor, expert or sequence "
            "parallelism written by hand, which one process cannot repeat batch by batch"
        ]
    passes = [about for step in steps for rank in step.ranks for about in rank.event["backwards"].values()]
    if any(one["gathers"] for one in passes):
        return ["the loss is computed from other ranks' outputs (torch.distributed.nn), not batch by batch"]
    if any(one["contrastive"] for one in passes):
        return [
            "the loss multiplies the batch's outputs with each other (contrastive): each rank compares its own samples "
            "alone, and one process would compare all of them"
        ]
    if any(not micro.is_linear for step in steps for micro in step.micros):
        site = next(micro.site for step in steps for micro in step.micros if not micro.is_linear)
        return [
            f"the loss at {site} is no mean or sum but a function of one (a root, a logarithm, a product), so that "
            "what several batches would give together does not follow from each of them"
        ]
    return []


def _names(step: Event) -> list[str]:
    return [one["name"] for one in step["parameters"]]
