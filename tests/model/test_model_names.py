"""The table of weights covers every model, and says what may be cut and what decays."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.model.adapter_shape import AdapterShape
from plait.model.names import DIMS, cut_dim, decays, dims_of, expert_of, layer_of, pattern_of
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.parts.mixture import MixtureShape
from plait.model.parts.objectives import ObjectivesShape
from plait.model.shape import ModelShape, linear_layers, parameter_count, weight_sizes
from plait.model.weights import describe_weights, kept_values, trained_parameter_count, training_flops_per_token

SHAPE = ModelShape(layers=12, width=48, heads=6, kv_heads=2, head_width=8, ffn=80, vocabulary=97, sequence=32)
EVERYTHING = replace(
    SHAPE,
    norm="layernorm",
    positions="learned",
    bias="all",
    qk_norm=True,
    adapter=AdapterShape(rank=2, alpha=4.0, targets=linear_layers(SHAPE)),
)


def test_the_table_has_the_weights_of_the_fullest_shape_and_no_others() -> None:
    of_experts = replace(
        SHAPE,
        qk_norm=True,
        qk_norm_width="all heads",
        mixture=MixtureShape(experts=12, experts_per_token=2, expert_ffn=16, shared_experts=1, balance=("bias",)),
    )
    after = replace(SHAPE, norm="layernorm", bias="all", norm_places="after")
    latent = LatentAttentionShape(key_value_rank=12, rope_width=4, value_width=8, query_rank=16)
    biased = MixtureShape(experts=12, experts_per_token=2, expert_ffn=16, bias=True)
    sunk = replace(SHAPE, attention_sinks=True, mixture=biased)
    latents = [replace(SHAPE, kv_heads=6, latent=one) for one in (latent, replace(latent, query_rank=0))]
    names = {*weight_sizes(EVERYTHING), *weight_sizes(of_experts), *kept_values(of_experts)}
    objectives = ObjectivesShape(heads=(4,), head_weights=(0.3,), ahead=1)
    beside = replace(SHAPE, norm="layernorm", bias="all", objectives=objectives)
    delta = DeltaAttentionShape(layers=(0,), key_heads=2, value_heads=4, key_width=8, value_width=4, taps=4)
    names |= set(weight_sizes(replace(SHAPE, delta=delta)))
    joined = replace(SHAPE, layer_input_width=4, layer_multipliers=True)
    names |= {name for one in (*latents, beside, after, sunk, joined) for name in weight_sizes(one)}
    names |= set(kept_values(joined))
    assert {pattern_of(name) for name in names} == set(DIMS)


def test_an_expert_is_found_by_its_number() -> None:
    assert expert_of("layers.3.feedforward.experts.11.gate.weight") == 11
    assert expert_of("layers.3.feedforward.shared.gate.weight") is None
    assert dims_of("layers.3.feedforward.experts.11.down.weight") == ("width", "expert_ffn")


def test_a_weight_is_found_by_its_layer() -> None:
    assert layer_of("layers.11.attention.k.weight") == 11
    assert layer_of("norm.weight") is None
    assert dims_of("layers.11.attention.k.weight") == ("kv_heads", "width")
    with pytest.raises(KeyError):
        dims_of("layers.0.attention.z.weight")


def test_columns_are_cut_before_the_nonlinearity_and_rows_after_it() -> None:
    cuts = {
        name: cut_dim(f"layers.0.{name}") for name in ("attention.q.weight", "attention.q.bias", "attention.o.weight")
    }
    assert cuts == {"attention.q.weight": 0, "attention.q.bias": 0, "attention.o.weight": 1}
    assert cut_dim("layers.0.feedforward.down.weight") == 1
    assert cut_dim("layers.0.feedforward.down.bias") is None
    assert cut_dim("embed.tokens.weight") == 0
    assert cut_dim("norm.weight") is None


def test_only_the_matrices_of_linear_layers_decay() -> None:
    decaying = {pattern_of(name) for name in DIMS if decays(name)}
    kinds = (".weight", ".lora_a", ".lora_b")
    linear = {name for name in DIMS if name.endswith(kinds) and "norm" not in name and not name.startswith("embed")}
    assert decaying == linear


def test_an_adapter_is_cut_where_its_layer_is() -> None:
    cuts = {
        name: cut_dim(f"layers.0.{name}")
        for name in ("attention.k.lora_a", "attention.k.lora_b", "feedforward.down.lora_a", "feedforward.down.lora_b")
    }
    assert list(cuts.values()) == [None, 0, 1, None]


def test_what_learns_is_told_by_the_shape() -> None:
    described, plain = describe_weights(EVERYTHING), describe_weights(replace(EVERYTHING, adapter=None))
    assert all(one.trained for one in plain.values())
    assert {name for name, one in described.items() if one.trained} == set(described) - set(plain)
    numbers = sum(one.numbers for one in described.values() if one.trained)
    assert (
        numbers
        == trained_parameter_count(EVERYTHING)
        == parameter_count(EVERYTHING) - parameter_count(replace(EVERYTHING, adapter=None))
    )


def test_frozen_products_cost_two_thirds() -> None:
    small = replace(SHAPE, adapter=AdapterShape(rank=1, alpha=1.0, targets=("attention.v",)))
    whole, frozen = (training_flops_per_token(one, 1, "full") for one in (SHAPE, small))
    square = 12 * SHAPE.layers * SHAPE.size_of("heads")
    adapter = 6 * trained_parameter_count(small)
    assert frozen - square - adapter == (whole - square) * 2 / 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rank": 0}, "rank is 0; choose a whole number of at least 1"),
        ({"rank": 17}, "rank 17 .* layer attention.k allows: its smaller side is 16; choose a rank of at most 16"),
        ({"alpha": float("nan")}, "alpha is nan; choose a number above 0"),
        ({"targets": ()}, "needs linear layers to adapt, each named once"),
        ({"targets": ("attention.q", "attention.q")}, "each named once"),
        ({"targets": ("head",)}, "target is 'head', which is not a linear layer; choose among attention.q, "),
        ({"variant": "other"}, "variant is 'other'; choose"),
        ({"quantization": "fp4"}, 'frozen weights are in \'fp4\'; choose "none", "nf4" or "int8"'),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(values: dict[str, Any], sentence: str) -> None:
    usual = {"rank": 2, "alpha": 4.0, "targets": linear_layers(SHAPE)}
    with pytest.raises(PlaitError, match=sentence):
        replace(SHAPE, adapter=AdapterShape(**{**usual, **values}))


def test_a_layer_that_a_model_does_not_have_is_refused() -> None:
    adapter = AdapterShape(rank=2, alpha=4.0, targets=("feedforward.gate",))
    with pytest.raises(PlaitError, match=r"no feedforward.gate to adapt; choose among attention.q, "):
        replace(SHAPE, activation="gelu", adapter=adapter)


def test_json_brings_an_adapter_back() -> None:
    assert ModelShape.from_dict(json.loads(json.dumps(EVERYTHING.to_dict()))) == EVERYTHING
    assert "adapter" not in SHAPE.to_dict()
    assert EVERYTHING.adapter is not None and "quantization" not in EVERYTHING.to_dict()["adapter"]
    quantized = replace(EVERYTHING, adapter=replace(EVERYTHING.adapter, quantization="nf4"))
    assert ModelShape.from_dict(json.loads(json.dumps(quantized.to_dict()))) == quantized


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    plain = AdapterShape(rank=16, alpha=32.0, targets=("attention.q",))
    assert plain.scale == 2.0 and replace(plain, variant="rslora").scale == 8.0
