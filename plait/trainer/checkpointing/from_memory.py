"""Restores ranks from the copies in the memory of their host's supervisor or agent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.checkpoint.arrival import part_files
from plait.checkpoint.assembled import BESIDE
from plait.checkpoint.manifest import StoredPart, parse_parts
from plait.checkpoint.transfer import slice_of_parts
from plait.errors import PlaitError, RunFailed
from plait.launch.values.copies import CopyStore
from plait.parallel.exchange import run_on_all_ranks
from plait.partition.boxes import Box
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.host_cover import PartPlace, covers
from plait.trainer.checkpointing.persist import LOSS_SCALE, load_state, state_boxes
from plait.trainer.optimizer.moments import counts_updates
from plait.trainer.state import TrainState


@torch.no_grad()
def restore_from_memory(assembly: Assembly, store: CopyStore, ranks: range, lineage: int, step: int) -> TrainState:
    """Load the copies of this step and lineage into this rank, bit for bit, and return the training state at that step;
    `ranks` are those of this host. Every rank must call it; raises RunFailed on all of them if one does not find its
    whole state."""
    opened: list[_OpenedCopies] = []
    boxes = list(state_boxes(assembly))

    def look() -> None:
        try:
            opened.append(_OpenedCopies(store, ranks, lineage, step))
        except (ValueError, KeyError, TypeError, PlaitError, OSError) as error:
            raise RunFailed(f"the copies in memory cannot be used: {error}") from None
        opened[0].require([(key, box.offset, box.extent) for key, box in boxes], {key: box.shape for key, box in boxes})

    run_on_all_ranks(assembly.sums, look, None)
    copies = opened[0]

    def read(key: str, box: Box) -> Tensor:
        return copies.read(key, box.offset, box.extent)

    counts = counts_updates(assembly.plan.job.optimizer)
    load_state(assembly, read, copies.whole("adam_step")[0] if counts else None)
    assembly.model.gradients.publish()
    if assembly.scale is not None:
        assembly.scale.resume(copies.whole(LOSS_SCALE))
    torch.set_rng_state(copies.whole(f"rng/rank-{assembly.sums.index}"))
    return TrainState(step=step, position=copies.position, tokens=int(copies.whole("tokens")[0]))


class _OpenedCopies:
    """The copies of all ranks of a host at one step, from which rectangles are read. Raises RunFailed if one is
    incomplete."""

    def __init__(self, store: CopyStore, ranks: range, lineage: int, step: int) -> None:
        self._data: dict[str, memoryview] = {}
        self._own: dict[str, list[StoredPart]] = {}
        self._beside: dict[str, list[StoredPart]] = {}
        positions = set[int]()
        for place, rank in enumerate(ranks):
            copy = next((one for one in store.copies(place) if (one.step, one.lineage) == (step, lineage)), None)
            if copy is None:
                raise RunFailed(f"rank {rank} has no complete copy of step {step}")
            text, file = json.loads(store.text(place, copy)), part_files(rank)[0]
            self._data[file] = store.data(place, copy)
            positions.add(text["position"])
            for part in parse_parts(text["parts"]):
                if part.file != file or part.begin + part.nbytes > copy.data_bytes or text["step"] != copy.step:
                    raise ValueError(f"the copy of rank {rank} is invalid")
                name = part.tensor.removeprefix(BESIDE)
                kept = self._own if name == part.tensor else self._beside
                kept.setdefault(name, []).append(replace(part, tensor=name))
        if len(positions) != 1:
            raise ValueError("they are of different positions")
        [self.position] = positions

    def require(self, places: Iterable[PartPlace], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise RunFailed unless all these rectangles, of tensors with these shapes, are present."""
        for place in places:
            fits = [
                [one for one in kept.get(place[0], ()) if one.shape == shapes[place[0]]]
                for kept in (self._own, self._beside)
            ]
            own, beside = ([(one.tensor, one.offset, one.extent) for one in some] for some in fits)
            if not covers(place, beside, own):
                raise RunFailed(f"this host's copies in memory lack a part of {place[0]}")

    def read(self, key: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """A rectangle of a tensor."""
        parts = [*self._own.get(key, ()), *self._beside.get(key, ())]
        if not parts:
            raise RunFailed(f"this host's copies in memory lack {key}")
        return slice_of_parts(parts, offset, extent, self._numbers)

    def whole(self, key: str) -> Tensor:
        """A whole tensor."""
        shape = next(iter([*self._own.get(key, ()), *self._beside.get(key, ())])).shape
        return self.read(key, (0,) * len(shape), shape)

    def _numbers(self, part: StoredPart, dtype: np.dtype[Any]) -> np.ndarray:
        count = part.nbytes // dtype.itemsize
        return np.frombuffer(self._data[part.file], dtype, count, part.begin) if count else np.empty(0, dtype)
