"""Chooses the layout of a user's modules for "auto", checks which are possible, and builds it."""

from __future__ import annotations

from typing import Literal, get_args

from plait.accelerator import is_accelerator, module_of
from plait.custom.exact_norm.batch_norm import announce_norms
from plait.custom.group import Workers
from plait.custom.layouts.description import CustomLayout, LayoutChoices, update_unit
from plait.custom.layouts.parallel_program import ParallelProgram, local_program
from plait.custom.layouts.units import recompute_units
from plait.custom.likeness import Kinds
from plait.custom.program import Program, parameters_of
from plait.errors import PlaitError
from plait.units import format_bytes

RequestedLayout = Literal["auto", "replicate", "shard optimizer", "shard parameters"]
MEMORY_SHARE = 0.5
"""Share of a GPU that weights, gradients and the optimizer's state may take before they are sharded."""
DEFAULT_CHOICES = LayoutChoices()


def choose_layout(
    requested: RequestedLayout, program: Program, workers: Workers, kinds: Kinds = "alike"
) -> tuple[CustomLayout, str]:
    """The layout and the reason for it; raises PlaitError for one that there is not."""
    if requested in ("replicate", "shard optimizer", "shard parameters"):
        return requested, "as asked"
    if requested != "auto":
        raise PlaitError(
            f'layout = "{requested}" is not possible for modules of your own; choose "auto", '
            + ", ".join(f'"{name}"' for name in get_args(CustomLayout))
            + "; tensor, pipeline and context parallelism need plait's own models (plait train)"
        )
    units = {update_unit(optimizer) for optimizer in program.optimizers}
    if kinds != "alike" and "whole weights" in units and "unknown" not in units:
        return "shard optimizer", "one worker updates each weight, as unlike devices would round its update differently"
    if workers.size == 1 or not is_accelerator(workers.device):
        return "replicate", "it sends least, and the weights fit" if workers.size > 1 else "one process"
    weights = sum(parameter.nbytes for parameter in program.named_parameters().values())
    trained = sum(p.nbytes for optimizer in program.optimizers for p in parameters_of(optimizer) if p.requires_grad)
    needed, room = weights + 3 * trained, module_of(workers.device).get_device_properties(workers.device).total_memory
    text = f"weights, gradients and two moments need {format_bytes(needed)} of {format_bytes(room)}"
    if needed <= MEMORY_SHARE * room:
        return "replicate", text
    if "unknown" in units:
        return "replicate", f"{text}, and the optimizer needs whole weights"
    if weights + trained + 2 * trained / workers.size <= MEMORY_SHARE * room:
        return "shard optimizer", text
    return "shard parameters", text


def parallelize_program(
    program: Program, workers: Workers, layout: CustomLayout, choices: LayoutChoices = DEFAULT_CHOICES
) -> ParallelProgram:
    """Spread a program's weights; every worker must call it. "shard parameters" changes the modules themselves.

    Raises PlaitError where the layout cannot carry this program exactly.
    """
    recompute_units(program, choices)
    if workers.size == 1:
        return local_program(program, workers)
    if announce_norms(program.prefixed_models(), workers.order) or layout == "shard parameters":
        # A GPU waits by itself.
        workers.order.follow(workers.rank, workers.size, "at once" if workers.device.type == "cpu" else "at the end")
    if layout != "shard parameters":
        from plait.custom.layouts.replicated import replicated_program

        return replicated_program(program, workers, choices, "whole" if layout == "replicate" else "cut")
    from plait.custom.layouts.sharded_parameters import sharded_program  # most of a second of imports

    return sharded_program(program, workers, choices)
