"""The processes of a proof: the ranks of a layout, and a plain process without a mesh to compare them with.

Each takes the same steps through the same code and leaves its tensors in a file. Their names are kind/weight/first
number along each dim/who: "own" on the one rank that answers for these numbers, "copy" on all others that have them.
In a mixture of experts the plain process comes first, and also leaves where each token went: Note [replayed] in
trainer/experts/replay.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from plait.commands.verifying.small_model import STEPS_PER_OPTIMIZER
from plait.devices import DEVICE_TRAITS
from plait.launch.values.job import RankContext
from plait.model.linear import Linear
from plait.model.matmul import select_matmul_precision
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.mesh import make_mesh, use_gpu, world_communicator
from plait.parallel.sharded_model import HeldWeight, LocalGradients, quantized_layers
from plait.parallel.tpu_slice import compute_alone
from plait.partition.boxes import boxes_of_range, whole_box
from plait.planner.plan import OptimizerKind, Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import read_saved_recipe
from plait.recipe.schema import RunConfig
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.experts.replay import RoutingRecord
from plait.trainer.optimizer.fused import FusedSGD, ParameterGroup
from plait.trainer.pair_reference import compute_reference
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for
from plait.workers import ROUTING

ReferenceScope = Literal["all", "gradients"]
ROUTER = "feedforward.router.weight"

_KINDS: Mapping[OptimizerKind, str] = {"adamw": "adamw", "muon": "muon", "sgd": "momentum"}
"""The kind of tensors that are weights after steps of the run's optimizer; "sgd" are those after plain steps."""


def run_check_rank(context: RankContext, argument: str) -> None:
    """Entry of each process of a proof.

    The argument is JSON: the folder with plan.json and recipe.toml; "extent", how far it goes; and "who": the layout's
    ranks, the reference, or everybody, which is the ranks and after them the reference.
    """
    requested = json.loads(argument)
    folder, extent, who = Path(requested["folder"]), requested["extent"], requested["who"]
    plan, config = read_plan(folder / "plan.json"), read_saved_recipe(folder / "recipe.toml")
    routing = folder / ROUTING
    if who == "reference" or context.rank == plan.world_size:
        save_file(reference_tensors(config, plan, extent, routing), folder / "reference.safetensors")
        return
    place: Any = replace(context, world_size=plan.world_size)  # a protocol's attributes are writable to a type checker
    with process_group_for(place, plan):
        assembly = assemble(
            config, plan, sums=world_communicator(), mesh=make_mesh(plan.placement.layout, plan.machines.device)
        )
        save_file(collect_tensors(assembly, extent, routing), folder / f"rank-{context.rank}.safetensors")


def reference_tensors(config: RunConfig, plan: Plan, scope: ReferenceScope, routing: Path) -> dict[str, Tensor]:
    """What one plain process computes: no mesh, no process group, no stage. It leaves a mixture's routing in a file,
    or follows the one that it finds there."""
    torch.set_num_threads(plan.placement.threads)
    if plan.machines.have_accelerators:
        if DEVICE_TRAITS[plan.machines.device].is_compiled:
            compute_alone()
        use_gpu(plan.gpu_of(0))
        select_matmul_precision(plan.execution.arithmetic.matmul_precision)
    assembly = assemble(config, plan, stages=(), sums=ONE_PROCESS)
    assert isinstance(assembly.model.gradients, LocalGradients) and assembly.model.pipe is None
    found = collect_tensors(assembly, scope, routing)
    assert not dist.is_initialized()
    return found


PROOF_SCALE = 2.0**10
"""Scale of losses in a proof in float16, where no gradient may overflow: a run's first scale is to be found by that."""


