"""Findings apart from gradients: batch statistics, random numbers, schedules, printed losses, weight decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from plait.checking.findings import ProgramFinding
from plait.checking.recorded import CheckedStep, Event, MicroBatch
from plait.checking.reference import passes_of, unit_count

_TELLING_DECIMALS = 5
"""A printed number with this many decimals that equals a loss is taken to be that loss."""


def norm_findings(events: Sequence[Sequence[Event]]) -> list[ProgramFinding]:
    """BatchNorm layers that see only their own rank's samples."""
    layers = [one for one in events[0] if one["kind"] == "batch_norm"]
    if not layers or len(events) < 2:
        return []
    names = list(dict.fromkeys(one["name"] for one in layers))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        ProgramFinding(
            kind="batch_norm", is_fault=True, parameter=names[0], parameters=len(names),
            where=next((one["site"] for one in events[0] if one["kind"] == "forward" and one["grad"]), ""),
            what=f"BatchNorm over a part: {names[0]}{more} uses the mean and variance of each rank's own samples",
            one_process="it would use those of all ranks' samples",
        )
    ]  # fmt: skip


def random_findings(events: Sequence[Sequence[Event]]) -> list[ProgramFinding]:
    """Forward passes that draw random numbers from the same state on all ranks."""
    drew = [[one for one in rank if one["kind"] == "forward" and one["grad"] and one["rng"]] for rank in events]
    pairs = list(zip(*drew, strict=False))
    alike = [pair for pair in pairs if len({one["rng"] for one in pair}) == 1]
    # Batches of unequal length draw different amounts of random numbers, so equal seeds show only in the first state.
    if len(events) < 2 or not pairs or (pairs[0] not in alike and len(alike) <= len(pairs) / 2):
        return []
    return [
        ProgramFinding(
            kind="dropout_alike", is_fault=True, where=pairs[0][0]["site"],
            what="dropout is the same on all ranks: the forward pass draws random numbers from the same state "
            "everywhere, so all ranks drop the same elements",
            one_process="it would draw different numbers for each example",
        )
    ]  # fmt: skip


def schedule_findings(events: Sequence[Sequence[Event]], steps: Sequence[CheckedStep]) -> list[ProgramFinding]:
    """Schedules that advance by several steps per optimizer step."""
    ranks, micros = len(events), max((passes_of(step) for step in steps), default=1)
    states = [one for one in events[0] if one["kind"] in ("step", "light_step") and one["optimizer"] == 0]
    ended = any(one["kind"] == "ended" for one in events[0])
    for place in range(max((len(one["schedules"]) for one in states), default=0)):
        seen = [one["schedules"][place] for one in states if len(one["schedules"]) > place]
        gone = Counter(after["at"] - before["at"] for before, after in pairwise(seen))
        if len(seen) < 2 or not gone:
            continue
        stride, often = gone.most_common(1)[0]
        if stride <= 1 or often < sum(gone.values()) / 2:
            continue
        about = seen[-1]
        last = about["at"] + stride if ended else None  # the schedule itself may be gone when the program ends
        planned = about["total"]
        if planned and last is not None and last <= planned * 1.01 + 1:
            continue  # the schedule was made for as many calls
        if stride == ranks and about["accelerate"] and last is None:
            continue  # Accelerate does so on purpose; only a finished run shows whether the total fits
        reason = (
            " (once for each rank)" if stride == ranks else " (once for each micro-batch)" if stride == micros else ""
        )
        planned_text = f", and it was made for {planned} steps" if planned else ""
        return [
            ProgramFinding(
                kind="schedule", is_fault=True, where=str(states[0].get("site", "")),
                what=f"the learning rate schedule advances by {stride} steps in each optimizer step{reason}: "
                f"{about['name']} is at {about['at']} after {len(states)} optimizer steps{planned_text}",
                one_process="it would advance by one",
            )
        ]  # fmt: skip
    return []


