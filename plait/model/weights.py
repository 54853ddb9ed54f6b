"""Properties of each weight of a model: its dims by meaning, whether it is trained, whether it decays, how it may be
cut.

Parallelism, the optimizer, checkpoints and proofs read these descriptions, so that none of them knows a model's names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Literal

from plait.model.adapter_shape import SavedModule
from plait.model.names import (
    BALANCE,
    EMBEDDING,
    HEAD,
    LAYER_PROJECTION,
    MULTIPLIER,
    Dim,
    auxiliary_head_of,
    cut_dim,
    decays,
    depth_of,
    dims_of,
    expert_of,
    is_adapter,
    is_hidden_matrix,
    layer_of,
)
from plait.model.parts.delta_attention import DELTA_CHUNK
from plait.model.parts.objectives import NO_OBJECTIVES
from plait.model.shape import (
    ModelPart,
    ModelShape,
    weight_sizes,
    weights_of_layer,
    weights_outside_layers,
)

SAVED_TABLES: Mapping[str, SavedModule] = {EMBEDDING: "embedding", HEAD: "head"}
"""Weights that an adapter's modules_to_save can name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDescription:
    """One weight. A frozen one (`trained` is False) has no gradient, no sum over ranks, no moments, and stands in no
    checkpoint."""

    name: str
    dims: tuple[Dim, ...]
    sizes: tuple[int, ...]
    trained: bool
    decays: bool
    cut: int | None
    """Index of the dim that tensor parallelism may cut; None where every rank needs all of it."""

    @property
    def numbers(self) -> int:
        return prod(self.sizes)


def describe_weights(shape: ModelShape) -> Mapping[str, WeightDescription]:
    """Every weight of a model by name, in the order of the forward pass."""
    return MappingProxyType({name: describe_weight(name, shape) for name in weight_sizes(shape)})


def describe_weight(name: str, shape: ModelShape) -> WeightDescription:
    """One weight of a model."""
    dims = dims_of(name)
    return WeightDescription(
        name=name,
        dims=dims,
        sizes=shape.sizes_of(name),
        trained=is_trained(name, shape),
        decays=decays(name),
        cut=cut_dim(name),
    )


def is_trained(name: str, shape: ModelShape) -> bool:
    """Whether a weight learns: all do, or where the model has an adapter that alone, and the tables beside it."""
    adapter = shape.adapter
    if adapter is None or is_adapter(name):
        return True
    return name in SAVED_TABLES and SAVED_TABLES[name] in adapter.modules_to_save


def is_quantized(name: str, shape: ModelShape) -> bool:
    """Whether a weight is kept in blocks of few bits: the frozen matrices of layers are, where the shape says so."""
    adapter = shape.adapter
    return adapter is not None and adapter.quantization != "none" and is_hidden_matrix(name)


def heads_in(part: ModelPart, shape: ModelShape) -> tuple[int, ...]:
    """The heads in the middle that stand in a part of the model, by the numbers of layers before them."""
    return tuple(after for after in shape.objectives.heads if after - 1 in part.layers)


def tables_used(part: ModelPart, shape: ModelShape) -> frozenset[str]:
    """The vocabulary tables that a part of the model computes with: the embedding where tokens are looked up, at the
    beginning and for prediction ahead, and the output matrix, or the embedding in its place, where heads are."""
    looks_up = part.embeds or (part.ends and shape.objectives.ahead > 0)
    scores = part.ends or bool(heads_in(part, shape))
    return frozenset(
        ([EMBEDDING] if looks_up or (scores and shape.tied) else []) + [HEAD] * (scores and not shape.tied)
    )


def holds_weight(part: ModelPart, name: str, shape: ModelShape) -> bool:
    """Whether a part of the model has a weight; layers for prediction ahead stand at its end."""
    layer, after = layer_of(name), auxiliary_head_of(name)
    if layer is not None:
        return layer in part.layers or (part.ends and layer >= shape.layers)
    if after is not None:
        return after in heads_in(part, shape)
    if name in (EMBEDDING, HEAD):
        return name in tables_used(part, shape) and name not in part.borrows
    return part.embeds if name.startswith("embed.") else part.ends


def trained_weights(shape: ModelShape) -> tuple[str, ...]:
    """Names of the weights that learn, in the order of the forward pass."""
    return tuple(name for name in weight_sizes(shape) if is_trained(name, shape))


def kept_values(shape: ModelShape) -> tuple[str, ...]:
    """Names of the vectors that no gradient changes and that checkpoints keep all the same: the routers' biases, one
    number for each expert, and the layers' multipliers."""
    layers = range(shape.all_layers)
    routed = layers if shape.mixture and shape.mixture.has_bias else ()
    return (
        *(f"layers.{layer}.{BALANCE}" for layer in routed if shape.mixture_of(layer)),
        *(f"layers.{layer}.{MULTIPLIER}" for layer in (layers if shape.layer_multipliers else ())),
    )


def stored_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shape of all that makes a model what it is, by name: its weights, and the values of `kept_values`."""
    return {**weight_sizes(shape), **{name: shape.sizes_of(name) for name in kept_values(shape)}}


@lru_cache(maxsize=64)
def active_parameter_count(shape: ModelShape) -> int:
    """Number of parameters that one token meets: of a layer's experts those that it goes to."""
    return sum(_active(one, shape) * layers for one, layers in _counted_weights(shape))


