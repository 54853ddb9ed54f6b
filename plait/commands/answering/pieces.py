"""Writes a model's words while they come."""

from __future__ import annotations

from collections.abc import Iterable

from plait.checked_json import printable
from plait.launch.local.output import OptionalOutput


def write_pieces(output: OptionalOutput, pieces: Iterable[str]) -> None:
    """The pieces and a line end; on a terminal without signs that it would obey, which a model may have learned."""
    is_terminal = output.isatty()
    for piece in pieces:
        output.write(printable(piece) if is_terminal else piece)
        output.flush()
    output.write("\n")
