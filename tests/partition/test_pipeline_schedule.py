"""Schedules: complete, without deadlock, as fast as the papers say, and torch's own wherever torch has them."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as peer

from plait.layout import Schedule
from plait.partition.pipeline_schedule import (
    Action,
    ActionKind,
    ActionLists,
    dependencies,
    dependency_order,
    receiving_stage,
    schedule_actions,
    stage_count,
)
from plait.partition.pipeline_simulation import StageTimes, equal_times, simulate, transfers


def check(lists: ActionLists) -> None:
    """Raise ValueError with a sentence unless every action is there once, on its rank, and none waits for ever."""
    found: dict[tuple[int, int], list[str]] = {}
    for rank, own in enumerate(lists):
        for action in own:
            if action.stage % len(lists) != rank:
                raise ValueError(f"rank {rank} does not hold the stage of {action}")
            found.setdefault((action.stage, action.micro), []).append(action.kind)
    micros = 1 + max(micro for _, micro in found)
    for stage, micro in product(range(stage_count(lists)), range(micros)):
        kinds = sorted(found.get((stage, micro), []))
        if kinds not in (["backward", "forward"], ["backward-input", "backward-weight", "forward"]):
            raise ValueError(f"stage {stage} does {kinds} with micro-batch {micro}")
    dependency_order(lists)


MARKS: dict[ActionKind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


def grid(lists: ActionLists) -> str:
    """A grid for people, a line a rank and a column a unit of time, as if all stages were equally fast."""
    stages = stage_count(lists)
    timeline = simulate(lists, equal_times(stages))
    rows = [["." for _ in range(round(timeline.duration_s))] for _ in lists]
    for row, spans in zip(rows, timeline.ranks, strict=True):
        for span in spans:
            label = f"{MARKS[span.action.kind]}{span.action.micro}"
            label += f"/{span.action.stage}" if stages > len(lists) else ""
            length = round(span.end_s) - round(span.start_s)
            row[round(span.start_s) : round(span.end_s)] = [label, *["-"] * (length - 1)]
    width = max(len(cell) for row in rows for cell in row)
    of_stage = " / stage" if stages > len(lists) else ""
    legend = f"F forward, B backward, I and W its halves for inputs and weights; number: micro-batch{of_stage}; . waits"
    lines = [f"rank {rank}  " + " ".join(cell.ljust(width) for cell in row).rstrip() for rank, row in enumerate(rows)]
    return "\n".join([*lines, f"{legend} ({timeline.bubble:.0%} of all time)"]) + "\n"


SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
COUNTS = {
    "schedule": st.sampled_from(SCHEDULES),
    "ranks": st.integers(1, 8),
    "virtual": st.integers(1, 4),
    "micros": st.integers(1, 24),
}

GRIDS = {
    ("gpipe", 1): """\
rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -
rank 1  .  F0 F1 F2 F3 .  .  .  B0 -  B1 -  B2 -  B3 -  .  .
rank 2  .  .  F0 F1 F2 F3 B0 -  B1 -  B2 -  B3 -  .  .  .  .
F forward, B backward, I and W its halves for inputs and weights; number: micro-batch; . waits (33% of all time)
""",
    ("1f1b", 1): """\
rank 0  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -
rank 1  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .
rank 2  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .
F forward, B backward, I and W its halves for inputs and weights; number: micro-batch; . waits (33% of all time)
""",
    ("zero-bubble", 1): """\
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
F forward, B backward, I and W its halves for inputs and weights; number: micro-batch; . waits (14% of all time)
""",
    ("interleaved", 2): """\
