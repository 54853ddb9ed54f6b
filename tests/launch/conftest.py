"""A fork server for all tests that need torch in their ranks.

Ranks are told their entries by name, so the repository's root must be where modules are looked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.launch.local.run import ForkServer

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def torch_server() -> Iterator[ForkServer]:
    with ForkServer(preload=("torch", "torch.distributed"), threads=1) as server:
        yield server
