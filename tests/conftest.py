"""What holds for all tests: full names for what stands beside them, and signals that are heeded."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session", autouse=True)
def no_signal_is_ignored() -> None:
    """A shell without job control starts `make test &` with SIGINT ignored, and nohup ignores SIGHUP; what tests
    start would inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
