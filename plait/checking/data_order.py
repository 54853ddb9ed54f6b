"""Checks which examples the ranks drew together: repeated ones, omitted ones, and those an evaluation counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.checking.findings import ProgramFinding
from plait.checking.recorded import Event

_COMPARED = 50
"""At most this many batches of a pass are compared between ranks."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass of a rank over a DataLoader: the batches drawn from one iterator."""

    about: Event
    batches: list[Any] = field(default_factory=list)
    contents: list[list[str]] = field(default_factory=list)
    ended: bool = False
    use: Literal["training", "evaluation", "unknown"] = "unknown"
    gathers: bool = False

    @property
    def known(self) -> bool:
        return bool(self.batches) and all(one is not None for one in self.batches)


def data_findings(events: Sequence[Sequence[Event]]) -> list[ProgramFinding]:
    """Findings about the examples drawn in each pass."""
    by_rank = [_passes_of(rank) for rank in events]
    found: dict[str, ProgramFinding] = {}
    ranks = len(events)
    for key in dict.fromkeys(key for passes in by_rank for key in passes):
        passes = [one[key] for one in by_rank if key in one]
        if any(one.use == "training" for one in passes):
            for finding in _training(passes, ranks):
                found.setdefault(finding.kind, finding)
        elif any(one.use == "evaluation" for one in passes):
            for finding in _evaluation(passes):
                found.setdefault(finding.kind, finding)
    shows_content = any(content for passes in by_rank for one in passes.values() for content in one.contents)
    if not shows_content and (finding := _same_inputs(events)) is not None:
        found.setdefault(finding.kind, finding)
    if (finding := _same_order(by_rank[0] if by_rank else {})) is not None:
        found.setdefault(finding.kind, finding)
    return list(found.values())


def data_not_checked(events: Sequence[Sequence[Event]]) -> list[str]:
    """Notes on what could not be checked in the order of the training data: there, the lack of a finding proves
    nothing."""
    by_rank = [_passes_of(rank) for rank in events]
    training: dict[tuple[int, int], list[_Pass]] = {}
    for passes in by_rank:
        for key, one in passes.items():
            if one.use == "training":
                training.setdefault(key, []).append(one)
    if len(events) < 2:
        return []
    if not training:
        return [
            "not checked: which examples each rank gets, because the program draws its batches without a DataLoader; "
            "the check compared only whether two ranks get the same inputs"
        ]
    said: dict[str, str] = {}
    for (loader, _), passes in training.items():
        where = passes[0].about["site"] or f"DataLoader {loader + 1}"
        if passes[0].about["dataset_length"] is None:
            why = "an IterableDataset has no indices"
        elif not all(one.known for one in passes):
            why = "its sampler yields no lists of indices"
        elif not _one_dataset(passes):
            why = "each rank has its own data set"
        else:
            continue
        said[where] = f"not checked: whether examples are repeated or left out in the data at {where}: {why}"
    if not said and not any(all(one.ended for one in passes) for passes in training.values()):
        said[""] = (
            "not checked: whether a pass over the data leaves examples out, because no pass ended during the check"
        )
    return list(said.values())


def _passes_of(events: Sequence[Event]) -> dict[tuple[int, int], _Pass]:
    passes: dict[tuple[int, int], _Pass] = {}
    undecided: list[_Pass] = []
    latest: _Pass | None = None
    for event in events:
        if event["kind"] == "pass":
            passes[event["loader"], event["passed"]] = _Pass(about=event)
        elif event["kind"] == "draw" and (event["loader"], event["passed"]) in passes:
            latest = passes[event["loader"], event["passed"]]
            latest.batches.append(event["indices"])
            latest.contents.append(event["content"])
            if latest.use == "unknown" and latest not in undecided:
                undecided.append(latest)
        elif event["kind"] == "pass_ends" and (event["loader"], event["passed"]) in passes:
            passes[event["loader"], event["passed"]].ended = True
        elif event["kind"] == "forward":
            for one in undecided[-1:]:
                one.use = "training" if event["grad"] else "evaluation"
            undecided.clear()
        elif event["kind"] == "gathers_for_metrics" and latest is not None:
            latest.gathers = True
    return passes


