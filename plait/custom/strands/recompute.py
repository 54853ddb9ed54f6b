"""Units that keep only their inputs for the backward pass and run a second time in it."""

from __future__ import annotations

from plait.custom.program import Program
from plait.custom.strands.description import StrandChoices
from plait.custom.strands.units import find_units
from plait.errors import PlaitError


def recompute_units(program: Program, choices: StrandChoices) -> None:
    """Wrap each unit as the choices say, by torch's hooks: names and values stay. Random numbers are drawn as before.

    Raises PlaitError where no unit is found.
    """
    if choices.recompute == "none":
        return
    from torch.distributed._composable.checkpoint_activation import checkpoint  # most of a second of imports

    for model in program.models:
        units = find_units(model, choices.units)
        if not units:
            raise PlaitError('recompute = "full" finds no row of layers (ModuleList); name units=… or leave it out')
        for unit in units.values():
            checkpoint(unit)
