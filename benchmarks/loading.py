"""How long ranks take to load a model, beside reading its bytes cold, and how much memory beside their parts.

    python -m benchmarks.loading --folder /somewhere/with/5GB               # 1B parameters in float32, by four ranks
    python -m benchmarks.loading --folder /somewhere/with/5GB --model 7b    # matrix sizes of a 7B model, in bf16

A model is made in the folder unless it is there. "7b" has the width, the vocabulary and the dtype of a Llama with 7B
parameters and files of 1 GB, but 6 layers in place of 32: 3 GB, which with what is made of them in float32 fit into the
memory of a small machine. What is timed is a rate and does not depend on their number.

Before each turn the kernel drops its cached pages of the model's files, and no others; how much then came from
the disk says whether it did. On a virtual machine the host may still hold them: the cold read is as fast as it is.

The ranks load as a run does that begins with the model (`model.from`): all weights in float32, a LoRA with frozen
matrices in bf16, or QLoRA. Their start and the building of the model without weights stand apart. Each rank counts what
it read by system calls and by page-ins of mapped files, what came from the disk for it, and its largest anonymous
memory, above what it had before. The cold read is by one process in order, and by as many as there are ranks with equal
shares; the faster one counts. Turns alternate, and a ratio is that of one round. QLoRA also quantizes each matrix,
which takes longer than reading it: it has no bar for time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.machine import describe
from benchmarks.pairing import alternate, save
from plait.commands.verifying.small_model import shrunk_plan
from plait.interop.base_model import read_base_model
from plait.interop.config_out import config_of_shape
from plait.interop.families import MODEL_FAMILIES
from plait.interop.tensor_files import ITEM_SIZES, StoredTensor, list_tensors
from plait.interop.write_weights import write_weights, written_tensors
from plait.launch.local.run import run_job
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, Message, RankContext
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape, Quantization
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, linear_layers, parameter_count
from plait.parallel.apply import parallelize
from plait.parallel.mesh import make_mesh
from plait.parallel.sharded_model import ShardedModel
from plait.planner.plan_file import read_plan, write_plan
from plait.recipe.load import parse_config
from plait.trainer.first_weights import fill_first_weights
from plait.trainer.worker import process_group_for

ROUNDS, BLOCK_BYTES, SEQUENCE = 3, 1 << 24, 64
BYTES_BAR = 1.3
COMMON = {"sequence": SEQUENCE, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope"}
READS = ("one process reads", "all processes read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a rank keeps a model."""

    layout: Layout
    method: Literal["full", "lora", "qlora"] = "full"

    @property
    def precision(self) -> str:
        return "float32" if self.method == "full" else "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model that is made, and by which ranks it is loaded."""

    sizes: Mapping[str, int]
    tied: bool
    dtype: Literal["F32", "BF16"]
    file_bytes: int
    """Size of one of its files, at most."""
    ranks: int
    time_bar: float
    cases: Mapping[str, Case]


_LARGE_CASES = {
    "tensor = 4": Case(layout=Layout(tensor=4)),
    "shard = 4, parameters": Case(layout=Layout(shard=4, shard_what="parameters")),
}
MODELS: Mapping[str, StoredModel] = {
    "1b": StoredModel(
        sizes={"layers": 18, "width": 2048, "heads": 16, "ffn": 5632, "vocabulary": 32768},
        tied=True,
        dtype="F32",
        file_bytes=5 * 10**9,
        ranks=4,
        time_bar=1.2,
        cases=_LARGE_CASES,
    ),
    "7b": StoredModel(
        sizes={"layers": 6, "width": 4096, "heads": 32, "ffn": 11008, "vocabulary": 32000},
        tied=False,
        dtype="BF16",
        file_bytes=10**9,
        ranks=2,
        time_bar=1.3,
        cases={
            "tensor = 2": Case(layout=Layout(tensor=2)),
            "shard = 2, parameters": Case(layout=Layout(shard=2, shard_what="parameters")),
            "pipeline = 2": Case(layout=Layout(pipeline=2, stage_layers=(3, 3))),
            "lora, tensor = 2": Case(layout=Layout(tensor=2), method="lora"),
            "qlora, tensor = 2": Case(layout=Layout(tensor=2), method="qlora"),
        },
    ),
    "small": StoredModel(
        sizes={"layers": 4, "width": 256, "heads": 4, "ffn": 704, "vocabulary": 4096},
        tied=False,
        dtype="BF16",
        file_bytes=4 * 10**6,
        ranks=2,
        time_bar=100.0,
        cases={
            "tensor = 2": Case(layout=Layout(tensor=2)),
            "qlora, pipeline = 2": Case(layout=Layout(pipeline=2, stage_layers=(2, 2)), method="qlora"),
        },
    ),
}
ENTRIES = EntryTable(
    functions={"load": "benchmarks.loading:load_rank", "read": "benchmarks.loading:read_rank"},
    preload=("benchmarks.loading",),
)
CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "loading"}})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """What one rank's turn took, from the moment at which all are ready to that at which all are done."""

    seconds: float
    call_bytes: int
    """Read by system calls."""
    paged_bytes: int
    """Paged in from mapped files."""
    disk_bytes: int
    """That the disk read for it, as the kernel counts."""
    anonymous_bytes: int
    """Its largest anonymous memory during loading and building, above that before."""
    build_s: float = 0.0
    """Building the cut model without its weights, before the caches are dropped."""
    part_bytes: int = 0
    """Memory of its part of the model."""


