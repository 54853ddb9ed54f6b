"""One rank of `benchmarks.straggler`: takes steps until it is ended, and rank 0 writes down everybody's times.

A rank's data are slow by as many seconds a step as stand in the file `delay-RANK` of the run's folder, if it is there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.data.loader import Loader
from plait.data.order import SampleOrder, make_order
from plait.data.samples.windows import WindowReader
from plait.launch.values.job import RankContext
from plait.parallel.collectives import message_from_before_s
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.balance.meter import attach_meter, clock_of
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for

TIMES = "times.jsonl"
"""A line a step: each rank's seconds (computing, waiting for others, for data, a timed message), and the step's."""
ASK = "ask"
"""A file that is there while messages are to be timed."""


class SlowOrder:
    """A run's order of samples behind a disk that can become slow: asked by the loader's own thread, as a disk is."""

    def __init__(self, order: SampleOrder, delay: Path) -> None:
        self.sequence = order.sequence
        self._order, self._delay = order, delay

    def windows(self, positions: Any) -> Any:
        time.sleep(read_delay(self._delay))
        return self._order.windows(positions)


def read_delay(file: Path) -> float:
    """Seconds that reading a step's samples takes longer now."""
    try:
        return float(file.read_text())
    except (FileNotFoundError, ValueError):  # being written this moment
        return 0.0


def main(folder: Path, rank: int) -> None:
    plan, config = read_plan(folder / "plan.json"), load_recipe(folder / "recipe.toml")
    with process_group_for(_rank_on_its_own(rank, plan, folder), plan):
        world = world_communicator()
        assembly = assemble(config, plan, sums=world, mesh=make_mesh(plan.placement.layout, plan.machines.device))
        assembly = _with_slow_data(assembly, config.run.seed, folder / f"delay-{rank}")
        assembly, meter = attach_meter(assembly, clock_of(assembly.device))
        state, write = TrainState(), _writer(folder / TIMES) if rank == 0 else None
        began = time.perf_counter()
        while True:
            state, _ = assembly.step(state)
            meter.record_data_wait(assembly.loader.wait_s)
            asked = world.largest(torch.tensor([int(rank == 0 and (folder / ASK).exists())]))
            link_s = message_from_before_s() if asked else 0.0
            [took] = meter.read()
            row = torch.tensor([took.compute_s, took.wait_s, took.data_s, link_s], dtype=torch.float64)
            gathered = [part.tolist() for part in world.gather(row)]
            now = time.perf_counter()
            if write is not None:
                write({"step": state.step, "ranks": gathered, "step_s": now - began})
            began = now


def _rank_on_its_own(rank: int, plan: Plan, folder: Path) -> RankContext:
    """A rank's place among its peers, without a supervisor: nobody listens, and nobody ends it."""
    return RankContext(
        rank=rank,
        world_size=plan.world_size,
        local_rank=0,
        local_world_size=1,
        threads=plan.threads_of(rank),
        rendezvous=str(folder / "rendezvous"),
        channel=lambda kind, values: None,
        stop=lambda: False,
    )


def _with_slow_data(assembly: Assembly, seed: int, delay: Path) -> Assembly:
    assembly.loader.close()
    order: Any = SlowOrder(make_order(assembly.corpus, seed, assembly.plan.job.sequence), delay)
    reader = WindowReader(assembly.corpus.train, order, assembly.corpus.vocabulary)
    return replace(assembly, loader=Loader(assembly.corpus, reader, assembly.loader.selection))


def _writer(file: Path) -> Callable[[dict[str, Any]], None]:
    out = file.open("a", buffering=1)
    return lambda values: print(json.dumps(values), file=out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
