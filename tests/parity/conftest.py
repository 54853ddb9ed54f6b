"""One warm fork server for all proofs of a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.launch.local.run import ForkServer
from plait.workers import ENTRIES, ForkedWorkers

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def workers() -> Iterator[ForkedWorkers]:
    with ForkServer(ENTRIES) as server:
        yield ForkedWorkers(server)
