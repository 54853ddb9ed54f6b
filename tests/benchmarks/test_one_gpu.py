"""The benchmarks for GPUs run on a processor with a tiny model: each contender with its flags, and each setting."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from benchmarks.gpu_settings import QUESTIONS
from benchmarks.one_gpu import CONTENDERS, ONLY_FOR, answer
from benchmarks.one_gpu_brief import TURNS
from benchmarks.processes import ROOT

TRIED = [(name, size) for name in CONTENDERS for size in ("125M", "1B", "LoRA 8B")
         if ONLY_FOR.get(name, kind := "LoRA" if "LoRA" in size else "full") == kind]  # fmt: skip
FLAGS = argparse.Namespace(attention="any", peak_flops=1e9, smoke=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), TRIED)
def test_every_contender_answers(name: str, size: str) -> None:
    if name == "Trainer":
        pytest.importorskip("accelerate", reason="comes with `make env-bench`")
    failed: dict[str, str] = {}
    found = answer(name, size, FLAGS, failed)
    assert found is not None and not failed
    assert found["step_s"] > 0 and 4.5 < found["first_loss"] < 6.5  # near the logarithm of 256 entries
    flops_per_token = 1e9 * found["mfu"] / found["tokens_per_s"]
    assert 2 * found["parameters"] < flops_per_token < 12 * found["parameters"]
    assert (found["planned_step_s"] is None) is (not name.startswith("plait"))


@pytest.mark.slow
def test_a_contender_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "torch loop", ("benchmarks.peers.gpu_loop", "--sequences", "-1"))
    failed: dict[str, str] = {}
    assert answer("torch loop", "125M", FLAGS, failed) is None
    assert "Error" in failed["torch loop"]


@pytest.mark.slow
def test_all_sizes_take_their_turn_in_two_processes() -> None:
    command = [sys.executable, "-m", "benchmarks.one_gpu_brief", "--smoke"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
    turns = [(program, size) for programs in TURNS.values() for program, sizes in programs.items() for size in sizes]
    assert len(told.splitlines()) == len(turns)
    for (program, size), line in zip(turns, told.splitlines(), strict=True):
        assert line.startswith(f"{program:14} {size:8}") and " ms " in line, line


@pytest.mark.slow
def test_every_setting_is_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_settings", "--smoke", "--rounds", "1"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
    assert all(f"### {name}\n" in told for name in QUESTIONS)
    assert told.count("| 1.000 |") >= len(QUESTIONS) and told.count("\n| ") == sum(
        2 + len(q.values) for q in QUESTIONS.values()
    )
