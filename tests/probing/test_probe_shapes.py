"""Whatever a model is made of, a probe of it times every piece of its layers, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.model.adapter_shape import AdapterShape
from plait.model.parts.mixture import MixtureShape
from plait.model.parts.objectives import ObjectivesShape
from plait.model.shape import ModelShape, linear_layers
from plait.model.sizes import explicit_shape
from plait.probing.arithmetic import arithmetic_runs, training_operations_for
from plait.probing.request import model_probe_request

PLAIN = explicit_shape(layers=2, width=64, heads=4, ffn=96, vocabulary=128, sequence=16)
SHAPES = {
    "plain": PLAIN,
    "adapters": replace(PLAIN, adapter=AdapterShape(rank=4, alpha=8.0, targets=linear_layers(PLAIN))),
    "a mixture": replace(PLAIN, mixture=MixtureShape(experts=4, experts_per_token=2, expert_ffn=32)),
    "heads": replace(PLAIN, objectives=ObjectivesShape(heads=(1,), head_weights=(0.1,), ahead=1)),
    "windows": replace(PLAIN, windows=(4, 0)),
    "latent attention": explicit_shape(
        layers=2, width=64, heads=4, ffn=96, vocabulary=128, sequence=16, key_value_rank=8, query_rank=12
    ),
}


@pytest.mark.parametrize("named", SHAPES)
def test_every_piece_runs(named: str) -> None:
    shape: ModelShape = SHAPES[named]
    request = model_probe_request(shape, sequence=16, sequences=2, device="cpu", precision="float32", threads=1)
    runs = arithmetic_runs(
        replace(request, products=request.products[:3]), torch.device("cpu"), training_operations_for(request)
    )
    assert {"layer", "layer_backward", "head", "embedding", "update"} <= {kind for kind, _ in runs}
    for kind, sizes in runs:
        if kind not in ("copy", "accumulate"):
            runs[kind, sizes]()
