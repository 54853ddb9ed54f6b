"""QLoRA: adapters beside frozen matrices in blocks of few bits train on every layout what one plain process trains
beside the dequantized matrices, and each rank's blocks stand for the same numbers as there."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape, AdapterTarget, Quantization
from plait.model.shape import ModelShape, linear_layers, weight_sizes
from plait.model.weights import trained_weights
from plait.planner.plan import Plan
from plait.recipe.load import parse_config
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import FAMILIES

CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "quantized"}})
_TWO = (3, 5)


def quantized(family: str, quantization: Quantization = "nf4", targets: tuple[AdapterTarget, ...] = ()) -> ModelShape:
    shape = FAMILIES[family]
    adapter = AdapterShape(rank=3, alpha=5.0, targets=targets or linear_layers(shape), quantization=quantization)
    return replace(shape, adapter=adapter)


CASES: dict[str, tuple[ModelShape, Layout, tuple[int, ...]]] = {
    "tensor × shard parameters": (quantized("gpt2"), Layout(tensor=2, shard=2, shard_what="parameters"), ()),
    "replicate, unequal": (quantized("qwen2"), Layout(replicate=2), (5, 2)),
    "shard parameters, unequal": (quantized("llama"), Layout(shard=3, shard_what="parameters"), (1, 1, 30)),
    "pipeline": (quantized("qwen3", "int8"), Layout(pipeline=2, stage_layers=_TWO), ()),
    "zero-bubble": (quantized("qwen2"), Layout(pipeline=2, stage_layers=_TWO, schedule="zero-bubble"), ()),
    "tensor beyond kv heads": (quantized("multi-query"), Layout(tensor=4, recompute="selective"), ()),
    "int8 × tensor": (quantized("odd groups", "int8"), Layout(context=2, tensor=2), ()),
    "a target alone": (quantized("llama", targets=("attention.v",)), Layout(shard=2, tensor=2, recompute="full"), ()),
    "pipeline × parameters": (
        quantized("llama"),
        Layout(pipeline=2, stage_layers=_TWO, shard=2, shard_what="parameters", recompute="full"),
        (),
    ),
    "unequal × tensor": (quantized("qwen3"), Layout(replicate=2, tensor=2), (5, 2)),
}


@pytest.mark.parametrize("name", few_fast(CASES, "tensor × shard parameters"))
def test_blocks_train_what_the_dequantized_matrices_train(name: str, workers: ForkedWorkers) -> None:
    check(shrunk_plan(CONFIG, *CASES[name]), workers)


@pytest.mark.slow
@pytest.mark.parametrize("ffn", [256, 192], ids=["between blocks", "through blocks"])
@pytest.mark.parametrize("name", ["tensor × shard parameters", "unequal × tensor", "int8 × tensor"])
def test_whole_rows_of_blocks_are_cut_alike(name: str, ffn: int, workers: ForkedWorkers) -> None:
    """Of matrices that are as wide as several blocks a rank keeps columns of them."""
    plan = shrunk_plan(CONFIG, *CASES[name])
    shape = plan.job.shape
    shape = replace(shape, width=128, head_width=128 // shape.heads // 2 * 2, ffn=ffn)
    check(replace(plan, job=replace(plan.job, shape=shape)), workers)


def check(plan: Plan, workers: ForkedWorkers) -> None:
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    shape = plan.job.shape
    compared = {(one.kind, one.name) for one in verdict.findings}
    gradients, weights = product(("gradient",), trained_weights(shape)), product(("sgd", "adamw"), weight_sizes(shape))
    assert compared == {*gradients, *weights, *(("sums", name) for name in ("norm", "loss", "evaluation"))}
