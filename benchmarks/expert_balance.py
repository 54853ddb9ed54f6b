"""What the bias does in recipes/07-experts.toml: loads and held-out loss with it and without, beside a dense model.

    python -m benchmarks.expert_balance [--steps STEPS] [--seeds N] [--smoke]

Each seed trains three models on the same text, one after the other: the recipe as it is, the recipe without anything
that balances, and a dense model in which a token meets as much. All have one worker and every core, as the layout does
not change what is learned. The loads are the metrics' expert_load_max: the busiest expert's tokens over the mean, of
the layer where that is most; the median of the last steps counts, for a step's own swings. Written to
benchmarks/results, with a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.lab.drawing import COLOURS, INK, PALE, path, stroke, svg, text
from benchmarks.machine import ROOT, describe
from benchmarks.pairing import save

RECIPE = ROOT / "recipes" / "07-experts.toml"
OPEN = ("model.experts=auto", "model.experts_per_token=auto", "model.expert_balance_rate=auto")
MODELS: Mapping[str, tuple[str, ...]] = {
    "bias": (),
    "nothing": ("model.expert_balance=none", "model.expert_balance_rate=auto"),
    "dense": OPEN,
}
LAST_STEPS = 20
MOST_LOAD, MOST_OF_EXCESS, WORSE_BY = 1.25, 1 / 3, 0.005
WIDTH, HEIGHT, LEFT, FLOOR = 760, 400, 60, 330


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """One model after its steps: the held-out loss in nats a token, and its loads step by step, none of a dense one."""

    eval_loss: float
    loads: tuple[float, ...]

    @property
    def last_load(self) -> float:
        return median(self.loads[-LAST_STEPS:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A seed's figures, and whether the bias does what it should."""

    seed: int
    load: float
    load_without: float
    loss: float
    loss_without: float
    loss_of_dense: float

    @property
    def holds(self) -> bool:
        even = self.load <= MOST_LOAD or self.load - 1 <= MOST_OF_EXCESS * (self.load_without - 1)
        return even and self.loss <= self.loss_without * (1 + WORSE_BY)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: busiest expert {self.load:.2f} × the mean with the bias, "
            f"{self.load_without:.2f} without; "
            f"held-out loss {self.loss:.4f} with it, {self.loss_without:.4f} without "
            f"({self.loss / self.loss_without - 1:+.2%}), {self.loss_of_dense:.4f} of the dense model "
            f"({self.loss / self.loss_of_dense - 1:+.2%}): {'holds' if self.holds else 'DOES NOT HOLD'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="the same path with a tiny model; saves nothing")
    flags = parser.parse_args()
    began = time.monotonic()
    steps, seeds = (4, 1) if flags.smoke else (flags.steps, flags.seeds)
    small = ("model.size=auto", "model.layers=2", "model.width=32", "model.vocabulary=300", "train.sequence=32")
    settings = (*small, "train.batch_tokens=256") if flags.smoke else ()
    learned: dict[int, dict[str, Learned]] = {}
    judged: list[Judged] = []
    for seed in range(1, seeds + 1):
        learned[seed] = {name: _trained(seed, steps, (*named, *settings)) for name, named in MODELS.items()}
        judged.append(_judged(seed, learned[seed]))
        print(judged[-1], flush=True)
    picture = drawing(learned)
    if flags.smoke:
        return
    minutes = round((time.monotonic() - began) / 60, 1)
    values = [{**asdict(one), "holds": one.holds} for one in judged]
    result = save("expert-balance", {"machine": describe(), "minutes": minutes, "steps": steps, "seeds": values})
    result.with_suffix(".svg").write_text(picture)
    print(f"written to {result} and {result.with_suffix('.svg').name}")
    sys.exit(not all(one.holds for one in judged))


def _trained(seed: int, steps: int, settings: Sequence[str]) -> Learned:
    """Train in a folder of its own, so that nothing of another run is used again."""
    named = (
        f"train.budget={steps} steps", f"run.seed={seed}", "layout.replicate=1", "run.name=it", *settings,
    )  # fmt: skip
    where = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "plait", "train", str(RECIPE), *named],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": where},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            sys.exit(f"seed {seed}, {' '.join(settings)} failed:\n{(ended.stdout + ended.stderr)[-2000:]}")
        lines = (Path(folder) / "runs" / "it" / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    return Learned(
        eval_loss=[line["eval_loss"] for line in read if line.get("eval_loss") is not None][-1],
        loads=tuple(line["expert_load_max"] for line in read if "expert_load_max" in line),
    )


def _judged(seed: int, learned: Mapping[str, Learned]) -> Judged:
    return Judged(
        seed=seed,
        load=learned["bias"].last_load,
        load_without=learned["nothing"].last_load,
        loss=learned["bias"].eval_loss,
        loss_without=learned["nothing"].eval_loss,
        loss_of_dense=learned["dense"].eval_loss,
    )


def drawing(learned: Mapping[int, Mapping[str, Learned]]) -> str:
    """The busiest expert's load step by step, with the bias and without, a curve a seed."""
    steps = len(learned[1]["bias"].loads)
    tall = 1.05 * max(max(one.loads) for models in learned.values() for one in models.values() if one.loads)

    def place(step: float, load: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - 30) * step / steps, FLOOR - (FLOOR - 50) * (load - 1) / (tall - 1)

    parts = [text(10, 22, "The busiest expert's tokens over the mean, in the layer where that is most", size=15)]
    for load in (1.0, MOST_LOAD, *(float(whole) for whole in range(2, int(tall) + 1))):
        colour, dash = (INK, "6 4") if load == MOST_LOAD else (PALE, "")
        parts.append(stroke(place(0, load), place(steps, load), colour, dash=dash))
        parts.append(text(LEFT - 8, place(0, load)[1] + 4, f"{load:g}", anchor="end"))
    for step in (1, *range(100, steps + 1, 100)):
        parts.append(text(place(step, 1)[0], FLOOR + 18, f"step {step}" if step == 1 else str(step), anchor="middle"))
    for number, name in enumerate(("bias", "nothing")):
        for models in learned.values():
            points = [place(step, load) for step, load in enumerate(models[name].loads, 1)]
            parts.append(path(points, COLOURS[number]))
        words = "with the bias" if name == "bias" else "without"
        parts.append(
            stroke((LEFT + 200 * number, FLOOR + 44), (LEFT + 30 + 200 * number, FLOOR + 44), COLOURS[number], width=2)
        )
        parts.append(text(LEFT + 38 + 200 * number, FLOOR + 48, words))
    parts.append(text(LEFT + 400, FLOOR + 48, f"{len(learned)} seeds each"))
    return svg(WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    main()
