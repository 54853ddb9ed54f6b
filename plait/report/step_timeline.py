"""A few steps of a run as spans of time on each rank, as planned or as recorded."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from plait.checked_json import parse_object, typed_value

StepWork = Literal["data", "forward", "backward", "backward-input", "backward-weight", "gradients", "update"]
"""Work of a rank. The four passes are the actions of a pipeline's schedule; "gradients" is the rest of their sums
after the last backward."""
MessageKind = Literal[
    "stage message",
    "tied embedding",
    "gradient sum",
    "weights",
    "tensor rows",
    "keys and values",
    "expert tokens",
    "whole matrices",
    "step numbers",
    "counts",
]
"""Kinds of communication between ranks."""
SpanKind = StepWork | MessageKind
Lane = Literal["work", "wait", "message"]
"""work: activity of a rank. wait: a part of it in which the rank waits for others. message: from the start of a
transfer or sum until the rank continued with the result."""
KIND_TEXTS: Mapping[SpanKind, str] = {
    "data": "fetch of samples",
    "forward": "forward",
    "backward": "backward",
    "backward-input": "backward, inputs' half",
    "backward-weight": "backward, weights' half",
    "gradients": "rest of the gradient sums",
    "update": "optimizer update",
    "stage message": "message between stages",
    "tied embedding": "rows of the tied embedding",
    "gradient sum": "sum of gradients",
    "weights": "gathering weights",
    "tensor rows": "rows between tensor ranks",
    "keys and values": "keys and values between context ranks",
    "expert tokens": "tokens to their experts and back",
    "whole matrices": "matrices for Muon's update",
    "step numbers": "sums of the step's numbers",
    "counts": "counts of examples",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """One event of one rank; times are seconds since the first rank began the first of the steps."""

    lane: Lane
    kind: SpanKind
    step: int
    """Counted as in metrics.jsonl."""
    start_s: float
    end_s: float
    stage: int = -1
    """Stage of the model, counted from 0, for the passes of a pipeline; -1: none."""
    micro: int = -1
    """Micro-batch of the step, counted from 0; -1: none."""
    n_bytes: int = 0
    """Bytes that this rank sends or contributes to a sum; 0 if unknown."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def name(self) -> str:
        """The displayed name, such as "forward 3, stage 2", counted from 1."""
        if self.kind == "stage message" and self.micro >= 0:
            return f"message of micro-batch {self.micro + 1} from stage {self.stage + 1}"
        micro = f" {self.micro + 1}" if self.micro >= 0 else ""
        stage = f", stage {self.stage + 1}" if self.stage >= 0 else ""
        text = f"{KIND_TEXTS[self.kind]}{micro}{stage}"
        return f"waiting: {text}" if self.lane == "wait" else text

    @property
    def place(self) -> tuple[Lane, SpanKind, int, int]:
        """The key by which an event is found in another timeline; several events may share it."""
        return self.lane, self.kind, self.stage, self.micro


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """The spans of one rank in the order in which they began."""

    rank: int
    spans: tuple[TimelineSpan, ...]
    host: str = ""
    clock_error_s: float = 0.0
    """Bound on the shift between this rank's clock and rank 0's; 0 on the same machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """Some consecutive steps of a run."""

    source: Literal["planned", "measured"]
    first_step: int
    bounds_s: tuple[tuple[float, float], ...]
    """Begin and end of each step: from when the first rank begins to when the last one ends."""
    ranks: tuple[RankTimeline, ...]

    def __post_init__(self) -> None:
        if not self.bounds_s or not self.ranks:
            raise ValueError("a timeline has at least one step and one rank")

    @property
    def steps(self) -> range:
        return range(self.first_step, self.first_step + len(self.bounds_s))

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(end - begin for begin, end in self.bounds_s) / len(self.bounds_s)

    def to_json(self) -> str:
        """One line; `timeline_from_json` reads it back."""
        return json.dumps(asdict(self))


def timeline_from_json(text: str | bytes) -> StepTimeline:
    """Read a timeline that `to_json` wrote; raises ValueError for anything else."""
    return typed_value(StepTimeline, parse_object(text))


def with_stage_messages(timeline: StepTimeline) -> StepTimeline:
    """The timeline with a message for each result that went to another rank's stage, in the sender's lane: from the end
    of the pass that made it until the receiver continued with it.

    The arrival itself is not observable: an early result waits in memory until its pass begins.
    """
    took = {
        (span.step, span.kind, span.stage, span.micro): (own.rank, _went_on_s(span, own.spans))
        for own in timeline.ranks
        for span in own.spans
        if span.lane == "work" and span.stage >= 0
    }
    ranks = []
    for own in timeline.ranks:
        messages = []
        for span in own.spans:
            if span.lane != "work" or span.stage < 0 or span.kind == "backward-weight":
                continue
            following = span.stage + (1 if span.kind == "forward" else -1)
            rank, taken_s = took.get((span.step, span.kind, following, span.micro), (own.rank, 0.0))
            if rank != own.rank:
                end_s = max(span.end_s, taken_s)
                messages.append(replace(span, lane="message", kind="stage message", start_s=span.end_s, end_s=end_s))
        ranks.append(replace(own, spans=tuple(sorted((*own.spans, *messages), key=_by_start))))
    return replace(timeline, ranks=tuple(ranks))


def _by_start(span: TimelineSpan) -> tuple[float, float]:
    return span.start_s, -span.end_s


def _went_on_s(passed: TimelineSpan, spans: Sequence[TimelineSpan]) -> float:
    """When a pass had its first input: the end of its first wait for a stage, else its beginning."""
    first = bisect_left(spans, passed.start_s, key=lambda span: span.start_s)
    for span in spans[first:]:
        if span.start_s > passed.end_s:
            break
        if span.lane == "wait" and span.kind == "stage message":
            return span.end_s
    return passed.start_s


# What a step's time went into, span by span.


_TOUCHING_S = 1e-9
"""Spans that touch may overlap by this much, by rounding."""


def own_seconds(spans: Sequence[TimelineSpan]) -> Iterator[tuple[TimelineSpan, float]]:
    """Each span of work and each wait of one rank with its own seconds, without the spans inside it.

    A message has no own seconds: it overlaps with work.
    """
    inner_s = dict[int, float]()
    open_spans = list[int]()
    ordered = sorted((span for span in spans if span.lane != "message"), key=lambda span: (span.start_s, -span.end_s))
    for number, span in enumerate(ordered):
        while open_spans and ordered[open_spans[-1]].end_s <= span.start_s + _TOUCHING_S:
            open_spans.pop()
        if open_spans:
            inner_s[open_spans[-1]] = inner_s.get(open_spans[-1], 0.0) + span.seconds
        open_spans.append(number)
    for number, span in enumerate(ordered):
        yield span, max(0.0, span.seconds - inner_s.get(number, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotals:
    """The events of one kind on one rank, as means over the steps."""

    events: float
    seconds: float


def totals_of(timeline: StepTimeline, rank: int) -> Mapping[tuple[Lane, SpanKind], KindTotals]:
    """The work of one rank in a step, by kind; for messages, the seconds that they travel."""
    found = dict[tuple[Lane, SpanKind], tuple[int, float]]()
    spans = timeline.ranks[rank].spans
    messages = [(span, span.seconds) for span in spans if span.lane == "message"]
    for span, own_s in (*own_seconds(spans), *messages):
        events, seconds = found.get((span.lane, span.kind), (0, 0.0))
        found[span.lane, span.kind] = events + 1, seconds + own_s
    steps = len(timeline.bounds_s)
    return {key: KindTotals(events=events / steps, seconds=s / steps) for key, (events, s) in found.items()}


def busiest_rank(timeline: StepTimeline) -> int:
    """The rank that works longest without waiting: the others wait for it."""

    def worked_s(rank: RankTimeline) -> float:
        return sum(own_s for span, own_s in own_seconds(rank.spans) if span.lane == "work" and span.kind != "gradients")

    return max(range(len(timeline.ranks)), key=lambda number: worked_s(timeline.ranks[number]))
