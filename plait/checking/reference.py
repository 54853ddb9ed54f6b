"""Computes what one process would have computed in a step, and compares the program's gradients with it.

Note [one process]: before any communication, the gradient that a backward pass of rank r adds to a weight is what one
process computes for that micro-batch. One process with all micro-batches would divide the sum over all elements
(tokens, examples) by their number. So its gradient is a sum of the ranks' own gradients, with factors that follow from
the number of elements in each loss; it is computed in float64. The program's gradients, as its optimizer got them, are
compared with it. Where they differ, other factors are tried, each of which is a known mistake.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from plait.checking.recorded import CheckedStep, MicroBatch

EXACT, ROUNDED = 1e-4, 3e-2
"""Largest difference that counts as rounding, relative to what was summed: in float32 and float64, and in 16 bits."""
_FACTOR_TOLERANCE = 2e-3
_MICROS_SOLVED = 32
"""Largest number of micro-batches per step for which arbitrary factors are solved for."""
_NEARLY = 1.35
"""A count that includes, say, the first token of each text is off by less than this; one that confuses ranks is off by
two or more."""
Unit = Literal["valid", "elements", "rows", "as written"]
Relation = Literal[
    "equal", "scaled", "mean of means", "own only", "micro-batches lost", "ranks uneven", "pieces uneven",
    "micro-batches uneven", "missing", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How one parameter's gradient on one rank relates to that of one process."""

    parameter: int
    rank: int
    relation: Relation
    factor: float
    error: float
    """Relative difference from one process's gradient, without any factor."""
    detail: str = ""
    """Which variant of the relation."""
    rank_factors: tuple[float, ...] = ()
    """The weight of each rank's own gradient, or of each micro-batch's for "micro-batches uneven" and the like."""

    @property
    def explanation(self) -> tuple[str, str, str]:
        """Equal for parameters with the same cause."""
        return self.relation, self.detail, f"{self.factor:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """All gradients of a step, compared."""

    step: CheckedStep
    unit: Unit
    comparisons: Sequence[Comparison]
    literal_factor: float
    """The factor by which the program multiplies its mean before backward; 1.0 for a plain mean."""

    @property
    def differing(self) -> list[Comparison]:
        return [one for one in self.comparisons if one.relation != "equal"]

    @property
    def largest_error(self) -> float:
        return max((one.error for one in self.comparisons if one.relation == "equal"), default=0.0)


def compare_step(step: CheckedStep, *, tolerance: float, after_clipping: bool = False) -> StepComparison:
    """Compare a step's gradients, as they were before clipping, with those of one process.

    If the loss is a sum, the program may have divided it by tokens, elements or examples, or may mean it as a sum: the
    reading that explains most is taken, the first one if several do.
    """
    units = _readings(step)
    sources = {micro.source for micro in step.micros}
    # Backward at two lines: two losses that are added, or the halves of an unrolled loop.
    readings = [step, replace(step, micros=_as_one_loss(step.micros))] if len(sources) > 1 else [step]
    results = [_compare_in(reading, unit, tolerance, after_clipping) for reading in readings for unit in units]
    return min(results, key=_complexity)


def _readings(step: CheckedStep) -> list[Unit]:
    """The units over which the losses of a step may be means. A sum that is divided by one constant, or not at all, may
    also be meant as a sum."""
    if {micro.kind for micro in step.micros} != {"sum"}:
        return ["valid"]
    is_constant = len({micro.coefficient for micro in step.micros}) == 1
    units: list[Unit] = ["valid", "elements", "rows"]
    return [*units, "as written"] if is_constant and not _divides_by_own_count(step) else units


def _divides_by_own_count(step: CheckedStep) -> bool:
    """Whether every sum is a mean over its own elements that the program spells out, such as loss.sum() / batch_size,
    possibly with another factor such as 0.3."""
    passes = passes_of(step)
    counted: Sequence[Unit] = ("valid", "elements", "rows")
    return any(
        all(
            (count := unit_count(micro, unit)) > 1
            and any(
                abs(inverse * count * times - 1) < _FACTOR_TOLERANCE
                for inverse in (abs(micro.coefficient), *(1 / one for one in micro.divisors if one))
                for times in (1, passes)
            )
            for micro in step.micros
        )
        for unit in counted
    )


def _is_bare_sum(step: CheckedStep) -> bool:
    """Whether the loss is a sum over several elements that nothing divides or multiplies."""
    return all(
        micro.kind == "sum" and micro.coefficient == 1 and unit_count(micro, "valid") > 1 for micro in step.micros
    )


def weights_of_loss(step: CheckedStep, *, tolerance: float) -> Mapping[str, float]:
    """The factor by which a step's gradients exceed one process's, of a mean or of a sum, for each reading in which all
    parameters share one factor.

    A program's own weight, such as 0.3, is the same for any number of workers in one of the readings; a factor that
    involves the number of ranks varies in all of them.
    """
    found: dict[str, float] = {}
    merged = replace(step, micros=_as_one_loss(step.micros))
    for name, reading in (("", step), ("as one loss, ", merged)):
        for unit in _readings(step):
            comparisons = _compare_in(reading, unit, tolerance, after_clipping=False).comparisons
            factors = [one.factor for one in comparisons]
            if not comparisons or any(one.relation not in ("equal", "scaled") for one in comparisons):
                continue
            if max(factors) - min(factors) <= max(_FACTOR_TOLERANCE, tolerance) * abs(max(factors, key=abs)):
                found[name + unit] = factors[0] * (step.micros[0].coefficient if unit == "as written" else 1.0)
    return found


def _as_one_loss(micros: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches as if they had one loss, regardless of the lines that call backward."""
    places: dict[int, int] = {}
    merged = []
    for micro in micros:
        place = places[micro.rank] = places.get(micro.rank, -1) + 1
        merged.append(replace(micro, source=micros[0].source, place=place))
    return merged


