"""One warm fork server for all proofs of a session, and a warm process for all mutants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.launch.local.run import ForkServer
from plait.workers import ENTRIES, ForkedWorkers
from tests.warm_process import WarmProcess

TORCH = (
    "torch._dynamo", "safetensors.torch", "pydantic", "jinja2", "tokenizers", "numpy.ma",
    "transformers.models.gpt2.modeling_gpt2", "tests.parity.mutate",
)  # fmt: skip
CallMutant = Callable[..., Any]


@pytest.fixture(scope="session")
def workers() -> Iterator[ForkedWorkers]:
    with ForkServer(ENTRIES) as server:
        yield ForkedWorkers(server)


@pytest.fixture(scope="session")
def warm_torch() -> Iterator[WarmProcess]:
    process = WarmProcess(TORCH)
    yield process
    process.close()


@pytest.fixture
def call_mutant(warm_torch: WarmProcess, tmp_path: Path) -> CallMutant:
    """Call a function of mutant_proofs in plait with a patch."""

    def call(patch: Path | None, function: str, *arguments: Any) -> Any:
        order = (str(patch) if patch else None, function, *arguments)
        return warm_torch.call(tmp_path, "tests.parity.mutate:call_mutant", *order)

    return call
