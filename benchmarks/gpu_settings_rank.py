"""What one rank of gpu_settings.py does: steps, or copies from its device, with one setting changed in this process."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.peers.gpu_loop import mark, seconds_between
from plait.checkpoint import host_bytes
from plait.devices import traits_of
from plait.launch.values.job import RankContext
from plait.parallel import pipeline_links
from plait.parallel.apply import STAGES
from plait.parallel.gradient_buckets import BUCKET_BYTES
from plait.parallel.mesh import make_mesh, world_communicator
from plait.parallel.replicate import replicate
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer import loss
from plait.trainer.assemble import assemble
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for

Setting = Literal["bucket_bytes", "receives_ahead", "loss_numbers", "copy_bytes"]
Length = Literal["full", "short"]
STEPS: dict[Length, tuple[int, int]] = {"full": (10, 30), "short": (1, 2)}
"""Steps to warm up, and steps that are timed."""
COPIED_BYTES: dict[Length, int] = {"full": 4 << 30, "short": 1 << 28}


def time_steps(context: RankContext, argument: str) -> None:
    """Median seconds of a step with the setting, and the most bytes that this rank's GPU held."""
    asked: dict[str, Any] = json.loads(argument)
    warm_up, timed = STEPS[asked["length"]]
    folder = Path(asked["folder"])
    plan, device = read_plan(folder / "plan.json"), torch.device(asked["device"])
    change(asked["setting"], asked["value"], device)
    bucket_bytes = asked["value"] if asked["setting"] == "bucket_bytes" else BUCKET_BYTES
    *others, last = STAGES
    stages = (*others, replace(last, apply=partial(replicate, bucket_bytes=bucket_bytes)))
    with process_group_for(context, plan):  # pyright: ignore[reportArgumentType]
        mesh, config = make_mesh(plan.placement.layout, plan.machines.device), load_recipe(folder / "recipe.toml")
        assembly = assemble(config, plan, sums=world_communicator(), mesh=mesh, stages=stages)
        state, marks = TrainState(), [mark(device)]
        for _ in range(warm_up + timed):
            state, _ = assembly.step(state)
            marks.append(mark(device))
        seconds = median(seconds_between(marks)[warm_up:])
        assembly.loader.close()
    context.send("timed", seconds=seconds, peak_bytes=peak_bytes(device))


def time_copies(context: RankContext, argument: str) -> None:
    """Seconds in which the bytes of a tensor on the device are read in the host's memory, in pieces of the setting."""
    asked: dict[str, Any] = json.loads(argument)
    device = torch.device(asked["device"])
    change(asked["setting"], asked["value"], device)
    numbers = torch.zeros(COPIED_BYTES[asked["length"]], dtype=torch.uint8, device=device)
    began = time.perf_counter()
    read = sum(len(piece) for piece in host_bytes.host_bytes(numbers))
    assert read == len(numbers)
    context.send("timed", seconds=time.perf_counter() - began, peak_bytes=peak_bytes(device))


def change(setting: Setting, value: int, device: torch.device) -> None:
    """Give a constant of plait another value, in this process, which does nothing else afterwards."""
    if setting == "receives_ahead":
        pipeline_links.RECEIVES_AHEAD = value
    if setting == "loss_numbers":
        loss._PIECE_NUMBERS[traits_of(device.type).place] = value  # pyright: ignore[reportPrivateUsage]
    if setting == "copy_bytes":
        host_bytes.PIECE_BYTES = value


def peak_bytes(device: torch.device) -> int:
    """The most bytes that this process held on its GPU; 0 on a processor."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