rank 0  F0/0 F1/0 F2/0 F3/0 F0/3 F1/3 F2/3 F3/3 .    .    .    B0/3 -    .    B1/3 -    .    B2/3 -    .    B3/3 -    \
B0/0 -    B1/0 -    B2/0 -    B3/0 -
rank 1  .    F0/1 F1/1 F2/1 F3/1 F0/4 F1/4 F2/4 .    B0/4 -    F3/4 B1/4 -    .    B2/4 -    .    B3/4 -    B0/1 -    \
B1/1 -    B2/1 -    B3/1 -    .    .
rank 2  .    .    F0/2 F1/2 F2/2 F3/2 F0/5 B0/5 -    F1/5 B1/5 -    F2/5 B2/5 -    F3/5 B3/5 -    B0/2 -    B1/2 -    \
B2/2 -    B3/2 -    .    .    .    .
F forward, B backward, I and W its halves for inputs and weights; number: micro-batch / stage; . waits (20% of all time)
""",
}


@pytest.mark.parametrize(("schedule", "virtual"), GRIDS)
def test_the_grid(schedule: Schedule, virtual: int) -> None:
    assert grid(schedule_actions(schedule, ranks=3, virtual=virtual, micros=4)) == GRIDS[schedule, virtual]


@settings(max_examples=100, deadline=None)
@given(**COUNTS)
def test_any_counts_give_every_action_once_after_what_it_waits_for(
    schedule: Schedule, ranks: int, virtual: int, micros: int
) -> None:
    lists = schedule_actions(schedule, ranks=ranks, virtual=virtual, micros=micros)
    check(lists)
    kinds = ["forward", "backward-input", "backward-weight"] if schedule == "zero-bubble" else ["forward", "backward"]
    stages = ranks * virtual
    wanted = {Action(kind=k, stage=s, micro=m) for k, s, m in product(kinds, range(stages), range(micros))}
    assert stage_count(lists) == stages
    assert sorted(map(str, (action for own in lists for action in own))) == sorted(map(str, wanted))
    assert all(action.stage % ranks == rank for rank, own in enumerate(lists) for action in own)
    for kind in kinds[:2]:  # what rows of a tied weight travel by, see parallel/tied_embedding.py
        assert [each.micro for each in lists[0] if (each.stage, each.kind) == (0, kind)] == list(range(micros))
    spans = {span.action: span for own in simulate(lists, equal_times(stages), message_s=0.25).ranks for span in own}
    for action, span in spans.items():
        for needed in dependencies(action, stages):
            travel_s = 0.25 if needed.stage % ranks != action.stage % ranks else 0.0
            assert spans[needed].end_s + travel_s <= span.start_s


@settings(max_examples=40, deadline=None)
@given(**COUNTS)
def test_transfers_stand_in_an_order_that_no_rank_can_get_stuck_in(
    schedule: Schedule, ranks: int, virtual: int, micros: int
) -> None:
    """Even if a rank could pass on only one transfer at a time, and only in this order."""
    lists = schedule_actions(schedule, ranks=ranks, virtual=virtual, micros=micros)
    stages, order = ranks * virtual, transfers(lists)
    place = {action: number for number, action in enumerate(order)}
    assert len(order) == len(place) == 2 * (stages - 1) * micros
    for own in lists:
        needed_so_far = -1
        for action in own:
            from_others = [place[each] for each in dependencies(action, stages) if each.stage != action.stage]
            needed_so_far = max([needed_so_far, *from_others])
            if receiving_stage(action, stages) is not None:
                assert place[action] > needed_so_far, "a result would have to be sent before what it was made from"
                needed_so_far = place[action]


@pytest.mark.parametrize(("ranks", "micros"), [(2, 1), (2, 5), (4, 4), (4, 12), (7, 20)])
def test_the_bubble_is_the_papers(ranks: int, micros: int) -> None:
    """(p - 1) / (m + p - 1) for GPipe and 1F1B; p - 1 over v for the interleaved one, in units of a stage's work."""
    for schedule in ("gpipe", "1f1b"):
        timeline = simulate(schedule_actions(schedule, ranks=ranks, virtual=1, micros=micros), equal_times(ranks))
        assert timeline.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))
        assert timeline.duration_s == 3 * (micros + ranks - 1)


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (4, 2), (4, 3)])
def test_virtual_stages_divide_the_bubble(ranks: int, virtual: int) -> None:
    micros = 4 * ranks
    timeline = simulate(
        schedule_actions("interleaved", ranks=ranks, virtual=virtual, micros=micros), equal_times(ranks * virtual)
    )
    assert timeline.duration_s == 3 * virtual * micros + 3 * (ranks - 1)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (6, 12)])
def test_split_backward_fills_two_thirds_of_the_bubble(ranks: int, micros: int) -> None:
    """ZB-H1: (p - 1)(forward + backward-input - backward-weight), Qi et al. 2024, section 2."""
    timeline = simulate(schedule_actions("zero-bubble", ranks=ranks, virtual=1, micros=micros), equal_times(ranks))
    assert timeline.duration_s == 3 * micros + (ranks - 1)


def test_unequal_stages_and_slow_links_by_hand() -> None:
    """Two stages of 1 s and 3 s forward (backward twice that), a link of half a second, two micro-batches."""
    times = StageTimes(forward_s=(1.0, 3.0), backward_input_s=(1.0, 3.0), backward_weight_s=(1.0, 3.0))
    timeline = simulate(schedule_actions("1f1b", ranks=2, virtual=1, micros=2), times, message_s=0.5)
    starts = [[(MARKS[s.action.kind], s.action.micro, s.start_s) for s in spans] for spans in timeline.ranks]
    assert starts == [
        [("F", 0, 0.0), ("F", 1, 1.0), ("B", 0, 11.0), ("B", 1, 20.0)],
        [("F", 0, 1.5), ("B", 0, 4.5), ("F", 1, 10.5), ("B", 1, 13.5)],
    ]
    assert timeline.duration_s == 22.0 and timeline.bubble == pytest.approx(1 - 24 / 44)


