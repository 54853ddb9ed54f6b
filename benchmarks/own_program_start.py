"""What `plait.spread` adds to the start of a program in one process: import and first step, against plain torch.

    python benchmarks/own_program_start.py [--pairs 5]

Prints processor seconds of both programs, each in fresh processes, in turn, and the median difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median

BEFORE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
images, labels = torch.randn(64, 32), torch.randint(0, 10, (64,))
"""
PLAIN = BEFORE + "F.cross_entropy(model(images), labels).backward()\noptimizer.step()\n"
SPREAD = (
    """
import plait
"""
    + BEFORE
    + """
def loss_sum(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

run = plait.spread(model, optimizer, loss_sum=loss_sum)
for batch in run.batches((images, labels), batch=64):
    run.step(batch)
"""
)


def processor_s(program: str) -> float:
    """User and system seconds of a fresh process that runs the program."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    """Measure pairs in turn and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    processor_s(SPREAD)  # caches of files
    plain, spread = zip(*[(processor_s(PLAIN), processor_s(SPREAD)) for _ in range(pairs)], strict=True)
    print(f"plain    {median(plain):.3f} s of processor time (median of {pairs})")
    print(f"spread   {median(spread):.3f} s")
    print(f"more     {median(b - a for a, b in zip(plain, spread, strict=True)):+.3f} s (bar: 0.2)")


if __name__ == "__main__":
    main()
