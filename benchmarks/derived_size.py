"""Is the size that plait derives the right one? Runs of a time budget on three texts, each beside other sizes.

    python -m benchmarks.derived_size [--text small|middle|large ...]

Each text is trained on with the size left to plait, then with named sizes a factor of two apart around that one, each
for the whole budget and with the same seed. All runs evaluate the same held-out text ten times. Of each the results
hold the loss at the end and the best on the way, in nats a byte: a run whose end is above its best overfits.
Written to benchmarks/results. On two cores the three texts take some six, twenty and fifty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import ROOT, describe
from benchmarks.pairing import save
from plait.model.shape import ModelShape, parameter_count

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
WITHIN = 0.02
"""How far the derived size's loss may lie above that of the best of all sizes."""
OVERFIT = 0.005
"""How far a loss at the end may lie above the best on the way: what two evaluations of a run at rest differ by."""


def _shakespeare(first: int, size: int) -> bytes:
    return (ROOT / "plait" / "examples" / "shakespeare.txt").read_bytes()[first : first + size]


def _python_sources(size: int) -> bytes:
    """The standard library's source, which every machine has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    whole = b"".join(path.read_bytes() for path in files if "site-packages" not in path.parts)
    return whole[:size].decode("utf-8", errors="ignore").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A text and the time to learn it in."""

    text: Callable[[], bytes]
    minutes: int


CASES: Mapping[str, Case] = {
    "small": Case(text=lambda: _shakespeare(0, 200_000), minutes=1),
    "middle": Case(text=lambda: _shakespeare(1_000_000, 1_500_000), minutes=4),
    "large": Case(text=lambda: _python_sources(20_000_000), minutes=10),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One run: its size, how long it took, and its held-out losses in nats a byte."""

    size: str
    parameters: int
    steps: int
    tokens: int
    train_s: float
    losses: tuple[float, ...]

    @property
    def overfit(self) -> float:
        """How far the last loss lies above the best one."""
        return self.losses[-1] / min(self.losses) - 1


def main() -> int:
    """Train all sizes of the texts asked for; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", choices=list(CASES), nargs="+", default=list(CASES))
    flags = parser.parse_args()
    found = {name: _sizes_of(CASES[name], name) for name in flags.text}
    missed = [name for name, runs in found.items() if not _is_met(name, runs)]
    values = {name: [asdict(run) for run in runs] for name, runs in found.items()}
    print(f"written to {save('derived-size', {'machine': describe(), 'within': WITHIN, 'texts': values})}")
    return int(bool(missed))


def _sizes_of(case: Case, name: str) -> list[Trained]:
    """Trains the derived size, then the sizes around it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_bytes(case.text())
        recipe = f'[data]\nfiles = "text.txt"\n\n[train]\nbudget = "{case.minutes} minutes"\n'
        (Path(folder) / "size.toml").write_text(recipe)
        runs = [_train(Path(folder), "derived", "auto")]
        for factor in FACTORS:
            size = f"{runs[0].parameters * factor / 1000:.0f}K"
            if run := None if factor == 1.0 else _train_if_there_is_one(Path(folder), size):
                runs.append(run)
    return runs


def _train_if_there_is_one(folder: Path, size: str) -> Trained | None:
    """A run of a size, unless no shape has it: with this vocabulary there may be none so small."""
    try:
        return _train(folder, size.lower(), size)
    except subprocess.CalledProcessError as error:
        if "no shape with a vocabulary" not in error.stderr:
            raise
        return None


def _train(folder: Path, run: str, size: str) -> Trained:
    path = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
    settings = (f"run.name={run}", f"model.size={size}", "run.seed=1")
    subprocess.run(
        [sys.executable, "-m", "plait", "train", "size.toml", *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((folder / "runs" / run / "plan.json").read_text())
    losses = tuple(line["eval_nats_per_byte"] for line in lines if line.get("eval_nats_per_byte") is not None)
    steps = [line for line in lines if "step_s" in line]
    trained = Trained(
        size=size,
        parameters=parameter_count(ModelShape.from_dict(plan["job"]["shape"])),
        steps=plan["job"]["steps"],
        tokens=steps[-1]["tokens"],
        train_s=round(sum(line["step_s"] for line in steps), 1),
        losses=losses,
    )
    print(
        f"{size:>8} {trained.parameters:>10,} parameters, {trained.tokens:>11,} tokens in {trained.train_s:5.0f} s: "
        f"{losses[-1]:.4f} nats a byte, {trained.overfit:.1%} above its best",
        flush=True,
    )
    return trained


def _is_met(name: str, runs: list[Trained]) -> bool:
    derived, best = runs[0], min(run.losses[-1] for run in runs)
    above = derived.losses[-1] / best - 1
    met = above <= WITHIN and derived.overfit <= OVERFIT
    print(f"{name}: the derived size ends {above:.1%} above the best of {len(runs)}: {'met' if met else 'MISSED'}")
    return met


if __name__ == "__main__":
    sys.exit(main())
