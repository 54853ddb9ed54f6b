"""The benchmarks for GPUs run on a processor with a tiny model: each contender with its flags, and each setting."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_settings import QUESTIONS
from benchmarks.one_gpu import CONTENDERS, ONLY_FOR, answer
from benchmarks.one_gpu_brief import TURNS
from benchmarks.processes import ROOT

TRIED = [(name, size) for name in CONTENDERS for size in ("125M", "1B", "LoRA 8B")
         if ONLY_FOR.get(name, kind := "LoRA" if "LoRA" in size else "full") == kind]  # fmt: skip
pytestmark = pytest.mark.benchmark
FLAGS = argparse.Namespace(attention="any", peak_flops=1e9, smoke=True, timeout=300)


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


def test_a_contender_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "torch loop", ("benchmarks.peers.gpu_loop", "--sequences", "-1"))
    failed: dict[str, str] = {}
    assert answer("torch loop", "125M", FLAGS, failed) is None
    assert "Error" in failed["torch loop"]


def test_all_sizes_take_their_turn_in_two_processes() -> None:
    command = [sys.executable, "-m", "benchmarks.one_gpu_brief", "--smoke"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
    turns = [(program, size) for programs in TURNS.values() for program, sizes in programs.items() for size in sizes]
    assert len(told.splitlines()) == len(turns)
    for (program, size), line in zip(turns, told.splitlines(), strict=True):
        assert line.startswith(f"{program:14} {size:8}") and " ms " in line, line


def test_every_setting_is_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_settings", "--smoke", "--rounds", "1"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
    assert all(f"### {name}\n" in told for name in QUESTIONS)
    assert told.count("| 1.000 |") >= len(QUESTIONS) and told.count("\n| ") == sum(
        2 + len(q.values) for q in QUESTIONS.values()
    )


def test_the_experiment_writes_each_result_as_it_comes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_experiment", "1", "--smoke", "--only", "alone", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=300)
    about, *rows = map(json.loads, out.read_text().splitlines())
    assert about["call"] == 1 and [row["name"] for row in rows] == ["AdamW alone", "products alone", "attention alone"]
    errors = [error for kernel in rows[2]["errors"].values() for each in kernel.values() for error in each]
    assert rows[0]["plain, copy equal"] and max(errors) < 0.02  # bfloat16 beside float64


@pytest.mark.parametrize("lever", ["cudnn", "product weights", "fp8", "bf16 stream"])
def test_every_lever_trains_a_step_like_plait_without_it(tmp_path: Path, lever: str) -> None:
    out, call = tmp_path / "results.jsonl", "2" if lever in ("fp8", "bf16 stream") else "1"
    names = f"plait 1B, any(, {lever})?$"
    command = [sys.executable, "-m", "benchmarks.gpu_experiment", call, "--smoke", "--only", names, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=600)
    plain, changed = map(json.loads, out.read_text().splitlines()[1:])
    assert plain["first_loss"] == pytest.approx(changed["first_loss"], rel=1e-3)
