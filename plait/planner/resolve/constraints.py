"""What a recipe settles of the layout, as the planner's search takes it."""

from __future__ import annotations

from plait.planner.search.enumeration import Pins
from plait.planner.search.validity import named_degrees
from plait.recipe.schema import RunConfig


def pins_of(config: RunConfig) -> Pins:
    """What the recipe's [layout] settles."""
    asked = config.layout
    named = {
        "virtual": asked.virtual_stages,
        "schedule": asked.schedule,
        "recompute": asked.recompute,
        "shard_what": asked.shard_what,
        "micro_sequences": asked.micro_sequences,
    }
    return Pins(
        degrees=named_degrees(config),
        knobs={knob: value for knob, value in named.items() if value != "auto"},
        stage_layers=() if asked.stage_layers == "auto" else asked.stage_layers,
        shares=() if asked.shares == "auto" else asked.shares,
    )
