"""What the choices of `plait.spread` cost and gain: sizes of buckets, bf16 on the way, and waiting for data.

    plait run benchmarks/own_program_choices.py --workers 2 -- [--rounds 7]

One encoder, all choices in the same processes, in turns: `bucket_mib="auto"` against five sizes by hand, and
`transfer="bf16"`. Then how long a ResNet on images that are read and changed one by one waits for its data.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import plait
from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.spread_work import PROGRAMS, loss_sum

SIZES_MIB = (0.5, 2.0, 8.0, 32.0, 128.0)
STEPS_OF_A_TURN = 4
DIGITS = Path(__file__).parents[1] / "examples" / "data" / "digits.npz"
IMAGES, BATCH = 512, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    choices: dict[str, dict[str, Any]] = {"auto": {"bucket_mib": "auto"}, "bf16, auto": {"bucket_mib": "auto"}}
    choices["bf16, auto"]["transfer"] = "bf16"
    choices |= {f"{size:g} MiB": {"bucket_mib": size} for size in SIZES_MIB}
    seconds = _times(choices, rounds)
    waited = _data_wait()
    if plait.rank() == 0:
        standings = compare(seconds, "auto")
        print(table(standings, {}, "auto"))
        print(f"waiting for data: {waited:.2%} of the time")
        rows = {one.name: [one.median_s, one.ratio, one.least_ratio, one.greatest_ratio] for one in standings}
        print(save("own-program-choices", {"machine": describe(), "steps": rows, "data_wait": waited}))


def _times(choices: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each choice, turn by turn: of the slowest worker."""
    program, runs = PROGRAMS["encoder"], {}
    torch.manual_seed(7)
    batch = program.make_batch(program.examples)
    for name, more in choices.items():
        model = program.make_model()
        runs[name] = plait.spread(model, torch.optim.AdamW(model.parameters(), lr=3e-4), loss_sum=loss_sum, **more)
    own = slice(*(len(batch[0]) * (plait.rank() + one) // plait.size() for one in (0, 1)))
    share = (batch[0][own], batch[1][own])

    def turn(name: str) -> float:
        runs[name].step(share)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS_OF_A_TURN):
            runs[name].step(share)
        return plait.all_reduce(time.perf_counter() - began, "largest") / STEPS_OF_A_TURN

    return alternate(list(choices), rounds, turn)


class ReadImages(Dataset[tuple[Tensor, int]]):
    """Images that are unpacked and enlarged one by one, as a data set of files does."""

    def __init__(self) -> None:
        held = np.load(DIGITS)
        self._images, self._labels = held["images"][:IMAGES], held["labels"][:IMAGES]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self._images[position]).float() / 255
        wide = torch.nn.functional.pad(image, (2, 2, 2, 2)).expand(3, 32, 32)
        return (wide - wide.mean()) / (wide.std() + 1e-3), int(self._labels[position])


def _data_wait() -> float:
    """The part of a loop's time that its slowest worker waits for data."""
    model = PROGRAMS["resnet"].make_model()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_sum=loss_sum)
    began = time.perf_counter()
    for batch in run.batches(ReadImages(), batch=BATCH):
        run.step(batch)
    return float(plait.all_reduce(run.data_wait_s / (time.perf_counter() - began), "largest"))


main()
