"""Writes a model as one .gguf file, with its tokenizer and chat template, as llama.cpp's converter lays it out.

Numbers are rounded by the package gguf, some rows of a tensor at a time. It makes no K-quants; llama.cpp's own
llama-quantize does, from such a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from torch import Tensor

from plait.errors import PlaitError, installing
from plait.interop.gguf_tokenizer import GgufTokenizer
from plait.interop.write_weights import WRITE_BYTES, ReadPart
from plait.model.names import layer_of, within_layer
from plait.model.shape import ModelShape, weight_sizes

GgufType = Literal["float32", "bfloat16", "float16", "q8_0"]
_QUANTIZED: Mapping[GgufType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
_FILE_TYPES: Mapping[GgufType, str] = {
    "float32": "ALL_F32", "bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0",
}  # fmt: skip
_LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One value of general.architecture that llama.cpp computes as we do."""

    name: str
    fixed: Mapping[str, Any]
    """The fields of a ModelShape that all its models share, where they are not the shape's defaults."""
    rotates: Literal["halves", "neighbors", "nothing"]
    """Which numbers of a head llama.cpp turns together: of "neighbors" the rows of queries and keys are reordered."""


ARCHITECTURES = (
    Architecture(name="llama", fixed={}, rotates="neighbors"),
    Architecture(name="qwen2", fixed={"bias": "qkv"}, rotates="halves"),
    Architecture(name="qwen3", fixed={"qk_norm": True}, rotates="halves"),
    Architecture(
        name="gpt2",
        fixed={"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": "all"},
        rotates="nothing",
    ),
)
_SAID = ("layers", "width", "heads", "kv_heads", "head_width", "ffn", "vocabulary", "sequence", "tied", "norm_eps",
         "rope_theta", "learned_positions")  # fmt: skip
"""Fields that the file states, whatever the architecture."""

_OUTSIDE = {
    "embed.tokens": "token_embd",
    "embed.positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
}
_INSIDE = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.o": "attn_output",
    "feedforward_norm": "ffn_norm",
    "feedforward.gate": "ffn_gate",
    "feedforward.up": "ffn_up",
    "feedforward.down": "ffn_down",
}
_ROPE_DIVISORS = "rope_freqs.weight"
"""A llama's tensor of what the frequency of each pair of a head is divided by, where they are stretched."""
_QKV = ("attention.q", "attention.k", "attention.v")


def architecture_of(shape: ModelShape) -> Architecture:
    """The architecture under which llama.cpp computes what this shape computes; raises PlaitError, naming what the
    nearest one has otherwise, where there is none."""
    differences = {one.name: _differing(shape, one) for one in ARCHITECTURES}
    for one in ARCHITECTURES:
        if not differences[one.name]:
            return one
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise PlaitError(
        f"plait writes models as .gguf that are {', '.join(differences)} and no other; this one differs from {nearest} "
        f"in {', '.join(differences[nearest])}. Export it as a folder, and let llama.cpp's convert_hf_to_gguf.py try"
    )


