"""The work of the strands' benchmark, the same for plait and its peers, and how a rank takes its turns at it.

All contenders of a group are alive at the same time, each a process a rank, and only one computes: a turn is a line on
its standard input, the answer a line of JSON on its standard output. So a turn costs no start-up and may be short.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.contender import leave
from plait.model.shape import ModelShape

TakeStep = Callable[[int], float | None]
"""Takes a rank's step of this number, and tells its loss, or None where another rank knows it."""
FIRST_STEPS = 2
"""Before all turns, from the common first weights: their losses must be alike."""
KEPT_TOKENS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A Llama-like model (RMSNorm, rotary positions, SwiGLU) and the batch of a step; float32, AdamW, no clipping."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocabulary: int
    sequences: int
    """Of a step, over all ranks."""
    sequence: int = 256
    timed_steps: int = 2
    """Of a turn: the longer a step, the fewer."""
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    seed: int = 7

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.heads,
            head_width=self.width // self.heads, ffn=self.ffn, vocabulary=self.vocabulary, sequence=self.sequence,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence


WORKS = {
    "11M": Work(layers=6, width=384, heads=6, ffn=896, vocabulary=2048, sequences=8),
    "50M": Work(layers=8, width=640, heads=10, ffn=1728, vocabulary=8192, sequences=4, timed_steps=1),
}
SMOKE = {"smoke": Work(layers=2, width=64, heads=2, ffn=128, vocabulary=256, sequences=4, sequence=64)}


def tokens_of(work: Work) -> np.ndarray:
    """The text: random, rare words rarer, the same on all ranks."""
    generator = np.random.default_rng(work.seed)
    return np.minimum(generator.zipf(1.3, KEPT_TOKENS + 1), work.vocabulary).astype(np.uint16) - 1


def window_starts(work: Work, positions: np.ndarray) -> np.ndarray:
    """Where the sequences with these numbers, counted over all steps, begin in the text."""
    return positions % (KEPT_TOKENS // work.sequence) * work.sequence


class Batches:
    """Inputs and targets of a step, each [rows, sequence], for peers: of all its sequences, or of one rank's rows."""

    def __init__(self, work: Work) -> None:
        self._work, self._tokens = work, tokens_of(work)
        self._span = np.arange(work.sequence + 1)

    def __call__(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._work.sequences // ranks
        first = step * self._work.sequences + rank * rows
        starts = window_starts(self._work, np.arange(first, first + rows))
        window = torch.from_numpy(self._tokens[starts[:, None] + self._span].astype(np.int64))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def join() -> tuple[Work, argparse.Namespace]:
    """A rank's first line: one thread, the others found where there are any; the work, and which kind it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--work", required=True)
    parser.add_argument("--rendezvous", required=True)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{flags.rendezvous}", rank=rank, world_size=world_size)
    values = json.loads(flags.work)
    return Work(**{**values, "betas": tuple(values["betas"])}), flags


def work_as_text(work: Work) -> str:
    """What `join` reads."""
    return json.dumps(asdict(work))


def serve(take_step: TakeStep) -> None:
    """A rank's last line: the first steps' losses, then a turn for each line."""
    _answer({"losses": [take_step(step) for step in range(FIRST_STEPS)]})
    step = FIRST_STEPS
    for line in sys.stdin:
        untimed, timed = (int(word) for word in line.split())
        if dist.is_initialized():
            dist.barrier()
        began_cpu_s, seconds = time.process_time(), []
        for number in range(untimed + timed):
            began_s = time.perf_counter()
            take_step(step)
            step += 1
            if number >= untimed:
                seconds.append(time.perf_counter() - began_s)
        _answer({"step_s": median(seconds), "cpu_s": time.process_time() - began_cpu_s})
    leave()


def _answer(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)
