"""Signals arrive wherever the kernel brings them."""

from __future__ import annotations

import select
import signal
import threading

import pytest

from plait.launch.local.signals import collected_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_another_thread_gets_wakes_who_waits(number: signal.Signals) -> None:
    """So it is with the second of two in a row, while the main thread still has the first at hand."""
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    assert other.ident is not None
    before = signal.getsignal(number)
    try:
        with collected_signals() as mailbox:
            threading.Timer(0.2, signal.pthread_kill, (other.ident, number)).start()
            ready, _, _ = select.select([mailbox.wire], [], [], 20)
            assert ready and mailbox.read() == [number.name]
            assert mailbox.read() == []
    finally:
        done.set()
        other.join()
    assert signal.getsignal(number) is before and signal.set_wakeup_fd(-1) == -1
