"""Latent attention in the planner: what it prices is what the model computes, cut as the strands cut it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from plait.layout import Layout
from plait.machines.catalog import find_device
from plait.machines.measured import WorkKind
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.shape import ModelShape, parameter_count, weight_sizes
from plait.model.weights import attention_matrices, training_flops_per_token
from plait.partition.boxes import weight_boxes
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.stage_partition import layer_parameters
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.step_time.device_rates import device_rates
from plait.planner.step_time.device_time import DeviceTime
from tests.probing.probed import device, timed

LATENT = LatentAttentionShape(key_value_rank=24, query_rank=32, rope_width=12, value_width=20)
SHAPE = ModelShape(
    layers=3, width=96, heads=4, kv_heads=4, head_width=24, ffn=128, vocabulary=256, sequence=64, latent=LATENT
)
KINDS = pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, latent=replace(LATENT, query_rank=0, value_width=40))], ids=["usual", "wide values"]
)


def work_of(shape: ModelShape) -> Workload:
    return workload_of(shape, sequence=64, batch_sequences=16)


@KINDS
def test_products_and_weights_are_those_of_the_model(shape: ModelShape) -> None:
    work = work_of(shape)
    assert work.latent is not None
    assert [(columns, inner) for inner, columns, _ in work.latent.products] == attention_matrices(shape)
    assert work.flops_per_token("full") == training_flops_per_token(shape, 64, "full")
    norms = sum(prod(sizes) for name, sizes in weight_sizes(shape).items() if "norm" in name)
    assert work.parameters == parameter_count(shape) - norms


@KINDS
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_ranks_of_tensor_hold_what_is_priced(shape: ModelShape, tensor: int) -> None:
    layout, work = Layout(tensor=tensor), work_of(shape)
    boxes = weight_boxes(shape, layout, layout.coordinates(0))
    held = sum(box.numbers for name, box in boxes.items() if name.startswith("layers.0.") and "norm" not in name)
    few = Candidates.from_rows([{"tensor": tensor, "micro_sequences": 1}], layer_split="balanced")
    common, experts = layer_parameters(work, few)
    assert (common[0], experts[0]) == (held, 0)


def test_attention_is_priced_as_wide_as_its_kernel_takes_it() -> None:
    usual, wide = work_of(SHAPE), work_of(replace(SHAPE, latent=replace(LATENT, value_width=40)))
    assert (usual.kernel_width, wide.kernel_width) == (24 + 12, 40)
    padded = usual.latent
    assert padded is not None
    # Where values get zeros, the product behind attention keeps them once more, without the zeros.
    alone = np.array([1])
    assert padded.kept(alone)[0] - replace(padded, values=padded.kernel).kept(alone)[0] == padded.values


def test_measured_products_are_those_of_latents() -> None:
    rate, sizes = 1e11, (256, 256, 256)
    kinds: tuple[WorkKind, ...] = ("product", "product_input", "product_weight")
    probed = device(*(timed(kind, sizes, 2.0 * prod(sizes) / rate) for kind in kinds), timed("launch", (), 1e-12))
    work = replace(work_of(SHAPE), precision="float32")
    few = Candidates.from_rows([{"micro_sequences": 2}, {"micro_sequences": 2, "tensor": 2}], layer_split="balanced")
    rates = device_rates(find_device("H100"), "float32", PLAIT_PROFILE)
    found = DeviceTime(workload=work, profile=PLAIT_PROFILE, rates=rates, measured=probed).layer_time(few)
    matrices = sum(prod(matrix) for matrix in attention_matrices(SHAPE)) + 3 * 96 * 128
    # Each rank of `tensor` has its rows of what is whole, and its part of the columns of all else.
    np.testing.assert_allclose(found.products, [2 * 128 * matrices / rate, 2 * 128 * matrices / rate / 2], rtol=1e-6)
