"""A rank's weights, moments and random state to a checkpoint and back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.arrival import await_parts
from plait.checkpoint.manifest import Manifest, check_model, tensor_names
from plait.checkpoint.store import checkpoint_for, prune, publish, staging_for
from plait.checkpoint.transfer import TensorSlice, read_slice, read_tensor, whole_slice, write_rank
from plait.errors import PlaitError, RunFailed
from plait.model.shape import weight_sizes
from plait.parallel.mesh import Sums
from plait.parallel.sharded_model import OptimizerUnitPart
from plait.partition.boxes import Box
from plait.trainer.assemble import Assembly
from plait.trainer.state import TrainState

_MOMENTS = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}
"""Names in a checkpoint and in torch's AdamW."""

_SENTENCE_BYTES = 2_000


Send = Callable[[Path], None]
"""Has this rank's part in a staging folder sent to rank 0's host; returns before it is there."""


def save(assembly: Assembly, state: TrainState, folder: Path, world: Sums, *, send: Send | None = None) -> Path:
    """Write and publish the checkpoint of `state`; every rank must call it, and blocks until it is on disk.

    A rank gives `send` where its `folder` is not rank 0's; what it leaves there is gone at the end.
    Raises RunFailed on every rank when one of them could not write; earlier checkpoints stay as they are.
    """
    staging, final = staging_for(folder, state.step), checkpoint_for(folder, state.step)
    clears = send is not None or world.index == 0

    def write_own() -> None:
        write_rank(staging, world.index, _own_part(assembly, state, world))
        if send is not None:
            send(staging)

    def publish_all() -> None:
        if world.index == 0:
            await_parts(staging, world.size)
            shape = assembly.plan.shape
            publish(
                staging,
                final,
                step=state.step,
                cursor=state.position,
                model=shape.to_dict(),
                world_size=world.size,
                needs=[f"{kind}/{name}" for kind in ("model", *_MOMENTS) for name in weight_sizes(shape)],
            )

    def prune_old() -> None:
        if world.index == 0:
            prune(folder, assembly.plan.checkpoint_keep)

    _together(world, write_own, staging if clears else None)
    _together(world, publish_all, staging if clears else None)
    _together(world, prune_old, None)  # a vote of its own: it reads old ones again, which may take minutes
    if send is not None:
        shutil.rmtree(staging, ignore_errors=True)
    return final


@torch.no_grad()
def restore(assembly: Assembly, path: Path, manifest: Manifest, world: Sums) -> TrainState:
    """Load a checkpoint of any layout into this rank and say where it stands; PlaitError for another model."""
    check_model(manifest, assembly.plan.shape.to_dict())

    def read(key: str, box: Box) -> Tensor:
        return read_slice(path, manifest, key, box.offset, box.extent)

    fill_state(assembly, read, read_tensor(path, manifest, "adam_step")[0])
    assembly.model.gradients.publish()
    random = f"rng/rank-{world.index}"
    if random in tensor_names(manifest):
        torch.set_rng_state(read_tensor(path, manifest, random))
    tokens = int(read_tensor(path, manifest, "tokens")[0])
    return TrainState(step=manifest.step, position=manifest.cursor, tokens=tokens)


@torch.no_grad()
def fill_state(assembly: Assembly, read: Callable[[str, Box], Tensor], updates: Tensor) -> None:
    """Fill a rank's weights and moments, after this number of `updates`, with what `read` returns for a key and a
    rectangle.

    Reads come in the order of `state_boxes`. Before the first forward the gradients must `publish`.
    """
    for held in assembly.model.weights:
        held.tensor.copy_(read(f"model/{held.name}", held.box))
    for unit in assembly.model.units:
        moments = {key: torch.zeros_like(unit.parameter) for key in _MOMENTS.values()}
        for part in unit.parts:
            for kind, key in _MOMENTS.items():
                numbers_of(moments[key], part).copy_(read(f"{kind}/{part.name}", part.box))
        # A copy each: AdamW counts in place, and one tensor for all would count a step once for every parameter.
        step = updates.to(unit.parameter.device, torch.float32, copy=True)
        assembly.optimizer.state[unit.parameter] = {"step": step, **moments}


def state_boxes(assembly: Assembly) -> Iterator[tuple[str, Box]]:
    """Keys and rectangles that `fill_state` reads."""
    yield from ((f"model/{held.name}", held.box) for held in assembly.model.weights)
    for unit in assembly.model.units:
        yield from ((f"{kind}/{part.name}", part.box) for part in unit.parts for kind in _MOMENTS)


def owned_state(assembly: Assembly) -> Iterator[tuple[str, Box, Tensor]]:
    """What this rank answers for: a key, a rectangle, and its numbers. Every rank must call it."""
    assembly.model.gradients.settle()
    for unit in assembly.model.units:
        if unit.owned:
            moments = assembly.optimizer.state[unit.parameter]
            kinds = {"model": unit.parameter.detach(), **{kind: moments[key] for kind, key in _MOMENTS.items()}}
            for kind, tensor in kinds.items():
                for part in unit.parts:
                    yield f"{kind}/{part.name}", part.box, numbers_of(tensor, part)


def load_weights(model: torch.nn.Module, path: Path, manifest: Manifest) -> None:
    """Fill a model's parameters from a checkpoint, bit for bit."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read_tensor(path, manifest, f"model/{name}"))


def _own_part(assembly: Assembly, state: TrainState, world: Sums) -> dict[str, list[TensorSlice]]:
    """What this rank writes: the units that it answers for, its random state, and on rank 0 what is one for all."""
    slices: dict[str, list[TensorSlice]] = {f"rng/rank-{world.index}": [whole_slice(torch.get_rng_state())]}
    if world.index == 0:
        moments = next(iter(assembly.optimizer.state.values()))
        slices["tokens"] = [whole_slice(torch.tensor([state.tokens]))]
        slices["adam_step"] = [whole_slice(moments["step"].reshape(1))]
    for key, box, numbers in owned_state(assembly):
        slices.setdefault(key, []).append(TensorSlice(tensor=numbers, shape=box.shape, offset=box.offset))
    return slices


def numbers_of(tensor: Tensor, part: OptimizerUnitPart) -> Tensor:
    """The numbers of a unit's tensor that belong to one of its parts, as a view of the part's shape."""
    return tensor.view(-1)[part.first : part.first + part.box.numbers].view(part.box.extent)


def _together(world: Sums, act: Callable[[], None], clear: Path | None) -> None:
    """Do something on every rank; where one could not, all of them raise its sentence: nobody knows who is heard.

    Then `clear` goes as well, where this rank is one that clears up.
    """
    sentence = b""
    try:
        act()
    except PlaitError as error:
        # The first to fail takes the folder away under the others, who then miss their files: they are heard last.
        order = b"2" if isinstance(error.__cause__, FileNotFoundError) else b"1"
        sentence = (order + str(error).encode())[:_SENTENCE_BYTES]
    if not int(world.largest(torch.tensor([len(sentence)]))[0]):
        return
    if clear is not None:  # now that nobody writes into it any more
        shutil.rmtree(clear, ignore_errors=True)
    padded = torch.tensor(list(sentence.ljust(_SENTENCE_BYTES, b"\0")), dtype=torch.uint8)
    texts = [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in world.gather(padded)]
    raise RunFailed(min((text for text in texts if text), key=lambda text: text[0])[1:])
