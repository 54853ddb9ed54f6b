"""Prints the figures of published runs as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def print_report(found: Mapping[str, Any]) -> None:
    """One line per source, then the pools, the ranking of layouts and the memory tests."""
    head = f"{'source':20s} {'rows':>5s} {'priced':>6s} {'guessed':>7s} {'scalar':>7s} {'median':>7s} {'p90':>7s}"
    print(f"{head} {'unfitted':>8s} {'bias':>7s} {'memory':>7s}  reading")
    for name, values in sorted(found["sources"].items(), key=lambda item: -item[1]["n_rows"]):
        print(_line(name, values))
    for name in ("all", "moe_tpu"):
        print(_line(name, found[name]))
        for nodes in ("multi_node", "single_node"):
            print(f"  {nodes:12s} " + ", ".join(f"{key} {_share(value)}" for key, value in found[name][nodes].items()))
    for profile, words in (("program", "by the program that ran them"), ("plait", "as if plait had run them")):
        print(f"odd halves, {words}:")
        for family, votes in found["held_out"][profile].items():
            row, source = votes["each_row"], votes["each_source"]
            print(
                f"  {family:10s} {row['rows']:5d} rows, median {_share(row['median'])}, p90 {_share(row['p90'])};"
                f" each of {source['sources']} sources one vote: {_share(source['median'])}, {_share(source['p90'])}"
            )
    out = found["out_of_memory"]
    print(f"published as out of memory: {out['n_rows']}, of which refused: {out['n_refused']}")
    print(f"rows that ran but would be refused: {', '.join(found['refused']) or 'none'}")
    print(f"rows that could not be priced: {found['unpriced'] or 'none'}")
    for job in sorted(found["jobs"], key=lambda job: (not job["multi_node"], -job["regret"])):
        kind = "several nodes" if job["multi_node"] else "one node"
        told = f"tau {job['tau']:5.2f} regret {job['regret']:6.1%} of {job['layouts']:3d} layouts, {kind}"
        print(f"  {told}: {job['source']} {job['name']}")


def _line(name: str, values: Mapping[str, Any]) -> str:
    counts = f"{values['n_rows']:5d} {values['n_priced']:6d} {values['n_guessed']:7d}"
    scalar = values.get("scalar")
    shares = " ".join(f"{_share(values[key]):>7s}" for key in ("median_abs_err", "p90_abs_err"))
    plain = f"{_share(values['median_abs_err_unfitted']):>8s} {_share(values['bias_unfitted']):>7s}"
    size = f"{_share(values['memory_median_abs_err']):>7s}"
    told = f"{scalar:7.3f}" if scalar else f"{'-':>7s}"
    return f"{name:20s} {counts} {told} {shares} {plain} {size}  {values.get('memory_reading', '')}"


def _share(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1%}"
