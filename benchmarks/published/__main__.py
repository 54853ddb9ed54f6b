"""Prices published runs and tells how far off the planner's model is.

python -m benchmarks.published --rows FILE [--sweeps FILE] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.pricing import Priced, cases_of, price
from benchmarks.published.reading import read_rows
from benchmarks.published.report import print_report
from benchmarks.published.scoring import Job, as_dict, errors, fitted_errors, jobs, ranking, scalar

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the tables, prices them, prints the figures and writes them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--rows", type=Path, default=HERE / "rows.csv")
    parser.add_argument("--sweeps", type=Path)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    found = figures([chosen.rows, *([chosen.sweeps] if chosen.sweeps else [])])
    print_report(found)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def figures(paths: Sequence[Path]) -> dict[str, Any]:
    """All figures of the given tables, ready for JSON."""
    rows = read_rows(*paths)
    cases, unread = cases_of(rows)
    priced = price(cases)
    timed = {row["id"] for row in rows if row.get("step_time_s") or row.get("tokens_per_s_per_gpu")}
    lost = sorted(timed & set(unread))
    ranked = jobs(priced)
    by_source: dict[str, list[Priced]] = defaultdict(list)
    for row in priced:
        by_source[row.case.source].append(row)
    factors = {source: scalar(found) for source, found in by_source.items()}
    return {
        "sources": {
            f"{source} ({kind})" if len({row.case.kind for row in found}) > 1 else source: {
                "kind": kind,
                "scalar": factors[source],
                "memory_reading": found[0].case.reading,
                **as_dict(errors(chosen, fitted_errors(chosen, factors[source]))),
            }
            for source, found in sorted(by_source.items())
            for kind in ("dense", "moe_tpu")
            if (chosen := [row for row in found if row.case.kind == kind])
        },
        "all": _pool(by_source, factors, ranked, "dense", len(lost)),
        "moe_tpu": _pool(by_source, factors, ranked, "moe_tpu", 0),
        "out_of_memory": {
            "n_rows": sum(row.case.ran_out for row in priced),
            "n_refused": sum(row.case.ran_out and not row.fits for row in priced),
        },
        "unpriced": {id: unread[id] for id in lost},
        "refused": [row.case.id for row in priced if row.case.step_s and not row.fits],
        "jobs": [
            {
                "source": j.source,
                "job": j.name,
                "multi_node": j.multi_node,
                "layouts": j.layouts,
                "tau": j.tau,
                "regret": j.regret,
            }
            for j in ranked
        ],
    }


def _pool(
    by_source: Mapping[str, Sequence[Priced]],
    factors: Mapping[str, float | None],
    ranked: Sequence[Job],
    kind: str,
    unpriced: int,
) -> dict[str, Any]:
    chosen = {source: [row for row in rows if row.case.kind == kind] for source, rows in by_source.items()}
    fitted = [error for source, rows in chosen.items() for error in fitted_errors(rows, factors[source])]
    rows = [row for found in chosen.values() for row in found]
    kinds = {row.case.job: row.case.kind for row in rows}
    here = [job for job in ranked if any(" ".join(name[1:]) == job.name and name[0] == job.source for name in kinds)]
    return {
        **as_dict(errors(rows, fitted, unpriced)),
        "multi_node": ranking([job for job in here if job.multi_node]),
        "single_node": ranking([job for job in here if not job.multi_node]),
    }


if __name__ == "__main__":
    main()