_ORDER: Sequence[Relation] = ("equal", "scaled", "mean of means", "own only", "micro-batches lost", "ranks uneven",
                              "pieces uneven", "micro-batches uneven", "missing", "unknown")  # fmt: skip


def _complexity(result: StepComparison) -> tuple[float, float]:
    """A sort key: explanations with fewer assumptions first, and plain factors such as 3 before 0.0127."""
    worst = max((_ORDER.index(one.relation) for one in result.comparisons), default=0)
    count = sum(_ORDER.index(one.relation) for one in result.comparisons)
    plain = 0.0
    if worst == 1:
        ranks, micros = len(result.step.ranks), passes_of(result.step)
        factors = [one.factor for one in result.comparisons if one.relation == "scaled"]
        is_named = all(named_factor(one, ranks, micros) for one in factors)
        if result.unit == "as written":  # only of a bare sum does a factor of 1 / ranks show a forgotten division
            plain = 0.2 if is_named and _is_bare_sum(result.step) else 0.6
        else:
            plain = 0.0 if is_named else 0.5
        plain = 0.1 if divides_by_another_count(result) else plain
    return worst + plain, count


def divides_by_another_count(result: StepComparison) -> bool:
    """Whether a program divides all its sums by one number that is close to the number of elements (transformers counts
    the first token of each text, which nothing predicts): every element then counts the same, as in one process."""
    micros = result.step.micros
    scaled = [one for one in result.comparisons if one.relation == "scaled"]
    if result.unit == "as written" or len(scaled) < len(result.comparisons) or not scaled:
        return False
    divisors = {micro.coefficient for micro in micros if micro.kind == "sum"}
    if len(divisors) != 1 or any(micro.kind != "sum" for micro in micros):
        return False
    return all(1 / _NEARLY < one.factor < _NEARLY for one in scaled)


