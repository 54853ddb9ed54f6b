"""Shapes by name: "250K" … "405B", a sensible Llama-like shape for each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Any

from plait.errors import PlaitError
from plait.model.parts import latent_attention
from plait.model.parts.mixture import RECIPE_NAMES, mixture_of_keys
from plait.model.shape import GATED, ModelShape, parameter_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A named size: its core dims, and the vocabulary with which the parameters add up to its name."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool


def _size(layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, tied: str = "") -> Size:
    return Size(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        tied=tied == "tied",
    )


MODEL_SIZES: dict[str, Size] = {
    #             layers width heads kv_heads ffn vocabulary
    "250K": _size(4, 64, 2, 2, 192, 512, "tied"),
    "500K": _size(2, 128, 4, 4, 384, 512, "tied"),
    "1M": _size(4, 128, 4, 4, 384, 1024, "tied"),
    "3M": _size(6, 192, 6, 6, 512, 2048, "tied"),
    "5M": _size(6, 256, 8, 8, 640, 2048, "tied"),
    "11M": _size(8, 320, 10, 10, 896, 4096, "tied"),
    "25M": _size(8, 448, 14, 14, 1216, 16384, "tied"),
    "50M": _size(8, 640, 10, 10, 1728, 16384, "tied"),
    "125M": _size(12, 768, 12, 12, 2048, 50304, "tied"),
    "350M": _size(24, 1024, 16, 16, 2752, 50304, "tied"),
    "760M": _size(24, 1536, 24, 24, 4096, 50304, "tied"),
    "1B": _size(16, 2048, 16, 16, 5632, 50304),
    "1.3B": _size(24, 2048, 16, 16, 5632, 50304, "tied"),
    "3B": _size(28, 3072, 24, 8, 8192, 50304),
    "7B": _size(32, 4096, 32, 32, 11008, 32000),
    "8B": _size(32, 4096, 32, 8, 14336, 128256),
    "13B": _size(40, 5120, 40, 40, 13824, 32000),
    "30B": _size(60, 6656, 52, 52, 17920, 32000),
    "65B": _size(80, 8192, 64, 64, 22016, 32000),
    "70B": _size(80, 8192, 64, 8, 28672, 128256),
    "175B": _size(96, 12288, 96, 96, 32768, 50304),
    "405B": _size(126, 16384, 128, 8, 53248, 128256),
}
"""A name is about the number of all parameters, embeddings included, at the vocabulary in its row."""


def named_shape(size: str, *, vocabulary: int, sequence: int, **explicit: Any) -> ModelShape:
    """The shape of a named size for a vocabulary and a longest sequence; explicit fields win over the size's own.

    Raises PlaitError for an unknown name and for fields that contradict each other.
    """
    if size not in MODEL_SIZES:
        raise PlaitError(f'there is no model size "{size}"; choose one of {", ".join(MODEL_SIZES)}')
    return _complete(MODEL_SIZES[size], vocabulary, sequence, explicit)


def explicit_shape(*, layers: int, width: int, vocabulary: int, sequence: int, **explicit: Any) -> ModelShape:
    """The shape that a person spells out: fields that are left open follow from the width, as in the named sizes."""
    heads = explicit.get("heads") or _heads_for(width)
    ffn = default_ffn(width, "swiglu")
    tied = "tied" if 12 * layers * width**2 < 10**9 else ""
    return _complete(_size(layers, width, heads, heads, ffn, vocabulary, tied), vocabulary, sequence, explicit)


def nearest_size(parameters: float, vocabulary: int) -> str:
    """The named size whose count of parameters at this vocabulary is nearest, as a ratio, to the given one."""

    def distance(size: str) -> float:
        count = _parameters_of(size, vocabulary)
        return max(count / parameters, parameters / count)

    return min(MODEL_SIZES, key=distance)


@lru_cache(maxsize=256)
def _parameters_of(size: str, vocabulary: int) -> int:
    return parameter_count(named_shape(size, vocabulary=vocabulary, sequence=1024))


def default_ffn(width: int, activation: str) -> int:
    """8/3 of the width for SwiGLU's three matrices, 4 times the width for two, in multiples of 64 or 256."""
    if activation not in GATED:
        return 4 * width
    step = 64 if width < 2048 else 256
    return -(-8 * width // 3 // step) * step


def _complete(size: Size, vocabulary: int, sequence: int, explicit: dict[str, Any]) -> ModelShape:
    """Fill in the fields that are not explicit; those that depend on an explicit field follow from it."""
    width = explicit.get("width", size.width)
    heads = explicit.get("heads", size.heads if width == size.width else _heads_for(width))
    follows = width != size.width or explicit.get("activation", "swiglu") != "swiglu"
    ffn = default_ffn(width, explicit.get("activation", "swiglu")) if follows else size.ffn
    mixture = mixture_of_keys(explicit, explicit.get("ffn", ffn))
    explicit = {key: value for key, value in explicit.items() if key not in RECIPE_NAMES}
    head_width = explicit.get("head_width") or _head_width(width, heads)
    latent = latent_attention.latent_of_keys(explicit, head_width)
    explicit = {key: value for key, value in explicit.items() if key not in latent_attention.LATENT_KEYS}
    open_fields = {
        "layers": size.layers,
        "width": width,
        "heads": heads,
        "kv_heads": size.kv_heads if heads == size.heads and latent is None else heads,
        "head_width": head_width,
        "ffn": ffn,
        "vocabulary": vocabulary,
        "sequence": sequence,
        "tied": size.tied,
        "mixture": mixture,
        "latent": latent,
    }
    return ModelShape.from_dict(open_fields | explicit)


def _head_width(width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        fitting = [str(number) for number in range(2, width // 16 + 1, 2) if width % (2 * number) == 0]
        raise PlaitError(
            f"heads = {heads} does not divide width {width}; choose {' or '.join(fitting)}, or a head_width"
        )
    return width // heads


def _heads_for(width: int) -> int:
    """An even number of heads, of about 32 numbers in narrow models, 64 and 128 in wide ones."""
    aim = 32 if width < 512 else 64 if width < 2048 else 128
    fitting = [heads for heads in range(2, width // 2 + 1, 2) if width % (2 * heads) == 0]
    if not fitting:
        raise PlaitError(f"width = {width} cannot be shared by an even number of heads; choose a multiple of 64")
    return min(fitting, key=lambda heads: abs(log(width / heads / aim)))
