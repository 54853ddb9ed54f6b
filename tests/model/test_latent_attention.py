"""Latent attention: weights of the published models, the papers' formulas head by head, and what goes with it."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import PlaitError
from plait.model.attention import Cache, Documents, Rows
from plait.model.gpt import GPT, row_positions
from plait.model.init import initialize
from plait.model.latent_attention import LatentAttention
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.rope_scaling import RopeScaling
from plait.model.rotary import Rotary
from plait.model.shape import ModelShape, parameter_count, weight_sizes
from plait.model.sizes import explicit_shape
from plait.model.weights import active_parameter_count, describe_weights, training_flops_per_token
from plait.recipe.load import load_recipe
from plait.trainer.generate import generate

RECIPES = Path(__file__).parents[2] / "recipes"
SEQUENCE = 12
NARROW = LatentAttentionShape(key_value_rank=5, query_rank=7, rope_width=4, value_width=3)
SHAPE = ModelShape(
    layers=2, width=16, heads=3, kv_heads=3, head_width=6, ffn=24, vocabulary=31, sequence=SEQUENCE, latent=NARROW
)
KINDS = {
    "queries by a latent": SHAPE,
    "queries from the stream": replace(SHAPE, latent=replace(NARROW, query_rank=0)),
    "wide values": replace(SHAPE, latent=replace(NARROW, value_width=13)),
    "windows": replace(SHAPE, windows=(0, 4)),
    "stretched": replace(
        SHAPE,
        latent=replace(NARROW, mscale_all_dim=0.7),
        rope=RopeScaling(kind="yarn", factor=4.0, original_sequence=4, table_scale=1.1),
    ),
}


def published(name: str) -> ModelShape:
    """The shape of one of the recipes on paper."""
    model = load_recipe(RECIPES / f"paper-{name}.toml").model.model_dump(exclude={"from_", "size"})
    return explicit_shape(sequence=4096, **{key: value for key, value in model.items() if value != "auto"})


def small_model(shape: ModelShape) -> GPT:
    model = GPT(shape).double()
    initialize(model, 3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(torch.linspace(0.5, 1.5, weight.numel()))
            if name.endswith((".o.weight", ".down.weight")):
                weight.mul_(200)  # else a layer adds next to nothing
    return model


def attention_of(shape: ModelShape, layer: int = 1) -> LatentAttention:
    attention = small_model(shape).layers[str(layer)].attention
    assert isinstance(attention, LatentAttention)
    return attention


def rows_of(shape: ModelShape, rows: int, documents: Documents | None = None) -> Rows:
    positions = row_positions(torch.zeros(rows, SEQUENCE))
    if documents is not None:
        flat = torch.cat([torch.arange(length) for length in documents.lengths])
        positions = flat.view(rows, SEQUENCE)
    latent = shape.latent
    assert latent is not None
    rotary = Rotary(sequence=SEQUENCE, head_width=latent.rope_width, theta=shape.rope_theta, scaling=shape.rope)
    rotation = rotary(positions, torch.float64)
    return Rows(rows=rows, tokens=SEQUENCE, rotation=rotation, documents=documents, cache=None)


def by_hand(attention: LatentAttention, shape: ModelShape, x_td: Tensor, seen: int = 0) -> Tensor:
    """One row by the formulas of DeepSeek-V2 (equations 9 to 19), query by query and head by head; a pair of numbers
    side by side is turned as one complex number."""
    latent, weights = shape.latent, dict(attention.named_parameters())
    assert latent is not None
    rank, width, rope = latent.key_value_rank, shape.head_width, latent.rope_width

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        plain = [shape.rope_theta ** (-pair / rope) for pair in range(0, rope, 2)]
        scaling = shape.rope
        angles = torch.tensor(
            scaling.stretch(plain, shape.rope_theta, shape.sequence) if scaling else plain, dtype=torch.float64
        )
        turn = torch.polar(torch.full_like(angles, scaling.table_scale if scaling else 1.0), angles * position)
        return torch.view_as_real(torch.complex(x[0::2], x[1::2]) * turn).flatten()

    down = x_td @ weights["key_value_down.weight"].T
    c_tr = normed(down[:, :rank], "key_value_norm")
    narrow = normed(x_td @ weights["query_down.weight"].T, "query_norm") if latent.query_rank else x_td
    queries = narrow @ weights["query_up.weight" if latent.query_rank else "query.weight"].T
    factor = (0.1 * latent.mscale_all_dim * log(shape.rope.factor) + 1) ** 2 if shape.rope else 1.0
    out = []
    for head in range(shape.heads):
        up = weights["key_value_up.weight"].view(shape.heads, -1, rank)[head]
        keys, values = c_tr @ up[:width].T, c_tr @ up[width:].T
        own = queries.view(len(x_td), shape.heads, -1)[:, head]
        for t in range(len(x_td)):
            first = max(0, t + 1 - seen) if seen else 0
            scores = torch.stack(
                [
                    own[t, :width] @ keys[s] + turned(own[t, width:], t) @ turned(down[s, rank:], s)
                    for s in range(first, t + 1)
                ]
            )
            shares = (scores * factor / (width + rope) ** 0.5).softmax(0)
            out.append(shares @ values[first : t + 1])
    mixed = torch.stack(out).view(shape.heads, len(x_td), -1).transpose(0, 1).flatten(1)
    return mixed @ weights["o.weight"].T


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


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_paper_writes_down(kind: str) -> None:
    shape, x_nd = KINDS[kind], torch.randn(2 * SEQUENCE, 16, dtype=torch.float64, generator=torch.Generator())
    attention = attention_of(shape)
    wanted = [by_hand(attention, shape, row, shape.window_of(1)) for row in x_nd.split(SEQUENCE)]
    found = attention(x_nd, rows_of(shape, 2))
    assert found.abs().max() > 1
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-11)
    parameters = tuple(attention.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(torch.cat(wanted).square().sum(), parameters),
        strict=True,
    ):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    x_nd = torch.randn(SEQUENCE, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    attention = attention_of(SHAPE)
    found = attention(x_nd, rows_of(SHAPE, 1, Documents(lengths=(5, 7))))
    wanted = [by_hand(attention, SHAPE, part) for part in x_nd.split([5, 7])]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [1, 5])
def test_a_cache_of_latents_gives_what_the_whole_text_gives(kind: str, prompt: int) -> None:
    shape = KINDS[kind]
    model = small_model(shape)
    ids = torch.randint(0, shape.vocabulary, (2, SEQUENCE), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cache = Cache(shape, rows=2, dtype=torch.float64, device=torch.device("cpu"))
        parts = [model(part, cache=cache) for part in ids.split([prompt, *[1] * (SEQUENCE - prompt)], dim=1)]
        found = torch.cat([part.view(2, -1, shape.width) for part in parts], dim=1)
        torch.testing.assert_close(found, model(ids).view(2, SEQUENCE, -1), rtol=0, atol=1e-12)


def test_a_cache_holds_latents_alone() -> None:
    cache = Cache(SHAPE, rows=1, dtype=torch.float32, device=torch.device("cpu"))
    (kept,) = cache.extend(0, torch.ones(1, 3, 1, 9))
    assert kept.shape == (1, 3, 1, 5 + 4)


def test_text_goes_on_as_without_a_cache() -> None:
    model = small_model(SHAPE).float()
    text = [1, 2, 3]
    for token in generate(model, list(text), tokens=6, temperature=0):
        with torch.no_grad():
            hidden = model(torch.tensor([text]))
        assert int(model.logits(hidden[-1]).argmax()) == token
        text.append(token)


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
