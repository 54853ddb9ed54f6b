"""`make bench-gpu`: plait and a plain torch loop on one GPU, in turns: 125M at 1,024 tokens and 1B at 4,096, bf16."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict

from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.processes import ROOT

MODULES = {"plait": "benchmarks.plait_gpu", "torch loop": "benchmarks.peers.gpu_loop"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=["125M", "1B"])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the processor; nothing is saved")
    flags = parser.parse_args()
    extra = ["--tiny", "--device", "cpu", "--compile", "none", "--warmup", "1", "--steps", "2"] if flags.smoke else []
    results: dict[str, object] = {"machine": describe()}
    for size in flags.sizes:
        turns = alternate(list(MODULES), flags.rounds, lambda name, size=size: answer(name, size, extra))
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


def answer(name: str, size: str, extra: list[str]) -> dict[str, float]:
    """One turn of a contender in a process of its own."""
    command = [sys.executable, "-m", MODULES[name], "--size", size, *extra]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
