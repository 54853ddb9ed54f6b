"""Calls a function every second from a separate thread, so that the screen moves while the work is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

TICK_S = 1.0


@contextmanager
def ticking(look: Callable[[], None], every_s: float = TICK_S) -> Iterator[None]:
    """Call `look` at regular intervals while the block runs."""
    over = Event()

    def run() -> None:
        while not over.wait(every_s):
            try:
                look()
            except OSError:  # a screen that cannot be written to: its owner meets that with the next line
                return

    thread = Thread(target=run, name="screen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
