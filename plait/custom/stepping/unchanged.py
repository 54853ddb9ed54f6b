"""Whether the models are still those that were spread: layers that a program adds or replaces later would train
alone."""

from __future__ import annotations

from plait.custom.program import Program
from plait.custom.strands.description import Strands
from plait.errors import PlaitError

EVERY_STEPS = 50
"""Steps between two looks, beside one after the first step."""


class ModelWatch:
    """Knows the parameters that a program began with."""

    def __init__(self, program: Program) -> None:
        self._program, self._names = program, list(program.named_parameters())

    def look(self, strands: Strands, step: int) -> None:
        """Now and then, raise PlaitError where parameters have come, gone or been replaced; `step` counts from 0."""
        if step != 1 and step % EVERY_STEPS:
            return
        now = self._program.named_parameters()
        changed = sorted(set(now) ^ set(self._names))
        if not changed and strands.form == "whole":
            pieces = [piece for index in range(len(self._program.optimizers)) for piece in strands.pieces(index)]
            changed = [piece.name for piece in pieces if now[piece.name] is not piece.parameter]
        if changed:
            raise PlaitError(
                f"{changed[0]} has been added, removed or replaced since plait.spread: the other workers and the "
                "optimizer do not know of it; change the model first, and call plait.spread then"
            )
