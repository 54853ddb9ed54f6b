"""plan.json: a plan on disk. From version 0.2.0 on every later version will read the formats before its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.errors import PlaitError
from plait.layout import LARGEST_CLUSTER
from plait.planner.plan import Plan
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file

PLAN_FORMAT = 4
_AGAIN = "start the run under a new run.name"
_MOST = 10**12
"""Sequences of a step, and steps: above every run that anybody has published."""


def plan_text(plan: Plan) -> str:
    """The text of plan.json."""
    return sealed_text({"format": PLAN_FORMAT, **asdict(plan)})


def write_plan(plan: Plan, path: Path) -> None:
    """Write plan.json atomically: a reader sees all of it or none. Raises PlaitError where the disk refuses, because no
    work has begun then."""
    replace_file(path, plan_text(plan).encode(), failure=PlaitError)


def read_plan(path: Path) -> Plan:
    """Read plan.json; raises PlaitError where it is none, or of another format."""
    try:
        values = parse_object(read_regular_file(path))
        written = values.pop("format", None)
        if written != PLAN_FORMAT:
            raise PlaitError(f'"{path}" was written by another version of plait; {_AGAIN}')
        plan = typed_value(Plan, values)
        _check_plan(plan)
        return plan
    except OSError as error:
        raise PlaitError(f'"{path}" cannot be read ({error.strerror}); bring it back, or {_AGAIN}') from None
    except ValueError as error:
        raise PlaitError(f'"{path}" is not a usable plan ({error}); bring it back, or {_AGAIN}') from None


def _check_plan(plan: Plan) -> None:
    """Raise ValueError, with the field's name, for numbers that no run can have, or that do not fit together: somebody
    may have edited the file by hand."""
    for name, count, least, most in _counts(plan):
        if not least <= count <= most:
            raise ValueError(f"{name} is {count} and must be {least} or more, at most {most:,}")
    for name, amount in _amounts(plan):
        if amount is not None and not (isfinite(amount) and amount > 0):
            raise ValueError(f"{name} is {amount:g} and must be more than 0")
    optimizer, cadence = plan.job.optimizer, plan.cadence
    not_negative = {
        "checkpoint_keep_s": cadence.checkpoint_keep_s,
        "optimizer.lr": optimizer.lr,
        "optimizer.adamw_lr": optimizer.lr if optimizer.adamw_lr is None else optimizer.adamw_lr,
        "optimizer.weight_decay": optimizer.weight_decay,
    }
    for name, amount in not_negative.items():
        if not (isfinite(amount) and amount >= 0):
            raise ValueError(f"{name} is {amount:g} and must be 0 or more")
    shares = {
        "optimizer.momentum": optimizer.momentum,
        **{f"optimizer.betas {number}": beta for number, beta in enumerate(optimizer.betas, 1)},
    }
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name} is {share:g} and must be from 0 to below 1")
    for number in (*plan.machines.gpus, *plan.placement.host_order):
        if not 0 <= number < LARGEST_CLUSTER:
            raise ValueError(f"gpus and host_order count from 0, and {number} is among them")
    if cadence.copy_every.unit != "steps":
        raise ValueError(f"copy_every is counted in {cadence.copy_every.unit} and must be in steps")
    _check_sums(plan)


def _counts(plan: Plan) -> Iterator[tuple[str, int, int, int]]:
    """Each count with its name, and the least and most that it may be."""
    job, placement, cadence = plan.job, plan.placement, plan.cadence
    layout = placement.layout
    yield from ((f"layout.{axis}", degree, 1, LARGEST_CLUSTER) for axis, degree in layout.degrees.items())
    yield "the layout's number of ranks", layout.world_size, 1, LARGEST_CLUSTER
    yield "threads", placement.threads, 1, _MOST
    yield "batch_sequences", job.batch_sequences, 1, _MOST
    yield "micro_sequences", placement.micro_sequences, 1, _MOST
    yield "steps", job.steps, 1, _MOST
    yield "checkpoint_keep", cadence.checkpoint_keep, 1, _MOST
    yield "report_every_steps", cadence.report_every_steps, 1, _MOST
    yield "evaluate_every_steps", cadence.evaluate_every_steps, 0, _MOST
    yield "balance_every_steps", cadence.balance_every_steps, 0, _MOST
    yield "optimizer.warmup_steps", job.optimizer.warmup_steps, 0, _MOST
    yield "sequence", job.sequence, 1, job.shape.sequence
    yield "copy_bytes", cadence.copy_bytes, 0, 10**18
    for stage, layers in enumerate(layout.stage_layers, 1):
        yield f"layout.stage_layers {stage}", layers, 1, job.shape.layers
    for part, share in enumerate(placement.shares, 1):
        yield f"shares {part}", share, 1, job.batch_sequences
    for part, most in enumerate(placement.micro_limits, 1):
        yield f"micro_limits {part}", most, 1, _MOST
    for number, host in enumerate(plan.machines.hosts, 1):
        yield f"hosts {number}: workers", host.workers, 1, LARGEST_CLUSTER
        yield f"hosts {number}: threads", host.threads, 1, LARGEST_CLUSTER


def _amounts(plan: Plan) -> Iterator[tuple[str, float | None]]:
    """Values that must be above 0 if they are given."""
    yield "budget", plan.job.budget.value
    yield "optimizer.clip", plan.job.optimizer.clip
    yield "step_s", plan.step_s
    yield "peak_flops", plan.machines.peak_flops
    yield "matmul_flops", plan.arithmetic.matmul_flops
    for name, every in (("checkpoint_every", plan.cadence.checkpoint_every), ("copy_every", plan.cadence.copy_every)):
        if every.value != 0:
            yield name, every.value
        yield f"{name}.cost_share", every.cost_share
    if forecast := plan.forecast:
        yield "forecast.step_s", forecast.step_s
        yield "forecast.one_device_step_s", forecast.one_device_step_s


def _check_sums(plan: Plan) -> None:
    """Check that stages add up to the model, shares to the batch and hosts to the ranks."""
    layout, replicas = plan.placement.layout, plan.placement.layout.data_parallel_degree
    if plan.job.batch_sequences < replicas:
        raise ValueError(f"batch_sequences is {plan.job.batch_sequences} for {replicas} data-parallel ranks")
    sums = {
        "shares": (sum(plan.placement.shares), plan.job.batch_sequences, "batch_sequences"),
        "layout.stage_layers": (sum(layout.stage_layers), plan.job.shape.layers, "the model's layers"),
        "hosts": (sum(host.workers for host in plan.machines.hosts), layout.world_size, "the layout's ranks"),
    }
    given = {"shares": plan.placement.shares, "layout.stage_layers": layout.stage_layers, "hosts": plan.machines.hosts}
    for name, (found, wanted, what) in sums.items():
        if given[name] and found != wanted:
            raise ValueError(f"{name} add up to {found}, and {what} are {wanted}")
    for name, numbers in (("shares", plan.placement.shares), ("micro_limits", plan.placement.micro_limits)):
        if numbers and len(numbers) != replicas:
            raise ValueError(f"{name} are {len(numbers)} numbers for {replicas} data-parallel ranks")
    stages = len(layout.stage_layers) or 1
    if stages % layout.pipeline:
        raise ValueError(f"layout.stage_layers has {stages} stages for a pipeline of {layout.pipeline} ranks")
