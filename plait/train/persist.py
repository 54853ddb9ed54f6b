"""A rank's weights, moments and random state to a checkpoint and back."""

from __future__ import annotations

import shutil
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

_SENTENCE_BYTES = 2_000


def save(assembly: Assembly, state: TrainState, folder: Path, world: Sums) -> Path:
    """Write and publish the checkpoint of `state`; every rank must call it, and blocks until it is on disk.

    Raises RunFailed on every rank when one of them could not write; earlier checkpoints stay as they are.
    """
    staging, final = staging_for(folder, state.step), checkpoint_for(folder, state.step)
    _together(world, staging, lambda: write_rank(staging, world.index, _own_part(assembly, state, world)))

    def publish_all() -> None:
        if world.index == 0:
            shape = assembly.plan.shape.to_dict()
            publish(staging, final, step=state.step, cursor=state.position, model=shape, world_size=world.size)
            prune(folder, assembly.plan.checkpoint_keep)

    _together(world, staging, publish_all)
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


def _together(world: Sums, staging: Path, act: Callable[[], None]) -> None:
    """Do something on every rank; where one could not, all of them raise its sentence: nobody knows who is heard."""
    sentence = b""
    try:
        act()
    except PlaitError as error:
        # The first to fail takes the folder away under the others, who then miss their files: they are heard last.
        order = b"2" if isinstance(error.__cause__, FileNotFoundError) else b"1"
        sentence = (order + str(error).encode())[:_SENTENCE_BYTES]
    if not int(world.largest(torch.tensor([len(sentence)]))[0]):
        return
    if world.index == 0:  # now that nobody writes into it any more
        shutil.rmtree(staging, ignore_errors=True)
    padded = torch.tensor(list(sentence.ljust(_SENTENCE_BYTES, b"\0")), dtype=torch.uint8)
    told = [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in world.gather(padded)]
    raise RunFailed(min((text for text in told if text), key=lambda text: text[0])[1:])
