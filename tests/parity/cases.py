"""The families of models and the mixes of strands that must all compute the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape, AdapterTarget, AdapterVariant, SavedModule
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.parts.unlike_layers import FullAttentionShape
from plait.model.rope_scaling import RopeScaling, WindowRope
from plait.model.shape import ModelShape, linear_layers

YARN = RopeScaling(kind="yarn", factor=4.0, original_sequence=16, table_scale=1.1)
LLAMA = ModelShape(layers=8, width=64, heads=8, kv_heads=4, head_width=8, ffn=128, vocabulary=256, sequence=64)
FAMILIES: dict[str, ModelShape] = {
    "llama": LLAMA,
    "gpt2": replace(LLAMA, kv_heads=8, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True),
    "qwen2": replace(LLAMA, kv_heads=2, bias="qkv", tied=True),
    "qwen3": replace(LLAMA, kv_heads=2, qk_norm=True, head_width=16),
    "multi-query": replace(LLAMA, kv_heads=1, activation="relu2", tied=True),
    "odd groups": replace(LLAMA, heads=12, kv_heads=3, width=96, bias="all", qk_norm=True),
    "windows": replace(LLAMA, windows=(0, 16) * 4, bias="attention", rope=YARN),
    "scaled": replace(
        LLAMA, windows=(16,) * 8, bias="feedforward", positions="learned", learned_positions=80,
        attention_scale="head and layer", tied=True,
    ),
    "normed twice": replace(
        LLAMA, kv_heads=2, head_width=16, qk_norm=True, norm_places="both", norm_weight="one plus", activation="geglu",
        embedding_multiplier=8.0, attention_multiplier=0.2, windows=(16, 0) * 4, tied=True,
        rope=RopeScaling(kind="linear", factor=8.0), window_rope=WindowRope(theta=300.0),
    ),
    "multiplied": replace(
        LLAMA, norm_places="after", embedding_multiplier=3.0, residual_multiplier=0.3, logit_divisor=5.0,
        attention_multiplier=0.5, unrotated_layers=(3, 7), bias="all", tied=True,
    ),
    "partly rotated": replace(
        LLAMA, kv_heads=2, bias="qkv", rotary_width=4, rotary_pairs="neighbors", query_growth=0.3, query_growth_after=8,
        rope=RopeScaling(
            kind="longrope", factor=2.0, original_sequence=32, table_scale=1.1, short_factors=(1.0, 2.0),
            long_factors=(2.0, 5.0),
        ),
    ),
    "capped": replace(
        LLAMA, kv_heads=2, head_width=16, norm_places="both", norm_weight="one plus", activation="geglu", tied=True,
        attention_cap=0.4, logit_cap=0.8, windows=(16, 0) * 4,
    ),
    "sinks": replace(LLAMA, kv_heads=2, attention_sinks=True, windows=(16, 0) * 4, bias="attention", rope=YARN),
    "unlike layers": replace(
        LLAMA, kv_heads=4, qk_norm=True, value_norm=True, norm_places="both", activation="geglu", tied=True,
        attention_multiplier=1.0, embedding_multiplier=8.0, logit_cap=0.8, windows=(16, 0) * 4, layer_multipliers=True,
        rope=RopeScaling(kind="proportional", factor=1.0, rotated_share=0.5), window_rope=WindowRope(theta=300.0),
        full_attention=FullAttentionShape(head_width=16, kv_heads=1, values="keys"),
    ),
}  # fmt: skip
"""Between them: biases, tied heads, grouped and single key/value heads, norms of queries and keys, windows, stretched
rotary positions, tables longer than a sequence; the parts of Gemma 3 and 4, Granite, OLMo, GLM-4, Phi 3 and
Ministral 3."""
NOT_EVERYWHERE: dict[str, ModelShape] = {
    "shared keys": replace(
        FAMILIES["unlike layers"], layer_input_width=8, shared_kv_layers=4, shared_kv_ffn=256,
        full_attention=FullAttentionShape(head_width=16, kv_heads=2),
    ),
    "layer inputs": replace(FAMILIES["qwen3"], activation="geglu", layer_input_width=8),
    "linear attention": replace(
        FAMILIES["qwen3"], norm_weight="one plus", attention_gate=True, rotary_width=8, bias="attention",
        delta=DeltaAttentionShape(
            layers=(0, 1, 2, 4, 5, 6), key_heads=4, value_heads=8, key_width=8, value_width=8, taps=4
        ),
    ),
}  # fmt: skip
"""Families that some layouts cannot carry: no pipeline parts layers that share keys or have inputs of their own, and
`context` does not cut the sequences of linear attention."""

EVERY_DAY: dict[str, tuple[str, Layout]] = {
    "replicate": ("gpt2", Layout(replicate=3)),
    "shard": ("qwen2", Layout(shard=2)),
    "shard parameters": ("gpt2", Layout(shard=2, shard_what="parameters")),
    "shard gradients": ("llama", Layout(shard=2, shard_what="gradients")),
    "shard master weights": ("gpt2", Layout(shard=2, shard_what="master-weights")),
    "pipeline × shard master weights": (
        "llama",
        Layout(pipeline=2, stage_layers=(3, 5), shard=2, shard_what="master-weights"),
    ),
    "tensor": ("qwen3", Layout(tensor=2)),
    "tensor beyond kv heads": ("multi-query", Layout(tensor=4)),
    "context": ("gpt2", Layout(context=2)),
    "pipeline, unequal": ("qwen3", Layout(pipeline=2, stage_layers=(5, 3))),
    "pipeline, tied": ("qwen2", Layout(pipeline=2, stage_layers=(4, 4), schedule="gpipe")),
    "interleaved": ("gpt2", Layout(pipeline=2, stage_layers=(2, 3, 2, 1), schedule="interleaved")),
    "zero-bubble": ("gpt2", Layout(pipeline=2, stage_layers=(4, 4), schedule="zero-bubble", recompute="full")),
    "shard × tensor": ("gpt2", Layout(shard=2, tensor=2, recompute="selective")),
    "context × tensor": ("qwen2", Layout(context=2, tensor=2)),
    "windows, context × tensor": ("windows", Layout(context=2, tensor=2)),
    "windows, pipeline × context": ("scaled", Layout(pipeline=2, stage_layers=(4, 4), context=2)),
    "pipeline × shard": ("llama", Layout(pipeline=2, stage_layers=(3, 5), shard=2)),
    "normed twice, context × tensor": ("normed twice", Layout(context=2, tensor=2)),
    "normed twice, parameters": ("normed twice", Layout(shard=2, shard_what="parameters", recompute="full")),
    "multiplied, pipeline × tensor": ("multiplied", Layout(pipeline=2, stage_layers=(5, 3), tensor=2)),
    "multiplied, copies": ("multiplied", Layout(replicate=2)),
    "partly rotated, shard × tensor": ("partly rotated", Layout(shard=2, tensor=2)),
    "partly rotated, context": ("partly rotated", Layout(context=2)),
    "capped, context × tensor": ("capped", Layout(context=2, tensor=2)),
    "sinks, context × tensor": ("sinks", Layout(context=2, tensor=2)),
    "sinks, parameters": ("sinks", Layout(shard=2, shard_what="parameters", recompute="full")),
    "unlike layers, context × tensor": ("unlike layers", Layout(context=2, tensor=2)),
    "unlike layers, pipeline": ("unlike layers", Layout(pipeline=2, stage_layers=(5, 3), schedule="zero-bubble")),
    "shared keys, tensor": ("shared keys", Layout(tensor=2)),
    "shared keys, tensor beyond kv heads": ("shared keys", Layout(tensor=4)),
    "shared keys, context": ("shared keys", Layout(context=2, recompute="selective")),
    "shared keys, parameters": ("shared keys", Layout(shard=2, shard_what="parameters", recompute="full")),
    "shared keys, shard × tensor": ("shared keys", Layout(shard=2, tensor=2, shard_what="parameters")),
    "shared keys, context × tensor": ("shared keys", Layout(context=2, tensor=2, recompute="full")),
    "layer inputs, replicate × shard": ("layer inputs", Layout(replicate=2, shard=2)),
    "linear attention, replicate": ("linear attention", Layout(replicate=2, recompute="full")),
    "linear attention, tensor": ("linear attention", Layout(tensor=2)),
    "linear attention, parameters": ("linear attention", Layout(shard=2, shard_what="parameters")),
    "linear attention, shard × tensor": ("linear attention", Layout(shard=2, tensor=2, recompute="selective")),
    "linear attention, pipeline": ("linear attention", Layout(pipeline=2, stage_layers=(5, 3), schedule="zero-bubble")),
    "linear attention, interleaved": (
        "linear attention",
        Layout(pipeline=2, stage_layers=(2, 3, 2, 1), schedule="interleaved"),
    ),
    "linear attention, pipeline × tensor": ("linear attention", Layout(pipeline=2, stage_layers=(3, 5), tensor=2)),
}

EACH_KIND = (
    "replicate", "shard", "shard parameters", "shared keys, tensor", "linear attention, tensor",
    "tensor", "context", "pipeline, unequal", "pipeline, tied", "interleaved",
    "zero-bubble", "pipeline × shard",
)  # fmt: skip
"""The layouts that `make test` tries: each kind of parallelism, each schedule, and a mix."""

UNEQUAL: dict[str, tuple[str, Layout, tuple[int, ...]]] = {
    "replicate": ("gpt2", Layout(replicate=2), (3, 1)),
    "shard": ("qwen2", Layout(shard=2), (3, 1)),
    "shard parameters": ("gpt2", Layout(shard=2, shard_what="parameters"), (3, 1)),
    "replicate × pipeline": ("qwen3", Layout(replicate=2, pipeline=2, stage_layers=(3, 1)), (3, 1)),
    "replicate × tensor": ("multi-query", Layout(replicate=2, tensor=2), (1, 3)),
    "shard × context": ("llama", Layout(shard=2, context=2), (3, 1)),
}
"""With the shares that the parts of the batch have of each step."""

_TWO = (3, 5)
_FOUR = (1, 2, 1, 2)
_VIRTUAL = (1, 2, 2, 1)
LONG: tuple[Layout, ...] = (
    Layout(replicate=5),
    Layout(replicate=2, shard=2),
    Layout(replicate=2, shard=2, shard_what="parameters"),
    Layout(shard=3),
    Layout(shard=3, shard_what="parameters", recompute="full"),
    Layout(shard=3, shard_what="gradients", recompute="full"),
    Layout(shard=2, tensor=2, shard_what="gradients"),
    Layout(shard=3, shard_what="master-weights"),
    Layout(shard=8),
    Layout(tensor=2, recompute="full"),
    Layout(tensor=4, recompute="selective"),
    Layout(context=4),
    Layout(context=3, recompute="selective"),
    Layout(context=8),
    Layout(replicate=2, tensor=2),
    Layout(replicate=3, tensor=2),
    Layout(shard=2, tensor=4),
    Layout(shard=2, tensor=2, shard_what="parameters"),
    Layout(replicate=2, shard=2, tensor=2),
    Layout(replicate=2, context=2),
    Layout(shard=2, context=2),
    Layout(shard=2, context=2, shard_what="parameters"),
    Layout(context=2, tensor=2, recompute="full"),
    Layout(context=2, tensor=4),
    Layout(context=4, tensor=2),
    Layout(shard=2, context=2, tensor=2),
    Layout(shard=2, context=2, tensor=2, shard_what="parameters"),
    Layout(pipeline=2, stage_layers=_TWO, replicate=2),
    Layout(pipeline=2, stage_layers=_TWO, tensor=2, schedule="gpipe"),
    Layout(pipeline=2, stage_layers=_TWO, tensor=2, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_VIRTUAL, tensor=2, schedule="interleaved"),
    Layout(pipeline=2, stage_layers=_TWO, context=2),
    Layout(pipeline=2, stage_layers=_TWO, context=2, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_VIRTUAL, context=2, schedule="interleaved"),
    Layout(pipeline=2, stage_layers=_TWO, shard=2, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_TWO, shard=2, shard_what="parameters"),
    Layout(pipeline=2, stage_layers=_VIRTUAL, shard=2, schedule="interleaved", shard_what="parameters"),
    Layout(pipeline=2, stage_layers=_VIRTUAL, shard=2, schedule="interleaved", shard_what="master-weights"),
    Layout(pipeline=3, stage_layers=(1, 3, 2)),
    Layout(pipeline=3, stage_layers=(1, 2, 1), schedule="zero-bubble", recompute="selective"),
    Layout(pipeline=4, stage_layers=_FOUR, schedule="zero-bubble"),
    Layout(pipeline=4, stage_layers=(1, 1, 2, 1, 1, 1, 2, 1), schedule="interleaved"),
    Layout(pipeline=4, stage_layers=_FOUR, tensor=2),
    Layout(pipeline=4, stage_layers=_FOUR, shard=2, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_TWO, replicate=2, shard=2),
    Layout(pipeline=2, stage_layers=_TWO, shard=2, tensor=2),
    Layout(pipeline=2, stage_layers=_TWO, context=2, tensor=2),
    Layout(pipeline=2, stage_layers=_TWO, shard=2, context=2, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_TWO, shard=2, tensor=2, shard_what="parameters", recompute="full"),
)


UNEQUAL_LONG: tuple[tuple[Layout, tuple[int, ...]], ...] = (
    (Layout(replicate=4), (1, 9, 2, 5)),
    (Layout(shard=3), (1, 1, 30)),
    (Layout(shard=3, shard_what="parameters", recompute="full"), (1, 1, 30)),
    (Layout(replicate=2, shard=2), (5, 3, 2, 1)),
    (Layout(replicate=2, shard=2, shard_what="parameters"), (5, 3, 2, 1)),
    (Layout(shard=2, context=2, shard_what="parameters"), (1, 4)),
    (Layout(replicate=2, shard=2, shard_what="gradients"), (5, 3, 2, 1)),
    (Layout(replicate=2, shard=2, shard_what="master-weights"), (5, 3, 2, 1)),
    (Layout(shard=2, tensor=2, shard_what="parameters"), (4, 1)),
    (Layout(pipeline=2, stage_layers=_TWO, replicate=2, schedule="zero-bubble"), (5, 1)),
    (Layout(pipeline=2, stage_layers=_VIRTUAL, shard=2, schedule="interleaved"), (5, 1)),
    (Layout(pipeline=2, stage_layers=_TWO, shard=2, shard_what="parameters"), (1, 5)),
    (Layout(pipeline=2, stage_layers=_TWO, shard=2, tensor=2), (3, 1)),
)
"""With so unequal ones that a part may have a single sequence, or fewer than there are micro-batches."""


def settings_of(layout: Layout) -> set[str]:
    """The axes of a layout and how each is carried out."""
    axes = ("replicate", "shard", "tensor", "context", "pipeline", "expert")
    how = {"shard": layout.shard_what, "pipeline": layout.schedule}
    used = {f"{axis} {how.get(axis, '')}" for axis in axes if getattr(layout, axis) > 1}
    return {*used, f"recompute {layout.recompute}"}


def by_turns(layouts: Sequence[Layout], kinds: Iterable[str], step: int) -> list[tuple[str, Layout]]:
    """Each layout with two kinds of models, by turns."""
    names = list(kinds)
    return [(names[(place + turn) % len(names)], layout) for place, layout in enumerate(layouts) for turn in (0, step)]


def covering(rows: Sequence[tuple[str, Layout]]) -> list[tuple[str, Layout]]:
    """As few of the rows as still have each layout, and each kind of model with each setting that it met in them."""
    left = {(kind, setting) for kind, layout in rows for setting in settings_of(layout)}
    layouts, chosen = list(dict.fromkeys(layout for _, layout in rows)), list[tuple[str, Layout]]()
    while layouts or left:
        at_hand = [row for row in rows if not layouts or row[1] == layouts[0]]
        best = max(at_hand, key=lambda row: sum((row[0], setting) in left for setting in settings_of(row[1])))
        left -= {(best[0], setting) for setting in settings_of(best[1])}
        chosen.append(best)
        layouts = layouts[1:]
    return chosen


def pairs() -> list[tuple[Layout, str]]:
    return [(layout, family) for family, layout in covering(by_turns(LONG, FAMILIES, 3))]


def adapted(
    family: str,
    *,
    targets: tuple[AdapterTarget, ...] = (),
    variant: AdapterVariant = "lora",
    rank: int = 3,
    saved: tuple[SavedModule, ...] = (),
    dropout: float = 0.0,
) -> ModelShape:
    """A family with an adapter beside these linear layers, or beside all of them, and with tables that are trained
    whole."""
    shape = {**FAMILIES, **NOT_EVERYWHERE}[family]
    targets = targets or linear_layers(shape)
    adapter = AdapterShape(
        rank=rank, alpha=5.0, targets=targets, variant=variant, modules_to_save=saved, dropout=dropout
    )
    return replace(shape, adapter=adapter)


ADAPTED_EVERY_DAY: dict[str, tuple[ModelShape, Layout]] = {
    "replicate": (adapted("gpt2"), Layout(replicate=3)),
    "shard": (adapted("qwen2", variant="rslora"), Layout(shard=2, recompute="full")),
    "shard parameters": (adapted("llama"), Layout(shard=4, shard_what="parameters")),
    "tensor beyond kv heads": (adapted("multi-query"), Layout(tensor=4)),
    "zero-bubble": (adapted("qwen3"), Layout(pipeline=2, stage_layers=(5, 3), schedule="zero-bubble")),
    "context × tensor": (adapted("odd groups"), Layout(context=2, tensor=2)),
    "tied tables, pipeline": (adapted("qwen2", saved=("embedding",)), Layout(pipeline=2, stage_layers=_TWO)),
    "dropout, context × tensor": (adapted("odd groups", dropout=0.3), Layout(context=2, tensor=2)),
}
_TABLES: tuple[SavedModule, ...] = ("embedding", "head")
ADAPTED_LONG: dict[str, tuple[ModelShape, Layout]] = {
    "all parts of a sequence": (adapted("windows"), Layout(context=4, recompute="selective")),
    "a few targets": (
        adapted("llama", targets=("attention.q", "attention.v")),
        Layout(tensor=2, shard=2, recompute="selective"),
    ),
    "values alone": (adapted("qwen2", targets=("attention.v",)), Layout(tensor=2, context=2, recompute="full")),
    "one target": (adapted("qwen3", targets=("feedforward.down",)), Layout(pipeline=2, stage_layers=_TWO, tensor=2)),
    "rank 1": (adapted("gpt2", rank=1), Layout(shard=2, tensor=2, shard_what="parameters")),
    "dropout, copies": (adapted("gpt2", dropout=0.1), Layout(replicate=3)),
    "dropout, zero-bubble": (
        adapted("qwen3", dropout=0.5),
        Layout(pipeline=2, stage_layers=_TWO, replicate=2, schedule="zero-bubble"),
    ),
    "dropout, interleaved × shard": (
        adapted("qwen2", dropout=0.2, saved=("embedding",)),
        Layout(pipeline=2, stage_layers=_VIRTUAL, shard=2, schedule="interleaved", recompute="selective"),
    ),
    "dropout, parameters × tensor, recomputed": (
        adapted("llama", dropout=0.3),
        Layout(shard=2, tensor=2, shard_what="parameters", recompute="full"),
    ),
    "tables, copies": (adapted("llama", saved=_TABLES), Layout(replicate=3)),
    "tables, shard × tensor": (adapted("qwen3", saved=_TABLES), Layout(shard=2, tensor=2)),
    "tables, parameters": (adapted("llama", saved=_TABLES), Layout(shard=3, shard_what="parameters")),
    "tables, context × zero-bubble": (
        adapted("qwen3", saved=_TABLES),
        Layout(pipeline=2, stage_layers=_TWO, context=2, schedule="zero-bubble"),
    ),
    "head alone, pipeline × parameters": (
        adapted("llama", saved=("head",)),
        Layout(pipeline=2, stage_layers=_TWO, shard=2, shard_what="parameters"),
    ),
    "embedding alone, interleaved": (
        adapted("llama", saved=("embedding",)),
        Layout(pipeline=2, stage_layers=_VIRTUAL, tensor=2, schedule="interleaved"),
    ),
    "tied tables, parameters × tensor": (
        adapted("qwen2", saved=("embedding",)),
        Layout(shard=2, tensor=2, shard_what="parameters", recompute="full"),
    ),
    "tied tables, pipeline of copies": (
        adapted("gpt2", saved=("embedding",)),
        Layout(pipeline=2, stage_layers=_TWO, replicate=2),
    ),
    "tied ends": (adapted("qwen2"), Layout(pipeline=2, stage_layers=_TWO)),
    "normed twice": (adapted("normed twice"), Layout(context=2, tensor=2)),
    "multiplied": (adapted("multiplied"), Layout(pipeline=2, stage_layers=_TWO, tensor=2)),
    "shared keys": (adapted("shared keys"), Layout(shard=2, tensor=2, recompute="selective")),
    "linear attention": (adapted("linear attention"), Layout(pipeline=2, stage_layers=_TWO, tensor=2)),
    "unlike layers": (adapted("unlike layers"), Layout(pipeline=2, stage_layers=_TWO, context=2)),
    "interleaved": (adapted("gpt2"), Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved")),
    "replicate × parameters": (adapted("gpt2"), Layout(replicate=2, shard=2, shard_what="parameters")),
    "pipeline × parameters": (
        adapted("llama"),
        Layout(pipeline=2, stage_layers=_TWO, shard=2, shard_what="parameters", recompute="full"),
    ),
    "replicate × shard × tensor": (adapted("odd groups"), Layout(replicate=2, shard=2, tensor=2)),
    "shard × context × tensor": (adapted("llama"), Layout(shard=2, context=2, tensor=2, recompute="full")),
    "parameters × context × tensor": (
        adapted("gpt2", variant="rslora"),
        Layout(shard=2, context=2, tensor=2, shard_what="parameters"),
    ),
    "pipeline × shard × tensor": (
        adapted("qwen3"),
        Layout(pipeline=2, stage_layers=_TWO, shard=2, tensor=2, recompute="selective"),
    ),
    "pipeline × context × tensor": (adapted("scaled"), Layout(pipeline=2, stage_layers=_TWO, context=2, tensor=2)),
    "zero-bubble × shard × context": (
        adapted("qwen2"),
        Layout(pipeline=2, stage_layers=_TWO, shard=2, context=2, schedule="zero-bubble"),
    ),
}
ADAPTED_UNEQUAL: dict[str, tuple[ModelShape, Layout, tuple[int, ...]]] = {
    "shard": (adapted("qwen3"), Layout(shard=2), (3, 1)),
    "dropout": (adapted("qwen3", dropout=0.3), Layout(replicate=2), (3, 1)),
    "shard parameters": (adapted("qwen2"), Layout(shard=3, shard_what="parameters"), (1, 1, 30)),
    "zero-bubble": (
        adapted("gpt2"),
        Layout(pipeline=2, stage_layers=_TWO, replicate=2, schedule="zero-bubble"),
        (5, 1),
    ),
}