def named_factor(factor: float, ranks: int, micros: int) -> str:
    """A name for a factor made of ranks and micro-batches, such as "1 / accumulation"; empty if it is neither."""
    names = {
        "world size": float(ranks),
        "1 / world size": 1.0 / ranks,
        "accumulation": float(micros),
        "1 / accumulation": 1.0 / micros,
        "world size x accumulation": float(ranks * micros),
        "1 / (world size x accumulation)": 1.0 / (ranks * micros),
        "world size squared": float(ranks**2),
        "1 / world size squared": 1.0 / ranks**2,
        "accumulation squared": float(micros**2),
        "1 / accumulation squared": 1.0 / micros**2,
        "world size / accumulation": ranks / micros,
        "accumulation / world size": micros / ranks,
    }
    for name, value in names.items():
        if value != 1.0 and abs(factor / value - 1.0) < _FACTOR_TOLERANCE:
            return name
    return ""


def passes_of(step: CheckedStep) -> int:
    """Micro-batches per step on one rank."""
    return 1 + max((micro.place for micro in step.micros), default=0)


def unit_count(micro: MicroBatch, unit: Unit) -> float:
    """Elements of a micro-batch, counted in a unit."""
    if micro.kind == "opaque":
        return 1.0
    if unit == "rows":
        return micro.units.get("rows", 0.0)
    if unit == "elements":
        return micro.units.get("elements", 0.0)
    return micro.units.get("valid", micro.units.get("elements", 0.0))


def mean_factor(micro: MicroBatch, unit: Unit) -> float:
    """The factor that turns a micro-batch's gradient into the gradient of the mean over its elements (of the negative
    mean, if the program minimizes that); 0.0 if no element counts."""
    size = abs(micro.coefficient)
    divided = size * unit_count(micro, unit) if micro.kind == "sum" else size
    return 1.0 / divided if divided else 0.0


def one_process_factors(micros: Sequence[MicroBatch], unit: Unit) -> list[float]:
    """The factor of each micro-batch's gradient in one process's gradient; see Note [one process]."""
    if unit == "as written":
        return [1.0] * len(micros)
    totals: dict[str, float] = {}
    for micro in micros:
        totals[micro.source] = totals.get(micro.source, 0.0) + unit_count(micro, unit)
    return [
        unit_count(micro, unit) / totals[micro.source] * mean_factor(micro, unit) if totals[micro.source] else 0.0
        for micro in micros
    ]


def _compare_in(step: CheckedStep, unit: Unit, tolerance: float, after_clipping: bool) -> StepComparison:
    factors = torch.tensor(one_process_factors(step.micros, unit), dtype=torch.float64)
    alternatives = list(_alternatives(step, unit))
    found: list[Sequence[Comparison]] = []
    nothing = _noise_floor(step)
    unknown: list[tuple[int, Tensor, Tensor]] = []
    """Unexplained so far: index in `found`, gradient, and each micro-batch's part of one process's gradient."""
    for parameter in range(len(step.parameters)):
        owns = [step.ranks[micro.rank].local(micro, parameter) for micro in step.micros]
        shape = next((one.shape for one in owns if one is not None), None)
        for rank, held in enumerate(step.ranks):
            got = None if after_clipping else held.tensor("unclipped", parameter)
            got = held.tensor("gradient", parameter) if got is None else got
            if shape is None and got is None:
                continue
            if shape is None:
                norm = float(got.norm()) if got is not None else 0.0
                if norm > 0:
                    found.append(
                        [Comparison(parameter=parameter, rank=rank, relation="unknown", factor=1.0, error=1.0)]
                    )
                continue
            rows = torch.stack([torch.zeros(shape, dtype=torch.float64) if one is None else one for one in owns])
            if float(rows.norm()) <= nothing and (got is None or float(got.norm()) <= nothing):
                continue  # a gradient that cancels out, such as a bias's before softmax, says nothing
            if got is None:
                if float((factors @ rows).norm()) > 0:
                    found.append(
                        [Comparison(parameter=parameter, rank=rank, relation="missing", factor=0.0, error=1.0)]
                    )
                continue
            about = step.parameters[parameter]
            pieces = len(step.ranks) if about["sharded"] and got.numel() == math.prod(about["shape"]) else 1
            cut = (pieces, about["shape"][0] if about["shape"] else 1)
            related = _relate(parameter, rank, got, rows, factors, alternatives, step.micros, tolerance, cut)
            if related[0].relation == "unknown":
                unknown.append((len(found), got, factors.unsqueeze(1) * rows))
            found.append(related)
    for index, got, rows in unknown:
        found[index] = [_explained_by_larger(found[index][0], got, rows, found, tolerance)]
    literal = {round(_literal_factor(micro, unit), 6) for micro in step.micros}
    return StepComparison(
        step=step,
        unit=unit,
        comparisons=_most_common(found),
        literal_factor=literal.pop() if len(literal) == 1 else 0.0,
    )


