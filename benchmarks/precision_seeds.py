"""Do runs in bf16 end where float32 runs end? Three seeds of two recipes, each in both precisions, side by side.

    python -m benchmarks.precision_seeds [--small STEPS] [--large STEPS]

The recipes are the default one (recipes/01-shakespeare.toml, its own model) and the same text with 11 million
parameters. Both precisions of a seed run at the same time, on half of the cores each, and take the same steps. Written
to benchmarks/results. A pair of the default recipe takes some ten minutes on two cores, the whole about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import ROOT, describe
from benchmarks.pairing import save

RECIPE = ROOT / "recipes" / "01-shakespeare.toml"
SEEDS = (1, 2, 3)
PRECISIONS = ("float32", "bf16")
WITHIN = 0.01
"""Relative difference of the held-out losses at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both precisions of one recipe and seed: the held-out loss at the end, in nats a token."""

    recipe: str
    seed: int
    steps: int
    float32: float
    bf16: float

    @property
    def difference(self) -> float:
        return self.bf16 / self.float32 - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", type=int, default=600, help="steps of the default recipe (default 600)")
    parser.add_argument("--large", type=int, default=60, help="steps of the model of 11M parameters (default 60)")
    flags = parser.parse_args()
    recipes = {"default": (flags.small, ()), "11M": (flags.large, ("model.size=11M", "train.batch_tokens=4096"))}
    began, pairs = time.monotonic(), list[Pair]()
    for name, (steps, settings) in recipes.items():
        for seed in SEEDS:
            pairs.append(_pair(name, seed, steps, settings))
            print(f"{name}, seed {seed}: {_line(pairs[-1])}", flush=True)
    worst = max(pairs, key=lambda pair: abs(pair.difference))
    told = "within" if abs(worst.difference) <= WITHIN else "MORE THAN"
    print(f"\nthe worst, {worst.recipe} with seed {worst.seed}, is off by {worst.difference:+.2%}: {told} {WITHIN:.0%}")
    values = [{**asdict(pair), "difference": pair.difference} for pair in pairs]
    minutes = round((time.monotonic() - began) / 60, 1)
    print(f"written to {save('precision-seeds', {'machine': describe(), 'minutes': minutes, 'pairs': values})}")
    sys.exit(abs(worst.difference) > WITHIN)


def _pair(name: str, seed: int, steps: int, settings: Sequence[str]) -> Pair:
    threads = max(1, (os.cpu_count() or 1) // 2)
    with tempfile.TemporaryDirectory() as folder:
        running = {
            precision: _start(Path(folder), precision, seed, steps, threads, settings) for precision in PRECISIONS
        }
        found = {precision: _final_loss(Path(folder), precision, process) for precision, process in running.items()}
        if _work(Path(folder), "float32") != _work(Path(folder), "bf16"):
            sys.exit(f"{name}: the two precisions were planned with other models or batches; name model.size and batch")
    return Pair(recipe=name, seed=seed, steps=steps, float32=found["float32"], bf16=found["bf16"])


def _start(
    folder: Path, precision: str, seed: int, steps: int, threads: int, settings: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Train in a folder of its own, so that nothing of another run is used again."""
    own = folder / precision
    own.mkdir()
    named = (
        f"train.budget={steps} steps", f"train.precision={precision}", f"run.seed={seed}", "run.workers=1",
        f"run.threads={threads}", *settings,
    )  # fmt: skip
    path = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
    with (own / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "plait", "train", str(RECIPE), *named],
            cwd=own,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _final_loss(folder: Path, precision: str, process: subprocess.Popen[bytes]) -> float:
    own = folder / precision
    if process.wait():
        sys.exit(f"{precision} failed:\n{(own / 'output.txt').read_text()[-2000:]}")
    (metrics,) = own.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["eval_loss"] for line in lines if line.get("eval_loss") is not None][-1]


def _work(folder: Path, precision: str) -> list[object]:
    """What a run's plan says of its model and batch."""
    (path,) = (folder / precision).glob("runs/*/plan.json")
    plan = json.loads(path.read_text())
    return [plan["job"][key] for key in ("shape", "sequence", "batch_sequences", "steps")]


def _line(pair: Pair) -> str:
    return f"float32 {pair.float32:.4f}, bf16 {pair.bf16:.4f} nats a token, {pair.difference:+.2%}"


if __name__ == "__main__":
    main()
