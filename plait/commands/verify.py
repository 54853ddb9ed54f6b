"""`plait verify`: proves that a layout computes what one plain process computes, on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.preparing.base import base_facts
from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.on_device import check_on_device, shares_text
from plait.commands.verifying.small_model import requested_layout, requested_shares, shrunk_plan
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.machine import usable_cores
from plait.planner.derive.hyperparameters import optimizer_kind
from plait.planner.plan import Plan
from plait.planner.resolve.named import named_workers
from plait.planner.search.validity import check_devices
from plait.probing.survey import resources_of, survey_machine
from plait.proof import BF16_TRANSFER_TOLERANCES, Verdict
from plait.recipe.load import RecipeSource, load_recipe
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted
from plait.workers import WorkerPool, serve_under_torchrun, worker_pool
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


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
    kind = optimizer_kind(config, flops=0, muon_cost=0, is_trained=base is not None)
    plan = shrunk_plan(config, shape, layout, requested_shares(config), kind)
    with worker_pool(working) as workers:
        _check_torchrun_workers(layout, workers)
        if where == "anywhere":
            screen.print(verification_start(plan, usable_cores()))
            verdict = check_gradients(config, plan, workers)
            if verdict.ok and config.optimizer.kind == "auto" and kind != "adamw":  # what a longer run takes
                other = shrunk_plan(config, shape, layout, requested_shares(config), "adamw")
                verdict = verdict.joined(check_gradients(config, other, workers))
            if verdict.ok and config.train.gradient_transfer == "bf16":
                verdict = _check_rounded(config, plan, workers, screen)
            verdict = replace(verdict, exception=_left_out(config))
        else:
            resources = resources_of(survey_machine(workers, named_workers(config)), workers)
            check_devices(layout, resources.machine)
            verdict = check_on_device(config, plan, resources, workers, screen)
    screen.print(str(verdict))
    if json_file is not None:
        write_output_file(json_file, verdict.to_json())
    return verdict


def verification_start(plan: Plan, cores: int) -> str:
    """The comparison that is about to start, on a machine with this many cores."""
    workers = plan.placement.layout.world_size
    turns = f" taking turns on {counted(cores, 'core')}" if workers > cores else ""
    doing = f"{counted(workers, 'gloo worker')}{turns} in float64, against one plain process"
    return f"layout   {plan.placement.layout}{shares_text(plan)}: {doing}"


def _check_rounded(config: RunConfig, plan: Plan, workers: WorkerPool, screen: Screen) -> Verdict:
    """The proof once more with gradients that travel in the recipe's precision; exact but for their rounding."""
    screen.print("         exact where gradients travel whole; now as bfloat16, which changes the numbers")
    rounded = replace(plan, arithmetic=replace(plan.arithmetic, gradient_transfer="bf16"))
    return check_gradients(config, rounded, workers, scope="gradients", tolerances=BF16_TRANSFER_TOLERANCES)


def _left_out(config: RunConfig) -> str:
    """The limit of a proof with exact messages: it excludes the rounding of what a recipe sends in 16 bits."""
    train = config.train
    sent = {"gradients": train.gradient_transfer, "the stream between stages": train.stage_transfer}
    rounded = " and of ".join(name for name, numbers in sent.items() if numbers == "bf16")
    return f"but for the rounding of {rounded} on their way" if rounded else ""


def _check_torchrun_workers(layout: Layout, workers: WorkerPool) -> None:
    if workers.fixed_workers is not None and workers.fixed_workers.workers != layout.world_size:
        raise PlaitError(
            f"the launcher started {workers.fixed_workers.workers} workers and the layout needs {layout.world_size}; "
            f"start {layout.world_size} (torchrun: --nproc-per-node), or verify without a launcher"
        )