def _explained_by_larger(
    one: Comparison, got: Tensor, rows: Tensor, found: Sequence[Sequence[Comparison]], tolerance: float
) -> Comparison:
    """Explain a parameter with too few elements to solve for factors by the factors of larger ones on the same rank."""
    for other in (each[0] for each in found):
        if other.relation == "micro-batches uneven" and other.rank == one.rank:
            wanted = torch.tensor(other.rank_factors, dtype=torch.float64) @ rows
            if float((got - wanted).norm()) <= 10 * tolerance * float(got.norm()):
                return replace(one, relation="micro-batches uneven", rank_factors=other.rank_factors)
    return one


def _noise_floor(step: CheckedStep) -> float:
    """The norm below which a gradient is mere rounding, judged by the other parameters' gradients."""
    norms = (
        float(tensor.double().norm()) for rank in step.ranks for key, tensor in rank.tensors.items()
        if key.startswith("local/")
    )  # fmt: skip
    return 1e-7 * max(norms, default=0.0)


def _most_common(found: Sequence[Sequence[Comparison]]) -> list[Comparison]:
    """For each gradient, the possible explanation that also explains most others: a bias with one element fits any."""
    counts = Counter(explanation for one in found for explanation in {each.explanation for each in one})
    return [max(one, key=lambda each: counts[each.explanation]) for one in found]


def _literal_factor(micro: MicroBatch, unit: Unit) -> float:
    factor = mean_factor(micro, unit)
    return 1.0 / factor if factor else 0.0


def _relate(
    parameter: int,
    rank: int,
    got: Tensor,
    rows: Tensor,
    factors: Tensor,
    alternatives: Sequence[tuple[Relation, str, Tensor]],
    micros: Sequence[MicroBatch],
    tolerance: float,
    cut: tuple[int, int],
) -> list[Comparison]:
    wanted = factors @ rows
    size = float((factors.abs() * rows.norm(dim=1)).sum())
    error = float((got - wanted).norm()) / size if size > 0 else float(got.norm() > 0)

    def answer(relation: Relation, factor: float = 1.0, detail: str = "", of_ranks: Sequence[float] = ()) -> Comparison:
        return Comparison(
            parameter=parameter, rank=rank, relation=relation, factor=factor, error=error, detail=detail,
            rank_factors=tuple(of_ranks),
        )  # fmt: skip

    if error <= tolerance:
        return [answer("equal")]
    if not size:
        return [answer("unknown")]
    found: list[Comparison] = []
    if (factor := _multiple(got, wanted, size, tolerance)) is not None:
        found.append(answer("scaled", factor))
    mine = torch.tensor([micro.rank == rank for micro in micros])
    for relation, detail, other in alternatives:
        chosen = other * mine if relation == "own only" and not detail.startswith("earlier") else other
        scale = float((chosen.abs() * rows.norm(dim=1)).sum())
        if scale > 0 and (factor := _multiple(got, chosen @ rows, scale, tolerance)) is not None:
            found.append(answer(relation, factor, detail))
    if found and got.numel() > 1:
        return found
    if cut[0] > 1 and (of_pieces := _pieces(got, wanted, cut, tolerance)) is not None:
        found.append(answer("pieces uneven", of_ranks=of_pieces))
    ranks = sorted({micro.rank for micro in micros})
    sums = torch.stack([torch.tensor([m.rank == one for m in micros]) * factors @ rows for one in ranks])
    solved = torch.linalg.lstsq(sums.T, got.unsqueeze(1)).solution.squeeze(1)
    if float((solved @ sums - got).norm()) <= tolerance * max(float(got.norm()), size * 1e-3):
        found.append(answer("ranks uneven", of_ranks=solved.tolist()))
    if not found and len(micros) <= _MICROS_SOLVED and got.numel() > 4 * len(micros):
        solved = torch.linalg.lstsq((factors.unsqueeze(1) * rows).T, got.unsqueeze(1)).solution.squeeze(1)
        if float((solved @ (factors.unsqueeze(1) * rows) - got).norm()) <= tolerance * float(got.norm()):
            found.append(answer("micro-batches uneven", of_ranks=solved.tolist()))
    return found or [answer("unknown")]


