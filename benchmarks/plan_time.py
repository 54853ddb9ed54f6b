"""How much processor time `plait plan` takes, from one node to sixteen thousand GPUs.

    python -m benchmarks.plan_time [--beside CHECKOUT] [--rounds 5]

Each command runs in a process of its own, in turns with that of another checkout where one is named. The figures are
medians of user and system seconds, which other programs disturb less than they do a clock; "start" is a command that
plans nothing. No text is there, so none is sampled. Written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.machine import ROOT, describe
from benchmarks.pairing import alternate, compare, save, table

PLAIN = ROOT / "recipes" / "02-single-gpu.toml"
CASES: Mapping[str, tuple[Path, str, str]] = {
    "start": (PLAIN, "", ""),
    "7B on 8 H100": (
        PLAIN,
        "8xH100",
        "model.layers=32 model.width=4096 model.heads=32 model.ffn=11008 model.vocabulary=32000 model.tied=false "
        "train.sequence=4096 train.batch_tokens=4194304 train.budget='1T tokens'",
    ),
    "125M on 32 A100 + 96 V100": (
        PLAIN,
        "32xA100+96xV100",
        "model.size=125M train.sequence=1024 train.batch_tokens=262144 train.budget='1B tokens'",
    ),
    "Llama 3 405B on 16,384 H100": (
        PLAIN,
        "16384xH100",
        "model.layers=126 model.width=16384 model.heads=128 model.kv_heads=8 model.ffn=53248 model.vocabulary=128256 "
        "model.tied=false train.sequence=8192 train.batch_tokens=16777216 train.budget='15.6T tokens'",
    ),
    "DeepSeek-V3 on 2,048 H800": (ROOT / "recipes" / "paper-deepseek-v3.toml", "2048xH800", ""),
}
"""Recipe, cluster and changes to the recipe."""


def main() -> None:
    """Time all commands and print and save the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout of plait, to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkouts = {"here": ROOT, **({"beside": options.beside.resolve()} if options.beside else {})}
    found: dict[str, Mapping[str, Sequence[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            turn = partial(_processor_s, checkouts=checkouts, case=name, folder=Path(folder))
            found[name] = alternate(list(checkouts), options.rounds, turn)
            print(f"\n{name}\n{table(compare(found[name], list(checkouts)[-1]), {}, list(checkouts)[-1])}", flush=True)
    revision = {name: _revision(path) for name, path in checkouts.items()}
    print(f"\nwritten to {save('plan-time', {'machine': describe(), 'revision': revision, 'processor_s': found})}")


def _processor_s(checkout: str, *, checkouts: Mapping[str, Path], case: str, folder: Path) -> float:
    """User and system seconds of the command and its children, in this checkout."""
    recipe, cluster, changes = CASES[case]
    words = ["plan", str(recipe), "--cluster", cluster, "data.files=none.txt", *shlex.split(changes)]
    command = [sys.executable, "-m", "plait", *(words if cluster else ["plan", "--help"])]
    environment = {**os.environ, "PYTHONPATH": str(checkouts[checkout]), "OMP_NUM_THREADS": "1"}
    started = os.times()
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    ended = os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {checkouts[checkout]}: {done.stderr}")
    return ended.children_user - started.children_user + ended.children_system - started.children_system


def _revision(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
