"""Copies of a rank's state in the memory of its host's supervisor or agent, which outlives the rank: made, saved from,
and restored by a later start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.arrival import part_files
from plait.checkpoint.assembled import BESIDE
from plait.checkpoint.host_bytes import host_bytes
from plait.checkpoint.manifest import ITEM_BYTES, StoredPart, parts_text
from plait.checkpoint.transfer import DTYPES, TensorSlice, rank_layout, stored_part, whole_slice
from plait.launch.values.copies import SLOTS, CopyStore, KeptCopy
from plait.machines.machine import free_memory_bytes
from plait.parallel.exchange import agree_on_any, gather_json
from plait.trainer.assemble import Assembly
from plait.trainer.checkpointing.carrier import MEMORY_KEPT, Slices
from plait.trainer.checkpointing.from_memory import restore_from_memory
from plait.trainer.checkpointing.host_cover import PartPlace, kept_beside
from plait.trainer.checkpointing.persist import LOSS_SCALE, held_state, rank_slices, state_boxes
from plait.trainer.optimizer.optim import updates_counted
from plait.trainer.state import TrainState
from plait.units import format_bytes

_NO_HASH = "0" * 64
"""Copies are not hashed: memory that flips bits would corrupt the run itself as well."""
_WITHOUT_COPIES = "after a failure the run continues from its newest checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The properties that stay the same from copy to copy: the text about the parts, and the order of slices."""

    signature: Sequence[tuple[Any, ...]]
    header: bytes
    order: Sequence[tuple[StoredPart, int]]
    text: str
    nbytes: int


