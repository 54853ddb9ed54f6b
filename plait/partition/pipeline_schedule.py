"""The schedule of a pipeline as data: what each rank computes in which order; how long that takes; how it looks.

The lists made here are what the planner times and prints and what the pipeline's ranks carry out, word for word. Stage
s of the model is on rank s % ranks. The orders are those of GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019),
interleaved 1F1B (Narayanan et al. 2021) and ZB-H1 with virtual stages (Qi et al. 2024), for any number of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from plait.layout import Schedule, share

Kind = Literal["forward", "backward", "backward-input", "backward-weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that a rank computes: a stage's part of one micro-batch.

    "backward" makes all gradients; "backward-input" those that the stage before waits for, and "backward-weight" the
    rest.
    """

    kind: Kind
    stage: int
    micro: int


Lists = tuple[tuple[Action, ...], ...]
"""For each rank of a pipeline its actions, in order."""


def actions(schedule: Schedule, *, ranks: int, virtual: int, micros: int) -> Lists:
    """What each rank of a pipeline does with `micros` micro-batches, for `virtual` stages on each rank.

    "1f1b" keeps the fewest micro-batches in memory; "interleaved" starts two forwards a hop earlier instead of one, so
    that no rank waits where each has several stages. Any schedule takes any counts of at least 1.
    """
    assert min(ranks, virtual, micros) >= 1, f"{ranks} ranks, {virtual} virtual stages, {micros} micro-batches"
    return tuple(_of_rank(schedule, rank, ranks, virtual, micros) for rank in range(ranks))


