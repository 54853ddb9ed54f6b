"""What the ranks of the tests of `shard` and `recompute` do; each leaves what it holds in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from plait.checkpoint.store import verify_checkpoint
from plait.launch.values.job import RankContext
from plait.layout import Layout
from plait.parallel import fully_sharded
from plait.parallel.apply import STAGES, ParallelStage
from plait.parallel.collectives import SPREAD_TAG, SUM_TAG, MessageBegin, spread_own, sum_parts
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.fully_sharded import announce_messages
from plait.parallel.mesh import make_mesh, world_communicator
from plait.parallel.replicate import replicate
from plait.partition.boxes import Box
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble, make_autocast
from plait.trainer.checkpointing.persist import restore
from plait.trainer.state import TrainState
from plait.trainer.step import make_forward
from plait.trainer.worker import process_group_for
from tests.plans import changed
from tests.trainer.saved import save

GATHERS = ("all_gather_into_tensor", "all_gather_single")
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
"""By torch's old names and its new ones."""
SMALL_BUCKET_BYTES = 3000
"""Of 8-byte numbers: several buckets in a tiny model, which end inside of rows."""


def take_steps(context: RankContext, argument: str) -> None:
    """For each case, so many steps of its layout and what came of them."""
    cases = json.loads(argument)
    with process_group_for(context, plan_of(cases[0])):
        for number, case in enumerate(cases):
            with assembled(case) as assembly:
                found = steps_taken(assembly, case["steps"])
            save_file(found, Path(case["folder"]) / f"{case['name']}-{number}-rank-{context.rank}.safetensors")


def keep_for_backward(context: RankContext, argument: str) -> None:
    """Run a forward, and tell the bytes of what it keeps in 16 bits for the backward that is as large as a layer's
    weight, and of all that it keeps."""
    case = json.loads(argument)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with process_group_for(context, plan_of(case)), assembled(case) as assembly:
        (model,) = assembly.model.chunks
        sizes = {math.prod(p.shape) for p in model.layers.parameters() if p.dim() == 2}
        micro, forward = assembly.loader.micros(0)[0], make_forward(make_autocast("bf16", assembly.device))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_nd = forward(model, micro, None)
        alive = [each for each in kept if each.untyped_storage().nbytes()]
        rounded = sum(each.nbytes for each in alive if each.dtype == torch.bfloat16 and each.numel() in sizes)
        context.send("kept", rounded=rounded, kept=sum(each.nbytes for each in alive))
        hidden_nd.sum().backward()  # whoever goes before a gathered weight's backward leaves others waiting


def look_ahead(context: RankContext, argument: str) -> None:
    """Take a step, and note for each layer, when it computes forward and backward, whose weights are under way."""
    case = json.loads(argument)
    noted: dict[str, list[list[int]]] = {"forward": [], "backward": []}
    with process_group_for(context, plan_of(case)), assembled(case) as assembly:
        layers = list(assembly.model.chunks[0].layers.values())

        def note(passing: str) -> None:
            noted[passing].append([at for at, layer in enumerate(layers) if under_way(layer)])

        for layer in layers:
            layer.feedforward.register_forward_pre_hook(lambda *_: note("forward"))
            layer.feedforward.register_full_backward_pre_hook(lambda *_: note("backward"))
        assembly.step(TrainState())
    Path(case["folder"], f"{case['name']}-{context.rank}.json").write_text(json.dumps(noted))


def listen(context: RankContext, argument: str) -> None:
    """Take a step, and note in which order messages between ranks, and collectives that could stand for them, begin."""
    case = json.loads(argument)
    noted: list[str] = []
    with process_group_for(context, plan_of(case)), assembled(case) as assembly, pytest.MonkeyPatch.context() as patch:
        for name in ("isend", "irecv", "all_gather", *GATHERS, "reduce_scatter", *SCATTERS):
            if hasattr(dist, name):
                patch.setattr(dist, name, partial(_noting, noted, name, getattr(dist, name)))
        assembly.step(TrainState())
    Path(case["folder"], f"{case['name']}-{context.rank}.json").write_text(json.dumps(noted))


def weigh(context: RankContext, argument: str) -> None:
    """Take a step, and note each message of a unit as it begins: its kind, the unit, its numbers and its bytes."""
    case = json.loads(argument)
    noted: list[list[Any]] = []

    def message(kind: str, unit: str, tag: int) -> MessageBegin:
        def begin(numbers: int) -> tuple[int, Callable[[], None]]:
            noted.append([kind, unit, numbers])
            return tag, lambda: None

        return begin

    def spread(whole: Tensor, *more: Any) -> Any:
        noted[-1].append(whole.nbytes)
        return spread_own(whole, *more)

    def add_up(own: Tensor, whole: Tensor, *more: Any) -> Any:
        noted[-1].append(whole.nbytes)
        return sum_parts(own, whole, *more)

    with process_group_for(context, plan_of(case)), assembled(case) as assembly, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fully_sharded, "spread_own", spread)
        patch.setattr(fully_sharded, "sum_parts", add_up)
        for chunk in assembly.model.chunks:
            for name, unit in chunk.named_modules():
                if isinstance(unit, FSDPModule):
                    gathered, summed = message("gather", name, SPREAD_TAG), message("sum", name, SUM_TAG)
                    announce_messages(unit, "cpu", gathered, summed)
        assembly.step(TrainState())
    context.send("weighed", noted=noted)


