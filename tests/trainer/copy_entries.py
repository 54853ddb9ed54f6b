"""What the ranks of test_memory_copies.py do, under the layout of the plan in their folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plait.errors import RunFailed
from plait.launch.values.copies import CopyStore, KeptCopy
from plait.launch.values.job import RankContext
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.checkpointing.background import saver_of
from plait.trainer.checkpointing.copies import StateCopies
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for
from tests.trainer.saved import save


def copy_and_save(context: RankContext, argument: str) -> None:
    """After each of so many steps copy the state into memory; then save a checkpoint, too. `spoil`: a rank voids its
    newest copy then."""
    asked = json.loads(argument)
    with assembled(context, Path(asked["folder"])) as assembly:
        torch.manual_seed(context.rank)
        copying = copies_of(context, assembly, asked)
        copying.begin()
        state = TrainState()
        for _ in range(asked["steps"]):
            state = stepped(assembly, state)
            assert copying.copy_state(state) == ""
        save(assembly, state, Path(asked["new"]))
        assert context.memory is not None
        newest = context.memory.copies(context.local_rank)[0]
        if asked.get("spoil") == context.rank:
            context.memory.begin(newest.slot)
        context.send("copied", step=newest.step, told=list(copying.news()))


def restore_and_save(context: RankContext, argument: str) -> None:
    """Go on from the copies of a step, as new processes, for so many steps, then save a checkpoint."""
    asked = json.loads(argument)
    with assembled(context, Path(asked["folder"]), initialize=False) as assembly:
        torch.manual_seed(1000)  # what a resume must not go on from
        copying = copies_of(context, assembly, asked)
        try:
            state = copying.restore(asked["from"])
        except RunFailed as error:
            context.send("restored", why=str(error))
            return
        copying.begin()
        for _ in range(asked["steps"]):
            state = stepped(assembly, state)
            if asked.get("copies"):
                copying.copy_state(state)
        save(assembly, state, Path(asked["new"]))
        context.send("restored", step=state.step, position=state.position, tokens=state.tokens)


def save_from_copies(context: RankContext, argument: str) -> None:
    """A save beside training writes a copy in memory, and copies go on meanwhile; tells in which slots they lie."""
    asked = json.loads(argument)
    with assembled(context, Path(asked["folder"])) as assembly:
        torch.manual_seed(context.rank)
        copying = copies_of(context, assembly, asked)
        copying.begin()
        new = Path(asked["new"])
        (new / "checkpoints").mkdir(parents=True, exist_ok=True)
        saver = saver_of(assembly, new, "here", 1, context.send, copying)
        state = stepped(assembly, TrainState())
        copying.copy_state(state)
        state = stepped(assembly, state)
        saver.begin(state)
        assert context.memory is not None
        slots = [context.memory.copies(context.local_rank)[0].slot]
        for _ in range(3):
            state = stepped(assembly, state)
            copying.copy_state(state)
            slots.append(context.memory.copies(context.local_rank)[0].slot)
        end = saver.finish()
        assert end is not None
        for _ in range(2):
            state = stepped(assembly, state)
            copying.copy_state(state)
            slots.append(context.memory.copies(context.local_rank)[0].slot)
        context.send("saved", step=end.step, failure=end.failure, slots=slots)


def copies_of(context: RankContext, assembly: Assembly, asked: dict[str, int]) -> StateCopies:
    """This rank's copies; with "hosts" so many, which have equal parts of the ranks each and see no other's copies."""
    assert context.memory is not None
    each = context.world_size // asked.get("hosts", 1)
    first = context.rank // each * each
    store = HostView(context.memory, first)
    return StateCopies(assembly, store, range(first, first + each), asked["lineage"])


@dataclass
class HostView:
    """The store of one of several hosts, whose ranks begin with `first`; all are in one file here."""

    store: CopyStore
    first: int

    def reserve(self, slot: int, nbytes: int) -> None:
        self.store.reserve(slot, nbytes)

    def begin(self, slot: int) -> None:
        self.store.begin(slot)

    def write(self, slot: int, offset: int, data: memoryview) -> None:
        self.store.write(slot, offset, data)

    def finish(self, slot: int, *, step: int, lineage: int, text: bytes, data_bytes: int) -> None:
        self.store.finish(slot, step=step, lineage=lineage, text=text, data_bytes=data_bytes)

    def release(self, slot: int, nbytes: int) -> None:
        self.store.release(slot, nbytes)

    def copies(self, local_rank: int) -> Sequence[KeptCopy]:
        return self.store.copies(self.first + local_rank)

    def text(self, local_rank: int, copy: KeptCopy) -> bytes:
        return self.store.text(self.first + local_rank, copy)

    def data(self, local_rank: int, copy: KeptCopy) -> memoryview:
        return self.store.data(self.first + local_rank, copy)


def stepped(assembly: Assembly, state: TrainState) -> TrainState:
    state, scalars = assembly.step(state)
    torch.rand(3)  # as a step with dropout would draw
    return replace(state, tokens=state.tokens + int(scalars.totals[1]))


@contextmanager
def assembled(context: RankContext, folder: Path, *, initialize: bool = True) -> Iterator[Assembly]:
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        assembly = assemble(config, plan, sums=world_communicator(), mesh=mesh, initialize=initialize)
        yield assembly
        assembly.loader.close()
