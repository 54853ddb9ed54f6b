"""What a worker of a person's program and plait's launcher tell each other: where its program and the other workers
are, what is saved, and whether this is the first start."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

from plait.errors import PlaitError

RENDEZVOUS = "PLAIT_RENDEZVOUS"
"""The workers' meeting point, as in `parallel.mesh.open_store`; their numbers are in torchrun's variables."""
PROGRAM_VARIABLE = "PLAIT_PROGRAM"
"""The path of the program file on the worker's own host: no message names a path or carries code."""
MODULE_VARIABLE = "PLAIT_PROGRAM_MODULE"
"""The name of the module that the program is, where its user named a module and not a file."""
SAVED, RESUMED = "saved", "resumed"
"""Kinds of the messages of rank 0, whose "folder" and "step" say where a state of the program is."""
LESS_MEMORY = 'take a smaller batch, accumulate=, layout="shard parameters" or recompute="full"'
"""Advice for a program whose workers need too much memory."""


class Launcher:
    """The launcher of this process, as seen by the runs of its program. `saved_in` is the folder of the latest save
    by an earlier start of the program, "" in the first start; without `send`, messages go nowhere."""

    def __init__(self, send: Callable[..., None] | None = None, saved_in: str = "") -> None:
        self._send, self._saved_in = send, saved_in

    def note_call(self, call: str) -> None:
        """Note that the program calls a method of its run. Raises PlaitError where a restarted program takes a step
        before it has resumed: it would train from scratch and overwrite the earlier save."""
        if call == "run.resume":
            self._saved_in = ""
        elif call == "run.step" and self._saved_in:
            raise PlaitError(
                "this program was started again after a failure, and takes a step before it calls run.resume, so that "
                f"it would train from scratch and overwrite what is in {self._saved_in}; call "
                f'run.resume("{self._saved_in}", missing="begin") before run.batches'
            )

    def tell(self, kind: str, folder: Path, step: int) -> None:
        """Tell the launcher that the state after a step was saved in a folder, or resumed from there."""
        if self._send is not None:
            self._send(kind, folder=str(folder), step=step)


LAUNCHER: ContextVar[Launcher] = ContextVar("LAUNCHER", default=Launcher())  # noqa: B039  never changed
"""The launcher of the program that runs in this process; `plait.spread` looks it up."""
