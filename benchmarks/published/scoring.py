"""Scores predictions against published runs by the written rules: errors by source, ranking of layouts by job."""

from __future__ import annotations

import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.published.pricing import Priced

FEWEST = 6
"""Timed rows from which on a source has its own scalar."""
DIFFERENT = 1.02
"""Times of two layouts that differ by less say nothing about their order."""
UNPRICED = 1.0
"""The error that a row counts with which the model could not price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What a group of rows shows; None where it has no such row."""

    n_rows: int
    n_priced: int
    n_guessed: int
    n_refused: int
    """Rows that ran, and that the memory model says cannot."""
    median_abs_err: float | None
    p90_abs_err: float | None
    median_abs_err_unfitted: float | None
    bias_unfitted: float | None
    """Median of predicted / measured - 1, nothing fitted."""
    memory_median_abs_err: float | None
    n_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Layouts of one piece of work on the same machines, ranked by the model."""

    source: str
    name: str
    multi_node: bool
    layouts: int
    tau: float
    regret: float
    """Measured time of the layout predicted as best against the best measured, less 1."""


def fitting_half(id: str) -> bool:
    """Whether a row belongs to the half that scalars are fitted on: even CRC32 of its id."""
    return zlib.crc32(id.encode()) % 2 == 0


def scalar(rows: Sequence[Priced]) -> float | None:
    """What a source's predictions are multiplied by: the median ratio on the fitting half; None below `FEWEST` rows."""
    timed = [row for row in rows if row.case.step_s]
    half = [row.case.step_s / row.step_s for row in timed if row.case.step_s and fitting_half(row.case.id)]
    return statistics.median(half) if half and len(timed) >= FEWEST else None


def fitted_errors(rows: Sequence[Priced], factor: float | None) -> list[float]:
    """|error| of a source's rows: of its odd half with the fitted scalar, of all its rows where there is none."""
    judged = [row for row in rows if factor is None or not fitting_half(row.case.id)]
    return [abs(_error(row, factor or 1.0)) for row in judged if row.case.step_s]


def errors(rows: Sequence[Priced], fitted: Sequence[float], unpriced: int = 0) -> Errors:
    """The summary of a group of rows, given their fitted errors; unpriced rows join with the worst error."""
    timed = [row for row in rows if row.case.step_s]
    plain = [_error(row, 1.0) for row in timed]
    memory = memory_errors(rows)
    judged = [*fitted, *[UNPRICED] * unpriced]
    return Errors(
        n_rows=len(timed) + unpriced,
        n_priced=len(timed),
        n_guessed=sum(row.case.guessed for row in timed),
        n_refused=sum(not row.fits for row in timed),
        median_abs_err=_quantile(judged, 0.5),
        p90_abs_err=_quantile(judged, 0.9),
        median_abs_err_unfitted=_quantile([*map(abs, plain), *[UNPRICED] * unpriced], 0.5),
        bias_unfitted=_quantile(plain, 0.5),
        memory_median_abs_err=memory["median"],
        n_memory=int(memory["rows"] or 0),
    )


def plain_errors(rows: Sequence[Priced]) -> dict[str, float | int | None]:
    """How many timed rows, and the median and 90th percentile of |error| as the model stands."""
    return summary([abs(_error(row, 1.0)) for row in rows if row.case.step_s])


def held_out_errors(rows: Sequence[Priced]) -> dict[str, dict[str, float | int | None]]:
    """The errors of rows on which nothing was fitted, as the model stands: each row one vote, and each source one."""
    judged = [row for row in rows if row.case.step_s and not fitting_half(row.case.id)]
    found = [abs(_error(row, 1.0)) for row in judged]
    rows_of = Counter(row.case.source for row in judged)
    votes = [1 / rows_of[row.case.source] for row in judged]
    each_source = {"sources": len(rows_of), "median": _weighted(found, votes, 0.5), "p90": _weighted(found, votes, 0.9)}
    ratios = [row.case.step_s / row.step_s for row in judged if row.case.step_s]
    return {"each_row": summary(found), "each_source": each_source, "ratios": nine_of_ten(ratios)}


