"""Whole steps on one device: one rank and several, checkpoints, memory beside the plan, and the proof by `verify`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from plait.commands.probe import probe
from plait.commands.verify import verify
from plait.planner.memory.traced_peak import MEMORY_ITEMS, traced_peak
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.workload import workload_of
from plait.screen.terminal import TerminalScreen
from plait.working_folder import WorkingFolder
from tests.gpu.conftest import RunRanks
from tests.matrix import few_fast
from tests.trainer.tiny import RECIPE, make_tiny

ALONE = "layout.replicate=1"
TOGETHER = {
    "replicate": ("layout.replicate=2",),
    "shard optimizer": (ALONE, "layout.shard=2", "layout.shard_what=optimizer"),
    "tensor": (ALONE, "layout.tensor=2"),
}
"""Layouts whose messages gloo carries also between tensors of a GPU; torch's FSDP, and sends, want NCCL there."""
SMALL = (
    "model.layers=8", "model.width=96", "model.heads=4", "model.vocabulary=300", "train.sequence=64",
    "train.batch_tokens=1024", "data.mask_documents=false", "layout.micro_sequences=4",
)  # fmt: skip


def steps(
    run_ranks: RunRanks, folder: Path, device: str, ranks: int, *keys: str, count: int = 3, **planned: Any
) -> dict[str, Any]:
    folder.mkdir()
    make_tiny(folder, *keys, device=device, **planned)
    return run_ranks("take_steps", json.dumps({"folder": str(folder), "steps": count}), ranks)[0]


@pytest.mark.parametrize("layout", few_fast(TOGETHER, "tensor"))
def test_ranks_that_share_a_device_compute_what_one_does(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device, layout: str
) -> None:
    one = steps(run_ranks, tmp_path / "one", device.type, 1, ALONE, precision="float32")
    both = steps(run_ranks, tmp_path / "both", device.type, 2, *TOGETHER[layout], precision="float32")
    assert both["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert both["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.parametrize("ahead", few_fast([1, 4], 4))
def test_a_pipeline_computes_what_one_device_does_however_many_receives_are_posted(
    run_ranks: RunRanks, tmp_path: Path, two_devices: str, ahead: int
) -> None:
    """Over NCCL on two GPUs, over gloo on a processor; what each number costs, benchmarks/gpu_settings.py tells."""
    one = steps(run_ranks, tmp_path / "one", two_devices, 1, ALONE, precision="float32")
    (tmp_path / "both").mkdir()
    keys = (ALONE, "layout.pipeline=2", "layout.micro_sequences=1", "layout.schedule=1f1b")
    make_tiny(tmp_path / "both", *keys, device=two_devices, precision="float32")
    asked = {"folder": str(tmp_path / "both"), "steps": 3, "library": "nccl", "receives_ahead": ahead}
    assert run_ranks("take_steps", json.dumps(asked), 2)[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_shards_on_two_gpus_compute_what_one_device_does(
    run_ranks: RunRanks, tmp_path: Path, two_devices: str, what: str
) -> None:
    one = steps(run_ranks, tmp_path / "one", two_devices, 1, ALONE, precision="float32")
    (tmp_path / "both").mkdir()
    keys = (ALONE, "layout.shard=2", f"layout.shard_what={what}")
    make_tiny(tmp_path / "both", *keys, device=two_devices, precision="float32")
    asked = {"folder": str(tmp_path / "both"), "steps": 3, "library": "nccl"}
    found = run_ranks("take_steps", json.dumps(asked), 2)[0]
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.slow
def test_rounded_arithmetic_trains_like_float32(run_ranks: RunRanks, tmp_path: Path, device: torch.device) -> None:
    exact, rounded = (
        steps(run_ranks, tmp_path / precision, device.type, 1, ALONE, precision=precision)
        for precision in ("float32", "bf16")
    )
    assert rounded["losses"] != exact["losses"]
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=1e-2)


def test_a_checkpoint_from_the_device_brings_back_every_bit(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device
) -> None:
    make_tiny(tmp_path, ALONE, device=device.type, precision="bf16")
    found = run_ranks("save_and_restore", str(tmp_path), 1)[0]
    assert found["same"] and found["tensors"] > 10 and device.type in found["devices"]
    assert (found["step"], found["next_step"]) == (2, 3)
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6 if device.type == "cuda" else 0)


