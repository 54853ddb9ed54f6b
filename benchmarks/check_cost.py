"""What `plait check` adds to a program's own steps: the same six steps under observation and without, in turns.

python -m benchmarks.check_cost [--rounds 3]     # writes benchmarks/results/check-cost-DATE.json

Each program notes the clock and its processor's seconds itself, on two ranks. The bar is 6 times the program's own time
for the checked steps. On a machine that others use, too, trust the processor's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.machine import describe
from benchmarks.pairing import alternate, save
from plait.checking.launch_command import WatchedProgram, read_launch_command
from plait.checking.launching import rank_environment, run_watched

WORKERS, STEPS, BAR = 2, 6, 6.0
PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

width, layers, vocab, rows, length, micros = map(int, sys.argv[1:7])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        block = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
torch.manual_seed(1 + rank)
notes = []
for step in range(7):
    notes.append((time.perf_counter(), time.process_time()))
    with open(f"{os.environ['COST_NOTES']}-{rank}", "w") as file:
        json.dump(notes, file)
    optimizer.zero_grad()
    for micro in range(micros):
        ids = torch.randint(0, vocab, (rows, length))
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) / micros
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.barrier()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Six steps of a program, on average over its ranks."""

    clock_s: float
    processor_s: float


SIZES: Mapping[str, Sequence[int]] = {
    "tiny: 3,000 weights, 8 examples": (8, 1, 64, 8, 16, 1),
    "small: 0.4 million weights, 8 x 64 tokens, 2 micro-batches": (128, 2, 512, 8, 64, 2),
    "medium: 7 million weights, 8 x 128 tokens": (256, 6, 4096, 8, 128, 1),
    "large weights, few tokens: 22 million, 2 x 32 tokens": (512, 6, 2048, 2, 32, 1),
}


def main() -> int:
    """Print and save the ratios; 1 where the bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    rows, missed = [], False
    for name, numbers in SIZES.items():
        turns = alternate(["bare", "watched"], rounds, lambda how, numbers=numbers: _turn(how, numbers))
        ratios = {
            what: [getattr(w, what) / getattr(b, what) for b, w in zip(turns["bare"], turns["watched"], strict=True)]
            for what in ("clock_s", "processor_s")
        }
        own = median(one.clock_s for one in turns["bare"])
        text = ", ".join(
            f"{what} x {median(values):.2f} ({min(values):.2f} … {max(values):.2f})" for what, values in ratios.items()
        )
        print(f"{name}: {own * 1000 / STEPS:.1f} ms a step of its own; {text}", flush=True)
        missed = missed or median(ratios["processor_s"]) > BAR
        rows.append({"name": name, "own_step_s": own / STEPS, **ratios})
    print(f"wrote {save('check-cost', {**describe(), 'bar': BAR, 'programs': rows})}")
    return int(missed)


def _turn(how: str, numbers: Sequence[int]) -> Turn:
    with TemporaryDirectory(prefix="plait-check-cost-") as name:
        folder = Path(name)
        file, notes = folder / "train.py", folder / "notes"
        file.write_text(PROGRAM, encoding="utf-8")
        command = ["env", f"COST_NOTES={notes}", "torchrun", str(file), *map(str, numbers)]
        program = read_launch_command(command)
        if how == "watched":
            run_watched(program, folder / "run", workers=WORKERS, steps=STEPS, silent_s=240, limit_s=600, after_s=0.5)
        else:
            _bare([str(file), *map(str, numbers)], program, folder)
        begin_end = [json.loads(Path(f"{notes}-{rank}").read_text(encoding="utf-8")) for rank in range(WORKERS)]
    clocks, processors = zip(
        *[[b - a for a, b in zip(one[0], one[STEPS], strict=True)] for one in begin_end], strict=True
    )
    return Turn(clock_s=sum(clocks) / WORKERS, processor_s=sum(processors) / WORKERS)


def _bare(words: Sequence[str], program: WatchedProgram, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, *words], env=rank_environment(os.environ, program, folder, rank, WORKERS, port)
        )
        for rank in range(WORKERS)
    ]
    for one in started:
        one.wait()


if __name__ == "__main__":
    sys.exit(main())
