"""All figures of a set of published runs, ready for JSON: by source, pooled, by family, and job by job."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.gpu_loop import SIZES
from benchmarks.plait_gpu import model_shape
from benchmarks.published.pricing import Priced, cases_of, price
from benchmarks.published.reading import read_rows
from benchmarks.published.scoring import (
    Job,
    as_dict,
    errors,
    fitted_errors,
    held_out_errors,
    jobs,
    memory_errors,
    nine_of_ten,
    plain_errors,
    ranking,
    scalar,
    summary,
)
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import workload_of
from plait.planner.search.model_error import FAMILIES, run_family
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import estimate_step_time

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The rows of the given tables, priced, with what the rules make of them."""

    priced: Sequence[Priced]
    unread: Mapping[str, str]
    """Why a row with a measured time could not be priced, by id."""
    factors: Mapping[str, float | None]
    """Each source's fitted scalar."""
    jobs: Sequence[Job]


def judge(paths: Sequence[Path]) -> Judged:
    """Reads and prices the tables."""
    rows = read_rows(*paths)
    cases, unread = cases_of(rows)
    priced = price(cases)
    timed = {row["id"] for row in rows if row.get("step_time_s") or row.get("tokens_per_s_per_gpu")}
    return Judged(
        priced=priced,
        unread={id: unread[id] for id in sorted(timed & set(unread))},
        factors={source: scalar(found) for source, found in _by_source(priced).items()},
        jobs=jobs(priced),
    )


def figures(judged: Judged) -> dict[str, Any]:
    """All figures, ready for JSON."""
    by_source = _by_source(judged.priced)
    return {
        "sources": {
            f"{source} ({kind})" if len({row.case.kind for row in found}) > 1 else source: {
                "kind": kind,
                "scalar": judged.factors[source],
                "memory_reading": found[0].case.reading,
                **as_dict(errors(chosen, fitted_errors(chosen, judged.factors[source]))),
            }
            for source, found in sorted(by_source.items())
            for kind in ("dense", "moe_tpu")
            if (chosen := [row for row in found if row.case.kind == kind])
        },
        "all": _pool(judged, "dense", len(judged.unread)),
        "moe_tpu": _pool(judged, "moe_tpu", 0),
        "families": families(judged.priced),
        "held_out": {
            "program": held_out(judged.priced),
            "plait": held_out(priced_as_plait(judged.priced)),
        },
        "ranges": ranges(judged.priced),
        "memory": memory_by_family(judged.priced),
        "out_of_memory": {
            "n_rows": sum(row.case.ran_out for row in judged.priced),
            "n_refused": sum(row.case.ran_out and not row.fits for row in judged.priced),
        },
        "unpriced": judged.unread,
        "refused": [row.case.id for row in judged.priced if row.case.step_s and not row.fits],
        "jobs": [asdict(job) for job in judged.jobs],
    }


def families(priced: Sequence[Priced]) -> dict[str, dict[str, float | int | None]]:
    """Unfitted errors by the families that the planner tells apart."""
    return {family: plain_errors(rows) for family, rows in _by_family(priced).items()}


def held_out(priced: Sequence[Priced]) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Errors of the rows on which nothing was fitted, by family."""
    return {family: held_out_errors(rows) for family, rows in _by_family(priced).items() if rows}


def ranges(priced: Sequence[Priced]) -> dict[str, dict[str, float | int | None]]:
    """What measured times over plait's forecasts lie between: of published runs by family, of plait's own on one card,
    and of the plans that were chosen on measured machines."""
    by_family = {family: found["ratios"] for family, found in held_out(priced_as_plait(priced)).items()}
    return {
        "measured": nine_of_ten(measured_machines()),
        "one card": nine_of_ten([took_s / forecast_s for *_, took_s, forecast_s in one_card()]),
        **by_family,
    }


def measured_machines() -> list[float]:
    """Steps of the chosen plans of the lab's newest whole run, over their forecasts."""
    lines = max(RESULTS.glob("lab-????-??-??.jsonl")).read_text(encoding="utf-8").splitlines()
    chosen = [case["layouts"][case["chosen"]] for case in map(json.loads, lines) if case["chosen"] in case["layouts"]]
    taken = [(one, [s for turn in one["turns"] for s in turn["seconds"]]) for one in chosen]
    return [median(seconds) / one["step_s"] for one, seconds in taken if seconds]


def one_card() -> Iterator[tuple[str, str, float, float]]:
    """plait's own steps on one card: the card, the model, the seconds that a step took, and its forecast."""
    for card, results in (("1xH100", "one-gpu-2026-11-26.json"), ("1xH200", "one-gpu-2026-11-26-h200.json")):
        read, cluster = json.loads((RESULTS / results).read_text(encoding="utf-8")), read_cluster(card)
        for size in [name for name in read if name in SIZES and "plait" in read[name]["turns"]]:
            work, took = SIZES[size], read[size]["turns"]["plait"][0]
            batch = work.sequences_per_rank
            workload = workload_of(model_shape(size, work), sequence=work.sequence, batch_sequences=batch)
            row = {**Layout().degrees, "recompute": "none", "micro_sequences": batch}
            inputs = CostInputs(
                workload=workload,
                cluster=cluster,
                candidates=Candidates.from_rows([row], layer_split="balanced"),
                profile=PLAIT_PROFILE.for_cluster(cluster),
            )
            yield card, size, took["step_s"], float(estimate_step_time(inputs).step_s[0])


def priced_as_plait(priced: Sequence[Priced]) -> list[Priced]:
    """The rows that plait could have run, as if it had: by the profile that `plait plan` takes, but for replayed steps,
    which these programs do not have. Rows in fp8 and fp4, which plait does not compute in, are left out."""
    profile = replace(PLAIT_PROFILE, launch_mode="ahead")
    cases = [row.case for row in priced if row.case.workload.precision not in ("fp8", "fp4")]
    return price([replace(case, profile=profile) for case in cases])


def memory_by_family(priced: Sequence[Priced]) -> dict[str, dict[str, float | int | None]]:
    """Errors of the memory forecast by the same families; on processors those of our own runs' processes."""
    found = {family: memory_errors(rows) for family, rows in _by_family(priced).items()}
    own = json.loads(max(RESULTS.glob("memory-forecast-*.json")).read_text(encoding="utf-8"))["readings"]
    return {**found, "cpu": summary([abs(each["predicted_rss_bytes"] / each["rss_bytes"] - 1) for each in own])}


def _by_family(priced: Sequence[Priced]) -> dict[str, list[Priced]]:
    return {family: [r for r in priced if run_family(r.case.workload, r.case.cluster) == family] for family in FAMILIES}


def _by_source(priced: Sequence[Priced]) -> dict[str, list[Priced]]:
    found: dict[str, list[Priced]] = defaultdict(list)
    for row in priced:
        found[row.case.source].append(row)
    return found


def _pool(judged: Judged, kind: str, unpriced: int) -> dict[str, Any]:
    rows = [row for row in judged.priced if row.case.kind == kind]
    fitted = [
        error for source, found in _by_source(rows).items() for error in fitted_errors(found, judged.factors[source])
    ]
    names = {(row.case.job[0], " ".join(row.case.job[1:])) for row in rows}
    here = [job for job in judged.jobs if (job.source, job.name) in names]
    return {
        **as_dict(errors(rows, fitted, unpriced)),
        "multi_node": ranking([job for job in here if job.multi_node]),
        "single_node": ranking([job for job in here if not job.multi_node]),
    }
