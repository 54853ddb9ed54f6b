"""Copies of the workers' state in their hosts' memory: how many bytes, after how many steps, and whether they fit."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from plait.model.weights import trained_parameter_count
from plait.planner.calibration.constants import constant
from plait.planner.plan import Plan
from plait.recipe.schema import RecoverSection
from plait.units import NEVER, Every, counted, format_bytes, format_duration

COPIES = 3
"""The newest whole one, the one that is made next, and one that is being saved."""
COST_SHARE = 0.02
"""Largest share of the time that copies and saving may take together by default."""
COPIES_SHARE = 0.01
"""The part of it that is left for copies where saving takes its own."""
COPY_RATE = constant("state_copy_rate")


def with_copies_reasoned(asked: RecoverSection, plan: Plan, hosts: int) -> Plan:
    """The plan with copies of the state, as `with_copies` says, and with the reason for them."""
    chosen, reason = with_copies(asked, plan, hosts)
    return replace(chosen, reasons=(*plan.reasons, reason)) if reason else chosen


def with_copies(asked: RecoverSection, plan: Plan, hosts: int) -> tuple[Plan, str]:
    """The plan with copies of the state as the recipe asks for them, and the reason for what was chosen, if anything
    was; `hosts` have about as many workers each."""
    nbytes = copy_bytes(plan, hosts)
    without = _with_copies_every(plan, NEVER, 0)
    if asked.mode == "never" or asked.state_every == "never":
        return without, ""
    if reason := why_none(plan, hosts, COPIES * nbytes):
        return without, reason
    if asked.state_every != "auto":
        return _with_copies_every(plan, Every(asked.state_every, "steps"), COPIES * nbytes), ""
    copy_s, step_s = nbytes / COPY_RATE, plan.step_s or (plan.forecast.step_s if plan.forecast else None)
    every = max(1, ceil(copy_s / (COPIES_SHARE * step_s))) if step_s else 1
    cost = f", {copy_s / (copy_s + every * step_s):.1%} of the time by forecast" if step_s else ""
    return _with_copies_every(plan, Every(every, "steps", COST_SHARE), COPIES * nbytes), (
        f"each worker's state is copied into memory that outlives it, every {counted(every, 'step', ',')} or as "
        f"measured ({COPIES} copies of {format_bytes(nbytes)} a worker; {format_duration(copy_s)} each{cost}): at most "
        "that many steps are lost when one dies (recover.state_every)"
    )


def _with_copies_every(plan: Plan, every: Every, nbytes: int) -> Plan:
    return replace(plan, cadence=replace(plan.cadence, copy_every=every, copy_bytes=nbytes))


def copy_bytes(plan: Plan, hosts: int) -> int:
    """Bytes of one worker's part of a copy: weights that learn and their moments, in float32, spread over the workers
    of its host; a host holds all that its own workers need."""
    layout = plan.placement.layout
    state = 4 * (trained_parameter_count(plan.job.shape) + plan.job.optimizer.state_numbers(plan.job.shape))
    parts = layout.pipeline * layout.tensor * layout.shard
    beside = max(1, layout.world_size // hosts)
    return ceil(state * min(1.0, beside / parts) / beside)


def why_none(plan: Plan, hosts: int, nbytes: int) -> str:
    """Why a worker's copies of this many bytes do not fit its host's memory; empty if they do, or if that is unknown.

    GPUs' hosts are not known to a plan: there the workers look when the first copy is due."""
    memory = plan.machines.fingerprint.get("memory_bytes")
    if plan.machines.device != "cpu" or plan.forecast is None or not isinstance(memory, int | float):
        return ""
    beside = max(1, plan.placement.layout.world_size // hosts)
    left = memory - beside * plan.forecast.bytes_per_device
    if beside * nbytes <= left:
        return ""
    return (
        f"the state is not copied into memory: {COPIES} copies need {format_bytes(beside * nbytes)} beside "
        f"{counted(beside, 'worker')}, and {format_bytes(max(0.0, left))} are left; a worker's death costs the steps "
        "since the newest checkpoint"
    )