def broken(kind: str) -> ActionLists:
    first, second = schedule_actions("1f1b", ranks=2, virtual=1, micros=2)
    return {
        "missing": (first, second[:-1]),
        "twice": (first, (*second, second[-1])),
        "misplaced": (second, first),
        "too early": ((first[2], *first[:2], first[3]), second),
        "half": (first, (*second[:-1], second[-1]._replace(kind="backward-input"))),
    }[kind]


@pytest.mark.parametrize("kind", ["missing", "twice", "misplaced", "too early", "half"])
def test_a_broken_schedule_is_found(kind: str) -> None:
    with pytest.raises(ValueError, match="for ever" if kind == "too early" else "stage"):
        check(broken(kind))


def plain(order: Any) -> list[str]:
    """Torch's compute actions in its own notation, stage, kind and micro-batch, without pauses."""
    return [str(each) for each in order if each is not None]


def ours(lists: ActionLists, rank: int) -> list[str]:
    return [f"{action.stage}{MARKS[action.kind]}{action.micro}" for action in lists[rank]]


def multi(cls: Any, rank: int, ranks: int, virtual: int, micros: int) -> list[str]:
    """The list that torch's schedule makes for a rank; it needs no more of itself than these counts."""
    schedule = SimpleNamespace(
        n_local_stages=virtual,
        pp_group_size=ranks,
        _n_microbatches=micros,
        microbatches_per_round=micros // max(1, micros // ranks),
    )
    return plain(cls._calculate_single_rank_operations(schedule, rank))


class StageThatNotes:
    """A stage of torch's single-stage schedules that only writes down what it is told to compute."""

    submod = None

    def __init__(self, stage: int) -> None:
        self.stage_index = stage
        self.told: list[str] = []

    def forward_one_chunk(self, micro: int, *_: Any, **__: Any) -> None:
        self.told.append(f"{self.stage_index}F{micro}")

    def backward_one_chunk(self, micro: int, **_: Any) -> None:
        self.told.append(f"{self.stage_index}B{micro}")

    def no_transfers(self, micro: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def release_fwd_send_outputs(self, micro: int) -> None:
        """Nothing was sent; torch 2.15 asks for it."""

    def perform_reduce_grad(self, factor: int) -> None:
        """Nothing to reduce."""


def single(cls: Any, rank: int, ranks: int, micros: int) -> list[str]:
    stage = StageThatNotes(rank)
    empty = [()] * micros
    schedule = SimpleNamespace(
        _stage=stage,
        _n_microbatches=micros,
        _num_stages=ranks,
        scale_grads=False,
        _finalize_gradients=True,  # from torch 2.15 on
        _check_inputs=lambda *_: (empty, empty),
        _initialize_stage=lambda *_: None,
        _maybe_compute_loss=lambda *_: None,
        _maybe_get_loss=lambda *_: None,
        _update_losses=lambda *_: None,
    )
    cls._step_microbatches(schedule)
    return stage.told


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_gpipe_and_1f1b_are_torchs(ranks: int) -> None:
    for micros, rank in product((ranks, ranks + 1, 3 * ranks), range(ranks)):
        gpipe = schedule_actions("gpipe", ranks=ranks, virtual=1, micros=micros)
        assert ours(gpipe, rank) == single(peer.ScheduleGPipe, rank, ranks, micros)
        one = schedule_actions("1f1b", ranks=ranks, virtual=1, micros=micros)
        assert ours(one, rank) == single(peer.Schedule1F1B, rank, ranks, micros)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_interleaved_and_zero_bubble_are_torchs_wherever_it_accepts_the_counts(ranks: int, virtual: int) -> None:
    accepted = [micros for micros in range(1, 4 * ranks) if micros % max(1, micros // ranks) == 0]
    for micros, rank in product(accepted, range(ranks)):
        interleaved = schedule_actions("interleaved", ranks=ranks, virtual=virtual, micros=micros)
        assert ours(interleaved, rank) == multi(peer.ScheduleInterleaved1F1B, rank, ranks, virtual, micros)
        split = schedule_actions("zero-bubble", ranks=ranks, virtual=virtual, micros=micros)
        assert ours(split, rank) == multi(peer.ScheduleInterleavedZeroBubble, rank, ranks, virtual, micros)