def nine_of_ten(ratios: Sequence[float]) -> dict[str, float | int | None]:
    """How many measured times over their forecasts, and between which two the next one is with a probability of 0.9.

    Of few ratios these are the least and the greatest: Weibull's positions, of which the expected coverage is exact.
    """
    low, high = np.quantile(ratios, [0.05, 0.95], method="weibull") if ratios else (None, None)
    return {"rows": len(ratios), "low": low and float(low), "high": high and float(high)}


def memory_errors(rows: Sequence[Priced]) -> dict[str, float | int | None]:
    """How many readings of the allocator, and the median and 90th percentile of the memory forecast's |error|."""
    sizes = [row for row in rows if row.case.memory_bytes and row.case.reading == "allocated"]
    return summary([abs(row.memory_bytes / (row.case.memory_bytes or 1) - 1) for row in sizes])


def summary(errors: Sequence[float]) -> dict[str, float | int | None]:
    """How many errors, their median and their 90th percentile."""
    return {"rows": len(errors), "median": _quantile(errors, 0.5), "p90": _quantile(errors, 0.9)}


def jobs(rows: Sequence[Priced]) -> list[Job]:
    """All jobs with at least four layouts whose times differ."""
    together: dict[tuple[str, ...], list[Priced]] = defaultdict(list)
    for row in rows:
        if row.case.step_s:
            together[row.case.job].append(row)
    return [job for name, group in together.items() if (job := _job(name, group))]


def ranking(found: Sequence[Job]) -> dict[str, float | int | None]:
    """The summary of a group of jobs."""
    regrets, taus = [job.regret for job in found], [job.tau for job in found]
    return {
        "n_jobs": len(found),
        "regret_median": _quantile(regrets, 0.5),
        "regret_p90": _quantile(regrets, 0.9),
        "regret_max": max(regrets, default=None),
        "tau_median": _quantile(taus, 0.5),
    }


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's rank correlation over the pairs whose measured times differ by more than `DIFFERENT`."""
    agree = pairs = 0
    for i in range(len(measured)):
        for j in range(i):
            if max(measured[i], measured[j]) > DIFFERENT * min(measured[i], measured[j]):
                pairs += 1
                agree += int(np.sign((measured[i] - measured[j]) * (predicted[i] - predicted[j])))
    return agree / pairs if pairs else 0.0


def as_dict(found: Errors) -> dict[str, float | int | None]:
    """A summary for JSON."""
    return asdict(found)


def _job(name: tuple[str, ...], group: Sequence[Priced]) -> Job | None:
    # The same layout measured several times is one layout with their median time.
    layouts: dict[tuple[object, ...], list[Priced]] = defaultdict(list)
    for row in group:
        layouts[row.case.workload, tuple(sorted(row.case.knobs.items()))].append(row)
    predicted = [statistics.median(row.step_s for row in rows) for rows in layouts.values()]
    measured = [statistics.median(row.case.step_s or 0.0 for row in rows) for rows in layouts.values()]
    if _different(measured) < 4:
        return None
    return Job(
        name=" ".join(name[1:]),
        source=name[0],
        multi_node=group[0].case.multi_node,
        layouts=len(measured),
        tau=kendall_tau(predicted, measured),
        regret=measured[int(np.argmin(predicted))] / min(measured) - 1,
    )


def _different(times: Sequence[float]) -> int:
    """How many of the times stand apart from each other by more than `DIFFERENT`."""
    kept = 0
    last = 0.0
    for value in sorted(times):
        if value > DIFFERENT * last:
            kept, last = kept + 1, value
    return kept


def _error(row: Priced, factor: float) -> float:
    return row.step_s * factor / (row.case.step_s or 1.0) - 1


def _weighted(values: Sequence[float], weights: Sequence[float], share: float) -> float | None:
    """The least value that, with all below it, has this share of the weight."""
    passed, whole = 0.0, sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        passed += weight
        if passed >= share * whole * (1 - 1e-12):
            return value
    return None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
