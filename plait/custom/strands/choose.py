"""The strands of a program under a layout."""

from __future__ import annotations

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.description import CustomLayout, StrandChoices, Strands
from plait.custom.strands.local import LocalStrands
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
        return LocalStrands(program)
    if layout != "shard parameters":
        from plait.custom.strands.replicated import ReplicatedStrands

        return ReplicatedStrands(program, workers, choices, "whole" if layout == "replicate" else "cut")
    from plait.custom.strands.sharded_parameters import ShardedParameterStrands  # most of a second of imports

    return ShardedParameterStrands(program, workers, choices)
