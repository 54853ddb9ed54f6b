"""Names known mistakes from how the program's gradients relate to those of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from plait.checking.findings import ProgramFinding, ProgramFindingKind
from plait.checking.recorded import CheckedStep, Event
from plait.checking.reference import (
    EXACT,
    ROUNDED,
    Comparison,
    StepComparison,
    compare_step,
    divides_by_another_count,
    named_factor,
    one_process_factors,
    passes_of,
    unit_count,
    weights_of_loss,
)

OtherWorkers = Callable[[], Mapping[tuple[int, int], Mapping[str, float]] | None]
"""Runs the same steps on another number of workers; returns `weights_of_loss` by (optimizer, step), or None if that run
fails."""

_SAME = 2e-3
"""Factors and norms that differ relatively by less than this are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientVerdict:
    """Findings about gradients, notes, and the largest difference among those that agree."""

    findings: Sequence[ProgramFinding]
    notes: Sequence[str]
    largest_error: float | None
    undecided: Sequence[str] = ()
    """Why some gradients cannot be judged."""

    def has(self, *kinds: ProgramFindingKind) -> bool:
        return any(one.kind in kinds for one in self.findings)


def judge_gradients(
    steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]], other_workers: OtherWorkers
) -> GradientVerdict:
    """Compare all steps, and name the mistakes that explain the differences."""
    tolerance = tolerance_of(steps, events)
    findings: list[ProgramFinding] = []
    notes: list[str] = []
    undecided: list[str] = []
    if tolerance == ROUNDED:
        notes.append("gradients were computed or sent in 16 bits, so differences up to 3 % count as rounding")
    kinds_of_clips = [clip for step in steps for clip in _clip_findings(step, events)]
    findings += kinds_of_clips[:1]
    early = bool(kinds_of_clips) and kinds_of_clips[0].kind == "clipping_before_sum"
    stale = next((step for step in steps if any(rank.event["stale"] for rank in step.ranks)), None)
    if stale is not None:
        findings.append(_stale_finding(stale))
    compared = [
        compare_step(step, tolerance=tolerance)
        for step in steps
        if not early and not any(rank.event["stale"] for rank in step.ranks)
    ]
    by_hand, explained = _clipped_by_hand(compared)
    notes += [by_hand] * bool(by_hand)
    for result in compared:
        if result.differing and result.step.step not in explained:
            for found in _explain(result, compared, tolerance, other_workers):
                if isinstance(found, ProgramFinding):
                    findings += [found] * (found.kind not in {have.kind for have in findings})
                else:
                    into = undecided if isinstance(found, _Undecided) else notes
                    into += [found.text] * (found.text not in into)
    errors = [result.largest_error for result in compared]
    largest = max(errors, default=None)
    return GradientVerdict(findings=findings, notes=notes, largest_error=largest, undecided=undecided)


def tolerance_of(steps: Sequence[CheckedStep], events: Sequence[Sequence[Event]]) -> float:
    """The largest difference that counts as rounding: larger if gradients were computed or sent in 16 bits."""
    has_hook = any(one["kind"] == "comm_hook" for rank in events for one in rank)
    is_16_bit = any(
        tensor.dtype in (torch.bfloat16, torch.float16)
        for step in steps[:1]
        for rank in step.ranks
        for tensor in rank.tensors.values()
    )
    return ROUNDED if has_hook or is_16_bit else EXACT


def _stale_finding(step: CheckedStep) -> ProgramFinding:
    return ProgramFinding(
        kind="stale_gradients", is_fault=True, where=step.site, step=step.step, parameter=step.name(0),
        parameters=len(step.parameters),
        what=f"gradients are never cleared: step {step.step + 1} still adds the gradients of earlier steps "
        f"({step.name(0)} is the first parameter)",
        one_process="it would use only this step's gradients",
    )  # fmt: skip


# Clipping.