def _noting(noted: list[str], name: str, begin: Callable[..., Any], *tensors: Any, **more: Any) -> Any:
    noted.append(name)
    return begin(*tensors, **more)


def under_way(layer: Any) -> bool:
    """Whether a gather of the layer's weights has begun that nobody has waited for."""
    result = layer._get_fsdp_state()._fsdp_param_group._all_gather_result
    return result is not None and result.all_gather_work is not None


def restore_and_save(context: RankContext, argument: str) -> None:
    """Go on from a checkpoint, where there is one, for so many steps, and save another one."""
    case = json.loads(argument)
    with process_group_for(context, plan_of(case)), assembled(case) as assembly:
        world, state = world_communicator(), TrainState()
        if case["old"]:
            # A forward gathers weights, which must not outlive what is restored.
            assembly.evaluate()
            path = Path(case["old"])
            state = restore(assembly, path, verify_checkpoint(path), world)
        for _ in range(case["steps"]):
            state, _ = assembly.step(state)
        Path(case["new"]).mkdir(exist_ok=True)
        save(assembly, state, Path(case["new"]))


def plan_of(case: dict[str, Any]) -> Plan:
    """The folder's plan with the case's layout and changes."""
    layout = Layout(**{key: tuple(v) if isinstance(v, list) else v for key, v in case.get("layout", {}).items()})
    return changed(read_plan(Path(case["folder"]) / "plan.json"), **case.get("plan", {}), layout=layout)


@contextmanager
def assembled(case: dict[str, Any]) -> Iterator[Assembly]:
    """The case's layout put together among its ranks, which must have joined."""
    plan = plan_of(case)
    mesh = make_mesh(plan.placement.layout, plan.machines.device)
    config = load_recipe(Path(case["folder"]) / "recipe.toml")
    assembly = assemble(config, plan, sums=world_communicator(), mesh=mesh, stages=small_buckets(STAGES))
    yield assembly
    assembly.loader.close()


def small_buckets(stages: Sequence[ParallelStage]) -> list[ParallelStage]:
    """The stages with many small buckets, which a tiny model would not have."""
    last = stages[-1]
    assert last.apply is replicate
    small = replace(last, apply=partial(replicate, bucket_bytes=SMALL_BUCKET_BYTES))
    return [*stages[:-1], small]


def steps_taken(assembly: Assembly, steps: int) -> dict[str, Tensor]:
    """Gradients of the first step, weights after the last, each step's totals and norm, and the held-out loss.

    The parts of a weight are named kind|weight|offset|owner, the weights that a rank holds kind "held".
    """
    state, found = TrainState(), {}
    for step in range(steps):
        state, scalars = assembly.step(state)
        found[f"totals-{step}"], found[f"norm-{step}"] = scalars.totals.clone(), scalars.norm.reshape(1).clone()
        if step == 0:
            found |= parts_of(assembly, "gradient")
    found["held-out"] = assembly.evaluate()
    assembly.model.settle()
    for held in assembly.model.weights:
        found[part_name("held", held.name, held.box, "each")] = held.tensor.clone().contiguous()
    return found | parts_of(assembly, "weight")


def parts_of(assembly: Assembly, kind: str) -> dict[str, Tensor]:
    """A copy of all parts of this rank's units, the gradients or the numbers themselves."""
    found = {}
    for unit in assembly.model.units:
        tensor = unit.parameter.grad if kind == "gradient" else unit.parameter.detach()
        assert tensor is not None
        for part in unit.parts:
            numbers = tensor.reshape(-1)[part.first : part.first + part.box.numbers].reshape(part.box.extent)
            owner = "owned" if unit.owned else "copy"
            found[part_name(kind, part.name, part.box, owner)] = numbers.clone().contiguous()
    return found


def part_name(kind: str, name: str, box: Box, owner: str) -> str:
    return "|".join([kind, name, ",".join(map(str, box.offset)), owner])


def alone_with(case: dict[str, Any]) -> dict[str, Tensor]:
    """The same steps by one plain process without a mesh."""
    config = load_recipe(Path(case["folder"]) / "recipe.toml")
    assembly = assemble(config, plan_of(case), sums=ONE_PROCESS, stages=())
    found = steps_taken(assembly, case["steps"])
    assembly.loader.close()
    return found
