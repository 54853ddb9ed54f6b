"""What this process does in a step, and when, for whoever records it: usually nobody.

Note [one watch]: ranks are processes, and a process has one set of process groups, one stream of steps and so one
WATCH. Code that computes a pass, begins a message or waits for one says so here, as `with WATCH.work("forward"): …`.
While nobody records, that is an attribute that is None and a context that does nothing: less than a microsecond, some
dozens of times in a step. No hook is installed anywhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from plait.report.step_timeline import MessageKind, StepWork

_UNWATCHED = nullcontext()


class PendingSpan(Protocol):
    """A message under way."""

    def end(self) -> None:
        """The rank goes on with its result."""
        ...


class SpanRecorder(Protocol):
    """Who records what a process does."""

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
    """Passes on what happens to `recorder`, where there is one; see Note [one watch]."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: SpanRecorder | None = None

    def work(self, kind: StepWork, *, stage: int = -1, micro: int = -1) -> AbstractContextManager[object]:
        """The block is work of this kind."""
        return _UNWATCHED if self.recorder is None else self.recorder.work(kind, stage=stage, micro=micro)

    def wait(self, kind: MessageKind, pending: PendingSpan | None = None) -> AbstractContextManager[object]:
        """The block waits for a message; with its end `pending` ends, which `begin` returned."""
        if self.recorder is None:
            return _UNWATCHED
        return _Wait(self.recorder.wait(kind), pending)

    def begin(self, kind: MessageKind, *sent: Tensor) -> PendingSpan | None:
        """A message begins, for which somebody will `wait`; None while nobody records."""
        if self.recorder is None:
            return None
        return self.recorder.message(kind, sum(tensor.nbytes for tensor in sent))

    def exchange(self, kind: MessageKind, *sent: Tensor) -> AbstractContextManager[object]:
        """The block sends and waits, as a sum does that blocks."""
        return _UNWATCHED if self.recorder is None else self.wait(kind, self.begin(kind, *sent))


class _Wait:
    """A wait, and the message that it ends."""

    def __init__(self, inner: AbstractContextManager[object], pending: PendingSpan | None) -> None:
        self._inner, self._pending = inner, pending

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(None, None, None)
        if self._pending is not None:
            self._pending.end()


WATCH = StepWatch()
