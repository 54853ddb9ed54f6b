"""Replayed steps: the numbers of steps that are launched kernel by kernel, and when there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.data.samples.micro import Micro
from plait.model.attention import Attention, Documents, attend
from plait.parallel.communicator import ONE_PROCESS
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars
from plait.trainer.step_graph import MOST_GRAPHS, SMALLEST_ROOM, TIMED_STEPS, UNTIMED_STEPS, StepGraphs
from tests.trainer.tiny import make_tiny

REHEARSED = 1
FIRST_REPLAY = UNTIMED_STEPS + TIMED_STEPS + REHEARSED


@dataclass
class Repeats:
    """Records on a processor: a replay does the work again, and puts its results where the first ones were."""

    room: bool = True
    fails: str = ""
    log: list[str] = field(default_factory=list[str])

    def rehearse(self, work: Callable[[], Scalars]) -> Scalars:
        self.log.append("rehearsed")
        return work()

    def record(self, work: Callable[[], Scalars]) -> Callable[[], Scalars]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.log.append("recorded")
        kept: list[Scalars] = []

        def replay() -> Scalars:
            self.log.append("replayed")
            found = work()
            if not kept:
                kept.append(found)
            for one in fields(found):
                value, place = getattr(found, one.name), getattr(kept[0], one.name)
                if isinstance(value, Tensor):
                    place.copy_(value)
            return kept[0]

        return replay

    def has_room(self) -> bool:
        return self.room

    def wait(self) -> None: ...


class Clock:
    """Steps take a second, replays a tenth or what is given; of steps the host is busy for `busy`."""

    def __init__(self, *, busy: float = 1.0, replay: float = 0.1) -> None:
        launched = [(0.0, busy, 1.0)] * TIMED_STEPS
        self.readings = [one for some in (*launched, *[(0.0, replay, replay)] * TIMED_STEPS) for one in some]

    def __call__(self) -> float:
        return self.readings.pop(0)


def tiny(folder: Path, *keys: str) -> Assembly:
    folder.mkdir()
    config, plan = make_tiny(folder, *keys)
    return assemble(config, plan, sums=ONE_PROCESS, stages=())


def steps(assembly: Assembly, count: int) -> list[Scalars]:
    state, found = TrainState(), list[Scalars]()
    for _ in range(count):
        state, scalars = assembly.step(state)
        found.append(scalars)
    assembly.loader.close()
    return found


def attend_by_ends(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, window: int = 0) -> Tensor:
    """What GPUs' attention does with documents: it knows them by their ends alone."""
    if documents is not None and documents.ends is not None:
        lengths = [end - begin for begin, end in pairwise(documents.ends.tolist())]
        documents = Documents(tuple(one for one in lengths if one))
    return attend(q, k, v, documents, window)


def with_graphs(assembly: Assembly, recorder: Repeats, clock: Clock | None = None) -> list[str]:
    """Give an assembly replays; returns what they tell."""
    told: list[str] = []
    assembly.graphs = StepGraphs(assembly.update_from, recorder, told.append, clock=clock or Clock())
    for module in assembly.model.chunks[0].modules():
        if isinstance(module, Attention):
            module.attend = attend_by_ends
    return told


@pytest.mark.parametrize("masked", ["true", "false"])
def test_replayed_steps_are_those_that_are_launched(tmp_path: Path, masked: str) -> None:
    plain, replayed = (tiny(tmp_path / name, f"data.mask_documents={masked}") for name in ("plain", "replayed"))
    recorder = Repeats()
    told = with_graphs(replayed, recorder)
    for one, other in zip(steps(plain, 20), steps(replayed, 20), strict=True):
        assert torch.equal(one.totals, other.totals) and torch.equal(one.norm, other.norm)
    for one, other in zip(plain.tensors(), replayed.tensors(), strict=True):
        assert torch.equal(one, other)
    assert recorder.log == ["rehearsed", "recorded", *["replayed"] * (20 - FIRST_REPLAY)]
    assert told == [
        "steps are replayed as a CUDA graph from now on: 0.1 s each, and 1 s where the host launches their kernels one "
        "by one"
    ]


