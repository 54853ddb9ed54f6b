"""How far off `plait check FILE` is on public configurations whose memory or speed was published.

python -m benchmarks.foreign_configs [--rows CSV] [--json OUT] [--each]

Each source has one vote: its median error; the figure is the median of the sources. A row published as out of memory
must not be said to fit; one that ran must not be said not to fit.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from plait.errors import PlaitError
from plait.foreign_configs.forecast import RunForecast, forecast
from plait.foreign_configs.reading import read_configuration
from plait.machines.cluster import read_cluster
from plait.planner.memory.estimate import ALLOCATOR_RESERVE

ROWS = Path(__file__).parent / "published" / "foreign_configs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConfig:
    """A row of the table and its forecast."""

    row: Mapping[str, str]
    found: RunForecast | None
    why: str = ""
    """Why there is no forecast."""

    @property
    def memory_error(self) -> float | None:
        """Relative error of memory, by the kind of reading that the source gives."""
        if not self.row["memory_gib"] or self.found is None:
            return None
        found = self.found
        readings = {
            "allocated": found.allocated_bytes,
            "reserved": found.allocated_bytes * ALLOCATOR_RESERVE,
            "device": found.needed_bytes,
        }
        said = readings[self.row["reading"]]
        return said / 2**30 / float(self.row["memory_gib"]) - 1

    @property
    def time_error(self) -> float | None:
        """Relative error of a step's time."""
        if self.found is None:
            return None
        if self.row["step_s"]:
            return self.found.step_s / float(self.row["step_s"]) - 1
        if self.row["tokens_per_s_per_device"]:
            rate = float(self.row["tokens_per_s_per_device"]) * self.found.cluster.n_devices
            return self.found.step_s * rate / self.found.workload.batch_tokens - 1
        return None

    @property
    def is_held_out(self) -> bool:
        """Whether constants were not fitted to this row."""
        return bool(crc32(self.row["id"].encode()) % 2)


def judged(rows: Sequence[Mapping[str, str]]) -> list[JudgedConfig]:
    """The forecasts of all rows."""
    with TemporaryDirectory() as name:
        return [_judge(row, Path(name)) for row in rows]


def _judge(row: Mapping[str, str], folder: Path) -> JudgedConfig:
    path = folder / row["file"]
    path.write_text(row["text"], encoding="utf-8")
    for beside, text in json.loads(row["beside"] or "{}").items():
        (folder / beside).write_text(text, encoding="utf-8")
    try:
        run = read_configuration(str(path), row["said"].split())[1]
        return JudgedConfig(row=row, found=forecast(run, read_cluster(row["machines"])))
    except PlaitError as error:
        return JudgedConfig(row=row, found=None, why=str(error))


def figures(all_rows: Sequence[JudgedConfig]) -> dict[str, Any]:
    """Counts and errors for JSON."""
    memory = [(one, abs(error)) for one in all_rows if (error := one.memory_error) is not None]
    time = [(one, abs(error)) for one in all_rows if (error := one.time_error) is not None]
    priced = [one for one in all_rows if one.found is not None]
    out = [one for one in priced if one.row["outcome"] == "out of memory"]
    ran = [one for one in priced if one.row["outcome"] == "ran" and (one.row["memory_gib"] or one.row["step_s"])]
    return {
        "rows": len(all_rows),
        "priced": len(priced),
        "sources": len({one.row["source"] for one in all_rows}),
        "memory": _voted(memory),
        "time": _voted(time),
        "out_of_memory": {
            "rows": len(out),
            "said_to_fit": [one.row["id"] for one in out if one.found and one.found.verdict == "fits"],
        },
        "ran": {
            "rows": len(ran),
            "said_not_to_fit": [one.row["id"] for one in ran if one.found and one.found.verdict == "does not fit"],
        },
        "not_priced": {one.row["id"]: one.why for one in all_rows if one.found is None},
    }


def _voted(errors: Sequence[tuple[JudgedConfig, float]]) -> dict[str, Any]:
    """The median over sources of each one's median, of all rows and of those that nothing was fitted to."""
    sources: dict[str, list[float]] = defaultdict(list)
    held_out: dict[str, list[float]] = defaultdict(list)
    for one, error in errors:
        sources[one.row["source"]].append(error)
        if one.is_held_out:
            held_out[one.row["source"]].append(error)
    return {
        "rows": len(errors),
        "each_row": median([error for _, error in errors]),
        "each_source": median([median(found) for found in sources.values()]),
        "held_out_each_source": median([median(found) for found in held_out.values()]),
        "by_source": {name: {"rows": len(found), "median": median(found)} for name, found in sources.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign_configs", description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--each", action="store_true", help="print every row")
    chosen = parser.parse_args(arguments)
    with chosen.rows.open(newline="", encoding="utf-8") as file:
        found = judged(list(csv.DictReader(file)))
    if chosen.each:
        for one in found:
            print(_line(one))
    result = figures(found)
    print(json.dumps(result, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _line(one: JudgedConfig) -> str:
    if one.found is None:
        return f"{one.row['id']:14s} {one.why}"
    errors = [
        f"{name} {error:+.1%}"
        for name, error in (("memory", one.memory_error), ("time", one.time_error))
        if error is not None
    ]
    need = f"{one.found.needed_bytes / 2**30:.1f} of {one.found.device_bytes / 2**30:.0f} GiB"
    read = f"read {one.row['memory_gib']}" if one.row["memory_gib"] else ""
    return f"{one.row['id']:14s} {one.row['outcome']:13s} {one.found.verdict:16s} {need} {read} {' '.join(errors)}"


if __name__ == "__main__":
    main()
