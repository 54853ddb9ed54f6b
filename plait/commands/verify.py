"""`plait verify`: proves that a layout computes what one plain process computes, on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.cluster.topology import usable_cores
from plait.commands.planning.measuring import resources_of, survey_machine
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.planning.workers import WorkerPool, serve_under_torchrun, worker_pool
from plait.commands.preparing.base import base_facts
from plait.commands.verifying.gradient_check import check_gradients, summation_order_noise
from plait.commands.verifying.small_model import plan_for_device, requested_layout, requested_shares, shrunk_plan
from plait.errors import PlaitError
from plait.layout import Layout
from plait.planner.derive.compile_mode import compile_of
from plait.planner.derive.resources import Resources
from plait.planner.derive.training_job import matmul_backend_of, matmul_precision_of, precision_of
from plait.planner.plan import Plan
from plait.planner.resolve.named_workers import named_workers
from plait.planner.search.validity import check_devices
from plait.proof.verdict import BF16_TRANSFER_TOLERANCES, FLOAT32_TOLERANCES, Verdict
from plait.recipe.load import RecipeSource, load_recipe
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

NOISE_FACTOR = 4.0
"""A layout's gradients may differ by this many times the difference between two runs on one device that only add in
another order."""


def verify(
    recipe: RecipeSource,
    overrides: Sequence[str] = (),
    *,
    where: Literal["anywhere", "here"] = "anywhere",
    json_file: Path | None = None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Verdict | None:
    """Prove a recipe's layout, print the verdict and return it; None under torchrun on all ranks but 0.

    "anywhere": in float64 on as many gloo ranks as it needs. "here": on this machine's devices, first in float32, then
    in the run's own precision. Raises PlaitError, before a worker computes, for an impossible layout.
    """
    if serve_under_torchrun():
        return None
    check_output_file(json_file)
    config = load_recipe(recipe, overrides)
    base = base_facts(config, working)
    shape, layout = requested_layout(config, base.shape if base else None)
    plan = shrunk_plan(config, shape, layout, requested_shares(config))
    with worker_pool(working) as workers:
        _check_torchrun_workers(layout, workers)
        if where == "anywhere":
            screen.print(verification_start(plan, usable_cores()))
            verdict = check_gradients(config, plan, workers)
            if verdict.ok and config.train.gradient_transfer == "bf16":
                verdict = _check_rounded(config, plan, workers, screen)
        else:
            resources = resources_of(survey_machine(workers, named_workers(config)), workers)
            check_devices(layout, resources.machine)
            verdict = _check_here(config, plan, resources, workers, screen)
    screen.print(str(verdict))
    if json_file is not None:
        write_output_file(json_file, verdict.to_json())
    return verdict


def verification_start(plan: Plan, cores: int) -> str:
    """What is about to be compared, on a machine with so many cores."""
    workers = plan.layout.world_size
    turns = f" taking turns on {cores} core{'s' if cores > 1 else ''}" if workers > cores else ""
    doing = f"{workers} gloo worker{'s' if workers > 1 else ''}{turns} in float64, beside one plain process"
    return f"layout   {plan.layout}{_shares_text(plan)}: {doing}"


def _check_rounded(config: RunConfig, plan: Plan, workers: WorkerPool, screen: Screen) -> Verdict:
    """The proof once more with gradients that travel in the recipe's precision; exact but for their rounding."""
    screen.print("         exact where gradients travel whole; now as bfloat16, which changes the numbers")
    rounded = replace(plan, gradient_transfer="bf16")
    verdict = check_gradients(config, rounded, workers, scope="gradients", tolerances=BF16_TRANSFER_TOLERANCES)
    return replace(verdict, exception="but for the rounding of gradients on their way")


def _check_here(config: RunConfig, plan: Plan, resources: Resources, workers: WorkerPool, screen: Screen) -> Verdict:
    """The worse of two verdicts: in float32 without shortcuts, and as the run itself computes."""
    machine = resources.machine
    plan = replace(plan, gpus=machine.gpus)
    single = plan_for_device(plan, machine.device, "float32")
    text = f"{plan.layout}{_shares_text(plan)} on {plan.world_size} × {machine.name}, in float32"
    screen.print(f"layout   {text}")
    strict = check_gradients(config, single, workers, scope="gradients", tolerances=FLOAT32_TOLERANCES)
    precision = precision_of(config, resources, [])
    own = replace(
        plan_for_device(plan, machine.device, precision),
        compile=compile_of(config, resources.machines, []),
        matmul_precision=matmul_precision_of(precision, resources, []),
        matmul_backend=matmul_backend_of(config, resources),
    )
    if not strict.ok or own == single:
        return strict
    noise = summation_order_noise(config, own, workers)
    compiled = ", compiled" if own.compile == "blocks" else ""
    screen.print(f"         float32 agrees to {strict.largest('gradient', 'sums'):.0e}")
    screen.print(
        f"         in {precision}{compiled} two runs on one device differ by {noise:.0e}; "
        f"the layout may differ by {NOISE_FACTOR * noise:.0e}",
    )
    allowed = replace(FLOAT32_TOLERANCES, gradient=max(FLOAT32_TOLERANCES.gradient, NOISE_FACTOR * noise))
    return check_gradients(config, own, workers, scope="gradients", tolerances=allowed)


def _check_torchrun_workers(layout: Layout, workers: WorkerPool) -> None:
    if workers.fixed_workers is not None and workers.fixed_workers.workers != layout.world_size:
        raise PlaitError(
            f"torchrun started {workers.fixed_workers.workers} workers and the layout needs {layout.world_size}; "
            f"start torchrun with --nproc-per-node {layout.world_size}, or verify without torchrun"
        )


def _shares_text(plan: Plan) -> str:
    return f" with shares of {' + '.join(map(str, plan.shares))} sequences" if plan.shares else ""
