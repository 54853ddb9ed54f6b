"""`plait verify --here`: the proof on this machine's devices, in float32 and in the run's own precision."""

from __future__ import annotations

from dataclasses import replace

from plait.commands.verifying.gradient_check import check_gradients, summation_order_noise
from plait.commands.verifying.small_model import plan_for_device
from plait.planner.derive.resources import Resources
from plait.planner.derive.training_job import compile_of, matmul_backend_of, matmul_precision_of, precision_of
from plait.planner.plan import Plan
from plait.proof import FLOAT32_TOLERANCES, Verdict
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.workers import WorkerPool

NOISE_FACTOR = 4.0
"""A layout's gradients may differ by this many times the difference between two runs on one device that only add in
another order."""


def check_on_device(
    config: RunConfig, plan: Plan, resources: Resources, workers: WorkerPool, screen: Screen
) -> Verdict:
    """The worse of two verdicts: in float32 without shortcuts, and as the run itself computes."""
    machine = resources.machine
    plan = replace(plan, machines=replace(plan.machines, gpus=machine.gpus))
    single = plan_for_device(plan, machine.device, "float32")
    text = f"{plan.placement.layout}{shares_text(plan)} on {plan.world_size} × {machine.name}, in float32"
    screen.print(f"layout   {text}")
    strict = check_gradients(config, single, workers, scope="gradients", tolerances=FLOAT32_TOLERANCES)
    precision = precision_of(config, resources).value
    own = plan_for_device(plan, machine.device, precision)
    arithmetic = replace(
        own.arithmetic,
        compile=compile_of(config, resources.machines).value,
        matmul_precision=matmul_precision_of(precision, resources).value,
        matmul_backend=matmul_backend_of(config, resources),
    )
    own = replace(own, arithmetic=arithmetic)
    if not strict.ok or own == single:
        return strict
    noise = summation_order_noise(config, own, workers)
    compiled = ", compiled" if own.arithmetic.compile == "blocks" else ""
    screen.print(f"         float32 agrees to {strict.largest('gradient', 'sums'):.0e}")
    screen.print(
        f"         in {precision}{compiled} two runs on one device differ by {noise:.0e}; "
        f"the layout may differ by {NOISE_FACTOR * noise:.0e}",
    )
    allowed = replace(FLOAT32_TOLERANCES, gradient=max(FLOAT32_TOLERANCES.gradient, NOISE_FACTOR * noise))
    return check_gradients(config, own, workers, scope="gradients", tolerances=allowed)


def shares_text(plan: Plan) -> str:
    """How unequal shares are said behind a layout."""
    return f" with shares of {' + '.join(map(str, plan.placement.shares))} sequences" if plan.placement.shares else ""
