"""A small training state on two ranks, saved the way a run saves it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import TensorSlice, whole_slice, write_rank

MODEL: dict[str, object] = {"layers": 2, "width": 256, "rope_theta": 10000.0, "tied": True}


def state(step: int) -> list[dict[str, TensorSlice]]:
    """What ranks 0 and 1 hold after `step`: a weight whole, one cut into rows, a bfloat16, a scalar, each its RNG."""
    generator = torch.Generator().manual_seed(step)
    norm, wide = (torch.randn(*shape, generator=generator) for shape in ((8,), (6, 4)))
    rng = [torch.randint(0, 255, (16,), generator=generator, dtype=torch.uint8) for _ in range(2)]
    rows = [TensorSlice(tensor=wide[low : low + 3], shape=(6, 4), offset=(low, 0)) for low in (0, 3)]
    return [
        {"model/norm": whole_slice(norm), "model/wide": rows[0], "rng/rank-0": whole_slice(rng[0])},
        {
            "model/wide": rows[1],
            "model/half": whole_slice(wide.bfloat16()),
            "state/tokens": whole_slice(torch.tensor(step * 1000)),
            "rng/rank-1": whole_slice(rng[1]),
        },
    ]


def save_state(folder: Path, step: int) -> Path:
    staging, final = staging_for(folder, step), checkpoint_for(folder, step)
    for rank, tensors in enumerate(state(step)):
        write_rank(staging, rank, tensors)
    publish(staging, final, step=step, cursor=step * 32, model=MODEL, world_size=2)
    return final


@pytest.fixture
def quick_disk() -> Iterator[Path]:
    """A folder where fsync costs nothing, if the machine has one: for tests that save hundreds of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def save() -> Callable[[Path, int], Path]:
    return save_state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder
