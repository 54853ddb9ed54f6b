"""Latent attention on paper: its weights are those of the published models, and it is refused where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.model.shape import ModelShape, parameter_count, weight_sizes
from plait.model.sizes import explicit_shape
from plait.model.weights import active_parameter_count, describe_weights, training_flops_per_token
from plait.recipe.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def published(name: str) -> ModelShape:
    """The shape of one of the recipes on paper."""
    model = load_recipe(RECIPES / f"paper-{name}.toml").model.model_dump(exclude={"from_", "size"})
    return explicit_shape(sequence=4096, **{key: value for key, value in model.items() if value != "auto"})


# All parameters as Hugging Face counts them, without the routers' biases of 58 layers with 256 experts, and of 60 with
# 384. Active: 37B and 32B, as the papers have it.
@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("deepseek-v3", 671_026_419_200 - 58 * 256, 37.5e9),
        ("kimi-k2", 1_026_408_232_448 - 60 * 384, 32.9e9),
    ],
)
def test_published_models_have_their_parameters(name: str, parameters: int, active: float) -> None:
    shape = published(name)
    assert parameter_count(shape) == parameters
    assert active_parameter_count(shape) == pytest.approx(active, rel=0.002)


def test_attention_of_deepseek_v3_by_hand() -> None:
    shape = published("deepseek-v3")
    own = {name: sizes for name, sizes in weight_sizes(shape).items() if name.startswith("layers.0.attention.")}
    assert {name.removeprefix("layers.0.attention."): sizes for name, sizes in own.items()} == {
        "query_down.weight": (1536, 7168),
        "query_norm.weight": (1536,),
        "query_up.weight": (128 * 192, 1536),
        "key_value_down.weight": (512 + 64, 7168),
        "key_value_norm.weight": (512,),
        "key_value_up.weight": (128 * 256, 512),
        "o.weight": (7168, 128 * 128),
    }
    # 192 numbers of a query meet those of a key, and a score 128 of a value: 2 FLOPs each, three times in training.
    scores = 3 * 61 * 4096 * 128 * 2 * (192 + 128)
    products = training_flops_per_token(shape, 4096, "full") - scores
    embedding = 129280 * 7168
    assert products == pytest.approx(6 * (active_parameter_count(shape) - embedding), rel=1e-4)


def test_counting_weight_by_weight_comes_to_the_same() -> None:
    shape = explicit_shape(
        layers=5, width=64, heads=4, vocabulary=128, sequence=32, key_value_rank=8, experts=6, experts_per_token=2,
        dense_layers=1, expert_every=2,
    )  # fmt: skip
    described = describe_weights(shape).values()
    unmet = [one for one in described if ".experts." in one.name and int(one.name.split(".experts.")[1][0]) >= 2]
    assert parameter_count(shape) == sum(one.numbers for one in described)
    assert active_parameter_count(shape) == sum(one.numbers for one in described) - sum(one.numbers for one in unmet)
    assert ModelShape.from_dict(shape.to_dict()) == shape


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"query_rank": 8}, "model.query_rank is of latent attention; name model.key_value_rank, too"),
        ({"key_value_rank": 8, "rope_head_width": 3}, "rope_head_width is 3; choose an even one"),
        ({"key_value_rank": 8, "kv_heads": 2}, "each head has keys of its own, and kv_heads is 2 of 4"),
        ({"key_value_rank": 8, "qk_norm": True}, "latent attention has no norms of queries and keys"),
        ({"key_value_rank": 8, "bias": "qkv"}, "latent attention has no biases"),
        ({"key_value_rank": 8, "positions": "learned"}, "latent attention has no learned positions"),
    ],
)
def test_what_does_not_go_with_it_is_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        explicit_shape(layers=2, width=64, heads=4, vocabulary=128, sequence=32, **keys)
