"""The schedule of a pipeline as data: what each rank computes, and in which order.

The lists made here are what the planner simulates and prints (pipeline_simulation.py) and what the ranks of a pipeline
execute, action by action. Stage s of the model is on rank s % ranks. The orders are those of GPipe (Huang et al. 2019),
1F1B (Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021) and ZB-H1 with virtual stages (Qi et al. 2024),
for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from plait.layout import Schedule, equal_share

ActionKind = Literal["forward", "backward", "backward-input", "backward-weight"]


class Action(NamedTuple):
    """One thing that a rank computes: a stage's part of one micro-batch.

    "backward" makes all gradients; "backward-input" those that the stage before waits for, and "backward-weight" the
    rest. A tuple, because a search looks hundreds of thousands of them up.
    """

    kind: ActionKind
    stage: int
    micro: int


ActionLists = tuple[tuple[Action, ...], ...]
"""One list per pipeline rank: its actions, in execution order."""


def schedule_actions(schedule: Schedule, *, ranks: int, virtual: int, micros: int) -> ActionLists:
    """What each rank of a pipeline does with `micros` micro-batches, for `virtual` stages on each rank.

    "1f1b" keeps the fewest micro-batches in memory; "interleaved" starts two forwards a hop earlier instead of one, so
    that no rank waits where each has several stages. Any schedule takes any counts of at least 1.
    """
    assert min(ranks, virtual, micros) >= 1, f"{ranks} ranks, {virtual} virtual stages, {micros} micro-batches"
    return tuple(_of_rank(schedule, rank, ranks, virtual, micros) for rank in range(ranks))


def _of_rank(schedule: Schedule, rank: int, ranks: int, virtual: int, micros: int) -> tuple[Action, ...]:
    rounds = list(micro_rounds(schedule, ranks, micros))
    stages = range(rank, ranks * virtual, ranks)
    forwards = [Action(kind="forward", stage=s, micro=m) for some in rounds for s in stages for m in some]
    backward: ActionKind = "backward-input" if schedule == "zero-bubble" else "backward"
    backwards = [Action(kind=backward, stage=s, micro=m) for some in rounds for s in reversed(stages) for m in some]
    ahead = min(forwards_ahead(schedule, ranks, virtual, len(rounds[0]))[rank], len(forwards))
    order = forwards[:ahead]
    for number, action in enumerate(backwards):
        order += [*forwards[ahead + number : ahead + number + 1], action]
        if schedule == "zero-bubble" and number >= rank:
            order.append(_weights_of(backwards[number - rank]))
    if schedule == "zero-bubble":
        order += [_weights_of(action) for action in backwards[max(0, len(backwards) - rank) :]]
    return tuple(order)


def forwards_ahead(schedule: Schedule, ranks: int, virtual: int, first_round: int) -> list[int]:
    """How many forwards each rank does before the one that its first backward follows, if there are that many.

    Through all its stages but the last with the first round, and for each hop to the last rank with as many
    micro-batches as keep it busy until a gradient can come back; in gpipe all of them.
    """
    if schedule == "gpipe":
        return [virtual * first_round] * ranks
    each_hop = 2 if schedule == "interleaved" else 1
    return [(virtual - 1) * first_round + each_hop * (ranks - 1 - rank) for rank in range(ranks)]


def micro_rounds(schedule: Schedule, ranks: int, micros: int) -> Iterator[range]:
    """The micro-batches in rounds, the longer ones first: a rank takes a round through one stage, then the next."""
    count = 1 if schedule == "gpipe" else max(1, micros // ranks)
    for index in range(count):
        first, length = equal_share(micros, count, index)
        yield range(first, first + length)


def _weights_of(action: Action) -> Action:
    return Action(kind="backward-weight", stage=action.stage, micro=action.micro)


def dependency_order(lists: ActionLists) -> list[tuple[int, Action, tuple[Action, ...]]]:
    """All actions as (rank, action, what it needs), in an order that respects dependencies and the order within each
    rank's list.

    Raises ValueError if the lists deadlock.
    """
    stages, done = stage_count(lists), set[Action]()
    following, order = [0] * len(lists), list[tuple[int, Action, tuple[Action, ...]]]()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while following[rank] < len(own):
                action = own[following[rank]]
                needed = dependencies(action, stages)
                if not done.issuperset(needed):
                    break
                done.add(action)
                order.append((rank, action, needed))
                following[rank] += 1
                moved = True
    for rank, own in enumerate(lists):
        if following[rank] < len(own):
            raise ValueError(f"rank {rank} waits for ever before its {own[following[rank]]}")
    return order


def stage_count(lists: ActionLists) -> int:
    """How many stages a pipeline with these lists has."""
    return 1 + max(action.stage for own in lists for action in own)


def dependencies(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions whose results this action needs, on this rank and on others."""
    stage, micro = action.stage, action.micro
    match action.kind:
        case "forward":
            return () if stage == 0 else (Action(kind="forward", stage=stage - 1, micro=micro),)
        case "backward-weight":
            return (Action(kind="backward-input", stage=stage, micro=micro),)
        case _:
            own = Action(kind="forward", stage=stage, micro=micro)
            return (own,) if stage == stages - 1 else (own, Action(kind=action.kind, stage=stage + 1, micro=micro))


def receiving_stage(action: Action, stages: int) -> int | None:
    """The stage that receives an action's result; None if no stage does: for losses and for gradients of weights."""
    if action.kind == "backward-weight":
        return None
    stage = action.stage + (1 if action.kind == "forward" else -1)
    return stage if 0 <= stage < stages else None