@lru_cache(maxsize=64)
def _counted_weights(shape: ModelShape) -> tuple[tuple[WeightDescription, int], ...]:
    """The weights of each kind of layer, described once, each with how many layers are of that kind: a large mixture
    has tens of thousands of weights in all."""
    layers = range(shape.all_layers)
    kinds = Counter((shape.layer_kind(layer), layer >= shape.layers) for layer in layers)
    first = {(shape.layer_kind(layer), layer >= shape.layers): layer for layer in reversed(layers)}
    inside = [
        (f"layers.{layer}.{name}", kinds[kind])
        for kind, layer in first.items()
        for name in weights_of_layer(shape, layer)
    ]
    named = [*inside, *((name, 1) for name in weights_outside_layers(shape))]
    return tuple((describe_weight(name, shape), number) for name, number in named)


def _active(weight: WeightDescription, shape: ModelShape) -> int:
    """Numbers of a weight that an average token meets, if tokens go to all experts alike."""
    if shape.mixture is None or expert_of(weight.name) is None:
        return weight.numbers
    # Whole experts: the layer's first ones stand for those that a token goes to.
    number = expert_of(weight.name)
    return weight.numbers if number is not None and number < shape.mixture.experts_per_token else 0


@lru_cache(maxsize=64)
def trained_parameter_count(shape: ModelShape) -> int:
    """Number of parameters that learn."""
    return sum(one.numbers * layers for one, layers in _counted_weights(shape) if one.trained)


@lru_cache(maxsize=64)
def hidden_matrix_numbers(shape: ModelShape) -> int:
    """Number of parameters that learn in hidden matrices."""
    hidden = ((one, n) for one, n in _counted_weights(shape) if one.trained and is_hidden_matrix(one.name))
    return sum(one.numbers * layers for one, layers in hidden)


@lru_cache(maxsize=64)
def training_flops_per_token(shape: ModelShape, sequence: int, attention: Literal["full", "causal"]) -> int:
    """Floating-point operations that one token costs in training: the forward's matrix products, once more for the
    gradients of what they read, and once more for those of the weights that learn. Delta attention counts with the
    products that its states and chunks take, but for the triangular systems.

    A product of m × k by k × n counts 2mnk; looking up an embedding counts nothing, the head counts. "full" counts each
    score of the T × T square, as torch's counter does; "causal" counts half of them. Of experts those count that a
    token goes to. Heads in the middle and prediction ahead count with what they compute.
    """
    matrices = _layer_matrices(shape)
    heads = 1 + len(shape.objectives.weights)
    head_learns = is_trained(EMBEDDING if shape.tied else HEAD, shape)
    head = heads * shape.vocabulary * shape.width * (6 if head_learns else 4)
    scoring = [layer for layer in range(shape.all_layers) if not shape.has_delta(layer)]
    square = 2 * sum(scored_width(shape.at(layer)) for layer in scoring) * sequence
    products = sum(_active(one, shape) * layers * (6 if one.trained else 4) for one, layers in matrices)
    states = 0
    if (delta := shape.delta) is not None:
        states = 6 * len(delta.layers) * delta.forward_products(min(DELTA_CHUNK, sequence))
    return products + head + states + 3 * (square if attention == "full" else square // 2)


def scored_width(shape: ModelShape) -> int:
    """Numbers of all heads that a query and a key are multiplied by each other with, and those of a value, together:
    twice the heads' width unless attention is latent."""
    queries = shape.size_of("query_heads") if shape.latent else shape.size_of("heads")
    return queries + shape.size_of("heads")


def attention_matrices(shape: ModelShape) -> list[tuple[int, ...]]:
    """Sizes [outputs, inputs] of the matrices of one layer's attention, in the order of the forward pass."""
    plain = replace(shape, full_attention=None, shared_kv_layers=0, shared_kv_ffn=0, layer_input_width=0, delta=None)
    sizes = weight_sizes(replace(plain, layers=1, windows=(), mixture=None, objectives=NO_OBJECTIVES, adapter=None))
    return [own for name, own in sizes.items() if name.startswith("layers.0.attention.") and len(own) == 2]


def rotary_width(shape: ModelShape) -> int:
    """Numbers of a head that rotary positions turn: all, unless attention is latent or the shape names fewer."""
    return shape.latent.rope_width if shape.latent else shape.rotary_width or shape.head_width


def kernel_width(shape: ModelShape) -> int:
    """Width of a head as attention's kernel takes it: of latent attention's queries or values the wider."""
    latent = shape.latent
    return max(shape.head_width + latent.rope_width, latent.value_width) if latent else shape.head_width


@lru_cache(maxsize=64)
def active_layer_products(shape: ModelShape) -> int:
    """Numbers of the layers' matrices that one token is multiplied with, of all layers together but those for
    prediction ahead."""
    return sum(_active(one, shape) * layers for one, layers in _layer_matrices(shape) if not _is_ahead(one.name, shape))


def active_ahead_products(shape: ModelShape) -> int:
    """Products of all depths of prediction ahead: their layers and projections, without the output matrix."""
    return sum(_active(one, shape) * layers for one, layers in _layer_matrices(shape) if _is_ahead(one.name, shape))


def _layer_matrices(shape: ModelShape) -> list[tuple[WeightDescription, int]]:
    """Matrices of all layers, multi-token-prediction projections and the one for the layers' inputs included."""
    counted = _counted_weights(shape)
    matrices = [(one, layers) for one, layers in counted if len(one.sizes) == 2 and "taps" not in one.dims]
    return [
        pair
        for pair in matrices
        if layer_of(name := pair[0].name) is not None or depth_of(name) is not None or name == LAYER_PROJECTION
    ]


def _is_ahead(name: str, shape: ModelShape) -> bool:
    """Whether a weight is of a layer, or of the projection before it, for prediction ahead."""
    return (layer_of(name) or 0) >= shape.layers or depth_of(name) is not None