def printed_findings(events: Sequence[Sequence[Event]], steps: Sequence[CheckedStep]) -> list[ProgramFinding]:
    """Printed losses that are rank 0's own although other ranks' losses differ. Other numbers may look like a loss, so
    one must match in at least two steps or to five decimals, and none may equal the loss over all ranks."""
    if len(events) < 2:
        return []
    found: list[ProgramFinding] = []
    decimals = 0
    for step in steps:
        own, whole = _losses(step, 0), _whole_losses(step)
        begins = min((micro.number for micro in step.micros if micro.rank == 0), default=0)
        ends = next((one["number"] for one in events[0] if one["kind"] == "backward_begins"
                     and one["number"] > step.ranks[0].event["number"]), float("inf"))  # fmt: skip
        printed = [
            (text, event["site"])
            for event in events[0]
            if event["kind"] == "printed" and begins < event["number"] < ends
            for text in event["numbers"]
        ]
        if any(_shows(text, whole) for text, _ in printed):
            return []
        of_rank = [(text, site) for text, site in printed if _shows(text, own)]
        for text, site in of_rank[:1]:
            decimals = max(decimals, _decimals(text))
            found.append(
                ProgramFinding(
                    kind="printed_loss", is_fault=False, where=site, step=step.step,
                    what=f"the printed loss {text} is rank 0's own; over all ranks it is "
                    f"{whole[0]:.{_decimals(text)}f}",
                    one_process="it would print the mean over all ranks' batches",
                )
            )  # fmt: skip
    return found[:1] if len(found) > 1 or decimals >= _TELLING_DECIMALS else []


def _losses(step: CheckedStep, rank: int) -> list[float]:
    micros = [micro for micro in step.micros if micro.rank == rank]
    each = [loss for micro in micros for loss in (micro.loss, _plain(micro))]
    sums = [sum(micro.loss for micro in micros), sum(_plain(micro) for micro in micros) / max(1, len(micros))]
    return [*each, *sums]


def _whole_losses(step: CheckedStep) -> list[float]:
    """The losses of all ranks, combined by elements, by ranks, per round of micro-batches, and as sums."""
    counts = [unit_count(micro, "valid") for micro in step.micros]
    total = sum(counts) or 1.0
    by_elements = sum(_plain(micro) * count for micro, count in zip(step.micros, counts, strict=True)) / total
    ranks = len(step.ranks)
    found = [by_elements, sum(micro.loss for micro in step.micros) / ranks, sum(micro.loss for micro in step.micros)]
    for place in range(passes_of(step)):
        group = [micro for micro in step.micros if micro.place == place]
        found += [sum(one.loss for one in group) / ranks, sum(_plain(one) for one in group) / ranks]
    return found


def _plain(micro: MicroBatch) -> float:
    """A loss without the factor that the program applied before backward."""
    return micro.loss / micro.coefficient if micro.kind != "sum" and micro.coefficient else micro.loss


def _shows(text: str, values: Sequence[float]) -> bool:
    decimals = _decimals(text)
    try:
        return any(abs(float(text) - value) <= 0.51 * 10**-decimals for value in values)
    except ValueError:
        return False


def _decimals(text: str) -> int:
    return len(text.lower().partition("e")[0].partition(".")[2])


def weight_decay_findings(steps: Sequence[CheckedStep]) -> list[ProgramFinding]:
    """Biases and norms with weight decay: a note, because many programs intend it."""
    for step in steps[:1]:
        names = list(_decayed_vectors(step.ranks[0].event["groups"], step.parameters))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return [
                ProgramFinding(
                    kind="weight_decay", is_fault=False, where=step.site, parameter=names[0], parameters=len(names),
                    what=f"weight decay also shrinks biases or norms: {names[0]}{more}",
                )
            ]  # fmt: skip
    return []


def _decayed_vectors(groups: Sequence[Mapping[str, Any]], parameters: Sequence[Event]) -> Iterator[str]:
    for group in groups:
        if group.get("weight_decay"):
            yield from (
                parameters[one]["name"] for one in group["params"] if len(parameters[one]["shape"]) <= 1 and
                parameters[one]["trained"]
            )  # fmt: skip