def _multiple(got: Tensor, of: Tensor, size: float, tolerance: float) -> float | None:
    """The factor that turns `of` into `got`; None if there is none."""
    squared = float(of @ of)
    if squared <= (1e-9 * size) ** 2:
        return None
    factor = float(got @ of) / squared
    close = float((got - factor * of).norm()) <= tolerance * size * abs(factor)
    return factor if close and factor != 0.0 else None


def _pieces(got: Tensor, wanted: Tensor, cut: tuple[int, int], tolerance: float) -> list[float] | None:
    """The factor of each rank's rows of a sharded parameter, if rows differ by rank and by nothing else; `cut` is
    (number of pieces, number of rows)."""
    factors = []
    pieces, rows = cut
    for one, other in zip(got.view(rows, -1).chunk(pieces), wanted.view(rows, -1).chunk(pieces), strict=False):
        one, other = one.reshape(-1), other.reshape(-1)
        factor = _multiple(one, other, float(other.norm()), 10 * tolerance)
        if factor is None:
            return None
        factors.append(factor)
    return factors


def _alternatives(step: CheckedStep, unit: Unit) -> Iterator[tuple[Relation, str, Tensor]]:
    """Factors that known mistakes give the micro-batches, each with its relation and a description."""
    micros = step.micros
    right = torch.tensor(one_process_factors(micros, unit), dtype=torch.float64)
    means = torch.tensor([mean_factor(micro, unit) for micro in micros], dtype=torch.float64)
    counts = torch.tensor([unit_count(micro, unit) for micro in micros], dtype=torch.float64)
    if unit != "as written":
        yield "mean of means", "each micro-batch of each rank counts the same", means
        yield "mean of means", "each rank counts the same", means * counts / _totals(micros, counts, "rank")
        yield (
            "mean of means",
            "each round of micro-batches counts the same",
            (means * counts / _totals(micros, counts, "place")),
        )
    yield "mean of means", "losses are added as they are", torch.ones_like(means)
    yield "own only", "", right
    yield "own only", "", means
    last = passes_of(step) - 1
    if last > 0:
        places = torch.tensor([micro.place for micro in micros])
        yield "micro-batches lost", "only the last micro-batch counts", right * (places == last)
        yield "micro-batches lost", "only the first micro-batch counts", right * (places == 0)
        yield "micro-batches lost", "the last micro-batch does not count", right * (places != last)
        yield "micro-batches lost", "the first micro-batch does not count", right * (places != 0)
        yield "own only", "only the last micro-batch counts", right * (places == last)
        for rank in range(len(step.ranks)):
            of_rank = torch.tensor([micro.rank == rank for micro in micros])
            yield (
                "own only",
                f"earlier micro-batches come from rank {rank} only",
                (right * ((places == last) / len(step.ranks) + (places != last) * of_rank)),
            )


def _totals(micros: Sequence[MicroBatch], counts: Tensor, by: Literal["rank", "place"]) -> Tensor:
    totals: dict[int, float] = {}
    keys = [micro.rank if by == "rank" else micro.place for micro in micros]
    for key, count in zip(keys, counts.tolist(), strict=True):
        totals[key] = totals.get(key, 0.0) + count
    return torch.tensor([totals[key] or 1.0 for key in keys], dtype=torch.float64)
