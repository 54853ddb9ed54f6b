"""A look at the screen now and then, from a thread of its own: whoever is being waited for may say nothing for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

TICK_S = 1.0


@contextmanager
def ticking(look: Callable[[], None], every_s: float = TICK_S) -> Iterator[None]:
    """While the block lasts, call `look` every so many seconds."""
    over = Event()

    def run() -> None:
        while not over.wait(every_s):
            look()

    thread = Thread(target=run, name="screen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
