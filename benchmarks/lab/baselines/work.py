"""What the baselines share: plait's own model and loss, random tokens, AdamW, and a line for each step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from plait.layout import equal_share
from plait.model.gpt import GPT
from plait.model.shape import ModelShape
from plait.trainer.loss import sum_of_losses

MICRO_TOKENS = 4096
"""At a time, at most, as plait's own limit for processors; the rest accumulates."""
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank is to do."""

    shape: ModelShape
    sequence: int
    rows: int
    """Sequences of this rank in a step."""
    steps: int
    steps_file: Path
    rank: int
    world_size: int

    @property
    def micros(self) -> list[int]:
        """Rows of each micro-batch."""
        pieces = -(-self.rows * self.sequence // MICRO_TOKENS)
        return [equal_share(self.rows, pieces, index)[1] for index in range(pieces)]


class Model(nn.Module):
    """plait's model with its loss: the mean over the tokens."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gpt = GPT(shape)

    def forward(self, inputs_bt: Tensor, targets_bt: Tensor) -> Tensor:
        total = sum_of_losses(self.gpt(inputs_bt), self.gpt.head_weight(), targets_bt.flatten())
        return total / targets_bt.numel()


class Steps:
    """Writes the file that the lab follows; only the first rank's lines are kept."""

    def __init__(self, work: Work) -> None:
        self._file = work.steps_file.open("w") if work.rank == 0 else None
        self._began_s = time.perf_counter()
        self._step = 0

    def begin(self) -> None:
        """Right before the first step."""
        self._began_s = time.perf_counter()

    def end_step(self) -> None:
        """A step is done: on a processor nothing is left to wait for."""
        now_s, self._step = time.perf_counter(), self._step + 1
        if self._file:
            self._file.write(json.dumps({"step": self._step, "step_s": now_s - self._began_s}) + "\n")
            self._file.flush()
        self._began_s = now_s


def read_work() -> Work:
    """This rank's work from its argument and torchrun's variables; one thread, as plait has it on one core."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    said = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Work(
        shape=ModelShape.from_dict(said["shape"]),
        sequence=said["sequence"],
        rows=equal_share(said["batch_sequences"], world_size, rank)[1],
        steps=said["steps"],
        steps_file=Path(said["steps_file"]),
        rank=rank,
        world_size=world_size,
    )


def micro_batches(work: Work) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of a step: their values do not matter to its time."""
    for rows in work.micros:
        tokens_bt = torch.randint(work.shape.vocabulary, (rows, work.sequence + 1))
        yield tokens_bt[:, :-1].contiguous(), tokens_bt[:, 1:].contiguous()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Fused, with decay on matrices."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def leave() -> NoReturn:
    """End without destructors, in which torch 2.13's gloo can deadlock (see benchmarks/contender.py)."""
    sys.stdout.flush()
    os._exit(0)
