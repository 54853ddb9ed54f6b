"""Batches that a thread makes ahead, and the end of a program amid them."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

import pytest

from plait.custom.data.ahead import BatchMaker


def test_the_end_of_a_program_waits_for_the_batch_in_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread that is in torch's code when the interpreter goes aborts the process."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    made, third, may_end = [0], threading.Event(), threading.Event()

    def make(_: object) -> int:
        made[0] += 1
        if made[0] == 3:
            third.set()
            assert may_end.wait(5)
        return made[0]

    batches = BatchMaker(1, may_thread="may thread").in_turn([make] * 9)
    assert [next(batches), next(batches)] == [1, 2] and third.wait(5)
    (thread,) = (one for one in threading.enumerate() if one.name == "plait-data")
    threading.Timer(0.1, may_end.set).start()
    at_exit[0]()
    assert not thread.is_alive()
