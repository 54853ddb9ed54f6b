"""Whether a plan that was read can be carried out: somebody else may have written it, or edited it by hand."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from plait.layout import LARGEST_CLUSTER
from plait.planner.plan import Plan

_MOST = 10**12
"""Sequences of a step, and steps: above every run that anybody has published."""
_COUNTS = {
    "threads": 1, "batch_sequences": 1, "micro_sequences": 1, "steps": 1, "checkpoint_keep": 1, "report_every_steps": 1,
    "evaluate_every_steps": 0, "balance_every_steps": 0,
}  # fmt: skip
"""The least that each may be."""


def check_plan(plan: Plan) -> None:
    """Raise ValueError, with the field's name, for numbers that no run can have, or that do not fit together."""
    for name, count, least, most in _counts(plan):
        if not least <= count <= most:
            raise ValueError(f"{name} is {count} and must be {least} or more, at most {most:,}")
    for name, amount in _amounts(plan):
        if amount is not None and not (isfinite(amount) and amount > 0):
            raise ValueError(f"{name} is {amount:g} and must be more than 0")
    if not (isfinite(plan.checkpoint_keep_s) and plan.checkpoint_keep_s >= 0):
        raise ValueError(f"checkpoint_keep_s is {plan.checkpoint_keep_s:g} and must be 0 or more")
    for name, amount in (("lr", plan.optimizer.lr), ("weight_decay", plan.optimizer.weight_decay)):
        if not (isfinite(amount) and amount >= 0):
            raise ValueError(f"optimizer.{name} is {amount:g} and must be 0 or more")
    shares = {
        "optimizer.momentum": plan.optimizer.momentum,
        **{f"optimizer.betas {number}": beta for number, beta in enumerate(plan.optimizer.betas, 1)},
    }
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name} is {share:g} and must be from 0 to below 1")
    for number in (*plan.gpus, *plan.host_order):
        if not 0 <= number < LARGEST_CLUSTER:
            raise ValueError(f"gpus and host_order count from 0, and {number} is among them")
    if plan.copy_every.unit != "steps":
        raise ValueError(f"copy_every is counted in {plan.copy_every.unit} and must be in steps")
    _check_sums(plan)


def _counts(plan: Plan) -> Iterator[tuple[str, int, int, int]]:
    """Each count with its name, and the least and most that it may be."""
    yield from ((f"layout.{axis}", degree, 1, LARGEST_CLUSTER) for axis, degree in plan.layout.degrees.items())
    yield "the layout's number of ranks", plan.layout.world_size, 1, LARGEST_CLUSTER
    yield from ((name, getattr(plan, name), least, _MOST) for name, least in _COUNTS.items())
    yield "optimizer.warmup_steps", plan.optimizer.warmup_steps, 0, _MOST
    yield "sequence", plan.sequence, 1, plan.shape.sequence
    yield "copy_bytes", plan.copy_bytes, 0, 10**18
    for stage, layers in enumerate(plan.layout.stage_layers, 1):
        yield f"layout.stage_layers {stage}", layers, 1, plan.shape.layers
    for part, share in enumerate(plan.shares, 1):
        yield f"shares {part}", share, 1, plan.batch_sequences
    for part, most in enumerate(plan.micro_limits, 1):
        yield f"micro_limits {part}", most, 1, _MOST
    for number, host in enumerate(plan.hosts, 1):
        yield f"hosts {number}: workers", host.workers, 1, LARGEST_CLUSTER
        yield f"hosts {number}: threads", host.threads, 1, LARGEST_CLUSTER


def _amounts(plan: Plan) -> Iterator[tuple[str, float | None]]:
    """What must be above 0 where it is given."""
    yield "budget", plan.budget.value
    yield "optimizer.clip", plan.optimizer.clip
    yield from ((name, getattr(plan, name)) for name in ("step_s", "peak_flops", "matmul_flops"))
    if plan.checkpoint_every.value != 0:
        yield "checkpoint_every", plan.checkpoint_every.value
    yield "checkpoint_every.cost_share", plan.checkpoint_every.cost_share
    if plan.copy_every.value != 0:
        yield "copy_every", plan.copy_every.value
    yield "copy_every.cost_share", plan.copy_every.cost_share
    if forecast := plan.forecast:
        yield "forecast.step_s", forecast.step_s
        yield "forecast.one_device_step_s", forecast.one_device_step_s


def _check_sums(plan: Plan) -> None:
    """What the parts of a whole come to."""
    layout, replicas = plan.layout, plan.layout.data_parallel_degree
    if plan.batch_sequences < replicas:
        raise ValueError(f"batch_sequences is {plan.batch_sequences} for {replicas} data-parallel ranks")
    sums = {
        "shares": (sum(plan.shares), plan.batch_sequences, "batch_sequences"),
        "layout.stage_layers": (sum(layout.stage_layers), plan.shape.layers, "the model's layers"),
        "hosts": (sum(host.workers for host in plan.hosts), layout.world_size, "the layout's ranks"),
    }
    given = {"shares": plan.shares, "layout.stage_layers": layout.stage_layers, "hosts": plan.hosts}
    for name, (found, wanted, what) in sums.items():
        if given[name] and found != wanted:
            raise ValueError(f"{name} add up to {found}, and {what} are {wanted}")
    for name, numbers in (("shares", plan.shares), ("micro_limits", plan.micro_limits)):
        if numbers and len(numbers) != replicas:
            raise ValueError(f"{name} are {len(numbers)} numbers for {replicas} data-parallel ranks")
    stages = len(layout.stage_layers) or 1
    if stages % layout.pipeline:
        raise ValueError(f"layout.stage_layers has {stages} stages for a pipeline of {layout.pipeline} ranks")