def collect_tensors(assembly: Assembly, scope: ReferenceScope, routing: Path) -> dict[str, Tensor]:
    """Take the steps and return the tensors to compare; every rank of the layout must call it. A mixture's tokens go
    where the file says, which is written where there is none."""
    record = RoutingRecord(assembly.loads.own, routing if routing.exists() else None)
    counts: list[Tensor] = []
    if assembly.pairs is not None and assembly.pairs.loss.compared_with == "base":
        assembly.pairs.set_reference(compute_reference(assembly))
    weights = ParameterGroup(parameters=[unit.parameter for unit in assembly.model.units], weight_decay=0.0)
    if assembly.scale is not None:
        assembly.scale.resume(torch.tensor([PROOF_SCALE, 0.0, 0.0]))
    plain = replace(assembly, optimizer=FusedSGD([weights], lr=assembly.plan.job.optimizer.lr))
    try:
        state, scalars = plain.step(TrainState())
        found = {"sums/norm": scalars.norm.reshape(1), "sums/loss": scalars.totals, **dict(_gradients(assembly))}
        counts.append(scalars.expert_counts)
        if scalars.auxiliary.numel():
            found["sums/auxiliary"] = scalars.auxiliary.flatten()
        if scope == "all":
            for _ in range(STEPS_PER_OPTIMIZER - 1):
                state, scalars = plain.step(state)
                counts.append(scalars.expert_counts)
            found |= dict(_weights(assembly, "sgd"))
            # A run may change the data-parallel ranks' shares of the batch at any step.
            assembly.set_sequences_per_replica(assembly.plan.sequences_per_replica[::-1])
            for _ in range(STEPS_PER_OPTIMIZER):
                state, scalars = assembly.step(state)
                counts.append(scalars.expert_counts)
            found |= dict(_weights(assembly, _KINDS[assembly.plan.job.optimizer.kind]))
            if (
                assembly.pairs is not None
            ):  # before the first update margins may be zero but for rounding, and have no sign
                found["sums/pairs"] = scalars.pairs
            record.passes = "held-out"
            found["sums/evaluation"] = assembly.evaluate()
    finally:
        assembly.loader.close()
    if assembly.plan.job.shape.mixture is not None:
        found["counts/experts"] = torch.stack(counts).flatten()
        found |= {f"routing/layers.{layer}.{ROUTER}/0/copy": regret for layer, regret in record.regret.items()}
        if not routing.exists():
            record.save(routing)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def _gradients(assembly: Assembly) -> Iterator[tuple[str, Tensor]]:
    """The gradients that the update has just used, each with its key."""
    for unit in assembly.model.units:
        grad = unit.parameter.grad
        if grad is None:
            continue  # the comparison reports it as missing
        who = "own" if unit.owned else "copy"
        for part in unit.parts:
            numbers = grad.reshape(-1)[part.first : part.first + part.box.numbers]
            yield f"gradient/{part.name}/{_offset_text(part.box.offset)}/{who}", numbers.view(part.box.extent).clone()


def _weights(assembly: Assembly, kind: str) -> Iterator[tuple[str, Tensor]]:
    """All weights that this rank computes with, copies included, each with its key."""
    assembly.model.settle()
    quantized = quantized_layers(assembly.model)
    for held in assembly.model.weights:
        if layer := quantized.get(held.name):
            yield from ((f"{kind}/{key}", numbers) for key, numbers in _dequantized(held, layer))
            continue
        yield f"{kind}/{held.name}/{_offset_text(held.box.offset)}/copy", held.tensor.detach().clone()
    for kept in assembly.kept_vectors():
        yield f"{kind}/{kept.name}/0/copy", kept.tensor.clone()


def _dequantized(held: HeldWeight, layer: Linear) -> Iterator[tuple[str, Tensor]]:
    """The numbers that a rank's blocks of a weight stand for, as rectangles of the weight, each with its key."""
    part, dtype = layer.part, torch.float32
    assert part is not None and layer.scales is not None
    numbers = part.numbers(held.tensor, layer.scales, dtype, first=held.box.offset[0]).view(-1)
    done = 0
    for first, end in part.runs(held.box.offset[0], held.box.extent[0]):
        for box, at in boxes_of_range(whole_box(part.shape), first, end):
            own = numbers[done + at - first : done + at - first + box.numbers].view(box.extent)
            yield f"{held.name}/{_offset_text(box.offset)}/copy", own.to(torch.float64)
        done += end - first


def _offset_text(offset: tuple[int, ...]) -> str:
    return ",".join(map(str, offset))
