"""Simulates a pipeline schedule: how long it takes and when each action runs. The cost model, the page's timeline and
the order of transfers all use this one simulator.

An action starts when its rank is free and what it waits for has arrived. A result for another rank travels while both
compute on; two ranks have one wire each way, which carries one message after the other. Many pipelines with the same
lists are simulated at once: every time is an array with one entry for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.layout import Schedule
from plait.partition.pipeline_schedule import (
    Action,
    ActionKind,
    ActionLists,
    dependency_order,
    receiving_stage,
    schedule_actions,
    stage_count,
)

Seconds = NDArray[np.float64]
ActionTimes = Mapping[ActionKind, Seconds]
"""Seconds per kind of action, shape [stages, pipelines]. A whole "backward" has no entry: it takes the sum of both
halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that each stage takes for one micro-batch; a whole backward takes those of both its halves."""

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]

    @property
    def by_kind(self) -> ActionTimes:
        """These times in the simulator's form, shape [stages, 1]."""
        named: dict[ActionKind, tuple[float, ...]] = {
            "forward": self.forward_s,
            "backward-input": self.backward_input_s,
            "backward-weight": self.backward_weight_s,
        }
        return {kind: np.array(seconds)[:, None] for kind, seconds in named.items()}


def equal_times(stages: int) -> StageTimes:
    """One second for a forward and for each half of a backward, for every stage."""
    return StageTimes(forward_s=(1.0,) * stages, backward_input_s=(1.0,) * stages, backward_weight_s=(1.0,) * stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpan:
    """When an action ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated schedule: start and end of each rank's actions, in seconds since the first rank began."""

    ranks: tuple[tuple[ActionSpan, ...], ...]

    @property
    def duration_s(self) -> float:
        return max(spans[-1].end_s for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is waiting."""
        busy_s = sum(span.end_s - span.start_s for spans in self.ranks for span in spans)
        return 1 - busy_s / (len(self.ranks) * self.duration_s)


def simulate(lists: ActionLists, times: StageTimes, message_s: float = 0.0) -> Timeline:
    """Simulate one pipeline; raises ValueError if the lists deadlock."""
    steps = _steps(lists)
    started_s, ended_s = _run(steps, times.by_kind, message_s)
    spans: list[list[ActionSpan]] = [[] for _ in lists]
    for slot, step in enumerate(steps, 1):
        span = ActionSpan(action=step.action, start_s=float(started_s[slot][0]), end_s=float(ended_s[slot][0]))
        spans[step.rank].append(span)
    return Timeline(ranks=tuple(tuple(own) for own in spans))


def durations_s(
    schedule: Schedule, counts: tuple[int, int, int], times: ActionTimes, message_s: Seconds | float = 0.0
) -> Seconds:
    """Seconds that each pipeline takes, shape [pipelines]; `counts` are (ranks, stages per rank, micro-batches)."""
    _, ended_s = _run(_steps_of(schedule, *counts), times, message_s)
    return np.maximum.reduce(ended_s)


def transfers(lists: ActionLists) -> tuple[Action, ...]:
    """The actions whose results go to another stage, in one order that all ranks can send and receive in.

    It is the order in which they end when every stage is as fast; so it agrees with each rank's own list, and of the
    results still under way the first never waits for a later one.
    """
    stages = stage_count(lists)
    spans = [span for own in simulate(lists, equal_times(stages)).ranks for span in own]
    spans.sort(key=lambda span: (span.end_s, span.action.stage))
    return tuple(span.action for span in spans if receiving_stage(span.action, stages) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An action and the slots that it waits for; a slot is an index in dependency order, from 1, and 0 is the start."""

    rank: int
    action: Action
    before: tuple[int, ...]
    """Slots on the same rank that must end first."""
    arriving: int
    """Slot on another rank whose result it needs; 0 for none."""
    wire: tuple[int, int] | None
    """(sender, receiver) of its result; None if the result stays on this rank."""


@lru_cache(maxsize=256)
def _steps_of(schedule: Schedule, ranks: int, virtual: int, micros: int) -> list[_Step]:
    return _steps(schedule_actions(schedule, ranks=ranks, virtual=virtual, micros=micros))


def _steps(lists: ActionLists) -> list[_Step]:
    ranks, stages = len(lists), stage_count(lists)
    slot_of: dict[Action, int] = {}
    latest = [0] * ranks
    steps: list[_Step] = []
    for slot, (rank, action, needed) in enumerate(dependency_order(lists), 1):
        here = [slot_of[each] for each in needed if each.stage % ranks == rank]
        [arriving] = [slot_of[each] for each in needed if each.stage % ranks != rank] or [0]
        to = receiving_stage(action, stages)
        wire = None if to is None or to % ranks == rank else (rank, to % ranks)
        steps.append(_Step(rank=rank, action=action, before=(latest[rank], *here), arriving=arriving, wire=wire))
        slot_of[action] = latest[rank] = slot
    return steps


def _run(steps: list[_Step], times: ActionTimes, message_s: Seconds | float) -> tuple[list[Seconds], list[Seconds]]:
    """When each step starts and ends, [slots] of (pipelines)."""
    by_kind = {kind: list(stages) for kind, stages in times.items()}
    by_kind["backward"] = list(times["backward-input"] + times["backward-weight"])
    at_start = np.zeros(times["forward"].shape[1])
    started_s, ended_s = [at_start], [at_start]
    arrived_s: dict[int, Seconds] = {}
    free_s: dict[tuple[int, int], Seconds] = {}  # when the wire between two ranks becomes free
    for slot, step in enumerate(steps, 1):
        first, *others = step.before
        start_s = ended_s[first]
        for other in others:
            start_s = np.maximum(start_s, ended_s[other])
        if step.arriving:
            start_s = np.maximum(start_s, arrived_s.pop(step.arriving))
        end_s = start_s + by_kind[step.action.kind][step.action.stage]
        started_s.append(start_s)
        ended_s.append(end_s)
        if step.wire:
            sent_s = (np.maximum(end_s, free_s[step.wire]) if step.wire in free_s else end_s) + message_s
            arrived_s[slot] = free_s[step.wire] = sent_s
    return started_s, ended_s