class StateCopies:
    """Copies of one rank's state; every rank has one and makes the same calls in the same order.

    `store` is None if no process outlives the ranks. `ranks` are those of this rank's host. `lineage` is the number of
    the last start that began from a checkpoint or from scratch.
    """

    def __init__(self, assembly: Assembly, store: CopyStore | None, ranks: range, lineage: int) -> None:
        self._assembly, self._world = assembly, assembly.sums
        self._maybe_store, self._ranks, self._lineage = store, ranks, lineage
        self._newest: KeptCopy | None = None
        self._saving: int | None = None
        """The slot of the copy that is being saved."""
        self._shape: _Shape | None = None
        self._beside: Sequence[PartPlace] | None = None
        self._settles = False
        """Whether any rank copies weights that another one updates: then all of them synchronize before a copy."""
        self.are_made = False
        """The same on every rank."""
        self._failed = False
        self._is_usable = True
        self._cost_s = 0.0
        """Seconds for which the last copy blocked this rank; for a save, they count as the save's."""

    def restore(self, step: int) -> TrainState:
        """Load the copies of this step, from which the run then continues. Every rank must call it; raises RunFailed on
        all ranks if one does not find its whole state."""
        state = restore_from_memory(self._assembly, self._store, self._ranks, self._lineage, step)
        own = self._store.copies(self._place)
        self._newest = next(one for one in own if (one.step, one.lineage) == (step, self._lineage))
        return state

    def begin(self) -> str:
        """Make copies from now on; older ones become invalid, except the one that was restored. Returns a sentence for
        the log if copies are impossible, else an empty text."""
        if self._maybe_store is None:
            return f"the state is not kept in memory: nothing outlives workers that torchrun started; {_WITHOUT_COPIES}"
        self.are_made = True
        try:
            for slot in set(range(SLOTS)) - self._kept_slots:
                self._store.begin(slot)
        except OSError:  # for example because of a user's limit on file sizes
            self._is_usable = False
        return ""

    @property
    def are_prepared(self) -> bool:
        """Whether copies are made and have their memory; the same on every rank."""
        return self.are_made and self._beside is not None

    def layers_moved(self) -> None:
        """The ranks have other parts of the state from now on."""
        self._shape = self._beside = None

    def prepare(self) -> str:
        """Determine what is copied and allocate memory for it, if that is not done yet. Every rank must call it before
        a state is copied or saved; blocks.

        Returns "" or, on all ranks alike, a warning that copies are impossible: then nothing is copied.
        """
        if not self.are_made or self.are_prepared:
            return ""
        free_bytes = (1 - MEMORY_KEPT) * free_memory_bytes()
        self._beside = self._found_beside()
        self._settles = agree_on_any(self._world, bool(self._beside))
        nbytes = self._shape_of(self._all_slices(TrainState())).nbytes
        lacks = not self._is_usable or SLOTS * nbytes * len(self._ranks) > free_bytes
        for slot in () if lacks else range(2):
            try:
                self._store.reserve(slot, nbytes)
            except OSError:
                lacks = True
        most, lacking = self._world.largest(torch.tensor([nbytes, int(lacks)])).tolist()
        if not lacking:
            return ""
        self.are_made = False
        return (
            f"warning  the state is not kept in memory: {SLOTS} copies of {format_bytes(most)} for each worker do not "
            f"fit into free memory, or a limit prevents them (ulimit -f); {_WITHOUT_COPIES}"
        )

    def copy_state(self, state: TrainState) -> str:
        """Copy a state; returns a warning for the log, or "". Every rank must call it."""
        warning = self.prepare()
        if self.are_made:
            self.copy(state)
        return warning

    def news(self) -> Sequence[int]:
        """Values for the agreement of all ranks after a step, where the largest counts: the microseconds of this rank's
        last copy, if new, and whether the copy failed."""
        cost_s, self._cost_s = self._cost_s, 0.0
        return round(cost_s * 1e6), int(self._failed)

    def agreed(self, cost_us: int, failed: int, tell: Callable[..., None]) -> float:
        """Process the agreed values; returns the seconds of the last copy, if new, and reports them."""
        if not self.are_made:
            return 0.0
        if failed:
            self.are_made = False
            tell(
                "note", text=f"warning  no memory was left for a copy of the state: no more are made; {_WITHOUT_COPIES}"
            )
        elif cost_us and self._newest is not None:
            tell("copied", step=self._newest.step, seconds=cost_us / 1e6)
        return cost_us / 1e6

    def copy(self, state: TrainState, own: Slices | None = None) -> KeptCopy | None:
        """Copy this rank's state, or its slices `own` for a checkpoint. Every rank must call it; returns when the copy
        is complete, or None if there was no memory: then the older one stays."""
        began_s = time.monotonic()
        slot = min(set(range(SLOTS)) - self._kept_slots)
        try:
            self._newest = self._written(state, self._all_slices(state, own), slot)
        except OSError:
            self._failed = True
            return None
        if own is None:
            self._cost_s = time.monotonic() - began_s
        return self._newest

    def begin_saving(self, copy: KeptCopy) -> Slices:
        """The slices of a copy for a checkpoint, in memory; no further copy replaces it until `saved`."""
        self._saving = copy.slot
        data, shape = self._store.data(self._place, copy), self._shape
        assert shape is not None
        slices: dict[str, list[TensorSlice]] = {}
        for part, _ in shape.order:
            if not part.tensor.startswith(BESIDE):
                one = TensorSlice(tensor=_tensor_at(data, part), shape=part.shape, offset=part.offset)
                slices.setdefault(part.tensor, []).append(one)
        return slices

    def take_third_slot(self) -> None:
        """Allocate memory for a copy in addition to the newest one and the one that is being saved; a failure is
        reported when that copy is made. Callable from any thread."""
        shape = self._shape
        if shape is not None:
            with suppress(OSError):
                for slot in set(range(SLOTS)) - self._kept_slots:
                    self._store.reserve(slot, shape.nbytes)

    def saved(self) -> None:
        """The copy that was saved may be replaced."""
        self._saving = None

    @property
    def _place(self) -> int:
        return self._world.index - self._ranks.start

    @property
    def _store(self) -> CopyStore:
        assert self._maybe_store is not None, "copies are made and asked for only if a process keeps them"
        return self._maybe_store

    @property
    def _kept_slots(self) -> set[int | None]:
        """Slots that must not be overwritten: the newest copy's, and that of the copy being saved."""
        return {self._saving, None if self._newest is None else self._newest.slot}

    def _written(self, state: TrainState, slices: Slices, slot: int) -> KeptCopy:
        shape, flat = self._shape_of(slices), _flat(slices)
        store = self._store
        store.begin(slot)
        store.write(slot, 0, memoryview(shape.header))
        for part, number in shape.order:
            at = part.begin
            for piece in host_bytes(flat[number][1].tensor):
                store.write(slot, at, piece)
                at += len(piece)
        text = f'{{"step": {state.step}, "position": {state.position}, {shape.text}}}'.encode()
        lineage = self._lineage
        store.finish(slot, step=state.step, lineage=lineage, text=text, data_bytes=shape.nbytes)
        return KeptCopy(step=state.step, lineage=lineage, slot=slot, text_bytes=len(text), data_bytes=shape.nbytes)

    def _shape_of(self, slices: Slices) -> _Shape:
        """The shape of a copy, recomputed only if its slices differ from those before."""
        flat = _flat(slices)
        signature = [(key, one.offset, one.tensor.shape, one.tensor.dtype) for key, one in flat]
        if self._shape is None or self._shape.signature != signature:
            self._shape = _shape(self._world.index, slices, signature)
        return self._shape

    def _all_slices(self, state: TrainState, own: Slices | None = None) -> Slices:
        """This rank's own slices and, under separate keys, those that it copies for its host."""
        whole = own if own is not None else rank_slices(self._assembly, state, self._world, check="nothing")
        found = {key: list(some) for key, some in whole.items()}
        if self._world.index > 0:  # only rank 0's host already has these
            found[BESIDE + "tokens"] = [whole_slice(torch.tensor([state.tokens]))]
            optimizer = self._assembly.optimizer
            if optimizer.state and (updates := updates_counted(optimizer)) is not None:
                found[BESIDE + "adam_step"] = [whole_slice(updates.reshape(1))]
            if self._assembly.scale is not None:
                found[BESIDE + LOSS_SCALE] = [whole_slice(self._assembly.scale.state)]
        if self._settles:
            self._assembly.model.settle()
        if wanted := set(self._beside or ()):
            for key, box, numbers in held_state(self._assembly):
                if (key, box.offset, box.extent) in wanted:
                    one = TensorSlice(tensor=numbers, shape=box.shape, offset=box.offset)
                    found.setdefault(BESIDE + key, []).append(one)
        return found

    def _found_beside(self) -> Sequence[PartPlace]:
        """The parts of other ranks that this rank copies; empty if all ranks are on one host. Every rank must call
        it."""
        if not agree_on_any(self._world, len(self._ranks) < self._world.size):
            return ()
        slices = rank_slices(self._assembly, TrainState(), self._world, check="nothing")
        own = [(key, one.offset, tuple(one.tensor.shape)) for key, some in slices.items() for one in some]
        needs = [(key, box.offset, box.extent) for key, box in state_boxes(self._assembly)]
        rows = gather_json([own, needs], self._world)
        of_host = [[_as_places(rows[rank][of]) for rank in self._ranks] for of in range(2)]
        return kept_beside(of_host[0], of_host[1])[self._place]


