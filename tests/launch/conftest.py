"""A fork server for all tests that need torch in their ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.launch.local.run import ForkServer
from tests.launch.processes import WITH_TORCH


@pytest.fixture(scope="session")
def torch_server() -> Iterator[ForkServer]:
    with ForkServer(WITH_TORCH, threads=1) as server:
        yield server