def main() -> int:
    """Make the model, time the turns, print and save them; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="loading a large model")
    parser.add_argument("--folder", type=Path, required=True, help="where to make the model, 4 GB, unless it is there")
    parser.add_argument("--model", choices=list(MODELS), default="1b")
    parser.add_argument("--only", action="append", default=[], help="part of a case's name")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--smoke", action="store_true", help="a tiny model; saves nothing")
    asked = parser.parse_args()
    name = "small" if asked.smoke else asked.model
    model, folder = MODELS[name], asked.folder.absolute() / name
    shape = make_model(folder, model)
    cases = {key: case for key, case in model.cases.items() if not asked.only or any(one in key for one in asked.only)}
    plans = {key: write_case(folder, key, case) for key, case in cases.items()}
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    largest = max(_stored_bytes(one) for one in list_tensors(folder).values())
    turns = alternate([*READS, *cases], asked.rounds, lambda key: _turn(key, folder, plans, model.ranks))
    results = [_result(key, turns, file_bytes, largest, model.time_bar, cases[key]) for key in cases]
    print(f"{parameter_count(shape):,} parameters, {file_bytes:,} bytes, {asked.rounds} rounds")
    for key in READS:
        print(f"{key:24} {median(_seconds(turn) for turn in turns[key]):7.2f} s")
    for one in results:
        print(
            f"{one['case']:24} {one['median_s']:7.2f} s, {one['ratio']:.2f} of the cold read (bar {one['time_bar']}); "
            f"read {one['bytes_ratio']:.3f} of the file, from the disk {one['disk_ratio']:.3f}; memory of a rank "
            f"{one['memory_mb']:,.0f} MB, {one['beside_mb']:,.0f} MB beside its part (bar {largest / 1e6:,.0f})"
        )
    if not asked.smoke:
        rows = {key: [[asdict(rank) for rank in turn] for turn in each] for key, each in turns.items()}
        values = {"machine": describe(), "parameters": parameter_count(shape), "file_bytes": file_bytes}
        print(f"wrote {save(f'loading-{name}', {**values, 'results': results, 'turns': rows})}")
    return int(not all(one["met"] for one in results))


def make_model(folder: Path, model: StoredModel) -> ModelShape:
    """A Llama in a folder, its weights the same noise again and again; left alone where it is there."""
    sizes = model.sizes
    heads = {"kv_heads": sizes["heads"], "head_width": sizes["width"] // sizes["heads"]}
    shape = ModelShape.from_dict({**COMMON, **sizes, **heads, "tied": model.tied})
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)) * 0.02

        def part(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
            numbers = torch.Size(extent).numel()
            return noise.repeat(-(-numbers // len(noise)))[:numbers].view(extent)

        tensors = written_tensors(shape, MODEL_FAMILIES["llama"])
        write_weights(folder, tensors, model.dtype, part, shard_bytes=model.file_bytes)
        config = config_of_shape(shape, "float32" if model.dtype == "F32" else "bfloat16")
        (folder / "config.json").write_text(json.dumps(config))
    return shape


def write_case(folder: Path, name: str, case: Case) -> Path:
    """The folder with the plan that a case's ranks read."""
    from tests.plans import changed  # ranks, which import this file, do not find the tests

    base = read_base_model(folder)
    shape = base.shape_for(SEQUENCE)
    if case.method != "full":
        quantization: Quantization = "nf4" if case.method == "qlora" else "none"
        adapter = AdapterShape(rank=16, alpha=32.0, targets=linear_layers(shape), quantization=quantization)
        shape = replace(shape, adapter=adapter)
    plan = changed(
        shrunk_plan(CONFIG, base.shape, case.layout),
        layout=case.layout,
        shape=shape,
        sequence=SEQUENCE,
        precision=case.precision,
        base=str(folder),
    )
    place = folder / f"plan-{name.replace(' ', '')}"
    place.mkdir(exist_ok=True)
    write_plan(plan, place / "plan.json")
    return place


def _turn(name: str, folder: Path, plans: Mapping[str, Path], all_ranks: int) -> list[RankCosts]:
    """One turn by fresh processes: what each rank's cost."""
    ranks = 1 if name == READS[0] else all_ranks
    argument = {"plan": str(plans.get(name, next(iter(plans.values())))), "files": str(folder)}
    job = Job(entry="read" if name in READS else "load", argument=json.dumps(argument), world_size=ranks, threads=1)
    found: dict[int, RankCosts] = {}

    def collect(message: Message) -> None:
        if message.kind == "costs":
            found[message.rank] = RankCosts(**message.values)

    run_job(job, ENTRIES, on_message=collect).require_finished()
    return [found[rank] for rank in range(ranks)]


