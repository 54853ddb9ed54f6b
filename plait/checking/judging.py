"""Judges a program from the records of all ranks: proven, differs, or cannot be judged, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.checking.data_order import data_findings, data_not_checked
from plait.checking.findings import CheckOutcome, CheckReport, ProgramFinding
from plait.checking.gradient_findings import OtherWorkers, judge_gradients, tolerance_of
from plait.checking.recorded import CheckedStep, Event, checked_steps
from plait.checking.reference import ROUNDED
from plait.checking.rest_findings import (
    norm_findings,
    printed_findings,
    random_findings,
    schedule_findings,
    weight_decay_findings,
)
from plait.checking.updates import judge_updates, rate_findings, step_count_findings, weight_findings


def judge(
    folder: Path, events: Sequence[Sequence[Event]], *, wall_s: float, other_workers: OtherWorkers
) -> CheckReport:
    """Judge the program by the records in `folder`."""
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
    gradients = judge_gradients(steps, events, other_workers)
    updates = judge_updates(steps)
    causes = [*gradients.findings, *updates.findings, *rate_findings(steps)]
    findings: list[ProgramFinding] = [
        *step_count_findings(steps, events),
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
    is_faulty = any(one.is_fault for one in findings)
    outcome: CheckOutcome = "differs" if is_faulty else "cannot judge" if gradients.undecided else "proven"
    notes = (
        *gradients.undecided,
        *gradients.notes,
        *updates.notes,
        *_not_compared(steps, events),
        *data_not_checked(events),
    )
    return CheckReport(
        outcome=outcome,
        workers=workers,
        steps=len(steps),
        parameters=len(names),
        largest_error=gradients.largest_error,
        findings=tuple(findings),
        reasons=notes,
        changed=changed,
        wall_s=wall_s,
    )


def _not_compared(steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]]) -> list[str]:
    """A note on steps that only some ranks recorded."""
    taken = [{(one["optimizer"], one["step"]) for one in rank if one["kind"] == "step"} for rank in events]
    missing = sorted(set().union(*taken) - {(step.optimizer, step.step) for step in steps})
    if not missing:
        return []
    numbers = ", ".join(str(step + 1) for step in sorted({step for _, step in missing}))
    return [f"not checked: optimizer steps that only some ranks took while they were watched (step {numbers})"]


def _without_consequences(findings: Sequence[ProgramFinding]) -> list[ProgramFinding]:
    """The findings without repeated samples if two ranks drew the same batches, which implies them."""
    is_same = any(one.kind == "same_batch" for one in findings)
    return [one for one in findings if not (is_same and one.kind == "repeated_samples")]


def _uncovered(steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]]) -> list[str]:
    """Reasons why the program cannot be judged; empty if it can."""
    groups = [next((one for one in rank if one["kind"] == "group"), None) for rank in events]
    if not steps:
        if not any(one["kind"] == "forward" for rank in events for one in rank):
            return ["no model ran and no optimizer took a step; name the program that trains"]
        return [
            "the program ran, but no optimizer of torch.optim took a step on all ranks; if it updates weights "
            "itself or through another library, there is nothing to compare"
        ]
    if any(one["kind"] == "fsdp1" for rank in events for one in rank):
        return ["FullyShardedDataParallel (FSDP1) flattens weights, which is not supported; use fully_shard (FSDP2)"]
    if any(_names(rank.event) != _names(step.ranks[0].event) for step in steps for rank in step.ranks):
        return [
            "the ranks' optimizers have different parameters (a sharded optimizer written by hand), so their "
            "steps cannot be compared"
        ]
    if any(one is None for one in groups):
        return [
            "the program never calls torch.distributed.init_process_group, so each process trains by itself; a program "
            "for one process has nothing to check"
        ]
    if any(one is not None and one["size"] != len(events) for one in groups):
        size = next(one["size"] for one in groups if one is not None)
        return [f"the program expects {size} ranks and {len(events)} were started; give --workers {size}"]
    inside = [
        one for rank in events for one in rank if one["kind"] == "message" and one["in_forward"] and not one["norm"]
    ]
    if inside:
        one = inside[0]
        return [
            f"{one['call']} at {one['site']} is called inside a module's forward pass: tensor, expert or sequence "
            "parallelism written by hand, which one process cannot reproduce batch by batch"
        ]
    passes = [about for step in steps for rank in step.ranks for about in rank.event["backwards"].values()]
    if any(one["gathers"] for one in passes):
        return ["the loss is computed from other ranks' outputs (torch.distributed.nn), not batch by batch"]
    gathers = [
        one for rank in events for one in rank
        if one["kind"] == "message" and one["trained"] and "gather" in one["call"] and not one["in_backward"]
    ]  # fmt: skip
    if gathers and any(one["joins_constants"] for one in passes):
        return [
            f"the loss combines a model's outputs with other ranks' ({gathers[0]['call']} at {gathers[0]['site']} "
            "carries no gradient), so it is not computed batch by batch"
        ]
    if any(one["contrastive"] for one in passes):
        return [
            "the loss multiplies the batch's outputs with each other (contrastive): each rank compares only its own "
            "samples, while one process would compare all of them"
        ]
    if any(not micro.is_linear for step in steps for micro in step.micros):
        site = next(micro.site for step in steps for micro in step.micros if not micro.is_linear)
        return [
            f"the loss at {site} is not a mean or a sum but a function of one (a root, a logarithm, a product), so the "
            "loss of several batches together does not follow from the loss of each"
        ]
    return _indistinct(steps, events)


def _indistinct(steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]]) -> list[str]:
    """Reasons why the recorded gradients cannot tell a correct program from a wrong one."""
    computed = [
        (step, int(key.rpartition("/")[2]), tensor)
        for step in steps
        for rank in step.ranks
        for key, tensor in rank.tensors.items()
        if key.startswith(("local/", "gradient/"))
    ]
    if not any(bool(tensor.any()) for _, _, tensor in computed):
        return ["no gradient reached an optimizer, or all were zero, so there is nothing to compare"]
    for step, position, tensor in computed:
        if not bool(tensor.isfinite().all()):
            return [
                f"the gradient of {step.name(position)} is not finite in step {step.step + 1}, so it cannot be "
                "compared; find where it becomes infinite or NaN, or check fewer --steps"
            ]
    parts = max(len(step.micros) for step in steps)
    if tolerance_of(steps, events) == ROUNDED and parts * ROUNDED >= 0.5:
        return [
            f"gradients were computed or sent in 16 bits, and each step has {parts} micro-batches over all ranks: a "
            "missing one would look like rounding; use fewer --workers or micro-batches, or float32"
        ]
    return []


def _names(step: Event) -> list[str]:
    return [one["name"] for one in step["parameters"]]
