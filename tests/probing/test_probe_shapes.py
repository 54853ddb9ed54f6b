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
from plait.probing.arithmetic import arithmetic_runs, attention_sizes
from plait.probing.request import layer_products, model_probe_request

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
    runs = arithmetic_runs(replace(request, products=request.products[:3]), torch.device("cpu"))
    assert {"layer", "layer_backward", "head", "embedding", "update"} <= {kind for kind, _ in runs}
    for kind, sizes in runs:
        if kind not in ("copy", "accumulate"):
            runs[kind, sizes]()


def test_latent_attention_is_probed_as_its_products_and_its_kernel() -> None:
    shape = SHAPES["latent attention"]
    request = model_probe_request(shape, sequence=16, sequences=2, device="cpu", precision="float32", threads=1)
    model = request.models[-1]
    # The stream to both latents, these to queries, and to keys and values; then out of attention, and the feed-forward.
    sizes = [(64, 12), (12, 96), (64, 16), (8, 128), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert layer_products(model) == tuple((32, *two) for two in sizes)
    assert attention_sizes(model) == (2, 16, 4, 4, 24)
    assert {(32, *two) for two in sizes} <= set(request.products)
