"""A probe of a model with latent attention times its layer, the layer's products, and attention as its kernel is."""

from __future__ import annotations

import pytest
import torch

from plait.model.sizes import explicit_shape
from plait.probing.arithmetic import arithmetic_runs, attention_sizes, training_operations_for
from plait.probing.request import layer_products, model_probe_request

SHAPE = explicit_shape(
    layers=2, width=64, heads=4, ffn=96, vocabulary=128, sequence=16, key_value_rank=8, query_rank=12
)
REQUEST = model_probe_request(SHAPE, sequence=16, sequences=2, device="cpu", precision="float32", threads=1)


def test_products_and_attention_are_those_of_latents() -> None:
    model = REQUEST.models[-1]
    # The stream to both latents, these to queries, and to keys and values; then out of attention, and the feed-forward.
    sizes = [(64, 12), (12, 96), (64, 16), (8, 128), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert layer_products(model) == tuple((32, *two) for two in sizes)
    assert attention_sizes(model) == (2, 16, 4, 4, 24)
    assert {(32, *two) for two in sizes} <= set(REQUEST.products)


@pytest.mark.slow
def test_every_piece_of_a_layer_runs() -> None:
    model = REQUEST.models[-1]
    runs = arithmetic_runs(REQUEST, torch.device("cpu"), training_operations_for(REQUEST))
    for kind, key in (("layer", (32, 64, 96)), ("attention", attention_sizes(model))):
        runs[kind, key]()
        runs[f"{kind}_backward", key]()
    assert {("product", size) for size in layer_products(model)} <= runs.keys()