def _clip_findings(step: CheckedStep, events: Sequence[Sequence[Event]]) -> list[ProgramFinding]:
    """Findings on clipping before gradients are complete, and on clipping by the norm of only some of them."""
    for index, rank in enumerate(step.ranks):
        for clip in rank.event["clips"]:
            end = rank.event["number"]
            later = [one for one in events[index] if clip["event"] < one["number"] < end]
            summed = [one for one in later if one["kind"] == "message" and _sums_gradients(one)]
            passes = [one for one in later if one["kind"] == "backward"]
            if summed or passes:
                before = f"all_reduce at {summed[0]['site']}" if summed else f"backward at {passes[0]['site']}"
                return [
                    ProgramFinding(
                        kind="clipping_before_sum", is_fault=True, where=clip["site"], step=step.step,
                        parameter=step.name(clip["parameters"][0]), parameters=len(clip["parameters"]),
                        what=f"clipping comes before the sum: gradients are clipped at {clip['site']}, and {before} "
                        f"changes them afterwards ({step.name(clip['parameters'][0])} and others)",
                        one_process="it would clip the gradient of the whole batch, once",
                    )
                ]  # fmt: skip
    lists = [sorted(tuple(clip["parameters"]) for clip in rank.event["clips"]) for rank in step.ranks]
    if any(one != lists[0] for one in lists):
        clips = [clip for rank in step.ranks for clip in rank.event["clips"]]
        first = clips[0]["parameters"][0]
        return [
            _partial(step, clips[0]["site"], step.name(first), "ranks clip different parameters, each by its own norm")
        ]
    for rank in step.ranks:
        for clip in rank.event["clips"]:
            whole = [rank.tensor("unclipped", one) for one in clip["parameters"]]
            present = [one for one in whole if one is not None]
            sizes = [_size(step, one) for one in clip["parameters"]]
            if clip["norm"] is None or clip["norm_type"] != 2.0 or any(size > 65_536 for size in sizes) or not present:
                continue
            norm = float(torch.stack([one.norm() for one in present]).norm())
            if abs(norm - clip["norm"]) > 1e-2 * max(norm, 1e-12):
                name = step.name(clip["parameters"][0])
                what = f"the norm used is {clip['norm']:.4g}, and the norm of the whole gradient is {norm:.4g}"
                return [_partial(step, clip["site"], name, what)]
    return []


def _sums_gradients(message: Event) -> bool:
    if message["call"] not in ("all_reduce", "reduce_scatter_tensor", "reduce", "all_gather", "broadcast"):
        return False
    return bool(message["gradient"]) or (message["elements"] > 1 and "float" in message["number_kind"])


def _size(step: CheckedStep, parameter: int) -> int:
    size = 1
    for one in step.parameters[parameter]["shape"]:
        size *= one
    return size


def _partial(step: CheckedStep, where: str, name: str, what: str) -> ProgramFinding:
    return ProgramFinding(
        kind="partial_clipping", is_fault=True, where=where, step=step.step, parameter=name,
        what=f"clipping by a partial norm: {what} ({name} and others)",
        one_process="it would clip by the norm of all gradients",
    )  # fmt: skip


def _clipped_by_hand(compared: Sequence[StepComparison]) -> tuple[str, set[int]]:
    """Whether the program itself scales gradients to one norm in several steps, as one process could: a note and the
    steps."""
    scaled: dict[int, float] = {}
    norms: dict[int, float] = {}
    for result in compared:
        factors = [one.factor for one in result.differing]
        if not factors:
            continue
        if any(one.relation != "scaled" for one in result.differing) or len(result.differing) < len(result.comparisons):
            return "", set()
        if max(factors) - min(factors) > _SAME * max(factors) or not 0 < max(factors) < 1:
            return "", set()
        scaled[result.step.step] = factors[0]
        held = result.step.ranks[0]
        if held.event["clips"]:
            return "", set()
        parts = [held.tensor("gradient", one) for one in range(len(result.step.parameters))]
        norms[result.step.step] = float(torch.stack([one.norm() for one in parts if one is not None]).norm())
    if len(scaled) < 2 or max(norms.values()) - min(norms.values()) > 1e-2 * max(norms.values()):
        return "", set()
    if max(scaled.values()) - min(scaled.values()) <= _SAME * max(scaled.values()):
        return "", set()
    norm = next(iter(norms.values()))
    return f"the program clips gradients itself, to a norm of {norm:.3g}, as one process would", set(scaled)


# Relations.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """A remark on gradients that are correct."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undecided:
    """Why it cannot be decided whether gradients are correct."""

    text: str


def _explain(
    result: StepComparison, compared: Sequence[StepComparison], tolerance: float, other_workers: OtherWorkers
) -> list[ProgramFinding | _Note | _Undecided]:
    """Findings and notes on one step: one for each group of parameters that differ in the same way."""
    worst: dict[int, Comparison] = {}
    for one in result.differing:
        worst.setdefault(one.parameter, one)
    total = len({one.parameter for one in result.comparisons})
    groups: dict[str, list[Comparison]] = {}
    for one in worst.values():
        key = f"{one.relation} {one.factor:.3g}" if one.relation == "scaled" else one.relation
        groups.setdefault(key, []).append(one)
    return [
        _scaled(result, members, total, tolerance, other_workers)
        if members[0].relation == "scaled"
        else _related(result, members, total, compared)
        for members in groups.values()
    ]


