"""Part of `make bench-gpu`: settings that only a card can choose, each value in turns. What is printed is a table for
each; nothing is changed by it.

    python -m benchmarks.gpu_settings            # what needs two GPUs is left out where there is one
    python -m benchmarks.gpu_settings --smoke    # the same with a tiny model on the processor; saves nothing

Buckets of gradients (8 MiB is small between hosts), receives that a pipeline's rank posts ahead (with NCCL each spins),
the piece of the logits that the loss holds at a time, and the piece in which a checkpoint's bytes leave a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_settings_rank import Setting
from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.peers.gpu_loop import SIZES, TINY
from benchmarks.plait_gpu import model_shape, plan_for
from benchmarks.workload import Workload
from plait.data.preparation.synthetic import write_synthetic
from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, Message
from plait.layout import Layout
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.units import format_bytes
from tests.plans import changed

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A setting whose values take turns, in steps of a layout; the first value is plait's own."""

    setting: Setting
    values: tuple[int, ...]
    layout: Mapping[str, Any]
    sequences: int = 1
    """Micro-batches of a step, for each data-parallel rank."""

    @property
    def ranks(self) -> int:
        return Layout(**self.layout).world_size


BUCKETS = (8 * MEBIBYTE, 25 * MEBIBYTE, 64 * MEBIBYTE)
QUESTIONS = {
    "bucket of gradients, replicate 2": Question(
        setting="bucket_bytes", values=BUCKETS, layout={"replicate": 2}, sequences=2
    ),
    "bucket of gradients, shard 2": Question(setting="bucket_bytes", values=BUCKETS, layout={"shard": 2}, sequences=2),
    "receives posted ahead, pipeline 2": Question(
        setting="receives_ahead", values=(4, 2, 1), layout={"pipeline": 2}, sequences=8
    ),
    "logits at a time": Question(setting="loss_numbers", values=(2**27, 2**26, 2**25), layout={}),
    "piece of a checkpoint's bytes": Question(
        setting="copy_bytes", values=(32 * MEBIBYTE, 8 * MEBIBYTE, 128 * MEBIBYTE), layout={}
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="1B", choices=tuple(SIZES))
    parser.add_argument("--only", nargs="+", default=list(QUESTIONS), choices=tuple(QUESTIONS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the processor; nothing is saved")
    flags = parser.parse_args()
    present = 2 if flags.smoke else torch.cuda.device_count()
    if not present:
        sys.exit("bench-gpu: torch sees no NVIDIA GPU here; --smoke tries the same on the processor")
    results: dict[str, object] = {"machine": describe()}
    for name in flags.only:
        if QUESTIONS[name].ranks > present:
            print(f"\n### {name}\n\nneeds {QUESTIONS[name].ranks} GPUs, and {present} is here", flush=True)
            continue
        results[name] = answered(name, QUESTIONS[name], flags)
    if not flags.smoke:
        print(f"\nwritten to {save('gpu-settings', results)}")


def answered(name: str, question: Question, flags: argparse.Namespace) -> dict[str, object]:
    """Times all values of a setting in turns, prints the table, and returns the figures."""
    work = TINY if flags.smoke else SIZES[flags.size]
    with tempfile.TemporaryDirectory(prefix="plait-settings-") as folder:
        write_inputs(Path(folder), question, work, flags)
        texts = {value_text(question, value): value for value in question.values}
        turns = alternate(list(texts), flags.rounds, lambda text: timed(question, texts[text], folder, flags))
    own = next(iter(texts))
    standings = compare({text: [turn["seconds"] for turn in each] for text, each in turns.items()}, own)
    peaks = {text: format_bytes(max(turn["peak_bytes"] for turn in each)) for text, each in turns.items()}
    print(f"\n### {name}\n\n{table(standings, {'peak': peaks}, own)}", flush=True)
    return {"standings": [asdict(one) for one in standings], "turns": turns}


def value_text(question: Question, value: int) -> str:
    """A value of a setting with its unit."""
    return format_bytes(value) if question.setting.endswith("_bytes") else f"{value:,}"


def write_inputs(folder: Path, question: Question, work: Workload, flags: argparse.Namespace) -> None:
    """Plan, recipe and tokens where the ranks find them."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_synthetic(corpus, vocabulary=work.vocabulary, sequence=work.sequence, seed=work.seed)
    (folder / "recipe.toml").write_text('[data]\nfiles = "none.txt"\n')
    write_plan(plan_of(question, work, flags, corpus), folder / "plan.json")


def plan_of(question: Question, work: Workload, flags: argparse.Namespace, corpus: Path) -> Plan:
    """The plan of one GPU's benchmark, for the question's layout."""
    layout = Layout(**question.layout)
    if layout.pipeline > 1:
        first = work.layers // 2
        layout = replace(layout, stage_layers=(first, work.layers - first))
    asked = argparse.Namespace(
        size=flags.size,
        device="cpu" if flags.smoke else "cuda",
        compile="none" if flags.smoke else "model",
        documents="mask",
        micro_batches=1,
        warmup=0,
        steps=1,
        peak_flops=1e15,
    )
    micros = question.sequences * layout.data_parallel_degree
    return changed(
        plan_for(model_shape(flags.size, work), work, asked, corpus),
        layout=layout,
        batch_sequences=work.sequences_per_rank * micros,
    )


def timed(question: Question, value: int, folder: str, flags: argparse.Namespace) -> dict[str, float]:
    """One turn in fresh processes: seconds of the slowest rank, and the most bytes that a GPU held."""
    entry = "time_copies" if question.setting == "copy_bytes" else "time_steps"
    table_of = EntryTable(functions={entry: f"benchmarks.gpu_settings_rank:{entry}"})
    argument = {
        "folder": folder,
        "setting": question.setting,
        "value": value,
        "length": "short" if flags.smoke else "full",
        "device": "cpu" if flags.smoke else "cuda",
    }
    answers: list[dict[str, float]] = []

    def hear(message: Message) -> None:
        answers.append(dict(message.values))

    with ForkServer(table_of, threads=1) as server:
        job = Job(entry=entry, argument=json.dumps(argument), world_size=question.ranks, threads=1)
        server.run(job, on_message=hear).require_finished()
    return {key: max(answer[key] for answer in answers) for key in ("seconds", "peak_bytes")}


if __name__ == "__main__":
    main()
