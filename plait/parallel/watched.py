"""Reports what this process does in a step, and when, to a recorder. By default there is none.

Note [one watch]: ranks are processes, and a process has one set of process groups, one stream of steps and so one
WATCH. Code that computes a pass, begins a message or waits for one reports it here, as in `with WATCH.work("forward"):
…`. Without a recorder, that costs an attribute look-up and an empty context: less than a microsecond, a few dozen times
per step. No hook is installed anywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from plait.report.step_timeline import MessageKind, StepWork

_UNWATCHED = nullcontext()


class PendingSpan(Protocol):
    """A message that is under way."""

    def end(self) -> None:
        """The result has arrived, and the rank continues."""
        ...


class SpanRecorder(Protocol):
    """Records what a process does."""

    def work(self, kind: StepWork, *, stage: int, micro: int) -> AbstractContextManager[object]:
        """A block of work."""
        ...

    def wait(self, kind: MessageKind) -> AbstractContextManager[object]:
        """A block in which the rank waits for others."""
        ...

    def message(self, kind: MessageKind, n_bytes: int) -> PendingSpan:
        """A message that begins now."""
        ...


class StepWatch:
    """Forwards events to `recorder`, if there is one; see Note [one watch]."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: SpanRecorder | None = None

    def work(self, kind: StepWork, *, stage: int = -1, micro: int = -1) -> AbstractContextManager[object]:
        """The block is work of this kind."""
        return _UNWATCHED if self.recorder is None else self.recorder.work(kind, stage=stage, micro=micro)

    def wait(self, kind: MessageKind, pending: PendingSpan | None = None) -> AbstractContextManager[object]:
        """The block waits for a message. At its end, `pending`, which `begin` returned, ends too."""
        if self.recorder is None:
            return _UNWATCHED
        return _Wait(self.recorder.wait(kind), pending)

    def begin(self, kind: MessageKind, *sent: Tensor) -> PendingSpan | None:
        """A message begins, and a later `wait` ends it; None while nothing is recorded."""
        if self.recorder is None:
            return None
        return self.recorder.message(kind, sum(tensor.nbytes for tensor in sent))

    def exchange(self, kind: MessageKind, *sent: Tensor) -> AbstractContextManager[object]:
        """The block sends and waits, as a blocking sum does."""
        return _UNWATCHED if self.recorder is None else self.wait(kind, self.begin(kind, *sent))


class _Wait:
    """A wait, and the pending message that ends with it."""

    def __init__(self, inner: AbstractContextManager[object], pending: PendingSpan | None) -> None:
        self._inner, self._pending = inner, pending

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(None, None, None)
        if self._pending is not None:
            self._pending.end()


WATCH = StepWatch()
