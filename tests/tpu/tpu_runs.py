"""`plait train` on the device "tpu", and a checkpoint from it on the processor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plait.checkpoint.store import verify_checkpoint
from plait.parallel.communicator import ONE_PROCESS
from plait.trainer.checkpointing.persist import restore
from plait.trainer.state import TrainState
from tests.tpu.kinds import assembled
from tests.trainer.saved import save

RECIPE = """
[data]
files = "rows.jsonl"
holdout = 0.2

[model]
layers = 2
width = 32
heads = 4
vocabulary = 280

[train]
sequence = 16
batch_tokens = 128
budget = "6 steps"

[run]
devices = "tpu"
workers = 1
"""


def plait(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plait", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)


def test_a_checkpoint_resumes_on_the_processor(tmp_path: Path) -> None:
    there = assembled("dense", tmp_path / "run", "tpu", "float32")
    state = TrainState()
    for _ in range(2):
        state, _ = there.step(state)
    path = save(there, state, tmp_path / "checkpoints")
    _, next_there = there.step(state)
    there.loader.close()
    here = assembled("dense", tmp_path / "run", "cpu", "float32")
    back = restore(here, path, verify_checkpoint(path), ONE_PROCESS)
    _, next_here = here.step(back)
    here.loader.close()
    assert back.step == 2
    assert float(next_here.totals[0]) == pytest.approx(float(next_there.totals[0]), rel=1e-5)


def test_a_run_trains_and_goes_on_upon_the_processor(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"line {n}: " + "to be or not to be " * (1 + n % 4)}) for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    trained = plait(tmp_path, "train", "tiny.toml")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "plait has not run on a TPU v5e" in " ".join(trained.stdout.split())
    plan = json.loads((tmp_path / "runs/tiny/plan.json").read_text())
    assert plan["machines"]["device"] == "tpu"
    sampled = plait(tmp_path, "sample", "tiny", "--prompt", "to be", "--tokens", "4")
    assert sampled.returncode == 0, sampled.stdout + sampled.stderr
