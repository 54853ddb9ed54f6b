"""The ordered list of stages: every one on an axis of the mesh with a reason, and none needed for one process."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch._dynamo.config as dynamo
from torch.distributed.device_mesh import DeviceMesh

from plait.layout import AXES
from plait.model.gpt import GPT
from plait.model.shape import ModelShape
from plait.parallel.apply import STAGES, parallelize
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.compile import COMPILED_SHAPES_LIMIT, compile_layers
from plait.parallel.sharded_model import unsharded
from tests.trainer.tiny import make_tiny

SHAPE = ModelShape(layers=2, width=16, heads=2, kv_heads=2, head_width=8, ffn=32, vocabulary=50, sequence=8)


def test_stages_name_their_axis_and_their_place() -> None:
    assert [stage.axis for stage in STAGES if stage.axis] == ["pipeline", "tensor", "context", "shard", "replicate"]
    assert {stage.axis for stage in STAGES} >= set(AXES)
    assert all(stage.axis in ("", *AXES) and stage.reason for stage in STAGES)


def test_without_stages_a_model_is_one_process_own(tmp_path) -> None:
    model = GPT(SHAPE)
    _, plan = make_tiny(tmp_path)
    sharded = parallelize(model, None, plan.execution, ())
    assert sharded.chunks == (model,) and sharded.gradients.buckets == []
    for _ in range(2):
        sharded.gradients.open()
        assert all(parameter.grad is None for parameter in model.parameters())
        sharded.gradients.arm(0)
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        sharded.gradients.close()


def test_alone_every_sum_is_global_already() -> None:
    values = torch.tensor([1.0, 2.0])
    assert (
        ONE_PROCESS(values) is values
        and ONE_PROCESS.largest(values) is values
        and ONE_PROCESS.gather(values) == [values]
    )


def test_compiled_layers_may_know_as_many_sizes_as_shares_may_bring(tmp_path) -> None:
    """Behind torch's own limit they would run uncompiled without a word."""
    _, plan = make_tiny(tmp_path)
    nowhere = cast(DeviceMesh, None)  # each layer for itself
    with dynamo.patch(recompile_limit=8):
        compile_layers(
            unsharded(GPT(SHAPE)), nowhere, replace(plan, arithmetic=replace(plan.arithmetic, compile="off"))
        )
        assert dynamo.recompile_limit == 8
        compile_layers(
            unsharded(GPT(SHAPE)), nowhere, replace(plan, arithmetic=replace(plan.arithmetic, compile="blocks"))
        )
        assert dynamo.recompile_limit == COMPILED_SHAPES_LIMIT >= 64
