"""Signals arrive wherever the kernel brings them."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.errors import StopSignal
from plait.launch.local.signals import REPEAT_S, StopRequests, collected_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


@pytest.mark.parametrize(
    ("signals", "new"),
    [
        ([("SIGTERM", 0.0), ("SIGTERM", 0.0)], [True, False]),
        ([("SIGINT", 0.0), ("SIGINT", 0.9 * REPEAT_S)], [True, False]),
        ([("SIGINT", 0.0), ("SIGINT", 1.1 * REPEAT_S)], [True, True]),
        ([("SIGINT", 0.0), ("SIGTERM", 0.0)], [True, True]),
        ([("SIGHUP", 0.0), ("SIGTERM", 0.5 * REPEAT_S)], [True, False]),
        ([("SIGHUP", 0.0), ("SIGTERM", 1.1 * REPEAT_S)], [True, True]),
        ([("SIGINT", 0.0), ("SIGHUP", 30.0), ("SIGHUP", 60.0)], [True, False, False]),
    ],
)
def test_what_repeats_a_request_to_stop_is_none_of_its_own(
    signals: Sequence[tuple[StopSignal, float]], new: Sequence[bool]
) -> None:
    now = 0.0
    requests = StopRequests(clock=lambda: 1000.0 + now)
    found = []
    for name, now in signals:  # noqa: B007 the clock reads it
        found.append(requests.is_new(name))
    assert found == new


def test_a_program_that_a_test_starts_heeds_signals() -> None:
    code = "import signal; print(signal.SIG_IGN in map(signal.getsignal, (signal.SIGINT, signal.SIGHUP)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.slow
def test_so_it_does_where_the_tests_themselves_were_started_with_signals_ignored() -> None:
    """As in `make test &` in a script, and under nohup."""
    test = f"{__file__}::{test_a_program_that_a_test_starts_heeds_signals.__name__}"
    command = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", sys.executable, "-m", "pytest", test]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