def _differing(shape: ModelShape, one: Architecture) -> list[str]:
    """The fields in which a shape is none of an architecture's."""
    values = {field.name: field.default for field in fields(ModelShape)}
    values |= {name: getattr(shape, name) for name in _SAID} | dict(one.fixed)
    if one.name in ("gpt2", "qwen2"):  # whose heads together are as wide as the model
        values["head_width"] = shape.width // shape.heads
    if one.name == "gpt2":
        values["kv_heads"] = shape.heads
    if one.name == "llama" and shape.rope is not None and shape.rope.kind in ("llama3", "linear"):
        values["rope"] = shape.rope  # _ROPE_DIVISORS
    unsaid = {"windows": not any(shape.windows), "rotary_width": shape.rotary_width == shape.head_width}
    return [name for name, value in values.items() if getattr(shape, name) != value and not unsaid.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of the file: the weights of ours that lie in it, one below the other, its sizes, and how its numbers are
    kept, a GGMLQuantizationType. Of the divisors of rotary frequencies there are no weights."""

    name: str
    weights: tuple[str, ...]
    sizes: tuple[int, ...]
    kept: Any
    stored: tuple[int, ...]
    """Its sizes in bytes: those of a row in place of the row's numbers."""

    @property
    def nbytes(self) -> int:
        return prod(self.stored)


def write_gguf(
    file: Path,
    shape: ModelShape,
    dtype: GgufType,
    read: ReadPart,
    tokenizer: GgufTokenizer,
    *,
    name: str,
    special: Mapping[str, int],
    adds_beginning: Literal["yes", "no"],
    chat_template: str = "",
    at_once: int = WRITE_BYTES,
) -> str:
    """Write the file and return its architecture; matrices are rounded to `dtype`, norms, biases and a table of
    positions stay in float32. `special` are ids by the file's names ("bos", "eos", "eot", "pad"). About `at_once` bytes
    of a tensor are in memory at a time. Raises PlaitError for a model that the format or the dtype cannot hold, and
    OSError where the disk refuses."""
    gguf, architecture = gguf_package(), architecture_of(shape)
    tensors = gguf_tensors(shape, dtype)
    writer = gguf.GGUFWriter(file, architecture.name)
    try:
        _add_sizes(writer, gguf, shape, architecture, dtype, name)
        _add_tokenizer(writer, tokenizer, special, adds_beginning, chat_template)
        for one in tensors:
            writer.add_tensor_info(one.name, one.stored, np.dtype(np.uint8), one.nbytes, raw_dtype=one.kept)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in tensors:
            rows = _rows(one, read, shape, architecture, at_once)
            writer.write_tensor_data(_Streamed(one.nbytes, (gguf.quants.quantize(some, one.kept) for some in rows)))
        writer.flush()
    finally:
        writer.close()
    return architecture.name


def gguf_tensors(shape: ModelShape, dtype: GgufType) -> list[GgufTensor]:
    """Every tensor of a model's file, in the order of the forward pass; raises PlaitError where no architecture has
    such models, or the package gguf is missing."""
    gguf, architecture = gguf_package(), architecture_of(shape)
    places: dict[str, list[str]] = {}
    every = weight_sizes(shape)
    for weight in every:
        part, _, kind = within_layer(weight).rpartition(".")
        layer = layer_of(weight)
        fused = architecture.name == "gpt2" and part in _QKV
        own = _OUTSIDE[part] if layer is None else f"blk.{layer}.{'attn_qkv' if fused else _INSIDE[part]}"
        places.setdefault(f"{own}.{kind}", []).append(weight)
    found: list[GgufTensor] = []
    for name, weights in places.items():
        sizes = (sum(every[one][0] for one in weights), *every[weights[0]][1:])
        kept = _kept_as(gguf, sizes, dtype, name)
        stored = tuple(gguf.quants.quant_shape_to_byte_shape(sizes, kept))
        found.append(GgufTensor(name=name, weights=tuple(weights), sizes=sizes, kept=kept, stored=stored))
    if shape.rope is not None:
        pairs, kept = shape.head_width // 2, gguf.GGMLQuantizationType.F32
        found.append(GgufTensor(name=_ROPE_DIVISORS, weights=(), sizes=(pairs,), kept=kept, stored=(4 * pairs,)))
    return found


def _kept_as(gguf: Any, sizes: Sequence[int], dtype: GgufType, name: str) -> Any:
    """How a tensor's numbers are kept: rows that no block of the dtype divides stay in 16 bits, as llama.cpp has it."""
    types = gguf.GGMLQuantizationType
    if len(sizes) == 1 or name.startswith("position_embd"):
        return types.F32
    wanted = types[_QUANTIZED[dtype]]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if sizes[-1] % block == 0 else types.F16


def gguf_package() -> Any:
    """The package gguf; raises PlaitError, with the command that brings it, where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise PlaitError(f"writing a .gguf file needs the package gguf; bring it: {installing('gguf')}") from None
    return gguf


def _add_sizes(
    writer: Any, gguf: Any, shape: ModelShape, architecture: Architecture, dtype: GgufType, name: str
) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.size_of("positions") if shape.positions == "learned" else shape.sequence)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    if shape.norm == "layernorm":
        writer.add_layer_norm_eps(shape.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(shape.norm_eps)
    if architecture.rotates != "nothing":
        writer.add_key_length(shape.head_width)
        writer.add_value_length(shape.head_width)
        writer.add_rope_dimension_count(shape.head_width)
        writer.add_rope_freq_base(shape.rope_theta)


def _add_tokenizer(
    writer: Any,
    tokenizer: GgufTokenizer,
    special: Mapping[str, int],
    adds_beginning: Literal["yes", "no"],
    chat_template: str,
) -> None:
    writer.add_tokenizer_model("gpt2")  # byte-level BPE, of which GPT-2's was the first
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    for key, number in special.items():
        getattr(writer, f"add_{key}_token_id")(number)
    writer.add_add_bos_token(adds_beginning == "yes")
    if chat_template:
        writer.add_chat_template(chat_template)


@dataclass(frozen=True, slots=True)
class _Streamed:
    """What gguf's writer asks of an array, of one that is made while it is written."""

    nbytes: int
    parts: Iterable[np.ndarray[Any, Any]]

    def tofile(self, file: BinaryIO) -> None:
        for part in self.parts:
            part.tofile(file)


def _rows(
    one: GgufTensor, read: ReadPart, shape: ModelShape, architecture: Architecture, at_once: int
) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """A tensor's numbers, as llama.cpp orders them, before they are rounded: some rows at a time, of queries and keys
    whole heads."""
    if one.name == _ROPE_DIVISORS:
        yield _rope_divisors(shape)
        return
    every = weight_sizes(shape)
    for weight in one.weights:
        rows, *columns = every[weight]
        some = max(1, at_once // (8 * prod(columns)))
        if _is_turned(weight, architecture):
            some = max(1, some // shape.head_width) * shape.head_width
        for first in range(0, rows, some):
            extent = (min(some, rows - first), *columns)
            values = read(weight, (first, *(0 for _ in columns)), extent)
            values = _reordered(values, shape) if _is_turned(weight, architecture) else values
            numbers = np.ascontiguousarray(values.float().numpy())
            _refuse_unrounded(weight, numbers, one)
            yield numbers


def _refuse_unrounded(weight: str, numbers: np.ndarray[Any, np.dtype[np.float32]], one: GgufTensor) -> None:
    """Raise PlaitError for numbers that a tensor's type cannot hold."""
    largest = float(np.abs(numbers).max(initial=0.0))
    if not isfinite(largest):
        raise PlaitError(f"{weight} holds numbers that are not finite; export an earlier checkpoint")
    # A block of Q8_0 has its scale, the largest number over 127, in float16.
    most = {"F16": _LARGEST_HALF, "Q8_0": 127 * _LARGEST_HALF}.get(one.kept.name, inf)
    if largest > most:
        raise PlaitError(
            f"{weight} holds {largest:g}, and {one.kept.name} ends at {most:g}; export with --dtype bfloat16"
        )


def _rope_divisors(shape: ModelShape) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert shape.rope is not None
    plain = [shape.rope_theta ** (-2 * pair / shape.head_width) for pair in range(shape.head_width // 2)]
    stretched = shape.rope.stretch(plain, shape.rope_theta, shape.sequence)
    return (np.array(plain) / np.array(stretched)).astype(np.float32)


def _is_turned(weight: str, architecture: Architecture) -> bool:
    """Whether a weight's rows are those of queries or keys that llama.cpp orders otherwise."""
    part, _, kind = within_layer(weight).rpartition(".")
    return architecture.rotates == "neighbors" and part in _QKV[:2] and kind == "weight"


def _reordered(values: Tensor, shape: ModelShape) -> Tensor:
    """Rows of whole heads in the order in which llama.cpp turns them: numbers i and i + half a head side by side."""
    return values.view(-1, 2, shape.head_width // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
