"""What a contender's process shares with all others: its orders, and the journal of losses and times it hands back."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the runner asks of one rank; `steps` are timed, after `warmup` steps that are not."""

    workdir: Path
    out: Path
    warmup: int
    steps: int
    threads: int
    rank: int
    world_size: int

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps


def read_orders(parser: argparse.ArgumentParser | None = None) -> tuple[Orders, argparse.Namespace]:
    """The orders from flags and environment, and the whole namespace for a contender with flags of its own."""
    parser = parser or argparse.ArgumentParser()
    for flag, kind in (("workdir", Path), ("out", Path), ("warmup", int), ("steps", int), ("threads", int)):
        parser.add_argument(f"--{flag}", type=kind, required=True)
    flags = parser.parse_args()
    orders = Orders(
        workdir=flags.workdir,
        out=flags.out,
        warmup=flags.warmup,
        steps=flags.steps,
        threads=flags.threads,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return orders, flags


class Journal:
    """Notes loss, wall and CPU time of each step; call `begin` right before the first step and `step` after each."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []

    def begin(self) -> None:
        self._stamp()

    def step(self, loss: float) -> None:
        """End of an optimizer step; `loss` is the mean over this rank's tokens or over all, before the update."""
        self._losses.append(loss)
        self._stamp()

    def write(self, orders: Orders, **facts: object) -> None:
        """Write the JSON that the runner reads: per-step losses of all steps, times of the timed ones."""
        answer = {
            "losses": self._losses,
            "step_s": _differences(self._wall_s)[orders.warmup :],
            "cpu_s": _differences(self._cpu_s)[orders.warmup :],
            **facts,
        }
        orders.out.write_text(json.dumps(answer))

    def _stamp(self) -> None:
        self._wall_s.append(time.perf_counter())
        self._cpu_s.append(time.process_time())


def leave() -> NoReturn:
    """End the process without running destructors; every contender's last line.

    torch 2.13's gloo process group can deadlock in its own: it is dropped under the GIL and joins a thread that may be
    waiting for the GIL to drop the last collective. By then the answer is written and nothing is left to say.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _differences(stamps: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stamps)]
