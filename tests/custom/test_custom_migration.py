"""plait's side of the migration guide runs as it stands there, and gives the same losses on one and two workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide-migration.md").read_text(encoding="utf-8")
BLOCKS = [
    "\n".join(line[4:] for line in block.splitlines()) for block in re.findall(r"(?:(?:^    .*)?\n)+", GUIDE, re.M)
]
COMMON = next(block for block in BLOCKS if "import plait" in block)
OURS = [block for block in BLOCKS if "plait.spread(" in block and "import plait" not in block]
THEIRS = [block for block in BLOCKS if "sampler" in block or "accelerator" in block or "fabric" in block]


def program_of(blocks: list[str]) -> str:
    """All blocks one after the other, each from fresh lines of their own; the loss of each is told at the end."""
    texts = [f"{COMMON}\n{block}\nlosses.append(float(loss))\n" for block in blocks]
    end = 'if run.rank == 0:\n    print("LOSSES", losses)\n'
    return f"losses = []\n{''.join(texts)}verdict = run.verify(batch)\nassert verdict.ok, str(verdict)\n{end}"


def losses_on(folder: Path, workers: int) -> list[float]:
    folder.mkdir()
    (folder / "program.py").write_text(program_of(OURS))
    command = [sys.executable, "-m", "plait", "run", "program.py", "--workers", str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"LOSSES (\[.*\])", done.stdout)
    return json.loads(found)


def test_five_frameworks_stand_in_ten_lines_each() -> None:
    assert len(OURS) == 5
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 10 for block in OURS)
    assert len(THEIRS) >= 4
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 12 for block in THEIRS)


@pytest.mark.slow
def test_every_block_runs_is_proven_and_has_the_same_losses_on_one_and_two_workers(tmp_path: Path) -> None:
    """But for Horovod's habit, where the batch grows with the workers. Each program verifies its gradients."""
    one, two = losses_on(tmp_path / "one", 1), losses_on(tmp_path / "two", 2)
    assert [a for k, a in enumerate(one) if k != 1] == pytest.approx([b for k, b in enumerate(two) if k != 1], rel=1e-4)
    assert len(two) == 5 and all(0 < loss < 2 for loss in two)