def micros_of(*documents: int) -> list[Micro]:
    """A micro-batch of two rows for each of these numbers of documents, the last ones of which hold one token."""
    made = []
    for count in documents:
        rows = torch.arange(2 * 64).view(2, 64)
        made.append(Micro(inputs=rows, targets=rows + 1, positions=rows % 5, lengths=(129 - count, *[1] * (count - 1))))
    return made


class Seen:
    """A step that keeps the micro-batches that it was given."""

    def __init__(self) -> None:
        self.micros: list[Micro] = []

    def __call__(self, micros: Sequence[Micro]) -> Scalars:
        self.micros = list(micros)
        return Scalars(totals=torch.ones(2, dtype=torch.float64), norm=torch.ones(()))


def past_timing(recorder: Repeats, clock: Clock | None = None) -> tuple[StepGraphs, Seen, Seen, list[str]]:
    """Replays whose launched steps are behind them, what takes recorded steps and what launches, and what is told."""
    recorded, launched, told = Seen(), Seen(), list[str]()
    graphs = StepGraphs(recorded, recorder, told.append, clock=clock or Clock())
    for _ in range(UNTIMED_STEPS + TIMED_STEPS):
        graphs.take(micros_of(3), launched)
    return graphs, recorded, launched, told


def test_missing_documents_are_empty_ones_behind_the_last() -> None:
    graphs, recorded, launched, _ = past_timing(Repeats())
    for _ in range(2):
        graphs.take(micros_of(3, 20), launched)
        first, second = recorded.micros
        assert first.ends is not None and second.ends is not None
        assert first.ends.tolist() == [0, 126, 127, *[128] * 30]
        assert len(second.ends) == len(first.ends) and second.ends[20] == 128
        assert torch.equal(first.inputs, micros_of(3)[0].inputs) and first.positions is not None


def test_unlike_steps_have_recordings_of_their_own_up_to_a_limit() -> None:
    recorder = Repeats()
    graphs, recorded, launched, _ = past_timing(recorder)
    wanted = [(SMALLEST_ROOM,), (5,), (SMALLEST_ROOM + 1,), (3, 3), (100,), (4,), (3, 3, 3), (6,)]
    for documents in wanted * 3:
        recorded.micros, launched.micros = [], []
        graphs.take(micros_of(*documents), launched)
        taker = launched if documents == (3, 3, 3) else recorded
        assert [one.inputs.shape for one in taker.micros] == [(2, 64)] * len(documents)
    assert recorder.log.count("recorded") == recorder.log.count("rehearsed") == MOST_GRAPHS


@pytest.mark.parametrize(
    ("recorder", "clock", "told"),
    [
        (Repeats(), Clock(busy=0.5), []),
        (Repeats(room=False), Clock(), ["its tensors do not fit into the GPU's memory a second time"]),
        (Repeats(fails="no such kernel\nmore"), Clock(), ["it cannot be recorded (no such kernel)"]),
        (Repeats(), Clock(replay=0.96), ["a replay takes 0.96 s, and launching its kernels one by one 1 s"]),
    ],
    ids=["the GPU is the slower one", "no room", "cannot be recorded", "not faster"],
)
def test_steps_are_launched_where_replays_gain_nothing(recorder: Repeats, clock: Clock, told: list[str]) -> None:
    graphs, recorded, launched, sentences = past_timing(recorder, clock)
    for _ in range(8):
        recorded.micros, launched.micros = [], []
        scalars = graphs.take(micros_of(3), launched)
        assert scalars.norm == 1 and len(recorded.micros) + len(launched.micros) == 1
    assert launched.micros and not recorded.micros
    assert sentences == [f"steps are not replayed as a CUDA graph: {why}" for why in told]


def test_the_next_replay_overwrites_no_results() -> None:
    graphs, _, launched, _ = past_timing(Repeats())
    found = [graphs.take(micros_of(3), launched) for _ in range(4)]
    assert len({one.totals.data_ptr() for one in found}) == 4


def test_what_watches_a_step_sees_replays_as_whole_steps() -> None:
    entered: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append("begun")
        yield
        entered.append("ended")

    graphs = StepGraphs(Seen(), Repeats(), [].append, around, clock=Clock())
    for _ in range(FIRST_REPLAY + 2):
        graphs.take(micros_of(3), Seen())
    assert entered == ["begun", "ended"] * (2 + REHEARSED)