def _scaled(
    result: StepComparison,
    members: Sequence[Comparison],
    total: int,
    tolerance: float,
    other_workers: OtherWorkers,
) -> ProgramFinding | _Note | _Undecided:
    """The meaning of a factor that several gradients share. A factor equal to the number of ranks or micro-batches
    proves nothing by itself, since a loss may be half a squared error. It is a fault if it changes with the number of
    ranks, or if the divisions in the loss show it."""
    step, factor = result.step, members[0].factor
    ranks, micros = len(step.ranks), passes_of(step)
    name = named_factor(factor, ranks, micros)
    if divides_by_another_count(result) and not name:
        return _Note(text="the loss divides all micro-batches by one count, which is not quite the number of elements")
    divisions = min(sum(abs(one / micros - 1) < _SAME for one in micro.divisors) for micro in step.micros)
    own = result.literal_factor * (micros if result.unit != "as written" else 1)
    is_own = len(members) == total and own > 0 and abs(factor / own - 1) < _SAME
    is_by_passes = abs(factor / micros - 1) < _SAME or abs(factor * micros - 1) < _SAME
    scaled_down = any(abs(one * micros - 1) < _SAME for micro in step.micros for one in micro.multipliers)
    kind: ProgramFindingKind = "scale"
    # Label smoothing adds a factor to cross-entropy, so the rest need not be the number of micro-batches.
    never, twice = divisions == 0 and factor > 1 and not scaled_down, divisions == 2 and factor < 1 and is_by_passes
    is_accumulation = is_own and micros > 1 and (never or twice)
    if is_accumulation and (never or ranks != micros):
        kind, name = "accumulation", "accumulation"
    elif len(members) == total and (is_own or "accumulation" not in name or "world" in name):
        follows = _follows_workers(result, tolerance, other_workers)
        if follows is False and micros > 1 and is_by_passes and (is_accumulation or not is_own):
            kind, name = "accumulation", "accumulation"
        elif follows is False:
            written = f"the loss is {factor:.4g} times a mean" if is_own else f"gradients are {factor:.4g} times a mean"
            return _Note(text=f"{written} with any number of workers, as the program is written")
        elif follows is None and is_own:
            text = (
                f"the loss is {factor:.4g} times a mean: that may be intended, or come from the number of ranks. The "
                "program did not run on another number of workers, which would have shown it; try other --workers"
            )
            return _Undecided(text=text) if name else _Note(text=text)
        else:
            kind = "world_size" if is_own or "world" in name else "scale"
            name = name or ("world size" if is_own else "")
    elif "world" in name:
        kind = "world_size"
    elif "accumulation" in name:
        kind = "accumulation"
    because = f" ({name}: {_numbers(name, ranks, micros)})" if name else ""
    return ProgramFinding(
        kind=kind, is_fault=True, where=_where(step), step=step.step, parameter=step.name(members[0].parameter),
        parameters=len(members),
        what=f"gradients are {factor:.4g} times what they should be{because}: {_names(step, members, total)}",
        one_process=_mean_of(result),
    )  # fmt: skip


def _follows_workers(result: StepComparison, tolerance: float, other_workers: OtherWorkers) -> bool | None:
    """Whether a step's factor changes with the number of workers; None if that cannot be tried."""
    mine = weights_of_loss(result.step, tolerance=tolerance)
    if result.unit == "as written":
        mine = {reading: weight for reading, weight in mine.items() if reading.endswith("as written")}
    others = (other_workers() or {}).get((result.step.optimizer, result.step.step), {})
    common = [reading for reading in mine if reading in others]
    if not common:
        return None
    return all(abs(others[one] / mine[one] - 1) > max(_SAME, tolerance) for one in common)


def _numbers(words: str, ranks: int, micros: int) -> str:
    counts = [f"{ranks} ranks"] * ("world" in words) + [f"{micros} micro-batches"] * ("accumulation" in words)
    return ", ".join(counts)