def _as_places(values: Sequence[Any]) -> list[PartPlace]:
    return [(key, tuple(at), tuple(n)) for key, at, n in values]


def _flat(slices: Slices) -> list[tuple[str, TensorSlice]]:
    return [(key, one) for key, some in slices.items() for one in some]


def _shape(rank: int, slices: Slices, signature: Sequence[tuple[Any, ...]]) -> _Shape:
    """Own parts are laid out as in the rank's checkpoint file, other ranks' parts after them."""
    file = part_files(rank)[0]
    number_of = {stored_part(key, one, file).key: number for number, (key, one) in enumerate(_flat(slices))}
    header, parts, _ = rank_layout(rank, slices)
    order = [(replace(part, sha256=_NO_HASH), number_of[part.key]) for part in parts]
    nbytes = len(header) + sum(part.nbytes for part, _ in order)
    text = f'"parts": {parts_text(part for part, _ in order)}'
    return _Shape(signature=signature, header=header, order=order, text=text, nbytes=nbytes)


def _tensor_at(data: memoryview, part: StoredPart) -> Tensor:
    dtype = DTYPES[part.dtype]
    count = part.nbytes // ITEM_BYTES[part.dtype]
    if not count:
        return torch.empty(part.extent, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=part.begin).view(part.extent)