def _training(passes: Sequence[_Pass], ranks: int) -> list[ProgramFinding]:
    about = passes[0].about
    if len(passes) < ranks:
        return []
    if (same := _same_batches(passes)) is not None:
        return [same]
    if about["replacement"]:  # one process would also draw some examples twice and others never
        return []
    replicas, where = about["replicas"], about["site"]
    if replicas is not None and replicas > ranks:
        return [
            ProgramFinding(
                kind="samples_left_out", is_fault=True, where=where,
                what=f"data: the sampler makes {replicas} shares but {ranks} ranks run, so {replicas - ranks} of "
                f"{replicas} shares of the data are never used",
                one_process="it would draw every example",
            )
        ]  # fmt: skip
    if not all(one.known for one in passes) or not _one_dataset(passes):
        return [] if (overlap := _overlap(passes)) is None else [overlap]
    length, drawn = about["dataset_length"], Counter(one for each in passes for one in _flat(each.batches))
    ended = all(one.ended for one in passes)
    share = max(one.about["sampler_length"] or 0 for one in passes)
    doubled = sum(count - 1 for count in drawn.values())
    total = sum(drawn.values())
    rest = ranks * int(about["batch_size"] or 1)
    shared_out = replicas == ranks
    if length and (
        (doubled > rest and doubled > total // 10) or (share >= length > rest and not shared_out and ranks > 1)
    ):
        return [
            ProgramFinding(
                kind="repeated_samples", is_fault=True, where=where,
                what=f"data: each of {ranks} ranks draws from all {length} examples"
                + (f", and {doubled} of {total} drawn so far are repeats" if doubled else "")
                + ": every example is drawn up to "
                f"{ranks} times per pass",
                one_process="it would draw each example once per pass",
            )
        ]  # fmt: skip
    missing = length - len(drawn) if length else 0
    allowed = rest if about["drop_last"] or any(one.about["drop_last"] for one in passes) else 0
    if ended and missing > allowed:
        return [
            ProgramFinding(
                kind="samples_left_out", is_fault=True, where=where,
                what=f"data: {missing} of {length} examples were drawn by no rank in a whole pass",
                one_process="it would draw every example",
            )
        ]  # fmt: skip
    return []


def _same_batches(passes: Sequence[_Pass]) -> ProgramFinding | None:
    """A finding if two ranks got the same examples at the same time; compares the batches' contents."""
    for rank in range(1, len(passes)):
        for earlier in range(rank):
            pairs = list(zip(passes[earlier].contents, passes[rank].contents, strict=False))[:_COMPARED]
            pairs = [(one, other) for one, other in pairs if one and other]
            alike = sum(sorted(one) == sorted(other) for one, other in pairs)
            various = len({one for first, _ in pairs for one in first})
            if pairs and alike > len(pairs) / 2 and various > 1:
                return ProgramFinding(
                    kind="same_batch", is_fault=True, where=passes[0].about["site"],
                    what=f"data: ranks {earlier} and {rank} get the same batches ({alike} of {len(pairs)} compared)",
                    one_process="it would draw different examples instead",
                )  # fmt: skip
    return None


def _same_inputs(events: Sequence[Sequence[Event]]) -> ProgramFinding | None:
    """A finding if the model gets the same inputs on two ranks, for programs whose batches contain no tensor or come
    without a DataLoader."""
    inputs = [
        [(one["inputs"], one["site"]) for one in rank if one["kind"] == "forward" and one["grad"] and one["inputs"]]
        for rank in events
    ]
    for rank in range(1, len(inputs)):
        for earlier in range(rank):
            pairs = list(zip(inputs[earlier], inputs[rank], strict=False))[:_COMPARED]
            alike = sum(one[0] == other[0] for one, other in pairs)
            if pairs and alike > len(pairs) / 2:
                return ProgramFinding(
                    kind="same_batch", is_fault=True, where=pairs[0][0][1],
                    what=f"data: the model gets the same inputs on ranks {earlier} and {rank} ({alike} of {len(pairs)} "
                    "forward passes compared)",
                    one_process="it would get different examples instead",
                )  # fmt: skip
    return None


def _overlap(passes: Sequence[_Pass]) -> ProgramFinding | None:
    """A finding if one rank's examples also appear on other ranks; compares contents, for data sets without indices."""
    drawn = [[content for batch in one.contents for content in batch] for one in passes]
    for rank, own in enumerate(drawn):
        if len(own) < 8 or len(set(own)) < 0.9 * len(own):
            continue  # contents that repeat anyway, such as labels
        others = {content for other in (*drawn[:rank], *drawn[rank + 1 :]) for content in other}
        common = sum(content in others for content in own)
        if common > len(own) / 2:
            return ProgramFinding(
                kind="repeated_samples", is_fault=True, where=passes[0].about["site"],
                what=f"data: {common} of the {len(own)} examples that rank {rank} drew so far appeared on others, too",
                one_process="it would draw each example once per pass",
            )  # fmt: skip
    return None


def _one_dataset(passes: Sequence[_Pass]) -> bool:
    """Whether an index means the same example on all ranks, rather than each rank having its own data set."""
    if len({one.about["dataset_length"] for one in passes}) != 1:
        return False
    seen: dict[int, str] = {}
    for one in passes:
        for indices, contents in zip(one.batches, one.contents, strict=True):
            if indices is None or len(indices) != len(contents):
                continue
            for index, content in zip(indices, contents, strict=True):
                if seen.setdefault(index, content) != content:
                    return False
    return True


def _evaluation(passes: Sequence[_Pass]) -> list[ProgramFinding]:
    """A finding if an evaluation that is split over all ranks does not count each example once."""
    length = passes[0].about["dataset_length"]
    if not length or not all(one.ended and one.known for one in passes) or not _one_dataset(passes):
        return []
    each = [Counter(_flat(one.batches)) for one in passes]
    if any(len(one) == length == sum(one.values()) for one in each):
        return []  # some rank evaluates all examples by itself
    together: Counter[int] = sum(each, Counter())
    doubled, missing = sum(together.values()) - len(together), length - len(together)
    if doubled and any(one.gathers for one in passes):
        doubled = 0
    if not doubled and not missing:
        return []
    parts = [f"counts {doubled} of {length} examples twice"] * bool(doubled)
    parts += [f"leaves out {missing} of {length} examples"] * bool(missing)
    return [
        ProgramFinding(
        kind="evaluation_data", is_fault=True, where=passes[0].about["site"],
        what=f"evaluation: it {' and '.join(parts)}",
        one_process=f"it would count each of {length} examples once",
    )
    ]  # fmt: skip


def _same_order(passes: Mapping[tuple[int, int], _Pass]) -> ProgramFinding | None:
    for (loader, number), one in passes.items():
        after = passes.get((loader, number + 1))
        if one.use != "training" or after is None or not one.about["shuffles"] or not one.known or not after.known:
            continue
        pairs = list(zip(one.batches, after.batches, strict=False))
        if len(pairs) >= 2 and all(first == second for first, second in pairs):
            return ProgramFinding(
                kind="same_order", is_fault=False, where=one.about["site"],
                what="data: the sampler shuffles, but every pass has the same order",
                one_process="a DataLoader with shuffle=True draws a different order in each pass",
            )  # fmt: skip
    return None


def _flat(batches: Sequence[Any]) -> list[int]:
    return [one for batch in batches if batch is not None for one in batch]
