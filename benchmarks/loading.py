"""How long four ranks take to load a model of 1B parameters from a float32 file, beside reading its bytes cold.

    python -m benchmarks.loading --folder /somewhere/with/5GB

Before each turn the kernel is told to drop what it holds of the model's files, and no others; how much then came from
the disk says whether it did.

The ranks are those of a run that goes on from the model (`model.from`): tensor = 4, and shard = 4 with the parameters
split. Their start and the building of the model without weights stand apart. Each rank counts what it read by system
calls and by page-ins of mapped files, what came from the disk for it, and its largest anonymous memory, above what it
had before. The cold read is by one process in order, and by four with a quarter each; the faster one counts. Turns
alternate, and a ratio is that of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.machine import describe
from benchmarks.pairing import alternate, save
from plait.commands.verifying.small_model import shrunk_plan
from plait.interop.base_model import read_base_model
from plait.interop.config_out import config_of_shape
from plait.interop.families import MODEL_FAMILIES
from plait.interop.write_weights import write_weights, written_tensors
from plait.launch.local.run import run_job
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, Message, RankContext
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, parameter_count
from plait.parallel.apply import parallelize
from plait.parallel.mesh import make_mesh
from plait.planner.plan_file import read_plan, write_plan
from plait.recipe.load import parse_config
from plait.trainer.first_weights import fill_first_weights
from plait.trainer.worker import process_group_for
from tests.plans import changed

RANKS, ROUNDS, BLOCK_BYTES, SEQUENCE = 4, 3, 1 << 24, 64
TIME_BAR, BYTES_BAR, MEMORY_BAR = 1.2, 1.3, 1.3
LARGE = {"layers": 18, "width": 2048, "heads": 16, "ffn": 5632, "vocabulary": 32768}
SMALL = {"layers": 4, "width": 256, "heads": 4, "ffn": 704, "vocabulary": 4096}
COMMON = {"sequence": SEQUENCE, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "tied": True}
LAYOUTS = {
    "tensor = 4": Layout(tensor=RANKS),
    "shard = 4, parameters": Layout(shard=RANKS, shard_what="parameters"),
}
READS = ("one process reads", "four processes read")
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


def main() -> int:
    """Make the model, time the turns, print and save them; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="loading a large model by four ranks")
    parser.add_argument("--folder", type=Path, required=True, help="where to make the model, 4 GB, unless it is there")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--smoke", action="store_true", help="a tiny model; saves nothing")
    asked = parser.parse_args()
    folder = asked.folder.absolute() / ("small" if asked.smoke else "large")
    shape = make_model(folder, SMALL if asked.smoke else LARGE)
    plans = {name: write_case(folder, name, layout) for name, layout in LAYOUTS.items()}
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    turns = alternate([*READS, *LAYOUTS], asked.rounds, lambda name: _turn(name, folder, plans))
    results = [_result(name, turns, file_bytes) for name in LAYOUTS]
    print(f"{parameter_count(shape):,} parameters, {file_bytes:,} bytes, {asked.rounds} rounds")
    for name in READS:
        print(f"{name:24} {median(_seconds(turn) for turn in turns[name]):7.2f} s")
    for one in results:
        print(
            f"{one['layout']:24} {one['median_s']:7.2f} s, {one['ratio']:.2f} of the cold read (bar {TIME_BAR}); read "
            f"{one['bytes_ratio']:.3f} of the file (bar {BYTES_BAR}), from the disk {one['disk_ratio']:.3f}; anonymous "
            f"memory {one['memory_ratio']:.3f} (bar {MEMORY_BAR})"
        )
    if not asked.smoke:
        rows = {name: [[asdict(rank) for rank in turn] for turn in each] for name, each in turns.items()}
        bars = {"time": TIME_BAR, "bytes": BYTES_BAR, "memory": MEMORY_BAR}
        values = {"machine": describe(), "parameters": parameter_count(shape), "file_bytes": file_bytes, "bars": bars}
        print(f"wrote {save('loading', {**values, 'results': results, 'turns': rows})}")
    return int(not all(one["met"] for one in results))


