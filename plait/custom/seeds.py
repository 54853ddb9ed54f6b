"""Seeds for everything random in a program: the same for the same place in it, regardless of worker and time."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch

from plait.accelerator import accelerator_count, initialized_accelerator


def seed_from(*numbers: int | str) -> int:
    """A number below 2**63 that follows from these alone."""
    return int.from_bytes(sha256(repr(numbers).encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), and Python's and numpy's own generators where a program may use them."""
    if torch.accelerator.current_accelerator() is None:
        # torch was built for no other device. For each of those it would note the caller's stack, a quarter of a
        # millisecond.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(seed % 2**32)


def generator_states() -> tuple[object, ...]:
    """The state of this process's CPU generators, to see whether something drew from them."""
    numpy_random = sys.modules.get("numpy.random")
    state = numpy_random.get_state() if numpy_random else (0, b"", 0)
    return bytes(torch.get_rng_state().numpy()), random.getstate(), bytes(state[1]), state[2]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed everything within the block; afterwards the generators are where they were."""
    numpy_random = sys.modules.get("numpy.random")
    own, numpy_own = random.getstate(), numpy_random.get_state() if numpy_random else None
    name = initialized_accelerator()
    devices = range(accelerator_count()) if name else ()
    with torch.random.fork_rng(devices, device_type=name or "cpu"):
        seed_everything(seed)
        try:
            yield
        finally:
            random.setstate(own)
            if numpy_random:
                numpy_random.set_state(numpy_own)
