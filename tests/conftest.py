"""What holds for all tests: full names for what stands beside them, signals that are heeded, one thread for torch."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

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


def pytest_collection_finish() -> None:
    """Two parts run side by side, and threads of torch that wait for each other on full cores take minutes."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
