"""The sizes of one_gpu.py in a few minutes, for a GPU that is lent for a quarter of an hour: each program trains all of
its sizes in one process, one turn each, and its imports and process groups are paid for once.

    python -m benchmarks.one_gpu_brief                       # plait first, then the peers; what was read is kept
    python -m benchmarks.one_gpu_brief --smoke               # tiny sizes on the processor; nothing is saved
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import describe
from benchmarks.one_gpu import gpu_name, known_peak
from benchmarks.pairing import save
from benchmarks.peers.gpu_loop import Measured, forget_peak, train, workload_for
from benchmarks.processes import ROOT

Row = dict[str, Any]
Turn = Callable[[argparse.Namespace], Measured]
TURNS: dict[str, dict[str, tuple[str, ...]]] = {
    "plait": {"plait": ("125M", "1B", "LoRA 8B", "3B", "7B"), "plait, joined": ("125M",)},
    "peers": {
        "titan loop": ("1B", "125M", "3B", "7B"),
        "PEFT loop": ("LoRA 8B",),
        "torch loop": ("125M",),
    },
}
"""By process: the programs in it and their sizes, in order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-process", choices=tuple(TURNS), help="be one of the processes; for this program itself")
    parser.add_argument("--timeout", type=float, default=240, help="seconds that each of the two processes may take")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the processor; nothing is saved")
    asked = parser.parse_args()
    if asked.in_process:
        with group(asked):
            take_turns(asked)
        return
    rows = [row for process in TURNS for row in rows_of(process, asked)]
    results: dict[str, Any] = {"machine": describe(), "gpu": gpu_name(), "peak_flops": known_peak()}
    for row in rows:
        kept = results.setdefault(row["size"], {"turns": {}, "failed": {}})
        if "why" in row:
            kept["failed"][row["program"]] = row["why"]
        else:
            kept["turns"][row["program"]] = [row["measured"]]
    if not asked.smoke:
        print(f"written to {save('one-gpu', results)}")


def rows_of(process: str, asked: argparse.Namespace) -> list[Row]:
    """What a process told until it ended or its time was over; each row is printed as it comes."""
    command = [sys.executable, "-m", "benchmarks.one_gpu_brief", "--in-process", process]
    limited = ["timeout", "-k", "5", f"{asked.timeout:g}", *command, *(["--smoke"] if asked.smoke else [])]
    rows: list[Row] = []
    with subprocess.Popen(limited, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in filter(lambda line: line.startswith("{"), running.stdout):
            rows.append(json.loads(line))
            print(text_of(rows[-1]), flush=True)
    return rows


def text_of(row: Row) -> str:
    """One line a turn."""
    head = f"{row['program']:14} {row['size']:8}"
    if "why" in row:
        return f"{head} {row['why']}"
    one = row["measured"]
    planned = (
        f"   planned {one['planned_step_s'] * 1e3:7.1f} ms {one['planned_bytes'] / 2**30:5.1f} GiB"
        if one["planned_step_s"]
        else ""
    )
    return (
        f"{head} {one['step_s'] * 1e3:7.1f} ms {one['tokens_per_s']:9,.0f} tokens/s  MFU {one['mfu']:.1%}  "
        f"{one['peak_bytes'] / 2**30:5.1f} GiB{planned}"
    )


@contextmanager
def group(asked: argparse.Namespace) -> Iterator[None]:
    """A process group of one, for all turns of this process, which ends with them: torch would wait for ever for a
    group that an error left open."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if asked.smoke else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        yield
    sys.stdout.flush()
    os._exit(0)


def take_turns(asked: argparse.Namespace) -> None:
    """Every size of every program of a process, a line of JSON each; one that fails says why, and the next begins."""
    for program, sizes in TURNS[asked.in_process].items():
        for size in sizes:
            flags = flags_of(program, size, asked)
            row: Row = {"program": program, "size": size}
            try:
                row["measured"] = asdict(turn_of(program)(flags))
            except Exception as error:
                traceback.print_exc()
                row["why"] = f"{type(error).__name__}: {str(error).partition('.')[0][:160]}"
            print(json.dumps(row), flush=True)
            forget(torch.device(flags.device))


def flags_of(program: str, size: str, asked: argparse.Namespace) -> argparse.Namespace:
    """The flags of peers/gpu_loop.py for one turn."""
    return argparse.Namespace(
        size=size,
        device="cpu" if asked.smoke else "cuda",
        tiny=asked.smoke,
        attention="any",
        documents="join" if program == "plait, joined" else "mask",
        compile="none" if asked.smoke else "model",
        sequences=None,
        micro_batches=1,
        warmup=1 if asked.smoke else 4,
        steps=2 if asked.smoke else 15,
        peak_flops=known_peak(),
    )


def turn_of(program: str) -> Turn:
    """What trains a program's model; imported only where it is asked for."""
    if program.startswith("plait"):
        return train_plait
    if program == "titan loop":
        from benchmarks.peers.gpu_titan import sharded_blocks

        return partial(train_peer, arrange=sharded_blocks)
    if program == "PEFT loop":
        from benchmarks.peers.gpu_lora import build_lora, compiled_layers

        return partial(train_peer, arrange=compiled_layers, build=build_lora)
    return train_peer


def train_plait(flags: argparse.Namespace) -> Measured:
    """plait as plait_gpu.py trains it."""
    from benchmarks import plait_gpu

    with tempfile.TemporaryDirectory() as folder:
        return plait_gpu.train(flags, workload_for(flags), Path(folder))


def train_peer(flags: argparse.Namespace, **how: Any) -> Measured:
    """A loop of peers/gpu_loop.py."""
    return train(flags, workload_for(flags), torch.device(flags.device), **how)


def forget(device: torch.device) -> None:
    """Give back what a turn compiled and held."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        forget_peak(device)


if __name__ == "__main__":
    main()
