"""Runs that go on from a model's folder compute on every layout what one plain process computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.errors import RunFailed
from plait.interop.base_model import read_base_model
from plait.interop.config_out import config_of_shape
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import unsharded
from plait.recipe.load import parse_config
from plait.trainer.first_weights import fill_first_weights
from plait.workers import ForkedWorkers
from tests.interop.random_models import random_model
from tests.matrix import few_fast
from tests.parity.cases import FAMILIES, NOT_EVERYWHERE, YARN

CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "weights"}})
MISTRAL = replace(FAMILIES["llama"], windows=(16,) * 8, rope=YARN)
GPT_OSS = replace(
    FAMILIES["sinks"], activation="clamped swiglu", rope=None,
    mixture=MixtureShape(experts=4, experts_per_token=2, expert_ffn=64, bias=True),
)  # fmt: skip
EVERY_DAY: dict[str, tuple[ModelShape, Layout]] = {
    "fused and transposed, tensor": (FAMILIES["gpt2"], Layout(tensor=2, replicate=2)),
    "parameters": (FAMILIES["qwen2"], Layout(shard=3, shard_what="parameters")),
    "windows, pipeline × context": (MISTRAL, Layout(pipeline=2, stage_layers=(3, 5), context=2)),
    "linear attention, tensor": (NOT_EVERYWHERE["linear attention"], Layout(tensor=2)),
    "shared keys, shard × tensor": (NOT_EVERYWHERE["shared keys"], Layout(shard=2, tensor=2)),
}
LONG: dict[str, tuple[ModelShape, Layout]] = {
    "replicate": (FAMILIES["qwen3"], Layout(replicate=3)),
    "multipliers of layers": (FAMILIES["unlike layers"], Layout(pipeline=2, stage_layers=(3, 5))),
    "optimizer": (FAMILIES["gpt2"], Layout(shard=3)),
    "parameters × tensor": (FAMILIES["gpt2"], Layout(shard=2, tensor=2, shard_what="parameters")),
    "more ranks than heads": (FAMILIES["qwen2"], Layout(tensor=4)),
    "context × tensor": (MISTRAL, Layout(context=2, tensor=2)),
    "experts by turns, expert × tensor": (GPT_OSS, Layout(replicate=2, expert=2, tensor=2)),
    "experts by turns, parameters": (GPT_OSS, Layout(shard=2, shard_what="parameters")),
    "tied ends": (FAMILIES["qwen2"], Layout(pipeline=2, stage_layers=(4, 4))),
    "interleaved": (FAMILIES["gpt2"], Layout(pipeline=2, stage_layers=(2, 3, 2, 1), schedule="interleaved")),
    "zero-bubble": (FAMILIES["qwen3"], Layout(pipeline=2, stage_layers=(4, 4), schedule="zero-bubble", shard=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_DAY)
def test_a_layout_begins_with_the_weights_of_the_folder(name: str, workers: ForkedWorkers, tmp_path: Path) -> None:
    check(*EVERY_DAY[name], workers, tmp_path / "model")


@pytest.mark.parametrize("name", few_fast(EVERY_DAY, "parameters"))
def test_rows_for_new_tokens_begin_as_the_mean_on_every_layout(
    name: str, workers: ForkedWorkers, tmp_path: Path
) -> None:
    """Seven more than the model has: no number of ranks divides them, and one rank may hold old and new rows."""
    check(*EVERY_DAY[name], workers, tmp_path / "model", new_tokens=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_any_layout_does(name: str, workers: ForkedWorkers, tmp_path: Path) -> None:
    check(*LONG[name], workers, tmp_path / "model")


def check(shape: ModelShape, layout: Layout, workers: ForkedWorkers, folder: Path, new_tokens: int = 0) -> None:
    plan = shrunk_plan(CONFIG, shape, layout)
    small = plan.job.shape
    if small.embedding_multiplier != 1.0:  # Gemma's, whatever the width
        small = replace(small, embedding_multiplier=small.width**0.5)
    model = random_model(AutoConfig.for_model(**config_of_shape(small, "float32")))
    model.save_pretrained(folder)
    base = read_base_model(folder)
    known, shape = base.shape.vocabulary, base.shape_for(plan.job.sequence)
    plan = replace(plan, job=replace(plan.job, shape=replace(shape, vocabulary=known + new_tokens), base=str(folder)))
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    ours = GPT(plan.job.shape).double()
    fill_first_weights(unsharded(ours), plan, 1)
    theirs = {name: weight.detach().double() for name, weight in model.named_parameters()}
    for name in {"norm.weight", "embed.tokens.weight", "head.weight"} & base.places.keys():
        found, wanted = ours.get_parameter(name).detach(), theirs[base.places[name].stored.name]
        assert torch.equal(found[: len(wanted)], wanted)
        if name != "norm.weight":
            assert len(found) == known + new_tokens
            assert all(torch.allclose(row, wanted.mean(0), rtol=1e-12, atol=1e-15) for row in found[known:])


def test_a_folder_that_changed_since_it_was_planned_with_is_refused(tmp_path: Path) -> None:
    plan = shrunk_plan(CONFIG, FAMILIES["qwen3"], Layout())
    random_model(AutoConfig.for_model(**config_of_shape(plan.job.shape, "float32"))).save_pretrained(tmp_path)
    other = replace(plan, job=replace(plan.job, shape=replace(plan.job.shape, rope_theta=77.0), base=str(tmp_path)))
    with pytest.raises(RunFailed, match="is not the one that this run was planned with"):
        fill_first_weights(unsharded(GPT(other.job.shape)), other, 1)