def make_model(folder: Path, sizes: dict[str, int]) -> ModelShape:
    """A Llama in a folder, its weights the same noise again and again; left alone where it is there."""
    heads = {"kv_heads": sizes["heads"], "head_width": sizes["width"] // sizes["heads"]}
    shape = ModelShape.from_dict({**COMMON, **sizes, **heads})
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)) * 0.02

        def part(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
            numbers = torch.Size(extent).numel()
            return noise.repeat(-(-numbers // len(noise)))[:numbers].view(extent)

        write_weights(folder, written_tensors(shape, MODEL_FAMILIES["llama"]), "F32", part)
        (folder / "config.json").write_text(json.dumps(config_of_shape(shape, "float32")))
    return shape


def write_case(folder: Path, name: str, layout: Layout) -> Path:
    """The folder with the plan that a layout's ranks read."""
    base = read_base_model(folder)
    plan = changed(
        shrunk_plan(CONFIG, base.shape, layout),
        layout=layout,
        shape=base.shape_for(SEQUENCE),
        sequence=SEQUENCE,
        precision="float32",
        base=str(folder),
    )
    place = folder / f"plan-{name.split()[0]}"
    place.mkdir(exist_ok=True)
    write_plan(plan, place / "plan.json")
    return place


def _turn(name: str, folder: Path, plans: dict[str, Path]) -> list[RankCosts]:
    """One turn by fresh processes: what each rank's cost."""
    ranks = 1 if name == READS[0] else RANKS
    argument = {"plan": str(plans.get(name, plans["tensor = 4"])), "files": str(folder)}
    job = Job(entry="load" if name in LAYOUTS else "read", argument=json.dumps(argument), world_size=ranks, threads=1)
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
        with _counted(context, Path(asked["files"]), peak, build_s):
            fill_first_weights(sharded, plan, 1)


def read_rank(context: RankContext, argument: str) -> None:
    """One process of the cold read: its share of each file's bytes, in order."""
    asked = json.loads(argument)
    plan = read_plan(Path(asked["plan"]) / "plan.json")
    plan = replace(plan, placement=replace(plan.placement, layout=Layout(replicate=context.world_size)))
    room, folder = memoryview(bytearray(BLOCK_BYTES)), Path(asked["files"])
    with process_group_for(context, plan), _anonymous_peak() as peak, _counted(context, folder, peak, 0.0):
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            first, end = (size * part // context.world_size for part in (context.rank, context.rank + 1))
            descriptor = os.open(file, os.O_RDONLY)
            while first < end:
                first += os.preadv(descriptor, [room[: min(BLOCK_BYTES, end - first)]], first)
            os.close(descriptor)


@contextmanager
def _counted(context: RankContext, folder: Path, peak: list[int], build_s: float) -> Iterator[None]:
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


def _result(name: str, turns: dict[str, list[list[RankCosts]]], file_bytes: int) -> dict[str, object]:
    """A layout's medians, and its ratios to the faster cold read of the same round."""
    cold = [min(map(_seconds, reads)) for reads in zip(*(turns[read] for read in READS), strict=True)]
    seconds = [_seconds(turn) for turn in turns[name]]
    ratios = [own / read for own, read in zip(seconds, cold, strict=True)]
    bytes_ratio, disk_ratio, memory_ratio = (
        max(sum(measure(rank) for rank in turn) for turn in turns[name]) / file_bytes
        for measure in (
            lambda rank: rank.call_bytes + rank.paged_bytes,
            lambda rank: rank.disk_bytes,
            lambda rank: rank.anonymous_bytes,
        )
    )
    met = median(ratios) <= TIME_BAR and bytes_ratio <= BYTES_BAR and memory_ratio <= MEMORY_BAR
    return {
        "layout": name,
        "median_s": median(seconds),
        "cold_read_s": median(cold),
        "ratio": median(ratios),
        "ratios": ratios,
        "bytes_ratio": bytes_ratio,
        "disk_ratio": disk_ratio,
        "memory_ratio": memory_ratio,
        "met": met,
    }


if __name__ == "__main__":
    sys.exit(main())
