"""The strands of a program under a layout."""

from __future__ import annotations

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.description import CustomLayout, StrandChoices
from plait.custom.strands.program_strands import Strands, local_strands
from plait.custom.strands.recompute import recompute_units

DEFAULT_CHOICES = StrandChoices()


def make_strands(
    program: Program, workers: Workers, layout: CustomLayout, choices: StrandChoices = DEFAULT_CHOICES
) -> Strands:
    """Spread a program's weights; every worker must call it. "shard parameters" changes the modules themselves.

    Raises PlaitError where the layout cannot carry this program exactly.
    """
    recompute_units(program, choices)
    if workers.size == 1:
        return local_strands(program, workers)
    if layout != "shard parameters":
        from plait.custom.strands.replicated import replicated_strands

        return replicated_strands(program, workers, choices, "whole" if layout == "replicate" else "cut")
    from plait.custom.strands.sharded_parameters import sharded_parameter_strands  # most of a second of imports

    return sharded_parameter_strands(program, workers, choices)
