"""What a contender's process shares with all others: its orders, and the journal through which it takes its turns.

A contender starts once and then waits. The runner gives it a number of steps to take, reads losses and times, and lets
the next contender go: so all of them are measured within seconds of each other, and none of them is started twice.
"""

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
    """What the runner asks of one rank: its place, its threads, and at most how many steps it will take."""

    workdir: Path
    steps: int
    """In all turns together."""
    threads: int
    precision: str
    """float32, or bf16: autocast to bfloat16 over float32 weights."""
    rank: int
    world_size: int


def read_orders(parser: argparse.ArgumentParser | None = None) -> tuple[Orders, argparse.Namespace]:
    """The orders from flags and environment, and the whole namespace for a contender with flags of its own."""
    parser = parser or argparse.ArgumentParser()
    for flag, kind in (("workdir", Path), ("steps", int), ("threads", int), ("turns", int), ("answers", int)):
        parser.add_argument(f"--{flag}", type=kind, required=True)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    flags = parser.parse_args()
    orders = Orders(
        workdir=flags.workdir,
        steps=flags.steps,
        threads=flags.threads,
        precision=flags.precision,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return orders, flags


class Journal:
    """Notes loss, wall and CPU time of each step, and waits for the runner between turns.

    Call `begin` right before the first step and `step` after each; the process ends in one of them. `turns` and
    `answers` are file descriptors: a line with a number of steps comes in, a line of JSON goes out.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self._turns = os.fdopen(flags.turns)
        self._answers = os.fdopen(flags.answers, "w")
        self._left = 0
        self._begin_turn()

    def begin(self) -> None:
        self._wait()

    def step(self, loss: float) -> None:
        """End of an optimizer step; `loss` is the mean over this rank's tokens or over all, before the update."""
        self._losses.append(loss)
        self._stamp()
        self._left -= 1
        if not self._left:
            answer = {
                "losses": self._losses,
                "step_s": _differences(self._wall_s),
                "cpu_s": _differences(self._cpu_s),
            }
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
            self._wait()

    def _wait(self) -> None:
        self._left = int(self._turns.readline() or 0)
        if not self._left:
            leave()
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._losses: list[float] = []
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []
        self._stamp()

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
