"""Saves a rank's weights, moments and random state to a checkpoint, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.checkpoint.file_check import HashShare
from plait.checkpoint.fitting import check_model, check_optimizer
from plait.checkpoint.manifest import Manifest, tensor_names
from plait.checkpoint.store import prune, verify_checkpoint
from plait.checkpoint.transfer import TensorSlice, read_slice, read_tensor, whole_slice
from plait.errors import RunFailed
from plait.model.gpt import GPT
from plait.model.weights import kept_values, trained_weights
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import run_on_all_ranks
from plait.parallel.sharded_model import HeldWeight, OptimizerUnitPart
from plait.partition.boxes import Box
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.fits import described_model
from plait.trainer.optimizer.moments import all_moment_names, counts_updates, moment_names
from plait.trainer.optimizer.optim import updates_counted
from plait.trainer.state import TrainState

LOSS_SCALE = "loss_scale"
"""The state of a float16 run's DeviceLossScale."""


def prune_old(
    folder: Path,
    keep: int,
    keep_s: float,
    world: Communicator,
    whole: Collection[int],
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Delete all but the `keep` newest checkpoints, of which only those of the steps in `whole` count (this job wrote
    or verified them), and those younger than `keep_s`. Every rank must call it; blocks while rank 0 deletes. `fence`
    raises RunFailed where it may no longer."""

    def prune_here() -> None:
        if world.index == 0:
            fence()
            prune(folder, keep, whole, keep_s=keep_s)

    run_on_all_ranks(world, prune_here, None)


def verify_together(path: Path, world: Communicator, local_rank: int) -> Manifest:
    """Verify a checkpoint; the ranks of each host, which may have a copy of its own, hash a share of it each.

    `local_rank` counts the ranks of a host, which follow each other, from 0. Every rank must call it; blocks. Raises
    RunFailed on all of them where one found damage.
    """
    places = [int(place) for place in world.gather(torch.tensor([local_rank]))]
    first = world.index - local_rank
    beyond = next((rank for rank in range(world.index + 1, world.size) if places[rank] == 0), world.size)
    found: list[Manifest] = []

    def verify_share() -> None:
        found.append(verify_checkpoint(path, HashShare(index=local_rank, count=beyond - first)))

    run_on_all_ranks(world, verify_share, None)
    return found[0]


@torch.no_grad()
def restore(assembly: Assembly, path: Path, manifest: Manifest, world: Communicator) -> TrainState:
    """Load a checkpoint written under any layout into this rank, and return the state of training at it; raises
    PlaitError where it is of another model or optimizer."""
    check_model(manifest, described_model(assembly.plan))
    optimizer, shape = assembly.plan.job.optimizer, assembly.plan.job.shape
    check_optimizer(manifest, all_moment_names(optimizer, trained_weights(shape)))

    def read(key: str, box: Box) -> Tensor:
        return read_slice(path, manifest, key, box.offset, box.extent)

    load_state(assembly, read, read_tensor(path, manifest, "adam_step")[0] if counts_updates(optimizer) else None)
    assembly.model.gradients.publish()
    names, random = tensor_names(manifest), f"rng/rank-{world.index}"
    if random in names:
        torch.set_rng_state(read_tensor(path, manifest, random))
    if assembly.scale is not None and LOSS_SCALE in names:
        assembly.scale.resume(read_tensor(path, manifest, LOSS_SCALE))
    tokens = int(read_tensor(path, manifest, "tokens")[0])
    return TrainState(step=manifest.step, position=manifest.cursor, tokens=tokens)


@torch.no_grad()
def load_state(assembly: Assembly, read: Callable[[str, Box], Tensor], updates: Tensor | None) -> None:
    """Fill the weights that a rank trains, and moments, with what `read` returns for a key and a box; `updates` is the
    number of optimizer steps done, None where the optimizer counts none.

    Reads come in the order of `state_boxes`. The gradients must `publish` before the first forward.
    """
    for key, box, numbers in held_state(assembly):
        numbers.copy_(read(key, box))
    if updates is not None:
        for state in assembly.optimizer.state.values():
            if "step" in state:
                state["step"].copy_(updates)


def state_boxes(assembly: Assembly) -> Iterator[tuple[str, Box]]:
    """The keys and boxes that `load_state` reads, in order."""
    return ((key, box) for key, box, _ in held_state(assembly))


def owned_state(assembly: Assembly) -> Iterator[tuple[str, Box, Tensor]]:
    """The weights, moments and biases that this rank owns, as (key, box, values). Every rank must call it."""
    assembly.model.gradients.settle()
    for unit in assembly.model.units:
        if unit.owned:
            state = assembly.optimizer.state[unit.parameter]
            names = moment_names(assembly.plan.job.optimizer, unit.parts[0].name)
            kinds = {"model": unit.parameter.detach(), **{kind: state[key] for kind, key in names.items()}}
            for kind, tensor in kinds.items():
                for part in unit.parts:
                    yield f"{kind}/{part.name}", part.box, unit_part_view(tensor, part)
    for kept in assembly.kept_vectors():
        if kept.owned:
            yield f"model/{kept.name}", kept.box, kept.tensor


def held_state(assembly: Assembly) -> Iterator[tuple[str, Box, Tensor]]:
    """All weights, moments and biases on this rank, whoever owns them: what `load_state` fills, in the same order. To
    read them the model must be settled."""
    for held in (*_trained(assembly), *assembly.kept_vectors()):
        yield f"model/{held.name}", held.box, held.tensor.detach()
    for unit in assembly.model.units:
        state = assembly.optimizer.state[unit.parameter]
        for part in unit.parts:
            for kind, key in moment_names(assembly.plan.job.optimizer, part.name).items():
                yield f"{kind}/{part.name}", part.box, unit_part_view(state[key], part)


def load_weights(model: GPT, path: Path, manifest: Manifest) -> None:
    """Fill the parameters of an unsharded model that were trained, and its routers' biases, from a checkpoint, bit for
    bit."""
    with torch.no_grad():
        for name in kept_values(model.shape):
            model.get_buffer(name).copy_(read_tensor(path, manifest, f"model/{name}"))
        for name in trained_weights(model.shape):
            model.get_parameter(name).copy_(read_tensor(path, manifest, f"model/{name}"))


def _trained(assembly: Assembly) -> list[HeldWeight]:
    return [held for held in assembly.model.weights if held.trained]


def rank_slices(
    assembly: Assembly, state: TrainState, world: Communicator, check: Literal["finite", "nothing"] = "finite"
) -> dict[str, list[TensorSlice]]:
    """The slices that this rank writes: the units that it owns, its random state, and on rank 0 the values that are
    global. Raises RunFailed where a number is not finite, if it is to `check` for that."""
    slices: dict[str, list[TensorSlice]] = {f"rng/rank-{world.index}": [whole_slice(torch.get_rng_state())]}
    if world.index == 0:
        slices["tokens"] = [whole_slice(torch.tensor([state.tokens]))]
        if (updates := updates_counted(assembly.optimizer)) is not None:
            slices["adam_step"] = [whole_slice(updates.reshape(1))]
        if assembly.scale is not None:
            slices[LOSS_SCALE] = [whole_slice(assembly.scale.state)]
    owned = list(owned_state(assembly))
    finite = [True] * len(owned)
    if owned and check == "finite":
        finite = torch.stack([all_finite(numbers) for _, _, numbers in owned]).tolist()
    for (key, box, numbers), is_finite in zip(owned, finite, strict=True):
        if not is_finite:
            raise RunFailed(
                f"{key} is not finite after step {state.step}, which is therefore not saved: the run diverged, most "
                "likely by a learning rate that is too high; choose a lower optimizer.lr and another run.name"
            )
        slices.setdefault(key, []).append(TensorSlice(tensor=numbers, shape=box.shape, offset=box.offset))
    return slices


def all_finite(numbers: Tensor) -> Tensor:
    """Whether all numbers are finite, as a bool tensor of shape []: in one pass over them, where torch.isfinite makes
    several, with separate memory, and takes ten times as long."""
    if not numbers.numel():
        return torch.ones((), dtype=torch.bool, device=numbers.device)
    least, largest = torch.aminmax(numbers)  # NaN, both of them, where one number is
    return torch.isfinite(least) & torch.isfinite(largest)


def unit_part_view(tensor: Tensor, part: OptimizerUnitPart) -> Tensor:
    """The elements of a unit's flat tensor that belong to one of its parts, as a view of that part's shape."""
    return tensor.view(-1)[part.first : part.first + part.box.numbers].view(part.box.extent)
