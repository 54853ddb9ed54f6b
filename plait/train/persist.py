"""A rank's weights, moments and random state to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.manifest import Manifest, check_model, tensor_names
from plait.checkpoint.store import checkpoint_for, prune, publish, staging_for
from plait.checkpoint.transfer import TensorSlice, read_tensor, share_out, whole, write_rank
from plait.errors import PlaitError, RunFailed
from plait.parallel.mesh import Sums
from plait.train.assemble import Assembly
from plait.train.state import TrainState

_MOMENTS = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}
"""Names in a checkpoint and in torch's AdamW."""


def save(assembly: Assembly, state: TrainState, folder: Path, world: Sums) -> Path:
    """Write and publish the checkpoint of `state`; every rank must call it, and blocks until it is on disk.

    Raises RunFailed on every rank when one of them could not write; earlier checkpoints stay as they are.
    """
    staging, final = staging_for(folder, state.step), checkpoint_for(folder, state.step)
    _together(world, lambda: write_rank(staging, world.index, _own_part(assembly, state, world)))

    def publish_all() -> None:
        if world.index == 0:
            shape = assembly.plan.shape.to_dict()
            publish(staging, final, step=state.step, cursor=state.position, model=shape, world_size=world.size)
            prune(folder, assembly.plan.checkpoint_keep)

    _together(world, publish_all)
    return final


def restore(assembly: Assembly, path: Path, manifest: Manifest, world: Sums) -> TrainState:
    """Load a checkpoint of any layout into this rank and say where it stands; PlaitError for another model."""
    check_model(manifest, assembly.plan.shape.to_dict())
    load_weights(assembly.woven.model, path, manifest)
    updates = read_tensor(path, manifest, "adam_step")[0]
    for name, parameter in assembly.woven.model.named_parameters():
        assembly.optimizer.state[parameter] = {
            # A copy each: AdamW counts in place, and one tensor for all would count a step once for every parameter.
            "step": updates.to(parameter.device, torch.float32, copy=True),
            **{
                key: read_tensor(path, manifest, f"{kind}/{name}").to(parameter.device)
                for kind, key in _MOMENTS.items()
            },
        }
    random = f"rng/rank-{world.index}"
    if random in tensor_names(manifest):
        torch.set_rng_state(read_tensor(path, manifest, random))
    tokens = int(read_tensor(path, manifest, "tokens")[0])
    return TrainState(step=manifest.step, position=manifest.cursor, tokens=tokens)


def load_weights(model: torch.nn.Module, path: Path, manifest: Manifest) -> None:
    """Fill a model's parameters from a checkpoint, bit for bit."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read_tensor(path, manifest, f"model/{name}"))


def _own_part(assembly: Assembly, state: TrainState, world: Sums) -> dict[str, TensorSlice]:
    """What this rank writes: its share of the tensors that all replicas have, and its own random state."""
    tensors = _shared_tensors(assembly, state)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    mine = {name: tensors[name] for name in share_out(sizes, world.size)[world.index]}
    mine[f"rng/rank-{world.index}"] = torch.get_rng_state()
    return {name: whole(tensor) for name, tensor in mine.items()}


def _shared_tensors(assembly: Assembly, state: TrainState) -> dict[str, Tensor]:
    tensors = {"tokens": torch.tensor([state.tokens])}
    for name, parameter in assembly.woven.model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        moments = assembly.optimizer.state[parameter]
        tensors |= {f"{kind}/{name}": moments[key] for kind, key in _MOMENTS.items()}
        tensors["adam_step"] = moments["step"].reshape(1)
    return tensors


def _together(world: Sums, act: Callable[[], None]) -> None:
    """Do something on every rank and learn whether all of them could; a failure on one is a failure on all."""
    failure: PlaitError | None = None
    try:
        act()
    except PlaitError as error:
        failure = error
    failed = int(world.largest(torch.tensor([int(failure is not None)]))[0])
    if failure is not None:
        raise failure
    if failed:
        raise RunFailed("another worker could not save the checkpoint; see its message")
