"""Adapters beside frozen weights: every mix of strands trains what one plain process trains, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.reference import collect_tensors
from plait.commands.verifying.small_model import shrunk_plan
from plait.data.preparation.synthetic import write_synthetic
from plait.layout import Layout
from plait.model.shape import ModelShape, weight_sizes
from plait.model.weights import stored_sizes, trained_weights
from plait.parallel.communicator import ONE_PROCESS
from plait.planner.plan import Plan
from plait.planner.search.validity import check_layout
from plait.recipe.load import parse_config
from plait.trainer.assemble import assemble
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import ADAPTED_EVERY_DAY, ADAPTED_LONG, ADAPTED_UNEQUAL, adapted

CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "adapters"}})


@pytest.mark.parametrize("name", few_fast(ADAPTED_EVERY_DAY, "replicate", "zero-bubble"))
def test_an_adapter_learns_what_it_learns_in_one_process(name: str, workers: ForkedWorkers) -> None:
    check(*ADAPTED_EVERY_DAY[name], workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED_LONG)
def test_an_adapter_does_so_in_any_mix(name: str, workers: ForkedWorkers) -> None:
    check(*ADAPTED_LONG[name], workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED_UNEQUAL)
def test_an_adapter_does_so_with_unequal_shares(name: str, workers: ForkedWorkers) -> None:
    shape, layout, shares = ADAPTED_UNEQUAL[name]
    check(shape, layout, workers, shares)


def check(shape: ModelShape, layout: Layout, workers: ForkedWorkers, shares: tuple[int, ...] = ()) -> None:
    plan = shrunk_plan(CONFIG, shape, layout, shares)
    check_layout(
        plan.placement.layout, plan.job.shape, sequence=plan.job.sequence, batch_sequences=plan.job.batch_sequences
    )
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    compared = {(one.kind, one.name) for one in verdict.findings}
    learning = trained_weights(plan.job.shape)
    assert 0 < len(learning) < len(weight_sizes(plan.job.shape))
    gradients, weights = product(("gradient",), learning), product(("sgd", "adamw"), stored_sizes(plan.job.shape))
    assert compared == {*gradients, *weights, *(("sums", name) for name in ("norm", "loss", "evaluation"))}


def test_there_are_enough_mixes_of_several_strands() -> None:
    layouts = [layout for _, layout in (*ADAPTED_EVERY_DAY.values(), *ADAPTED_LONG.values())]
    strands = Counter(sum(degree > 1 for degree in layout.degrees.values()) for layout in layouts)
    assert len(set(layouts)) >= 14 and strands[3] >= 4


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan_in(folder: Path, shape: ModelShape) -> Plan:
    plan = shrunk_plan(CONFIG, shape, Layout())
    corpus = folder / "corpus"
    corpus.mkdir()
    write_synthetic(corpus, vocabulary=plan.job.shape.vocabulary, sequence=plan.job.sequence, seed=3)
    return replace(plan, job=replace(plan.job, corpus=str(corpus), batch_sequences=32))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["full", "adapter", "dropout"])
def test_micro_batches_of_any_size_give_the_same_gradients(kind: str, tmp_path: Path) -> None:
    shape = adapted("qwen3", dropout=0.3 if kind == "dropout" else 0.0)
    shape = replace(shape, adapter=None) if kind == "full" else shape
    plan = plan_in(tmp_path, shape)
    assemblies = [
        assemble(
            CONFIG, replace(plan, placement=replace(plan.placement, micro_sequences=size)), stages=(), sums=ONE_PROCESS
        )
        for size in (32, 8, 1)
    ]
    one, *others = [collect_tensors(assembly, "gradients", tmp_path / "routing") for assembly in assemblies]
    for other in others:
        for name, values in one.items():
            assert float((values - other[name]).abs().max()) <= 1e-10 * float(values.abs().max()), name


@pytest.mark.usefixtures("one_thread")
def test_frozen_weights_have_no_gradient_no_moments_and_no_buckets(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, adapted("gpt2"))
    assembly = assemble(CONFIG, plan, stages=(), sums=ONE_PROCESS)
    collect_tensors(assembly, "all", tmp_path / "routing")
    model = assembly.model.chunks[0]
    learning = set(trained_weights(plan.job.shape))
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == learning
    assert len(assembly.optimizer.state) == len(learning)
    numbers = sum(weight.numel() for name, weight in model.named_parameters() if name in learning)
    moments = [one for state in assembly.optimizer.state.values() for one in state.values() if one.ndim]
    assert sum(one.numel() for one in moments) == 2 * numbers
    assert all(torch.isfinite(one).all() for one in moments)
