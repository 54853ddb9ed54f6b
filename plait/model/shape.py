"""The shape of a decoder-only transformer: GPT-2, Llama, Mistral and Qwen are points in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import inf, prod
from typing import Any, Literal, get_args

from plait.errors import PlaitError
from plait.model.adapter_shape import AdapterShape, AdapterTarget, adapter_from, adapter_values, check_adapter_in
from plait.model.names import ADAPTER_A, ADAPTER_B, LAYER_PROJECTION, LAYER_TABLE, Dim, dims_of, layer_of, within_layer
from plait.model.parts import checks
from plait.model.parts.delta_attention import (
    DELTA_WEIGHTS,
    DeltaAttentionShape,
    check_delta_in,
    delta_from,
    delta_sizes,
)
from plait.model.parts.latent_attention import LatentAttentionShape, check_latent_in, latent_sizes, latent_weights
from plait.model.parts.mixture import (
    LATER_MIXTURE_FIELDS,
    MixtureShape,
    check_mixture_in,
    mixture_from,
    mixture_weights,
)
from plait.model.parts.objectives import (
    NO_OBJECTIVES,
    ObjectivesShape,
    check_objectives_in,
    objective_weights,
    objectives_from,
)
from plait.model.parts.unlike_layers import FullAttentionShape, check_unlike_layers_in
from plait.model.rope_scaling import RopeScaling, WindowRope, scaling_from, window_rope_from

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "swiglu", "relu2", "geglu", "clamped swiglu"]
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "clamped swiglu"})
"""Activations of feed-forward parts that have a gate."""
CLAMPED_AT, CLAMPED_SLOPE = 7.0, 1.702
"""Of the clamped SwiGLU (gpt-oss): the largest gate and the largest magnitude beside it, and the slope of the gate."""
NormPlaces = Literal["before", "after", "both"]
NormWeight = Literal["factor", "one plus"]
RotaryPairs = Literal["halves", "neighbors"]
Positions = Literal["learned", "rope"]
Bias = Literal["none", "qkv", "attention", "feedforward", "all"]
AttentionScale = Literal["head", "head and layer"]
QkNormWidth = Literal["head", "all heads"]

_CHOICES = {
    "norm": Norm, "activation": Activation, "positions": Positions, "bias": Bias,
    "attention_scale": AttentionScale, "qk_norm_width": QkNormWidth, "norm_places": NormPlaces,
    "norm_weight": NormWeight, "rotary_pairs": RotaryPairs,
}  # fmt: skip
MOST_LAYERS, MOST_OF_A_SIZE, LONGEST_SEQUENCE = 10_000, 10_000_000, 1_000_000_000
"""Far above every published model, and few enough to count through in a moment."""
_COUNTS = {
    "layers": MOST_LAYERS,
    **dict.fromkeys(("width", "heads", "kv_heads", "head_width", "ffn", "vocabulary"), MOST_OF_A_SIZE),
    "sequence": LONGEST_SEQUENCE,
}
"""The fields that count something, each with its upper bound."""
_LATER_FIELDS = ("rope", "windows", "learned_positions", "attention_scale", "adapter", "qk_norm_width", "mixture",
                 "objectives", "latent", "norm_places", "norm_weight", "embedding_multiplier", "residual_multiplier",
                 "attention_multiplier", "logit_divisor", "rotary_width", "rotary_pairs", "unrotated_layers",
                 "window_rope", "query_growth", "query_growth_after", "attention_cap", "logit_cap",
                 "attention_sinks", "full_attention", "value_norm", "layer_multipliers", "layer_input_width",
                 "shared_kv_layers", "shared_kv_ffn", "delta", "attention_gate")  # fmt: skip
"""Fields that checkpoints of earlier versions lack: written only where they are not the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All that decides the model's mathematics; the defaults are those of a Llama.

    `sequence` is the longest sequence. `bias` "qkv" is Qwen 2's choice, "attention" adds the output projection,
    "feedforward" means that part's layers alone, "all" is GPT-2's: every linear layer and every LayerNorm. "gelu" is
    the tanh form. `head_width` times `heads` need not equal `width` (Qwen 3). Raises PlaitError when the numbers do not
    fit together.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    sequence: int
    norm: Norm = "rmsnorm"
    activation: Activation = "swiglu"
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    bias: Bias = "none"
    qk_norm: bool = False
    tied: bool = False
    norm_eps: float = 1e-5
    rope: RopeScaling | None = None
    """How rotary frequencies are stretched; None: they are not."""
    windows: tuple[int, ...] = ()
    """For each layer, how many tokens a query sees, itself included; 0: all before it. Empty: 0 for all layers."""
    learned_positions: int = 0
    """Rows of a learned position table; 0: as many as `sequence`."""
    attention_scale: AttentionScale = "head"
    """Scores are divided by the root of head_width; "head and layer": also by the layer's number, from 1."""
    adapter: AdapterShape | None = None
    """Low-rank weights beside linear layers, which alone learn; None: all weights learn."""
    qk_norm_width: QkNormWidth = "head"
    """What `qk_norm` norms: each head's queries and keys (Qwen 3), or those of all heads as one (OLMoE)."""
    mixture: MixtureShape | None = None
    """Experts in place of some layers' feed-forward parts; None: there are none."""
    objectives: ObjectivesShape = NO_OBJECTIVES
    """What is learned beside the next token from the last layer."""
    latent: LatentAttentionShape | None = None
    """Latent attention, with which `head_width` has no position in it; None: plain attention."""
    norm_places: NormPlaces = "before"
    """Where attention and the feed-forward part are normed: what they read ("before"), what they add to the stream
    ("after", OLMo 2), or both (Gemma 3, GLM-4)."""
    norm_weight: NormWeight = "factor"
    """What a norm multiplies by: its weight, or one plus its weight (Gemma)."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of what attention and the feed-forward part add to the stream."""
    attention_multiplier: float = 0.0
    """Factor of scores in place of 1 / root of head_width; 0: that one."""
    logit_divisor: float = 1.0
    """What the scores of the vocabulary's entries are divided by."""
    rotary_width: int = 0
    """The first numbers of each head that rotary positions turn; 0: all of them."""
    rotary_pairs: RotaryPairs = "halves"
    """Which numbers are turned together: i and i + half the rotary width, or two side by side (GLM-4)."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without positions (SmolLM3)."""
    window_rope: WindowRope | None = None
    """Rotary positions of the layers with a window; None: those of all layers."""
    query_growth: float = 0.0
    """By how much queries grow with the logarithm of the position (Ministral 3); 0: not at all."""
    query_growth_after: int = 0
    """The number of positions after which they begin to grow."""
    attention_cap: float = 0.0
    """Attention's scores s become cap × tanh(s / cap) (Gemma 2); 0: they stay as they are."""
    logit_cap: float = 0.0
    """The same of the scores of the vocabulary's entries."""
    attention_sinks: bool = False
    """Whether each head has a learned score that takes a share of every softmax and gives nothing (gpt-oss)."""
    full_attention: FullAttentionShape | None = None
    """Heads of layers without a window; None: they are those of all layers (Gemma 4)."""
    value_norm: bool = False
    """Whether each head's values are normed, without a weight (Gemma 4)."""
    layer_multipliers: bool = False
    """Whether each layer's result is multiplied by a number that its files hold and that does not learn (Gemma 4)."""
    layer_input_width: int = 0
    """Width of what each layer is given of its own of every token (Gemma 4's per-layer embeddings); 0: nothing."""
    shared_kv_layers: int = 0
    """Last layers that have no keys and values: each uses those of the last layer before them that has, with a window
    or without as itself (Gemma 4)."""
    shared_kv_ffn: int = 0
    """`ffn` of the layers that share keys and values; 0: the same."""
    delta: DeltaAttentionShape | None = None
    """Gated delta attention in some layers, in place of attention with scores (Qwen 3.5); None: in none."""
    attention_gate: bool = False
    """Whether each head's result is multiplied by the sigmoid of what the queries' matrix gives beside its query
    (Qwen 3.5)."""

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            checks.check_count(name, getattr(self, name), most)
        for name, choices in _CHOICES.items():
            checks.check_shape_value(name, getattr(self, name), get_args(choices))
        rotary_width = self.head_width if self.positions == "rope" and self.latent is None else 0
        checks.check_head_counts(self.heads, self.kv_heads, rotary_width)
        checks.check_position_numbers(self.windows, self.layers, self.sequence, self.learned_positions)
        if self.rope is not None and self.positions != "rope":
            raise PlaitError('rotary frequencies are stretched and positions are learned; choose positions = "rope"')
        if self.mixture is not None:
            check_mixture_in(self.mixture, self.layers, checks.biased_parts(self.bias), self.adapter)
        self._check_positions()
        check_objectives_in(self.objectives, self.layers, self.sequence, self.adapter)
        if self.latent is not None:
            check_latent_in(self)
        check_unlike_layers_in(self)
        if self.delta is not None:
            check_delta_in(self)
        if self.attention_gate and (self.latent or (self.qk_norm and self.qk_norm_width != "head")):
            raise PlaitError("gated heads go with plain attention and norms by head; take out either")
        check_adapter_in(self.adapter, linear_layers(self), self.smaller_side, "tied" if self.tied else "untied")
        for name in ("rope_theta", "norm_eps", "embedding_multiplier", "residual_multiplier", "logit_divisor"):
            if not 0 < getattr(self, name) < inf:
                raise PlaitError(f"the model's {name} is {getattr(self, name)}; choose a number above 0")
        for name in ("attention_multiplier", "attention_cap", "logit_cap"):
            if not 0 <= getattr(self, name) < inf:
                raise PlaitError(f"the model's {name} is {getattr(self, name)}; choose one of at least 0")
        if self.norm == "layernorm" and (self.norm_weight != "factor" or self.logit_divisor != 1.0):
            raise PlaitError('a LayerNorm has a plain weight and divides no scores; choose norm = "rmsnorm"')

    def _check_positions(self) -> None:
        """Refuse rotary positions that do not fit the heads or the layers, or that nothing reads."""
        special = (
            self.rotary_width,
            self.unrotated_layers,
            self.window_rope,
            self.query_growth,
            self.query_growth_after,
        )
        if any(special) and (self.positions != "rope" or self.latent is not None):
            raise PlaitError(
                "rotary positions of some numbers or some layers alone go with plain attention and positions = "
                '"rope"; choose these'
            )
        if self.latent is not None and (self.norm_weight != "factor" or self.attention_multiplier):
            raise PlaitError("latent attention has norms with plain weights and a scale of its own; take out either")
        checks.check_rotary_width(self.rotary_width, self.head_width)
        checks.check_layer_numbers("unrotated_layers", self.unrotated_layers, self.layers)
        factors = [
            one for one in (self.rope, self.window_rope and self.window_rope.scaling) if one and one.long_factors
        ]
        width = self.latent.rope_width if self.latent else self.rotary_width or self.head_width
        for one in factors:
            if 2 * len(one.long_factors) != width:
                raise PlaitError(
                    f"longrope has {len(one.long_factors)} factors, and {width // 2} pairs of each head are rotated; "
                    "give one for each"
                )
        if not 0 <= self.query_growth < inf or type(self.query_growth_after) is not int:
            raise PlaitError(f"the model's query_growth is {self.query_growth}; choose a number of at least 0")
        if (self.query_growth > 0) != (self.query_growth_after > 0):
            raise PlaitError("query_growth and query_growth_after belong together; set both above 0, or neither")

    def at(self, layer: int) -> ModelShape:
        """The shape with the heads and the feed-forward width of one layer, where layers differ in these."""
        if self.full_attention is None and not self.shared_kv_ffn:
            return self
        return _shape_of_kind(self, self.window_of(layer) == 0, self.shares_kv(layer))

    def sizes_of(self, name: str) -> tuple[int, ...]:
        """Sizes of a weight's dims."""
        layer = layer_of(name)
        own = self if layer is None else self.at(layer)
        return tuple(own.size_of(dim) for dim in dims_of(name))

    def size_of(self, dim: Dim) -> int:
        """Size of a weight's dim, from the dim's meaning; where layers differ, ask the shape `at` one."""
        sizes: dict[Dim, int] = {
            "width": self.width,
            "joined": 2 * self.width,
            "heads": self.heads * self.head_width,
            "kv_heads": self.kv_heads * self.head_width,
            "head_width": self.head_width,
            "head_count": self.heads,
            "ffn": self.ffn,
            "vocabulary": self.vocabulary,
            "positions": self.learned_positions or self.sequence,
            "rank": self.adapter.rank if self.adapter else 0,
            "experts": self.mixture.experts if self.mixture else 0,
            "expert_ffn": self.mixture.expert_ffn if self.mixture else 0,
            "shared_ffn": self.mixture.shared_experts * self.mixture.expert_ffn if self.mixture else 0,
            "layer_input": self.layer_input_width,
            "layer_inputs": self.layer_input_width * self.layers,
            "one": 1,
            "queries": self.heads * self.head_width * (2 if self.attention_gate else 1),
        }
        return (sizes | delta_sizes(self.delta) | latent_sizes(self.latent, self.heads, self.head_width))[dim]

    @property
    def all_layers(self) -> int:
        """The layers, and after them one for each depth of prediction ahead."""
        return self.layers + self.objectives.ahead

    def window_of(self, layer: int) -> int:
        """How many tokens a query of a layer sees, itself included; 0: all before it."""
        return self.windows[min(layer, self.layers - 1)] if self.windows else 0

    def mixture_of(self, layer: int) -> MixtureShape | None:
        """The experts of a layer; None where it has a plain feed-forward part."""
        return self.mixture if self.mixture and self.mixture.holds(layer) else None

    def shares_kv(self, layer: int) -> bool:
        """Whether a layer uses the keys and values of an earlier one."""
        return layer >= self.layers - self.shared_kv_layers and self.shared_kv_layers > 0

    def lends_kv(self, layer: int) -> bool:
        """Whether later layers use the keys and values of this one: it is the last of its kind that has any."""
        windowed = self.window_of(layer) > 0
        alike = [other for other in range(self.layers) if (self.window_of(other) > 0) == windowed]
        own = [other for other in alike if not self.shares_kv(other)]
        return len(own) < len(alike) and own[-1] == layer

    def has_delta(self, layer: int) -> bool:
        """Whether a layer has delta attention in place of attention with scores."""
        return self.delta is not None and layer in self.delta.layers

    def values_are_keys(self, layer: int) -> bool:
        """Whether a layer has no matrix for values."""
        full = self.full_attention
        return full is not None and full.values == "keys" and not self.window_of(layer)

    def layer_kind(self, layer: int) -> tuple[object, ...]:
        """What layers with weights of the same names and sizes have in common."""
        full = self.full_attention is not None and not self.window_of(layer)
        return self.mixture_of(layer), full, self.shares_kv(layer), self.has_delta(layer)

    def adapter_of(self, layer: AdapterTarget) -> AdapterShape | None:
        """The adapter of a linear layer; None where it has none."""
        return self.adapter if self.adapter and layer in self.adapter.targets else None

    def smaller_side(self, target: AdapterTarget) -> int:
        """The smaller side of a linear layer, of all layers that have it."""
        kinds = {self.layer_kind(layer): layer for layer in range(self.layers)}
        return min(size for layer in kinds.values() for size in self.sizes_of(f"layers.{layer}.{target}.weight"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        defaults = {field.name: field.default for field in fields(self)}
        left_out = {name for name in _LATER_FIELDS if getattr(self, name) == defaults[name]}
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        if self.mixture is not None:
            for name, usual in LATER_MIXTURE_FIELDS.items():
                if getattr(self.mixture, name) == usual:
                    del values["mixture"][name]
        for one in (values.get("rope"), (values.get("window_rope") or {}).get("scaling")):
            if one and not one["long_factors"]:
                del one["long_factors"], one["short_factors"]  # later fields
            if one and one["rotated_share"] == 1.0:
                del one["rotated_share"]  # a later field
        if self.adapter is not None:
            values["adapter"] = adapter_values(self.adapter)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelShape:
        """The shape that `to_dict` wrote; raises PlaitError for unknown or missing fields."""
        known = {field.name for field in fields(cls)}
        checks.check_fields(set(values), known, set(_COUNTS))
        return cls(**{name: _own_value(name, value) for name, value in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Which part of a model: whether it begins with the embedding, its layers, whether it ends with norm and head."""

    embeds: bool
    layers: tuple[int, ...]
    ends: bool
    borrows: tuple[str, ...] = ()
    """Vocabulary tables that it computes with and that another part on the same rank holds."""


def whole_model(shape: ModelShape) -> ModelPart:
    """The part that is the whole model."""
    return ModelPart(embeds=True, layers=tuple(range(shape.layers)), ends=True)


def weight_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by name, in the order of the forward pass; a tied head has no entry."""
    layers = range(shape.all_layers)
    inside = (f"layers.{layer}.{name}" for layer in layers for name in weights_of_layer(shape, layer))
    names = [*_weights_before_layers(shape), *inside, *_weights_after_layers(shape)]
    found: dict[str, tuple[int, ...]] = {}
    known: dict[tuple[object, str], tuple[int, ...]] = {}  # a mixture has tens of thousands of weights
    kinds = {layer: shape.layer_kind(layer) for layer in layers}
    for name in names:
        layer = layer_of(name)
        key = (None if layer is None else kinds[layer], within_layer(name))
        if key not in known:
            known[key] = shape.sizes_of(name)
        found[name] = known[key]
    return found


def parameter_count(shape: ModelShape) -> int:
    """Number of all parameters, frozen ones and an adapter's included; a tied head counts once."""
    layers = range(shape.all_layers)
    alike = Counter(shape.layer_kind(layer) for layer in layers)
    inside = 0
    for layer in {shape.layer_kind(layer): layer for layer in layers}.values():  # one of each kind
        one = _numbers_of(shape, (f"layers.{layer}.{name}" for name in weights_of_layer(shape, layer)))
        inside += alike[shape.layer_kind(layer)] * one
    return inside + _numbers_of(shape, weights_outside_layers(shape))


def _numbers_of(shape: ModelShape, names: Iterable[str]) -> int:
    return sum(prod(shape.sizes_of(name)) for name in names)


@lru_cache(maxsize=64)
def _shape_of_kind(shape: ModelShape, full: bool, shares: bool) -> ModelShape:
    """The shape of which all layers are as those of one kind."""
    own = shape.full_attention if full else None
    return replace(
        shape,
        head_width=own.head_width if own else shape.head_width,
        kv_heads=own.kv_heads if own else shape.kv_heads,
        ffn=(shape.shared_kv_ffn if shares else 0) or shape.ffn,
        full_attention=None,
        shared_kv_ffn=0,
    )


def weights_outside_layers(shape: ModelShape) -> list[str]:
    """Names of the weights before the layers and after them."""
    return [*_weights_before_layers(shape), *_weights_after_layers(shape)]


def _weights_before_layers(shape: ModelShape) -> list[str]:
    inputs = [LAYER_TABLE, LAYER_PROJECTION, "embed.layer_norm.weight"] if shape.layer_input_width else []
    return ["embed.tokens.weight", *(["embed.positions.weight"] if shape.positions == "learned" else []), *inputs]


def _weights_after_layers(shape: ModelShape) -> list[str]:
    own = objective_weights(shape.objectives, lambda name: _norm_weights(name, shape))
    return [*_norm_weights("norm", shape), *own, *([] if shape.tied else ["head.weight"])]


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "adapter": adapter_from,
    "mixture": mixture_from,
    "objectives": objectives_from,
    "latent": lambda value: LatentAttentionShape(**value),
    "delta": delta_from,
    "full_attention": lambda value: FullAttentionShape(**value),
    "rope": scaling_from,
    "window_rope": window_rope_from,
}


def _own_value(name: str, value: Any) -> Any:
    """A field's value from JSON, as the field has it."""
    if name in ("windows", "unrotated_layers"):
        return tuple(value)
    return _READERS[name](value) if name in _READERS and isinstance(value, Mapping) else value


def linear_layers(shape: ModelShape) -> tuple[AdapterTarget, ...]:
    """The linear layers of the model's layers, all of which an adapter may adapt; some layers may lack some."""
    has_values = any(not shape.values_are_keys(layer) for layer in range(shape.layers - shape.shared_kv_layers))
    has = {"feedforward.gate": is_gated(shape), "attention.v": has_values}
    return tuple(name for name in get_args(AdapterTarget) if has.get(name, True))


def linear_layers_in(shape: ModelShape, layer: int) -> tuple[AdapterTarget, ...]:
    """The linear layers that one layer has."""
    lacks = {"attention.k", "attention.v"} if shape.shares_kv(layer) else set[str]()
    lacks |= {"attention.v"} if shape.values_are_keys(layer) else set()
    if shape.has_delta(layer):
        lacks |= {name for name in linear_layers(shape) if name.startswith("attention.")}
    return tuple(name for name in linear_layers(shape) if name not in lacks)


def is_gated(shape: ModelShape) -> bool:
    """Whether feed-forward parts have a gate: three matrices in place of two."""
    return shape.activation in GATED


def weights_of_layer(shape: ModelShape, layer: int) -> list[str]:
    """Names of a layer's weights within it, in the order of the forward pass."""
    linear = linear_layers_in(shape, layer)
    ffn = [name for name in linear if name.startswith("feedforward.")]
    first = [name for name in linear if name in ("attention.q", "attention.k", "attention.v")]
    biased = checks.biased_parts(shape.bias)
    normed = ("q_norm", "k_norm") if shape.qk_norm_width == "head" else ("queries_norm", "keys_norm")
    normed = normed[:1] if shape.shares_kv(layer) else normed
    mixture = shape.mixture_of(layer)
    before, after = shape.norm_places != "after", shape.norm_places != "before"
    attention = [
        *(["attention.sinks"] if shape.attention_sinks else []),
        *_linear_weights(first, shape, biased="qkv" in biased),
        *([f"attention.{name}.weight" for name in normed] if shape.qk_norm else []),
        *_linear_weights(["attention.o"], shape, biased="output" in biased),
    ]
    if shape.has_delta(layer):
        attention = [f"attention.{name}" for name in DELTA_WEIGHTS]
    return [
        *(_norm_weights("attention_norm", shape) if before else []),
        *(latent_weights(shape.latent) if shape.latent else attention),
        *(_norm_weights("attention_post_norm", shape) if after else []),
        *(_norm_weights("feedforward_norm", shape) if before else []),
        *(
            _linear_weights(ffn, shape, biased="feedforward" in biased)
            if mixture is None
            else mixture_weights(mixture, [name.removeprefix("feedforward.") for name in ffn])
        ),
        *(_norm_weights("feedforward_post_norm", shape) if after else []),
        *([f"inputs.{name}.weight" for name in ("gate", "projection", "norm")] if shape.layer_input_width else []),
    ]


def _linear_weights(names: Sequence[str], shape: ModelShape, *, biased: bool) -> list[str]:
    adapted = shape.adapter.targets if shape.adapter else ()
    return [
        f"{name}.{kind}"
        for name in names
        for kind in ("weight", *(["bias"] if biased else []), *([ADAPTER_A, ADAPTER_B] if name in adapted else []))
    ]


def _norm_weights(name: str, shape: ModelShape) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"] if has_norm_bias(shape) else [f"{name}.weight"]


def has_norm_bias(shape: ModelShape) -> bool:
    """Whether the norms add a bias: LayerNorm does where every linear layer does."""
    return shape.norm == "layernorm" and shape.bias == "all"
