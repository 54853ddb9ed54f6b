"""Every key of the recipe changes something: the plan, what is asked of the data, the folder, or the first weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from pydantic import BaseModel

from plait.commands.monitoring.restarts import decision_after
from plait.commands.preparing.base import base_folder
from plait.commands.preparing.corpus import data_request
from plait.data.preparation.tokens import train_bpe
from plait.data.samples.sizes import CorpusSizes
from plait.data.shards import Corpus, open_corpus
from plait.machines.cluster import read_cluster
from plait.machines.pool import pool_of_short_form
from plait.machines.requested_workers import chosen_gpus
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.model.sizes import named_shape
from plait.planner.derive.model_size import BaseFacts, CorpusFacts
from plait.planner.derive.resources import on_paper
from plait.planner.derive.training_job import compile_of
from plait.planner.plan import Plan
from plait.planner.pools.answer import aims_of
from plait.planner.resolve.named import named_workers
from plait.planner.resolve.request import request_of
from plait.recipe.schema import RunConfig, SourceSection
from plait.run_folder import run_folder
from plait.tracking.trackers import tracking_tools_of
from plait.trainer.assemble import preference_loss_of
from plait.trainer.rank_sinks import sinks_of_rank
from plait.trainer.samples import sample_beginning
from plait.trainer.worker import sample_every_steps
from plait.working_folder import CURRENT_FOLDER
from tests.commands.other_values import OTHER_VALUES, base_recipe, changed_recipe
from tests.planner.machines import LAPTOP, ONE_H100, corpus, planned
from tests.trainer.tiny import make_tiny

FACTS = corpus(1_500_000, 1)
BASE = named_shape("1M", vocabulary=4096, sequence=1024)
EXAMPLES = CorpusSizes(examples=(((100, 10, 30), (40, 1, 50)),))
SMALL = ModelShape(layers=1, width=8, heads=1, kv_heads=1, head_width=8, ffn=8, vocabulary=8, sequence=8)


def schema_keys() -> Iterator[str]:
    for section, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield from (f"{section}.{own.alias or key}" for key, own in field.annotation.model_fields.items())


def facts_of(config: RunConfig) -> CorpusFacts:
    return replace(FACTS, base=BaseFacts(folder="base", shape=BASE)) if config.model.from_ else FACTS


def plan_of(config: RunConfig) -> Plan:
    """What will be done, without what only tells of where it came from."""
    return replace(planned(config, facts_of(config), LAPTOP), recipe_hash="", reasons=())


def gpu_kernels(config: RunConfig) -> bool:
    """Whether a GPU is held to deterministic kernels, whatever else the recipe says of layouts and workers."""
    return planned(RunConfig(data=config.data, train=config.train), FACTS, ONE_H100).arithmetic.deterministic


def devices_used(config: RunConfig) -> list[str]:
    """Whether a layout of two unlike machines must use both."""
    request = request_of(config, facts_of(config), on_paper(read_cluster("1x4090+1x3080@1G")))
    return [one.devices for one in request.options]


def first_weights(config: RunConfig) -> list[float]:
    model = GPT(SMALL)
    initialize(model, config.run.seed)
    return torch.cat([weight.detach().reshape(-1) for weight in model.parameters()]).tolist()


@cache
def tiny_corpus() -> Corpus:
    with TemporaryDirectory() as folder:
        _, plan = make_tiny(Path(folder))
        return open_corpus(Path(plan.job.corpus))


def beginning_of_samples(config: RunConfig) -> list[int]:
    corpus = tiny_corpus()
    return sample_beginning(corpus, train_bpe(["Once upon a time"], 270), config.report.prompt, 8, "refuse")


def files_of_rank_0(config: RunConfig) -> set[str]:
    with TemporaryDirectory() as folder:
        sinks_of_rank(0, lambda *_, **__: None, Path(folder), 0, config.report.to, {}).close()
        return {path.name for path in Path(folder).iterdir()}


EFFECTS: dict[str, Callable[[RunConfig], object]] = {
    "the plan": plan_of,
    "the data": data_request,
    "the windows": lambda config: EXAMPLES.epoch_windows(64, config.data.overlong),
    "the folder": lambda config: run_folder(config.run.name),
    "the first weights": first_weights,
    "compiled layers": lambda config: compile_of(config, [ONE_H100]),
    "kernels of GPUs": gpu_kernels,
    "the loss of pairs": preference_loss_of,
    "the model's folder": lambda config: base_folder(config, CURRENT_FOLDER),
    "files and tools": lambda config: (files_of_rank_0(config), tracking_tools_of(config.report.to)),
    "when there are samples": lambda config: sample_every_steps(config.report.samples, 100),
    "the beginning of samples": beginning_of_samples,
    "devices left out": devices_used,
    "the GPUs": lambda config: chosen_gpus(named_workers(config), present=8),
    "what a pool is for": lambda config: aims_of(config, pool_of_short_form("8xH100")),
    "what follows a failure": lambda config: [decision_after(config.recover, n, "may pass") for n in range(1, 7)],
}


@cache
def effect_of(what: str, config: RunConfig) -> object:
    return EFFECTS[what](config)


ELSEWHERE = {
    "layout.devices": "devices left out",
    "report.to": "files and tools",
    "report.samples": "when there are samples",
    "report.prompt": "the beginning of samples",
    "model.from": "the model's folder",
    **dict.fromkeys(("finetune.beta", "finetune.label_smoothing", "finetune.margin"), "the loss of pairs"),
    "finetune.reference": "the loss of pairs",
    "run.devices": "the GPUs",
    "run.workers": "the GPUs",
    "train.compile": "compiled layers",
    "train.deterministic": "kernels of GPUs",
    "run.name": "the folder",
    "run.seed": "the first weights",
    "data.overlong": "the windows",
    "data.": "the data",
    "recover.state_every": "the plan",
    "recover.": "what follows a failure",
    "plan.": "what a pool is for",
}
NOT_JUST_THERE = {"data.mask_documents": "the plan"}


def test_the_table_of_other_values_is_complete() -> None:
    assert OTHER_VALUES.keys() == set(schema_keys())
    assert SourceSection.model_fields.keys() == {"path", "weight", "field"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all recipes, so that equal ones are planned once."""
    return tmp_path_factory.mktemp("recipes")


@pytest.mark.parametrize("key", sorted(OTHER_VALUES))
def test_every_key_changes_what_it_is_about(folder: Path, key: str) -> None:
    base, other = base_recipe(folder, key), changed_recipe(folder, key)
    assert other != base, f"the table's value for {key} is that of the base recipe"
    expected = next((what for start, what in ELSEWHERE.items() if key.startswith(start)), "the plan")
    what = NOT_JUST_THERE.get(key, expected)
    assert effect_of(what, base) != effect_of(what, other), f"{key} changes nothing of {what}"


@pytest.mark.parametrize("source", ['{path = "text.txt", weight = 3.0}', '{path = "text.txt", field = "body"}'])
def test_every_key_of_a_source_changes_the_data(tmp_path: Path, source: str) -> None:
    from plait.recipe.load import load_recipe

    base_recipe(tmp_path)
    plain, other = (
        data_request(load_recipe(tmp_path / "base.toml", [f"data.files=[{entry}]"]))
        for entry in ('{path = "text.txt"}', source)
    )
    assert plain != other