def load_rank(context: RankContext, argument: str) -> None:
    """One rank of a layout: builds its part of the model, waits until all have and the caches are empty, and loads."""
    asked = json.loads(argument)
    plan = read_plan(Path(asked["plan"]) / "plan.json")
    with process_group_for(context, plan), _anonymous_peak() as peak:
        began = time.perf_counter()
        with torch.device("meta"):
            model = GPT(plan.job.shape)
        sharded = parallelize(model, make_mesh(plan.placement.layout, plan.machines.device), plan.execution)
        build_s = time.perf_counter() - began
        part_bytes = _held_bytes(sharded)
        with _counted(context, Path(asked["files"]), peak, build_s, part_bytes):
            fill_first_weights(sharded, plan, 1)


def _held_bytes(sharded: ShardedModel) -> int:
    """Memory of all weights that a rank keeps; one that two weights share counts once."""
    return sum({one.tensor.data_ptr(): one.tensor.nbytes for one in sharded.weights}.values())


def read_rank(context: RankContext, argument: str) -> None:
    """One process of the cold read: its share of each file's bytes, in order."""
    asked = json.loads(argument)
    plan = read_plan(Path(asked["plan"]) / "plan.json")
    plan = replace(plan, placement=replace(plan.placement, layout=Layout(replicate=context.world_size)))
    room, folder = memoryview(bytearray(BLOCK_BYTES)), Path(asked["files"])
    with process_group_for(context, plan), _anonymous_peak() as peak, _counted(context, folder, peak, 0.0, 0):
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            first, end = (size * part // context.world_size for part in (context.rank, context.rank + 1))
            descriptor = os.open(file, os.O_RDONLY)
            while first < end:
                first += os.preadv(descriptor, [room[: min(BLOCK_BYTES, end - first)]], first)
            os.close(descriptor)


@contextmanager
def _counted(context: RankContext, folder: Path, peak: list[int], build_s: float, part_bytes: int) -> Iterator[None]:
    """Drop the caches, count what the block costs, and tell it."""
    dist.barrier()
    if context.rank == 0:
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    before, faults, began = _io(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt, time.perf_counter()
    yield
    dist.barrier()
    seconds, after = time.perf_counter() - began, _io()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    costs = RankCosts(
        seconds=seconds,
        call_bytes=after["rchar"] - before["rchar"],
        paged_bytes=faults * resource.getpagesize(),
        disk_bytes=after["read_bytes"] - before["read_bytes"],
        anonymous_bytes=max(peak) - peak[0],
        build_s=build_s,
        part_bytes=part_bytes,
    )
    context.send("costs", **asdict(costs))


@contextmanager
def _anonymous_peak() -> Iterator[list[int]]:
    """A list that grows: the process's anonymous memory in bytes, looked at every few milliseconds."""
    seen, ended = [_anonymous_bytes()], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            seen.append(_anonymous_bytes())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    yield seen
    ended.set()
    watcher.join()


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}


def _seconds(turn: Sequence[RankCosts]) -> float:
    return max(rank.seconds for rank in turn)


def _stored_bytes(one: StoredTensor) -> int:
    return prod(one.shape) * ITEM_SIZES[one.dtype]


def _result(
    name: str,
    turns: Mapping[str, Sequence[Sequence[RankCosts]]],
    file_bytes: int,
    largest_bytes: int,
    time_bar: float,
    case: Case,
) -> dict[str, Any]:
    """A case's medians, and its ratios to the faster cold read of the same round. The memory that it needs beside a
    rank's part may be that of the largest tensor; QLoRA quantizes a whole matrix, in float32."""
    cold = [min(map(_seconds, reads)) for reads in zip(*(turns[read] for read in READS), strict=True)]
    seconds = [_seconds(turn) for turn in turns[name]]
    ratios = [own / read for own, read in zip(seconds, cold, strict=True)]
    bytes_ratio, disk_ratio = (
        max(sum(measure(rank) for rank in turn) for turn in turns[name]) / file_bytes
        for measure in (lambda rank: rank.call_bytes + rank.paged_bytes, lambda rank: rank.disk_bytes)
    )
    beside = max(rank.anonymous_bytes - rank.part_bytes for turn in turns[name] for rank in turn)
    is_timed = case.method != "qlora"
    met = beside <= largest_bytes and (not is_timed or (median(ratios) <= time_bar and bytes_ratio <= BYTES_BAR))
    return {
        "case": name,
        "median_s": median(seconds),
        "cold_read_s": median(cold),
        "ratio": median(ratios),
        "ratios": ratios,
        "time_bar": time_bar if is_timed else "none",
        "bytes_ratio": bytes_ratio,
        "disk_ratio": disk_ratio,
        "memory_mb": max(rank.anonymous_bytes for turn in turns[name] for rank in turn) / 1e6,
        "beside_mb": beside / 1e6,
        "met": met,
    }


if __name__ == "__main__":
    sys.exit(main())
