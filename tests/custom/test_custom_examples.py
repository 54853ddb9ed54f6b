"""The programs in examples/: six lines turn each into a spread one, with the same numbers on any number of workers."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples" / "spread").glob("*.py"))
CHANGED_LINES = 6
STEPS = 6
NEEDS = {"keras_digits.py": "keras"}


def test_there_are_seven_programs() -> None:
    assert len(EXAMPLES) == 7
    assert sorted(path.name for path in (ROOT / "examples" / "plain").glob("*.py")) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_six_lines_at_most_are_added_or_changed(name: str) -> None:
    before, after = (ROOT / "examples" / folder / name for folder in ("plain", "spread"))
    lines = difflib.unified_diff(before.read_text().splitlines(), after.read_text().splitlines(), n=0, lineterm="")
    added = [line for line in list(lines)[2:] if line.startswith("+") and line[1:].strip()]
    assert any("import plait" in line for line in added)
    assert len(added) <= CHANGED_LINES, "\n".join(added)


def numbers_of(command: list[str]) -> list[float]:
    """The losses that a program prints, of its first worker."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps: dict[int, list[float]] = {}
    for number, told in re.findall(r"^step (\d+)  (.*)$", done.stdout, re.MULTILINE):
        steps.setdefault(int(number), [float(loss) for loss in re.findall(r"\d+\.\d+", told)])
    assert sorted(steps) == list(range(1, STEPS + 1)), done.stdout
    return [loss for number in sorted(steps) for loss in steps[number]]


def spread_on(name: str, workers: int) -> list[float]:
    program = [str(ROOT / "examples" / "spread" / name), "--workers", str(workers), "--", "--steps", str(STEPS)]
    return numbers_of([sys.executable, "-m", "plait", "run", *program])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_are_the_same_on_one_and_three_workers(name: str) -> None:
    """Three share no batch evenly; other numbers of ranks are in test_custom_parity.py."""
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    one = numbers_of([sys.executable, str(ROOT / "examples" / "spread" / name), "--steps", str(STEPS)])
    assert spread_on(name, 3) == pytest.approx(one, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_plain_program_runs_and_learns(name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    losses = numbers_of([sys.executable, str(ROOT / "examples" / "plain" / name), "--steps", str(STEPS)])
    assert losses[-1] < losses[0] or name == "gan_digits.py"  # two losses that pull against each other


@pytest.mark.slow
def test_a_language_model_in_one_file_has_the_same_losses_on_two_workers() -> None:
    program, text = str(ROOT / "examples" / "one_file_train.py"), str(ROOT / "plait" / "examples" / "shakespeare.txt")
    small = [text, "--steps", str(STEPS), "--batch", "5", "--sequence", "16", "--vocabulary", "300", "--width", "32"]
    one = numbers_of([sys.executable, program, *small])
    several = [sys.executable, "-m", "plait", "run", program, "--workers", "2", "--", *small, "--accumulate", "2"]
    assert numbers_of(several) == pytest.approx(one, rel=2e-4)
