"""A run that trained an adapter: exported both ways, used beside its base, and with others on one base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import whole_slice, write_rank
from plait.commands.evaluate import evaluate
from plait.commands.export import write_export
from plait.commands.models.opened_model import open_each, open_model
from plait.commands.sample import sample, sample_each
from plait.errors import PlaitError
from plait.model.gpt import GPT
from plait.model.weights import trained_weights
from plait.planner.plan_file import write_plan
from plait.run_folder import run_folder
from plait.screen.screen import SilentScreen
from plait.trainer.checkpointing.persist import described_model
from plait.working_folder import WorkingFolder
from tests.interop.folders import write_tokenizer
from tests.plans import changed
from tests.trainer.adapted import make_adapted
from tests.trainer.tiny import make_tiny

TOKENS_BT = torch.randint(0, 257, (2, 8), generator=torch.Generator().manual_seed(1))
HOW = {"tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 1}


def adapter_run(folder: Path, name: str, seed: int) -> None:
    """A run with a checkpoint of random adapters; all runs of this file have one base, of the same random weights."""
    own = run_folder(name, WorkingFolder(folder)).path
    own.mkdir(parents=True)
    _, plan, _ = make_adapted(own, f"run.name={name}")
    write_tokenizer(own / "base")
    model = GPT(plan.job.shape)
    draw = torch.Generator().manual_seed(seed)
    slices = {}
    for one in trained_weights(plan.job.shape):
        weight = torch.randn(model.get_parameter(one).shape, generator=draw) * 0.3
        slices[f"model/{one}"] = [whole_slice(weight)]
    staging = staging_for(own / "checkpoints", 3)
    write_rank(staging, 0, slices)
    target = checkpoint_for(own / "checkpoints", 3)
    publish(staging, target, step=3, cursor=9, model=described_model(plan), world_size=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> WorkingFolder:
    folder = tmp_path_factory.mktemp("runs")
    adapter_run(folder, "first", 5)
    adapter_run(folder, "second", 6)
    return WorkingFolder(folder)


def base_of(runs: WorkingFolder) -> str:
    return str(runs.path / "runs" / "first" / "base")


def logits_of(model: GPT) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS_BT))


def test_an_exported_adapter_is_used_beside_its_base(runs: WorkingFolder, tmp_path: Path) -> None:
    folder = write_export("first", tmp_path / "adapter", what="adapter", screen=SilentScreen(), working=runs)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {one.name for one in folder.iterdir()}
    assert not (folder / "config.json").exists()
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    own, other = open_model("first", runs).model, open_model("second", runs, adapter=str(folder)).model
    assert torch.equal(logits_of(own), logits_of(other))
    assert not torch.allclose(logits_of(own), logits_of(open_model("second", runs).model), atol=1e-2)


@pytest.mark.parametrize("what", ["merged", "model"])
def test_a_merged_export_computes_what_base_and_adapter_do(runs: WorkingFolder, tmp_path: Path, what: str) -> None:
    folder = write_export("first", tmp_path / "merged", what=what, screen=SilentScreen(), working=runs)  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = theirs(TOKENS_BT).logits.flatten(0, 1)
    torch.testing.assert_close(found, logits_of(open_model("first", runs).model), rtol=0, atol=1e-4)
    plain = logits_of(open_model("first", runs, adapter="none").model)
    assert not torch.allclose(found, plain, atol=1e-2)


def test_several_adapters_stand_on_one_base(runs: WorkingFolder) -> None:
    none, first, second = open_each("first", ("none", "first", "second"), runs)
    assert first.model.embed is not None and second.model.embed is not None and none.model.embed is not None
    pointers = {one.model.get_parameter("norm.weight").data_ptr() for one in (none, first, second)}
    assert len(pointers) == 1
    for opened, name in ((first, "first"), (second, "second")):
        assert torch.equal(logits_of(opened.model), logits_of(open_model(name, runs).model))
    texts = {
        name: str(text) for name, text in sample_each("first", ("none", "first", "second"), "abc", working=runs, **HOW)
    }
    assert texts["second"] == str(sample("second", "abc", working=runs, **HOW))
    assert texts["none"] == str(sample("first", "abc", adapter="none", working=runs, **HOW))


@pytest.mark.slow
def test_eval_measures_before_and_after(runs: WorkingFolder) -> None:
    after = evaluate("first", [], screen=SilentScreen(), working=runs)
    before = evaluate("first", [], adapter="none", screen=SilentScreen(), working=runs)
    other = evaluate("first", [], adapter="second", screen=SilentScreen(), working=runs)
    assert (after["step"], before["step"], other["step"]) == (3, 0, 0)
    assert len({one["eval_loss"] for one in (before, after, other)}) == 3
    assert before["tokens"] == after["tokens"]


def test_what_has_no_adapter_says_so(runs: WorkingFolder, tmp_path: Path) -> None:
    own = run_folder("whole", WorkingFolder(tmp_path)).path
    own.mkdir(parents=True)
    _, plan = make_tiny(own, "run.name=whole")
    model = GPT(plan.job.shape)
    staging = staging_for(own / "checkpoints", 3)
    write_rank(staging, 0, {f"model/{name}": [whole_slice(one.detach())] for name, one in model.named_parameters()})
    publish(
        staging, checkpoint_for(own / "checkpoints", 3), step=3, cursor=9, model=plan.job.shape.to_dict(), world_size=1
    )
    here = WorkingFolder(tmp_path)
    for act, words in (
        (
            lambda: write_export("whole", tmp_path / "x", what="adapter", screen=SilentScreen(), working=here),
            "no adapter",
        ),
        (lambda: open_model("whole", here, adapter="none"), "trained all weights, so no adapter can be added to them"),
        (lambda: open_model(base_of(runs), runs, adapter=str(own)), "trained all weights and has no adapter"),
        (lambda: open_model(base_of(runs), runs, adapter="nobody"), "there is no run"),
    ):
        with pytest.raises(PlaitError, match=words):
            act()
    assert not (tmp_path / "x").exists()


def test_an_adapter_of_another_base_is_refused(runs: WorkingFolder, tmp_path: Path) -> None:
    own = run_folder("wide", WorkingFolder(tmp_path)).path
    own.mkdir(parents=True)
    make_adapted(own, "run.name=wide", "model.width=32")
    write_tokenizer(own / "base")
    folder = write_export("first", tmp_path / "adapter", what="adapter", screen=SilentScreen(), working=runs)
    for adapter in (str(folder), str(runs.path / "runs" / "first")):
        with pytest.raises(PlaitError, match="is of another base"):
            open_model(str(own / "base"), WorkingFolder(tmp_path), adapter=adapter)
    # Of the same shape, with other weights: only the fingerprint tells.
    other = tmp_path / "other"
    other.mkdir()
    for file in (runs.path / "runs" / "first" / "base").iterdir():
        data = bytearray(file.read_bytes())
        if file.name == "model.safetensors":
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        (other / file.name).write_bytes(data)
    for adapter in (str(folder), str(runs.path / "runs" / "first")):
        with pytest.raises(PlaitError, match="is of another base than"):
            open_model(str(other), runs, adapter=adapter)
    moved = run_folder("first", runs)
    saved = moved.saved_plan()
    write_plan(changed(saved, base=str(other)), moved.plan)
    try:
        with pytest.raises(PlaitError, match=r"is not the one that .* trained its adapter on; bring that one back"):
            open_model("first", runs)
    finally:
        write_plan(saved, moved.plan)
