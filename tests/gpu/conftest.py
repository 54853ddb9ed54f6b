"""Each test of this folder runs on the processor in `make test`, and on an NVIDIA GPU in `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from plait.launch.values.job import Job, Message
from tests.shared_ranks import RanksOf

NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The processor, or the first GPU."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


NEEDS_TWO_GPUS = (pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"))
RunRanks = Callable[[str, str, int], dict[int, dict[str, Any]]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_TWO_GPUS)])
def two_devices(request: pytest.FixtureRequest) -> str:
    """Two processes of the processor, or the first two GPUs."""
    return request.param


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    """Runs an entry of rank_entries.py on so many ranks; answers each rank's last message."""
    server = RanksOf("tests.gpu.rank_entries")

    def run(entry: str, argument: str, world_size: int) -> dict[int, dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}

        def hear(message: Message) -> None:
            told[message.rank] = dict(message.values)

        server.run(Job(entry=entry, argument=argument, world_size=world_size, threads=1), on_message=hear)
        return told

    return run


@pytest.fixture(autouse=True)
def nothing_from_before() -> Iterator[None]:
    """Compiled functions of one test say nothing in the next, and its memory on the GPU is no other program's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
