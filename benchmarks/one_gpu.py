"""`make bench-gpu`: plait and its peers on one GPU, in turns, in bf16: 125M at 1,024 tokens and 1B at 4,096.

All may use the same attention kernels (`--attention`). plait runs as users get it, with its loader and documents
masked, and once more with documents joined, which is the peers' work: they read random tokens that lie on the device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

import torch

from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.peers.gpu_loop import H200_BF16_FLOPS, SIZES
from benchmarks.processes import ROOT
from plait.cluster.catalog import find_device_by_driver_name

CONTENDERS = {
    "plait": ("benchmarks.plait_gpu", "--documents", "mask"),
    "plait, joined": ("benchmarks.plait_gpu", "--documents", "join"),
    "torch loop": ("benchmarks.peers.gpu_loop",),
    "titan loop": ("benchmarks.peers.gpu_titan",),
    "Trainer": ("benchmarks.peers.gpu_trainer",),
}
SMOKE = ("--tiny", "--device", "cpu", "--compile", "none", "--warmup", "1", "--steps", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=["125M", "1B"], choices=tuple(SIZES))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=tuple(CONTENDERS))
    parser.add_argument("--attention", choices=("any", "flash"), default="any")
    parser.add_argument("--peak-flops", type=float, help="dense bf16 peak (default: the catalogue's for this GPU)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the processor; nothing is saved")
    flags = parser.parse_args()
    peak = flags.peak_flops or known_peak()
    extra = ["--attention", flags.attention, "--peak-flops", f"{peak:g}", *(SMOKE if flags.smoke else ())]
    results: dict[str, object] = {"machine": describe(), "attention": flags.attention, "peak_flops": peak}
    for size in flags.sizes:
        turns = alternate(flags.contenders, flags.rounds, lambda name, size=size: answer(name, size, extra))
        standings = compare({name: [turn["step_s"] for turn in each] for name, each in turns.items()}, "plait")
        rows = {name: each[len(each) // 2] for name, each in turns.items()}
        columns = {
            "tokens/s": {name: f"{row['tokens_per_s']:,.0f}" for name, row in rows.items()},
            "MFU (causal)": {name: f"{row['mfu']:.1%} ({row['mfu_causal']:.1%})" for name, row in rows.items()},
            "peak GiB": {name: f"{row['peak_bytes'] / 2**30:.1f}" for name, row in rows.items()},
        }
        print(f"\n### {size}\n\n{table(standings, columns, 'plait')}", flush=True)
        results[size] = {"standings": [asdict(one) for one in standings], "turns": turns}
    if not flags.smoke:
        print(f"\nwritten to {save('one-gpu', results)}")


def known_peak() -> float:
    """The catalogue's dense bf16 rate of this machine's GPU; an H200's where there is none."""
    known = find_device_by_driver_name(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    return known.peak_flops.get("bf16", H200_BF16_FLOPS) if known else H200_BF16_FLOPS


def answer(name: str, size: str, extra: list[str]) -> dict[str, float]:
    """One turn of a contender in a process of its own."""
    module, *own = CONTENDERS[name]
    command = [sys.executable, "-m", module, "--size", size, *own, *extra]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
