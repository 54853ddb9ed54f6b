"""What the ranks of these tests do, on the processor or all on the first GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from plait.checkpoint.store import verify_checkpoint
from plait.data.samples.micro import Micro
from plait.launch.values.job import RankContext
from plait.parallel import pipeline_links
from plait.parallel.apply import STAGES
from plait.parallel.communicator import Communicator
from plait.parallel.gradient_buckets import BUCKET_BYTES
from plait.parallel.mesh import make_mesh, open_store, world_communicator
from plait.parallel.replicate import replicate
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.report.memory import LiveTensorPeak
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.checkpointing.persist import restore
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars
from plait.trainer.step_graph import CudaRecorder, StepGraphs
from tests.trainer.saved import save
from tests.trainer.test_step_graph import Clock, Repeats


def take_steps(context: RankContext, argument: str) -> None:
    """Some steps of the plan in a folder: the losses and the norms of the gradients."""
    asked = json.loads(argument)
    library, bucket_bytes = asked.get("library", "gloo"), asked.get("bucket_bytes", BUCKET_BYTES)
    pipeline_links.RECEIVES_AHEAD = asked.get("receives_ahead", pipeline_links.RECEIVES_AHEAD)  # in this process alone
    with assembled(context, Path(asked["folder"]), library, bucket_bytes=bucket_bytes) as (assembly, _):
        told = steps_of(assembly, asked["steps"])
    context.send("steps", **told)


def steps_of(assembly: Assembly, count: int) -> dict[str, list[float]]:
    """Losses and norms of the gradients of some steps, none of which is waited for, and the sums of what they leave."""
    state, taken = TrainState(), list[Scalars]()
    for _ in range(count):
        state, scalars = assembly.step(state)
        taken.append(scalars)
    return {
        "losses": [float(one.totals[0] / one.totals[1]) for one in taken],
        "norms": [float(one.norm) for one in taken],
        "sums": [float(one.double().abs().sum()) for one in assembly.tensors()],
    }


def replayed_steps(context: RankContext, argument: str) -> None:
    """The same with steps that are replayed as CUDA graphs, or repeated on a processor, from the eighth on, and what
    was said of it. If the step "fails", it reads a value from the GPU, which cannot be recorded."""
    asked = json.loads(argument)
    with assembled(context, Path(asked["folder"]), "nccl") as (assembly, _):
        on_gpu, told = assembly.device.type == "cuda", list[str]()

        def update(micros: Sequence[Micro]) -> Scalars:
            scalars = assembly.update_from(micros)
            if asked["fails"] and on_gpu:
                scalars.norm.item()
            return scalars

        recorder = CudaRecorder() if on_gpu else Repeats(fails="a value was read" if asked["fails"] else "")
        assembly.graphs = StepGraphs(update, recorder, told.append, clock=Clock())
        found = steps_of(assembly, asked["steps"])
    context.send("steps", **found, told=told)


def save_and_restore(context: RankContext, argument: str) -> None:
    """A checkpoint after two steps brings back every bit, on the device where it was; and the next step is the same."""
    folder = Path(argument)
    with assembled(context, folder) as (assembly, world):
        state = TrainState()
        for _ in range(2):
            state, _ = assembly.step(state)
        path, before = save(assembly, state, folder / "checkpoints"), bits_of(assembly)
        after, first = assembly.step(state)
        back = restore(assembly, path, verify_checkpoint(path), world)
        same = [torch.equal(*pair) for pair in zip(before, bits_of(assembly), strict=True)]
        _, second = assembly.step(back)
        here = {tensor.device.type for tensor in assembly.tensors() if tensor.dim()}
    context.send(
        "restored",
        same=all(same),
        tensors=len(same),
        devices=sorted(here),
        step=back.step,
        next_step=after.step,
        losses=[float(one.totals[0]) for one in (first, second)],
    )


def watched_step(context: RankContext, argument: str) -> None:
    """The most bytes of live tensors in the second step, without the rooms that a GPU's products work in."""
    with assembled(context, Path(argument)) as (assembly, _):
        state, _ = assembly.step(TrainState())
        with LiveTensorPeak(assembly.device, assembly.tensors()) as peak:
            assembly.step(state)
        rooms = workspace_bytes() if assembly.device.type == "cuda" else 0
    context.send("peak", bytes=peak.bytes - rooms)


def workspace_bytes() -> int:
    """What cuBLAS and cuBLASLt keep of torch's memory; 64 MiB on an H100. It is given back."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def step_without_waiting(context: RankContext, argument: str) -> None:
    """Steps after the third, in which a host that waits for its GPU is an error; and whether torch saw one that did."""
    with assembled(context, Path(argument), "nccl") as (assembly, _):
        state = TrainState()
        for _ in range(3):  # compiles, and makes the optimizer's state
            state, _ = assembly.step(state)
        with no_host_waits(assembly.device):
            for _ in range(2):
                state, _ = assembly.step(state)
            state, scalars = assembly.step(state)
            caught = assembly.device.type == "cpu" or waits_are_errors(scalars.norm)
    context.send("steps", count=state.step, finite=bool(scalars.norm.isfinite()), caught=caught)


@contextmanager
def no_host_waits(device: torch.device) -> Iterator[None]:
    """Within the block torch raises where the host waits for a GPU; a processor has nobody to wait for."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def waits_are_errors(value: Tensor) -> bool:
    """Whether reading a value from the GPU is refused now."""
    try:
        value.item()
    except RuntimeError:
        return True
    return False


@contextmanager
def assembled(
    context: RankContext,
    folder: Path,
    library: Literal["gloo", "nccl"] = "gloo",
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[Assembly, Communicator]]:
    """This rank's part of the run in a folder: over gloo all ranks share the first GPU, as NCCL takes one rank for each
    GPU; over "nccl" each has its own."""
    plan = read_plan(folder / "plan.json")
    torch.set_num_threads(1)
    if plan.machines.device == "cuda":
        torch.cuda.set_device(context.rank if library == "nccl" else 0)
    store = open_store(context.rendezvous, context.rank, context.world_size)
    backend = "cpu:gloo,cuda:nccl" if (plan.machines.device, library) == ("cuda", "nccl") else "gloo"
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world_size)
    world, mesh = world_communicator(), make_mesh(plan.placement.layout, plan.machines.device)
    *others, last = STAGES
    stages = (*others, replace(last, apply=partial(replicate, bucket_bytes=bucket_bytes)))
    assembly = assemble(load_recipe(folder / "recipe.toml"), plan, sums=world, mesh=mesh, stages=stages)
    yield assembly, world
    assembly.loader.close()
    dist.destroy_process_group()


def bits_of(assembly: Assembly) -> list[Tensor]:
    """Copies of weights and moments."""
    moments = [value for state in assembly.optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu().clone() for tensor in (*(held.tensor for held in assembly.model.weights), *moments)]
