"""Plain values and tensors from rank to rank, as JSON and bytes, so that nothing received is executed; and operations
that succeed on all ranks or fail on all, with one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import PlaitError, RunFailed
from plait.parallel.communicator import Communicator

TENSOR_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
"""torch's element types by their names."""


def gather_json(value: Any, world: Communicator) -> list[Any]:
    """Every rank's value, in rank order. Every rank must call it; blocks. Values are JSON."""
    if world.size == 1:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in world.gather(torch.tensor([len(own)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    found = world.gather(padded)
    return [json.loads(bytes(one[:size].numpy())) for one, size in zip(found, sizes, strict=True)]


def gather_tensors(own: Tensor, world: Communicator) -> list[Tensor]:
    """Every rank's tensor, in rank order, regardless of its shape and element type. Every rank must call it; blocks."""
    if world.size == 1:
        return [own]
    described = gather_json([str(own.dtype).removeprefix("torch."), list(own.shape)], world)
    kinds = [(TENSOR_DTYPES[dtype], torch.Size(shape)) for dtype, shape in described]
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in kinds]
    room = torch.zeros(max(sizes), dtype=torch.uint8, device=own.device)  # not every library gathers every element type
    room[: own.nbytes] = own.detach().contiguous().view(-1).view(torch.uint8)
    parts = world.gather(room) if max(sizes) else [room] * world.size
    return [part[:size].view(kind[0]).view(kind[1]) for part, size, kind in zip(parts, sizes, kinds, strict=True)]


def sum_of_bits(own: Tensor, world: Communicator) -> Tensor:
    """The sum over ranks of which at most one has nonzero bits, bit for bit. In place; blocks."""
    if own.is_complex():
        sum_of_bits(torch.view_as_real(own), world)
        return own
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()]
    if bits == torch.int16:  # gloo cannot sum it
        wide = own.view(bits).to(torch.int32)
        world(wide)
        own.view(bits).copy_(wide)
    else:
        world(own.view(bits))
    return own


def first_ones(make: Callable[[], Any], world: Communicator) -> Any:
    """Rank 0's result, as JSON, on all ranks; a PlaitError that it raises is raised by all. Blocks."""
    outcome: dict[str, Any] = {}
    if world.index == 0:
        try:
            outcome = {"value": make()}
        except PlaitError as error:
            outcome = {"error": str(error)}
    outcome = gather_json(outcome, world)[0]
    if "error" in outcome:
        raise PlaitError(outcome["error"])
    return outcome["value"]


def agree_on_any(world: Communicator, own: bool) -> bool:
    """Whether `own` is true on any rank; the same answer on all. Every rank must call it."""
    return bool(world.largest(torch.tensor([int(own)]))[0])


def run_on_all_ranks(
    world: Communicator, act: Callable[[], None], clear: Path | None, number: Callable[[], int] = lambda: 0
) -> int:
    """Call `act` on every rank; if it fails on any of them, all ranks raise RunFailed with the same message. Returns
    the largest `number` of all ranks, asked for after `act`.

    Every rank must raise it, because no rank knows whose error will be shown. Then the folder `clear` is deleted, on
    the ranks that pass one.
    """
    sentence = ""
    try:
        act()
    except PlaitError as error:
        # The first rank to fail deletes the folder, so the others then miss their files: their errors are reported
        # last.
        sentence = ("2" if isinstance(error.__cause__, FileNotFoundError) else "1") + str(error)
    fails, largest = world.largest(torch.tensor([int(bool(sentence)), 0 if sentence else number()])).tolist()
    if not fails:
        return int(largest)
    if clear is not None:  # once no rank writes into it any more
        shutil.rmtree(clear, ignore_errors=True)
    raise RunFailed(min((text for text in gather_json(sentence, world) if text), key=lambda text: text[0])[1:])
