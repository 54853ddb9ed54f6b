"""The shape's counts are torch's counts, and wrong shapes are refused with a fix."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plait.errors import PlaitError
from plait.model.gpt import GPT
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.parts.unlike_layers import FullAttentionShape
from plait.model.rope_scaling import RopeScaling
from plait.model.shape import (
    ModelShape,
    parameter_count,
    weight_sizes,
)
from plait.model.weights import training_flops_per_token

LLAMA = ModelShape(layers=3, width=48, heads=6, kv_heads=2, head_width=16, ffn=80, vocabulary=97, sequence=32)
GPT2 = replace(
    LLAMA,
    kv_heads=6,
    head_width=8,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    bias="all",
    tied=True,
)
QWEN2 = replace(LLAMA, bias="qkv", tied=True)
QWEN3 = replace(LLAMA, qk_norm=True, activation="relu2")
STRETCHED = RopeScaling(kind="yarn", factor=4.0, original_sequence=16)
WINDOWS = replace(LLAMA, windows=(0, 8, 8), bias="attention", rope=STRETCHED)
SCALED = replace(GPT2, learned_positions=48, bias="feedforward", attention_scale="head and layer")
# Values are as wide as queries: no zeros are added, which torch would count.
LATENT = replace(
    LLAMA, kv_heads=6, latent=LatentAttentionShape(key_value_rank=5, query_rank=7, rope_width=4, value_width=20)
)
FROM_THE_STREAM = replace(LATENT, latent=LatentAttentionShape(key_value_rank=5, rope_width=4, value_width=20))
JOINED = replace(
    LLAMA, layers=4, tied=True, activation="geglu", norm_places="both", qk_norm=True, value_norm=True,
    windows=(8, 0, 8, 0), layer_multipliers=True, layer_input_width=6, shared_kv_layers=2, shared_kv_ffn=160,
    full_attention=FullAttentionShape(head_width=8, kv_heads=1, values="keys"),
    rope=RopeScaling(kind="proportional", factor=1.0, rotated_share=0.5),
)  # fmt: skip
DELTA = replace(
    LLAMA, qk_norm=True, attention_gate=True, rotary_width=8,
    delta=DeltaAttentionShape(layers=(0, 2), key_heads=2, value_heads=4, key_width=8, value_width=16, taps=4),
)  # fmt: skip
SHAPES = pytest.mark.parametrize(
    "shape",
    [LLAMA, GPT2, QWEN2, QWEN3, WINDOWS, SCALED, LATENT, FROM_THE_STREAM, JOINED, DELTA],
    ids=[
        "llama",
        "gpt2",
        "qwen2",
        "qwen3",
        "windows",
        "scaled",
        "latent",
        "latent, queries from the stream",
        "shared keys",
        "linear attention",
    ],
)


@SHAPES
def test_weights_and_counts_are_those_of_the_model(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = GPT(shape)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == weight_sizes(shape)
    assert parameter_count(shape) == sum(p.numel() for p in model.parameters())


@SHAPES
def test_flops_are_three_times_the_forward_that_torch_counts(shape: ModelShape) -> None:
    rows, sequence = 2, 24
    with torch.device("meta"):
        model = GPT(shape)
        tokens_bt = torch.zeros(rows, sequence, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens_bt))
    per_token = training_flops_per_token(shape, sequence, "full")
    assert per_token * rows * sequence == 3 * counter.get_total_flops()


def test_causal_attention_counts_half_of_the_square() -> None:
    full, causal = (training_flops_per_token(LLAMA, 32, kind) for kind in ("full", "causal"))
    assert full - causal == 3 * 2 * LLAMA.layers * 6 * 16 * 32


@SHAPES
def test_a_shape_survives_its_dict(shape: ModelShape) -> None:
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


def test_shapes_of_earlier_versions_are_written_as_before() -> None:
    """A checkpoint's manifest is compared key by key with the shape of the run."""
    assert not {"rope", "windows", "learned_positions", "attention_scale"} & LLAMA.to_dict().keys()
    assert {"rope", "windows"} <= WINDOWS.to_dict().keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 4}, "kv_heads = 4 does not divide 6 heads; choose one of 1, 2, 3, 6"),
        ({"head_width": 15}, "choose an even head_width"),
        ({"layers": 0}, "layers is 0; choose a whole number"),
        ({"width": 2.5}, "width is 2.5; choose a whole number"),
        ({"norm": "batchnorm"}, 'choose "layernorm" or "rmsnorm"'),
        ({"bias": True}, 'choose "none" or "qkv" or "attention" or "feedforward" or "all"'),
        ({"windows": [4]}, "give one number of at least 0 for each of 3 layers"),
        ({"positions": "learned", "rope": {"kind": "linear", "factor": 2.0}}, 'choose positions = "rope"'),
        ({"rope": {"kind": "ntk", "factor": 2.0}}, "choose linear, llama3, yarn, longrope, dynamic"),
        ({"rope": {"kind": "yarn", "factor": 2.0}}, "original_sequence of yarn rotary positions is 0"),
        ({"rope": {"kind": "linear", "factor": -1.0}}, "factor of linear rotary positions is -1.0"),
        ({"learned_positions": 16}, "choose at most 16"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; choose a number above 0"),
        ({"shared_kv_layers": 3}, "leaves none of 3 layers with keys of its own"),
        ({"shared_kv_layers": 1, "windows": [4, 4, 0]}, "among the first 2 there is none without a window"),
        ({"shared_kv_ffn": 8}, "set shared_kv_layers"),
        ({"full_attention": {"head_width": 8, "kv_heads": 4}}, "kv_heads = 4 does not divide 6 heads"),
        ({"delta": {**DELTA.to_dict()["delta"], "layers": [3]}}, "the model's delta.layers are"),
        ({"delta": {**DELTA.to_dict()["delta"], "value_heads": 3}}, "2 key heads and 3 value heads; choose a multiple"),
        ({"delta": DELTA.to_dict()["delta"], "windows": [4, 0, 4]}, "delta attention goes with no windows"),
        ({"layer_input_width": -1}, "layer_input_width is -1; choose a whole number of at least 0"),
        ({"rope": {"kind": "linear", "factor": 2.0, "rotated_share": 0.5}}, "rotated_share of linear rotary positions"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlaitError, match=words):
        ModelShape.from_dict(LLAMA.to_dict() | changes)


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(PlaitError, match="no field 'wdith'"):
        ModelShape.from_dict(LLAMA.to_dict() | {"wdith": 3})
    values = LLAMA.to_dict()
    del values["heads"]
    with pytest.raises(PlaitError, match="lacks 'heads'"):
        ModelShape.from_dict(values)