@pytest.mark.parametrize("fails", few_fast([False, True], False))
@pytest.mark.parametrize("precision", few_fast(["float32", "bf16"], "float32"))
def test_replayed_steps_are_those_that_are_launched(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device, precision: str, fails: bool
) -> None:
    """With a learning rate that changes in each step; in bf16 with documents of unlike numbers."""
    masked = precision == "bf16" and device.type == "cuda"
    keys = (ALONE, f"data.mask_documents={'true' if masked else 'false'}")
    compiled = "blocks" if device.type == "cuda" else "off"
    plain = steps(run_ranks, tmp_path / "plain", device.type, 1, *keys, precision=precision, compile=compiled, count=40)
    (tmp_path / "replayed").mkdir()
    make_tiny(tmp_path / "replayed", *keys, device=device.type, precision=precision, compile=compiled)
    asked = {"folder": str(tmp_path / "replayed"), "steps": 40, "fails": fails}
    found = run_ranks("replayed_steps", json.dumps(asked), 1)[0]
    near = 1e-5 if precision == "float32" else 1e-2
    assert found["losses"] == pytest.approx(plain["losses"], rel=near)
    assert found["norms"] == pytest.approx(plain["norms"], rel=10 * near)
    assert found["sums"] == pytest.approx(plain["sums"], rel=10 * near, abs=1e-6)
    (sentence,) = found["told"]
    assert ("cannot be recorded" if fails else "are replayed as a CUDA graph from now on") in sentence


@pytest.mark.parametrize("recompute", few_fast(["none", "selective", "full"], "selective"))
@pytest.mark.parametrize("documents", few_fast(["mask", "join"], "join"))
def test_no_step_waits_for_the_gpu(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device, documents: Any, recompute: str
) -> None:
    """With loader, documents, compiled layers and the optimizer's own kernel, by torch's own watch over the host."""
    compiled = "blocks" if device.type == "cuda" else "off"
    keys = (ALONE, f"layout.recompute={recompute}", f"data.mask_documents={'true' if documents == 'mask' else 'false'}")
    _, plan = make_tiny(tmp_path, *keys, device=device.type, precision="bf16", compile=compiled)
    assert plan.job.documents == documents
    found = run_ranks("step_without_waiting", str(tmp_path), 1)[0]
    assert found == {"count": 6, "finite": True, "caught": True}


@pytest.mark.parametrize(
    ("recompute", "precision"),
    few_fast([("none", "bf16"), ("selective", "float32"), ("full", "bf16")], ("selective", "float32")),
    ids=str,
)
def test_the_device_holds_what_was_planned(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device, recompute: str, precision: Any
) -> None:
    keys = (*SMALL, ALONE, f"layout.recompute={recompute}")
    _, plan = make_tiny(tmp_path, *keys, device=device.type, precision=precision)
    held = run_ranks("watched_step", str(tmp_path), 1)[0]["bytes"]
    work = workload_of(
        plan.job.shape, sequence=64, batch_sequences=16, precision=precision, moments=plan.job.optimizer.moments
    )
    row = {
        **plan.placement.layout.degrees,
        "recompute": recompute,
        "micro_sequences": 4,
        "schedule": plan.placement.layout.schedule,
    }
    told = traced_peak(work, Candidates.from_rows([row], layer_split="balanced"), rank=0)
    assert sum(told[item][0] for item in MEMORY_ITEMS) == pytest.approx(held, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_verify_proves_the_run_s_own_arithmetic(tmp_path: Path, recompute: str) -> None:
    """Compiled and in bf16 on this machine's GPU, after float32: `plait verify --here` (on processors: end_to_end)."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    out = io.StringIO()
    verdict = verify(
        tmp_path / "tiny.toml",
        [ALONE, f"layout.recompute={recompute}"],
        where="here",
        screen=TerminalScreen(Console(file=out, width=200)),
        working=WorkingFolder(tmp_path),
    )
    assert verdict is not None and verdict.ok
    assert "in bf16, compiled two runs on one device differ by" in out.getvalue()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_probe_measures_the_gpu_that_it_fills(tmp_path: Path) -> None:
    """`plait probe` to its end: what it holds itself is no other program's."""
    screen = TerminalScreen(Console(file=io.StringIO(), width=200))
    found = probe(
        None, workers=1, threads=None, fresh="again", out=None, screen=screen, working=WorkingFolder(tmp_path)
    )
    assert found is not None and found.measured is not None
    assert {device.name for device in found.measured.devices} == {torch.cuda.get_device_name(0)}
