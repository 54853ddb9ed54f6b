"""The planner's memory beside what runs of two steps held: peak of live tensors, and of whole processes, on processors.

    python -m benchmarks.memory_forecast --json benchmarks/results/memory-forecast-DATE.json
    python -m benchmarks.memory_forecast --only "tensor 2" --only gpipe

Each case is trained by the command line in a folder of its own, as a user would; peaks do not depend on how busy the
machine is. What the planner says of its own error is of the newest of these files: renew that after it
(`python -m benchmarks.published --errors …`, as plait/planner/calibration/errors.toml says).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from benchmarks.machine import describe

TEXT = Path(__file__).parents[1] / "recipes" / "shakespeare.txt"
MODELS: Mapping[str, Mapping[str, int]] = {
    "11M": {"layers": 8, "width": 320, "heads": 8, "vocabulary": 2048},
    "50M": {"layers": 8, "width": 640, "heads": 8, "vocabulary": 8192},
}
BATCHES = {"11M": (16, 256), "50M": (2, 512)}
"""Sequences of a step, and tokens of each."""
STEPS = 2
"""The first makes the optimizer's state; the second holds all that a step ever does."""

LAYOUTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "11M": (
        {"replicate": 1, "micro_sequences": 4},
        {"replicate": 2, "micro_sequences": 8},
        {"replicate": 2, "micro_sequences": 2},
        {"replicate": 2, "micro_sequences": 8, "recompute": "full"},
        {"replicate": 2, "micro_sequences": 8, "recompute": "selective"},
        {"shard": 2, "micro_sequences": 8},
        {"shard": 2, "micro_sequences": 4, "shard_what": "parameters"},
        {"tensor": 2, "micro_sequences": 16},
        {"context": 2, "micro_sequences": 16},
        {"pipeline": 2, "schedule": "1f1b", "micro_sequences": 2},
        {"pipeline": 2, "schedule": "gpipe", "micro_sequences": 2},
        {"pipeline": 2, "schedule": "gpipe", "micro_sequences": 1},
        {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 4, "micro_sequences": 4},
        {"pipeline": 2, "schedule": "zero-bubble", "micro_sequences": 1},
        {"replicate": 2, "tensor": 2, "micro_sequences": 8},
        {"pipeline": 2, "replicate": 2, "schedule": "1f1b", "micro_sequences": 2},
        {"shard": 2, "context": 2, "micro_sequences": 8},
    ),
    "50M": (
        {"replicate": 2, "micro_sequences": 1},
        {"shard": 2, "micro_sequences": 1},
        {"tensor": 2, "micro_sequences": 2},
        {"context": 2, "micro_sequences": 2},
        {"pipeline": 2, "schedule": "1f1b", "micro_sequences": 1},
        {"pipeline": 2, "schedule": "zero-bubble", "micro_sequences": 1},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One case: bytes on the fullest rank, foretold and held."""

    name: str
    predicted_tensor_bytes: float
    tensor_bytes: float
    predicted_rss_bytes: float
    rss_bytes: float

    @property
    def tensor_error(self) -> float:
        return self.predicted_tensor_bytes / self.tensor_bytes - 1

    @property
    def rss_error(self) -> float:
        return self.predicted_rss_bytes / self.rss_bytes - 1


def name_of(model: str, layout: Mapping[str, Any]) -> str:
    """ "11M, tensor 2, micro_sequences 16"."""
    return ", ".join([model, *(f"{key} {value}" for key, value in layout.items())])


def read(model: str, layout: Mapping[str, Any], cache: Path) -> Reading:
    """Train the case and read what its plan and its receipt say."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "case.toml"
        recipe.write_text(_recipe(model, layout))
        command = [sys.executable, "-m", "plait", "train", str(recipe), "--no-check"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise SystemExit(f"{name_of(model, layout)}: {done.stderr or done.stdout}")
        receipt = json.loads((Path(folder) / "runs/case/receipt.json").read_text())
        forecast = json.loads((Path(folder) / "runs/case/plan.json").read_text())["forecast"]
    return Reading(
        name=name_of(model, layout),
        predicted_tensor_bytes=forecast["tensor_bytes"],
        tensor_bytes=max(receipt["peak_tensor_bytes"]),
        predicted_rss_bytes=forecast["bytes_per_device"],
        rss_bytes=max(receipt["peak_rss_bytes"]),
    )


def _recipe(model: str, layout: Mapping[str, Any]) -> str:
    sequences, tokens = BATCHES[model]
    train = {"budget": f"{STEPS} steps", "sequence": tokens, "batch_tokens": sequences * tokens, "precision": "float32"}
    return tomli_w.dumps(
        {
            "run": {"name": "case"},
            "model": dict(MODELS[model]),
            "data": {"files": str(TEXT), "holdout": 0},
            "train": train,
            "layout": dict(layout),
            "checkpoint": {"every": "never"},
        }
    )


def summary(readings: Sequence[Reading]) -> dict[str, float]:
    """Medians and worst of the errors."""
    tensors, processes = ([abs(getattr(r, name)) for r in readings] for name in ("tensor_error", "rss_error"))
    return {
        "tensor_error_median": median(tensors),
        "tensor_error_worst": max(tensors),
        "rss_error_median": median(processes),
        "rss_error_worst": max(processes),
    }


def main() -> None:
    """Read all cases, or those whose name has one of the texts of --only."""
    parser = argparse.ArgumentParser(description="the planner's memory beside what runs held")
    parser.add_argument("--only", action="append", default=[], help="part of a case's name")
    parser.add_argument("--json", type=Path, help="where to put the readings")
    asked = parser.parse_args()
    cases = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
    readings = []
    with tempfile.TemporaryDirectory() as cache:
        for model, layout in cases:
            if asked.only and not any(text in name_of(model, layout) for text in asked.only):
                continue
            readings.append(one := read(model, layout, Path(cache)))
            print(
                f"{one.name:70} tensors {one.tensor_bytes / 1e6:6.0f} MB {one.tensor_error:+6.1%}   "
                f"process {one.rss_bytes / 1e6:6.0f} MB {one.rss_error:+6.1%}",
                flush=True,
            )
    print("  ".join(f"{name} {value:.1%}" for name, value in summary(readings).items()))
    if asked.json:
        values = {"machine": describe(), "summary": summary(readings), "readings": [asdict(one) for one in readings]}
        asked.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