def _of_rank(schedule: Schedule, rank: int, ranks: int, virtual: int, micros: int) -> tuple[Action, ...]:
    rounds = _rounds(micros, 1 if schedule == "gpipe" else max(1, micros // ranks))
    stages = range(rank, ranks * virtual, ranks)
    forwards = [Action(kind="forward", stage=s, micro=m) for some in rounds for s in stages for m in some]
    backward: Kind = "backward-input" if schedule == "zero-bubble" else "backward"
    backwards = [Action(kind=backward, stage=s, micro=m) for some in rounds for s in reversed(stages) for m in some]
    # Before its first backward a rank runs ahead: through all its stages but the last with the first round, and for
    # each hop to the last rank with as many micro-batches as keep it busy until a gradient can come back.
    ahead = (virtual - 1) * len(rounds[0]) + (2 if schedule == "interleaved" else 1) * (ranks - 1 - rank)
    ahead = len(forwards) if schedule == "gpipe" else min(ahead, len(forwards))
    order = forwards[:ahead]
    for number, action in enumerate(backwards):
        order += [*forwards[ahead + number : ahead + number + 1], action]
        if schedule == "zero-bubble" and number >= rank:
            order.append(_weights_of(backwards[number - rank]))
    if schedule == "zero-bubble":
        order += [_weights_of(action) for action in backwards[max(0, len(backwards) - rank) :]]
    return tuple(order)


def _rounds(micros: int, count: int) -> list[range]:
    """The micro-batches in rounds, the longer ones first: a rank takes a round through one stage, then the next."""
    shares = [share(micros, count, index) for index in range(count)]
    return [range(first, first + length) for first, length in shares]


def _weights_of(action: Action) -> Action:
    return Action(kind="backward-weight", stage=action.stage, micro=action.micro)


def check(lists: Lists) -> None:
    """Raise ValueError with a sentence unless every action is there once, on its rank, and none waits for ever."""
    found: dict[tuple[int, int], list[str]] = {}
    for rank, own in enumerate(lists):
        for action in own:
            if action.stage % len(lists) != rank:
                raise ValueError(f"rank {rank} does not hold the stage of {action}")
            found.setdefault((action.stage, action.micro), []).append(action.kind)
    micros = 1 + max(micro for _, micro in found)
    for stage, micro in product(range(stages_of(lists)), range(micros)):
        kinds = sorted(found.get((stage, micro), []))
        if kinds not in (["backward", "forward"], ["backward-input", "backward-weight", "forward"]):
            raise ValueError(f"stage {stage} does {kinds} with micro-batch {micro}")
    _timed(lists, lambda action: 1.0, 0.0)


def stages_of(lists: Lists) -> int:
    """How many stages a pipeline with these lists has."""
    return 1 + max(action.stage for own in lists for action in own)


def awaited(action: Action, stages: int) -> tuple[Action, ...]:
    """What must be done before an action, on whatever rank."""
    stage, micro = action.stage, action.micro
    match action.kind:
        case "forward":
            return () if stage == 0 else (Action(kind="forward", stage=stage - 1, micro=micro),)
        case "backward-weight":
            return (Action(kind="backward-input", stage=stage, micro=micro),)
        case _:
            own = Action(kind="forward", stage=stage, micro=micro)
            return (own,) if stage == stages - 1 else (own, Action(kind=action.kind, stage=stage + 1, micro=micro))


def receiver(action: Action, stages: int) -> int | None:
    """The stage that waits for an action's result; None where the result stays: losses, and gradients of weights."""
    if action.kind == "backward-weight":
        return None
    stage = action.stage + (1 if action.kind == "forward" else -1)
    return stage if 0 <= stage < stages else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that each stage takes for one micro-batch; a whole backward takes those of both its halves."""

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]

    def __call__(self, action: Action) -> float:
        gradients_s = self.backward_input_s[action.stage], self.backward_weight_s[action.stage]
        match action.kind:
            case "forward":
                return self.forward_s[action.stage]
            case "backward":
                return sum(gradients_s)
            case "backward-input":
                return gradients_s[0]
            case "backward-weight":
                return gradients_s[1]


def equal_times(stages: int) -> StageTimes:
    """One second for a forward and for each half of a backward, whatever the stage."""
    return StageTimes(forward_s=(1.0,) * stages, backward_input_s=(1.0,) * stages, backward_weight_s=(1.0,) * stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When an action ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule carried out: each rank's actions with their times, from the moment when the first rank began."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def duration_s(self) -> float:
        return max(spans[-1].end_s for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they only wait."""
        busy_s = sum(span.end_s - span.start_s for spans in self.ranks for span in spans)
        return 1 - busy_s / (len(self.ranks) * self.duration_s)


def simulate(lists: Lists, times: Callable[[Action], float], link_s: float = 0.0) -> Timeline:
    """Carry out a schedule on paper: an action starts when its rank is free and what it waits for has arrived.

    A result travels to the next rank for `link_s` while both compute on. Raises ValueError where ranks wait for each
    other for ever.
    """
    return _timed(lists, times, link_s)


def _timed(lists: Lists, times: Callable[[Action], float], link_s: float) -> Timeline:
    stages, ended_s = stages_of(lists), dict[Action, float]()
    spans: list[list[Span]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(spans[rank]) < len(own):
                action = own[len(spans[rank])]
                needed = awaited(action, stages)
                if any(each not in ended_s for each in needed):
                    break
                arrived = [ended_s[each] + link_s * (each.stage % len(lists) != rank) for each in needed]
                start_s = max([spans[rank][-1].end_s if spans[rank] else 0.0, *arrived])
                ended_s[action] = start_s + times(action)
                spans[rank].append(Span(action=action, start_s=start_s, end_s=ended_s[action]))
                moved = True
    for rank, own in enumerate(lists):
        if len(spans[rank]) < len(own):
            raise ValueError(f"rank {rank} waits for ever before its {own[len(spans[rank])]}")
    return Timeline(ranks=tuple(tuple(each) for each in spans))


def transfers(lists: Lists) -> tuple[Action, ...]:
    """The actions whose results go to another stage, in one order that all ranks can send and receive in.

    It is the order in which they end when every stage is as fast; so it agrees with each rank's own list, and of the
    results still under way the first never waits for a later one.
    """
    stages = stages_of(lists)
    spans = [span for own in simulate(lists, equal_times(stages)).ranks for span in own]
    spans.sort(key=lambda span: (span.end_s, span.action.stage))
    return tuple(span.action for span in spans if receiver(span.action, stages) is not None)


MARKS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


def text(lists: Lists) -> str:
    """A grid for people, a line a rank and a column a unit of time, as if all stages were equally fast."""
    stages = stages_of(lists)
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