def _related(
    result: StepComparison, members: Sequence[Comparison], total: int, compared: Sequence[StepComparison]
) -> ProgramFinding:
    step, first = result.step, members[0]
    names = _names(step, members, total)
    kind: ProgramFindingKind
    if first.relation == "mean of means":
        counts = [unit_count(micro, result.unit) for micro in step.micros]
        kind = "mean_of_means"
        sizes = f"micro-batches of {min(counts):g} to {max(counts):g} elements"
        what = f"a mean of means: {sizes}, and {first.detail}: {names}"
    elif first.relation == "own only":
        kind = "never_summed" if len(members) == total else "missing_sum"
        what = (
            f"gradients are never summed over ranks: each rank keeps its own: {names}"
            if kind == "never_summed"
            else f"a sum is missing: each rank keeps its own gradient of {names}"
        )
        if first.detail:
            what += f" ({first.detail})"
    elif first.relation == "missing":
        kind = "missing_sum"
        what = f"the optimizer gets no gradient for {names}, though the loss depends on it"
    elif first.relation == "micro-batches lost":
        kind, what = "lost_micro_batches", f"micro-batches are lost: {first.detail}: {names}"
    elif first.relation == "pieces uneven":
        factors = ", ".join(f"{one:.3g}" for one in first.rank_factors)
        kind = "partial_clipping"
        what = f"clipping by a partial norm: ranks scale their pieces by {factors}: {names}"
    elif first.relation == "ranks uneven":
        factors = ", ".join(f"{one:.3g}" for one in first.rank_factors)
        if _clips_before_sum(compared):
            kind = "clipping_before_sum"
            what = f"clipping comes before the sum: each rank's own gradient is scaled first, by {factors}: {names}"
        elif any(abs(one) < 1e-3 for one in first.rank_factors):
            kind = "missing_sum"
            what = f"a sum leaves ranks out: their gradients count {factors} times: {names}"
        else:
            kind, what = "uneven_ranks", f"ranks do not count equally: their gradients count {factors} times: {names}"
    elif first.relation == "micro-batches uneven":
        kind, what = _by_micro_batch(step, first, names)
    else:
        kind = "unexplained"
        what = f"gradients differ by {first.error:.1g}, and no known mistake explains it: {names}"
    return ProgramFinding(
        kind=kind, is_fault=True, where=_where(step), step=step.step, parameter=step.name(first.parameter),
        parameters=len(members), what=what, one_process=_mean_of(result),
    )  # fmt: skip


def _by_micro_batch(step: CheckedStep, one: Comparison, names: str) -> tuple[ProgramFindingKind, str]:
    """How much each micro-batch counts in a rank's gradient."""
    counts = {(micro.rank, micro.place): count for micro, count in zip(step.micros, one.rank_factors, strict=True)}
    places = sorted({place for _, place in counts})
    alone = [
        place
        for place in places
        if abs(counts.get((one.rank, place), 0.0)) > 1e-2
        and all(abs(count) < 1e-2 for (rank, at), count in counts.items() if at == place and rank != one.rank)
    ]
    if alone:
        numbers = ", ".join(str(place + 1) for place in alone)
        return "missing_sum", f"a sum is missing: for micro-batch {numbers} each rank keeps its own gradient: {names}"
    text = ", ".join(f"{count:.3g}" for count in one.rank_factors)
    return "uneven_ranks", f"micro-batches do not count equally: {text} times on rank {one.rank}: {names}"


def _clips_before_sum(compared: Sequence[StepComparison]) -> bool:
    """Whether the part of each rank's own gradient that counts has the same norm in all steps, as after clipping."""
    norms: list[float] = []
    for result in compared:
        step = result.step
        factors = one_process_factors(step.micros, result.unit)
        uneven = [one for one in result.differing if one.relation == "ranks uneven" and one.rank == 0]
        if not uneven:
            continue
        for rank in range(len(step.ranks)):
            squares = 0.0
            for parameter in range(len(step.parameters)):
                parts = [
                    factor * own
                    for micro, factor in zip(step.micros, factors, strict=True)
                    if micro.rank == rank and (own := step.ranks[rank].local(micro, parameter)) is not None
                ]
                if parts:
                    squares += float(torch.stack(parts).sum(0).norm()) ** 2
            norms.append(abs(uneven[0].rank_factors[rank]) * squares**0.5)
    if len(norms) < 2:
        return False
    largest = max(norms)
    return sum(one > largest * (1 - 2e-2) for one in norms) >= max(2, len(norms) // 2)


def _names(step: CheckedStep, members: Sequence[Comparison], total: int) -> str:
    first = step.name(members[0].parameter)
    if len(members) == total:
        return f"{first} and all other parameters" if total > 1 else first
    return first if len(members) == 1 else f"{first} and {len(members) - 1} more of {total} parameters"


def _where(step: CheckedStep) -> str:
    sites = list(dict.fromkeys(micro.site for micro in step.micros if micro.site))
    return sites[0] if sites else step.site


def _mean_of(result: StepComparison) -> str:
    if result.unit == "as written":
        return "it would add the losses of all micro-batches, as they are written"
    total = sum(unit_count(micro, result.unit) for micro in result.step.micros)
    what = {"valid": "elements", "elements": "elements", "rows": "examples"}[result.unit]
    if all(micro.kind == "opaque" for micro in result.step.micros):
        return f"it would take the mean over the step's {total:g} micro-batches"
    return f"it would divide the sum over all {total:g} {what} of the step by {total:g}"
