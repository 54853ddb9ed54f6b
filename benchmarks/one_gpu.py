"""`make bench-gpu`: plait and its peers on one GPU, in turns, in bf16: 125M at 1,024 tokens, 1B and 3B at 4,096, 7B at
2,048 where the GPU holds it, and adapters (LoRA) beside 8B frozen weights at 2,048.

Each program takes the attention kernel that torch chooses for it, cuDNN's on an H100 or H200 but FlashAttention-2 for
plait's documents, unless `--attention flash` gives all the same. plait runs as users get it, with its loader and
documents masked, and once more with documents joined, which is the peers' work: they read random tokens that lie on the
device. A contender that fails, most often for want of memory, is left out of its table, which says why.
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
from plait.machines.catalog import find_device_by_driver_name

CONTENDERS = {
    "plait": ("benchmarks.plait_gpu", "--documents", "mask"),
    "plait, joined": ("benchmarks.plait_gpu", "--documents", "join"),
    "torch loop": ("benchmarks.peers.gpu_loop",),
    "titan loop": ("benchmarks.peers.gpu_titan",),
    "Trainer": ("benchmarks.peers.gpu_trainer",),
    "PEFT loop": ("benchmarks.peers.gpu_lora",),
}
ONLY_FOR = {"torch loop": "full", "titan loop": "full", "PEFT loop": "LoRA"}
"""Whether all weights learn, or adapters, where a contender does not do both."""
Answer = dict[str, float]
SMOKE = ("--tiny", "--device", "cpu", "--compile", "none", "--warmup", "1", "--steps", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=tuple(SIZES))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=tuple(CONTENDERS))
    parser.add_argument("--attention", choices=("any", "flash"), default="any")
    parser.add_argument("--peak-flops", type=float, help="dense bf16 peak (default: the catalogue's for this GPU)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one turn may take")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the processor; nothing is saved")
    flags = parser.parse_args()
    results: dict[str, object] = {"machine": describe(), "gpu": gpu_name(), "attention": flags.attention}
    results["peak_flops"] = flags.peak_flops = flags.peak_flops or known_peak()
    for size in flags.sizes:
        results[size] = compared(size, flags)
    if not flags.smoke:
        print(f"\nwritten to {save('one-gpu', results)}")


def compared(size: str, flags: argparse.Namespace) -> dict[str, object]:
    """All contenders at one size in turns: prints their table, and returns the figures."""
    kind, failed = "LoRA" if "LoRA" in size else "full", dict[str, str]()
    names = [name for name in flags.contenders if ONLY_FOR.get(name, kind) == kind]
    turns = alternate(names, flags.rounds, lambda name: None if name in failed else answer(name, size, flags, failed))
    each = {name: [turn for turn in turns[name] if turn] for name in names if name not in failed}
    reference = next(iter(each), "")
    standings = compare({name: [turn["step_s"] for turn in some] for name, some in each.items()}, reference)
    rows = {name: some[len(some) // 2] for name, some in each.items()}
    columns = {
        "tokens/s": {name: f"{row['tokens_per_s']:,.0f}" for name, row in rows.items()},
        "MFU (causal)": {name: f"{row['mfu']:.1%} ({row['mfu_causal']:.1%})" for name, row in rows.items()},
        "peak GiB": {name: f"{row['peak_bytes'] / 2**30:.1f}" for name, row in rows.items()},
        "planned GiB, ms": {name: planned_text(row) for name, row in rows.items()},
    }
    left_out = "".join(f"\n\n{name}: left out, {why}" for name, why in failed.items())
    print(f"\n### {size}\n\n{table(standings, columns, reference)}{left_out}", flush=True)
    return {"standings": [asdict(one) for one in standings], "turns": turns, "failed": failed}


def planned_text(row: Answer) -> str:
    """What plait's planner had foretold; of other programs nothing."""
    if row["planned_step_s"] is None:
        return ""
    return f"{row['planned_bytes'] / 2**30:.1f}, {row['planned_step_s'] * 1e3:.1f}"


def gpu_name() -> str:
    """The driver's name of the first GPU; empty where there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def known_peak() -> float:
    """The catalogue's dense bf16 rate of this machine's GPU; an H200's where there is none."""
    known = find_device_by_driver_name(gpu_name()) if gpu_name() else None
    return known.peak_flops.get("bf16", H200_BF16_FLOPS) if known else H200_BF16_FLOPS


def answer(name: str, size: str, flags: argparse.Namespace, failed: dict[str, str]) -> Answer | None:
    """One turn of a contender in a process of its own; None where it failed, whose reason `failed` keeps."""
    module, *own = CONTENDERS[name]
    asked = ["--size", size, "--attention", flags.attention, "--peak-flops", f"{flags.peak_flops:g}"]
    length = SMOKE if flags.smoke else ("--warmup", str(flags.warmup), "--steps", str(flags.steps))
    command = [sys.executable, "-m", module, *own, *asked, *length]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=flags.timeout, check=False)
    except subprocess.TimeoutExpired:
        failed[name] = f"not done in {flags.timeout:g} s"
        return None
    sys.stderr.write(done.stderr[-3000:] if done.returncode else "")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        failed[name] = errors[-1][:200] if errors else f"ended with {done.returncode}"
        return None
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
