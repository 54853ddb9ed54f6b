"""Prices published runs and tells how far off the planner's model is.

python -m benchmarks.published --rows FILE [--sweeps FILE] [--json OUT] [--plot SVG] [--errors TOML]

`--errors plait/planner/calibration/errors.toml` renews what the planner says of its own error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.published.figures import figures, judge
from benchmarks.published.plot import drawing
from benchmarks.published.report import print_report

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the tables, prices them, prints the figures and writes what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--rows", type=Path, default=HERE / "rows.csv")
    for name in ("--sweeps", "--json", "--plot", "--errors"):
        parser.add_argument(name, type=Path)
    chosen = parser.parse_args(arguments)
    judged = judge([chosen.rows, *([chosen.sweeps] if chosen.sweeps else [])])
    found = figures(judged)
    print_report(found)
    if chosen.json:
        chosen.json.write_text(json.dumps({**_made(), **found}, indent=1) + "\n", encoding="utf-8")
    if chosen.plot:
        chosen.plot.write_text(drawing(judged, datetime.now(UTC).date()), encoding="utf-8")
    if chosen.errors:
        chosen.errors.write_text(errors_text(found, datetime.now(UTC).date().isoformat()), encoding="utf-8")


def errors_text(found: Mapping[str, Any], date: str) -> str:
    """The planner's errors.toml."""
    lines = [
        "# How far off the planner's model is on published runs, no scalar fitted to a source: written by",
        "# `python -m benchmarks.published --rows ... --sweeps ... --errors plait/planner/calibration/errors.toml`;",
        "# not by hand. `memory`: of the bytes that an allocator reports; on processors of whole processes, as read by",
        "# `python -m benchmarks.memory_forecast`.",
        f'date = "{date}"',
    ]
    for family, values in found["families"].items():
        lines += ["", f"[{family}]", *_error_lines(values)]
        lines += ["", f"[{family}.memory]", *_error_lines(found["memory"][family])]
    lines += [
        "",
        "# Measured time over forecast, by plait's own constants, of runs that no constant was fitted to (but for",
        "# those on one card): nine of ten lie between `low` and `high`.",
    ]
    for kind, values in found["ranges"].items():
        if values["rows"]:
            known = [f"{name} = {values[name]:.3f}" for name in ("low", "high")]
            lines += ["", f'[range."{kind}"]', f"rows = {values['rows']}", *known]
    return "\n".join(lines) + "\n"


def _error_lines(values: Mapping[str, Any]) -> list[str]:
    known = [f"{name} = {values[name]:.4f}" for name in ("median", "p90") if values["rows"]]
    return [f"rows = {values['rows']}", *known]


def _made() -> dict[str, object]:
    """When and on what a result was made; the machine's description is the other benchmarks', and needs torch."""
    from benchmarks.machine import describe

    return {"name": "published", "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe()}


if __name__ == "__main__":
    main()
