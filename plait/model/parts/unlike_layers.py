"""Parts that not all layers of a model have alike: heads of layers without a window, keys and values that later layers
use again, inputs that each layer has of its own. Gemma 4 has them all. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from plait.errors import PlaitError
from plait.model.parts import checks

_MOST_WIDE = 10_000_000
"""Largest number of heads or width: far above every published model."""
ValueSource = Literal["own", "keys"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionShape:
    """Heads of the layers without a window, where they differ from those of layers with one. Raises PlaitError."""

    head_width: int
    kv_heads: int
    values: ValueSource = "own"
    """"keys": values are what the keys' matrix gives, before norms and rotation; there is no matrix for values."""

    def __post_init__(self) -> None:
        for name in ("head_width", "kv_heads"):
            checks.check_count(f"full_attention.{name}", getattr(self, name), _MOST_WIDE)
        checks.check_shape_value("full_attention.values", self.values, get_args(ValueSource))


def check_unlike_layers_in(shape: Any) -> None:
    """Refuse layers that differ in ways that do not fit each other or the other parts of the model."""
    for name in ("layer_input_width", "shared_kv_layers", "shared_kv_ffn"):
        if type(value := getattr(shape, name)) is not int or not 0 <= value <= _MOST_WIDE:
            raise PlaitError(f"the model's {name} is {value!r}; choose a whole number of at least 0")
    full = shape.full_attention
    if full is not None:
        checks.check_head_counts(shape.heads, full.kv_heads, full.head_width)
        longrope = shape.rope is not None and shape.rope.long_factors
        if shape.latent or shape.rotary_width or longrope or (shape.qk_norm and shape.qk_norm_width != "head"):
            raise PlaitError(
                "heads of another width in layers without a window go with plain attention, whole heads rotated and "
                "norms by head; take out either"
            )
    if not (shape.layer_input_width or shape.shared_kv_layers or shape.shared_kv_ffn or shape.value_norm):
        return
    if shape.latent or shape.objectives.weights:
        raise PlaitError(
            "inputs of each layer, shared keys and norms of values go neither with latent attention nor with heads in "
            "the middle or prediction ahead; take out either"
        )
    if shape.shared_kv_ffn and not shape.shared_kv_layers:
        raise PlaitError("shared_kv_ffn is the width of layers that share keys, and none does; set shared_kv_layers")
    shared = shape.shared_kv_layers
    if shared >= shape.layers:
        raise PlaitError(
            f"shared_kv_layers = {shared} leaves none of {shape.layers} layers with keys of its own; choose fewer"
        )
    own = shape.layers - shared
    windowed = [shape.window_of(layer) > 0 for layer in range(shape.layers)]
    for missing in set(windowed[own:]) - set(windowed[:own]):
        raise PlaitError(
            f"shared_kv_layers = {shared}: the last layers use keys of earlier ones of their kind, and among the first "
            f"{own} there is none {'with' if missing else 'without'} a window; choose fewer"
        )
