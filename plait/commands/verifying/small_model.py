"""Shrinks a recipe's model and layout to a small run that can go wrong in all the ways in which the large one can.

Pure: values in, values out.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from plait.commands.verifying.small_parts import (
    SHRUNK_SHARING,
    longrope_for,
    shrunk_delta,
    shrunk_latent,
    shrunk_mixture,
    shrunk_objectives,
    shrunk_positions,
    shrunk_unlike_layers,
    widened_latent,
)
from plait.devices import DeviceName
from plait.layout import Layout
from plait.model.parts.objectives import OBJECTIVE_KEYS, objectives_of_keys
from plait.model.requested_size import shape_of_size
from plait.model.shape import ModelShape, parameter_count
from plait.model.sizes import MODEL_SIZES, explicit_shape
from plait.partition.execution import Precision, RunArithmetic
from plait.planner.derive import published_rules
from plait.planner.derive.adapters import adapter_for
from plait.planner.derive.hyperparameters import with_usual_numbers
from plait.planner.plan import Cadence, Machines, OptimizerKind, Placement, Plan, TrainingJob
from plait.planner.resolve.named import check_schedule, layout_of, named_degrees
from plait.planner.search.validity import check_layout, check_shares
from plait.recipe.finetune import ADAPTER_METHODS
from plait.recipe.schema import RunConfig
from plait.units import Amount, Every

STEPS_PER_OPTIMIZER = 5
"""Number of updates by plain gradient descent, and then of updates by the run's optimizer."""
SHRUNK_WINDOW = 3
"""Tokens that a query of a windowed layer sees in a small model."""
SHRUNK_RANK = 3
"""Rank of a small model's adapters: fewer rows than many layouts have ranks."""
CHECK_LR = 0.01
CHECK_CLIP = 0.25
"""Below the norms of a small model's first gradients, so that clipping acts."""


def requested_layout(config: RunConfig, base: ModelShape | None = None) -> tuple[ModelShape, Layout]:
    """The model and the layout that a recipe names; raises PlaitError for what cannot be.

    Without any named degree the layout has two data-parallel replicas. `base` is the shape of the model that the run
    goes on from.
    """
    degrees = named_degrees(config) or Layout(replicate=2)
    check_schedule(config, degrees)
    shape = requested_shape(config, degrees) if base is None else _base_shape(config, base)
    layout = layout_of(config, shape, degrees)
    requested, shares = config.train.batch_tokens, requested_shares(config)
    batch = (sum(shares) or layout.data_parallel_degree) if requested == "auto" else requested // shape.sequence
    check_layout(layout, shape, sequence=shape.sequence, batch_sequences=batch)
    check_shares(shares, layout, batch)
    return shape, layout


def requested_shares(config: RunConfig) -> tuple[int, ...]:
    """The shares that a recipe names; empty where they are equal."""
    return () if config.layout.shares == "auto" else config.layout.shares


def requested_shape(config: RunConfig, degrees: Layout) -> ModelShape:
    """The shape that the recipe spells out; where it leaves the size to the budget, the smallest that can be cut so."""
    model, train = config.model, config.train
    named = model.model_dump(exclude={"from_", "size", "vocabulary"})
    explicit = {key: value for key, value in named.items() if value != "auto" and key not in OBJECTIVE_KEYS}
    vocabulary = 2048 if model.vocabulary == "auto" else model.vocabulary
    sequence = 1024 if train.sequence == "auto" else train.sequence
    if model.size == "auto" and {"layers", "width"} <= explicit.keys():
        shape = explicit_shape(vocabulary=vocabulary, sequence=sequence, **explicit)
    else:
        size = _fitting_size(degrees) if model.size == "auto" else model.size
        shape = shape_of_size(size, vocabulary=vocabulary, sequence=sequence, **explicit)
    if train.sequence == "auto":
        shape = replace(shape, sequence=published_rules.usual_sequence_length(parameter_count(shape)))
    return replace(shape, objectives=objectives_of_keys(named))


def _base_shape(config: RunConfig, base: ModelShape) -> ModelShape:
    """A trained model's shape, for the sequences that the recipe names or that are usual for its size, with the adapter
    that the recipe asks for."""
    usual, requested = published_rules.usual_sequence_length(parameter_count(base)), config.train.sequence
    shape = replace(base, sequence=min(usual, base.sequence) if requested == "auto" else requested)
    if config.finetune.method not in ADAPTER_METHODS:
        return shape
    return replace(shape, adapter=adapter_for(config.finetune, shape, 0).value)


def _fitting_size(degrees: Layout) -> str:
    tensor, pipeline = degrees.tensor, degrees.pipeline
    fitting = [name for name, size in MODEL_SIZES.items() if size.heads % tensor == 0 and size.layers >= 2 * pipeline]
    return fitting[0] if fitting else next(iter(MODEL_SIZES))


def shrunk_layout(layout: Layout) -> Layout:
    """The layout with one or two layers in each stage: unequal stages stay unequal."""
    least = min((number for number in layout.stage_layers if number), default=0)
    return replace(layout, stage_layers=tuple(min(number, 1 + (number > least)) for number in layout.stage_layers))


def shrunk_shape(shape: ModelShape, layout: Layout) -> ModelShape:
    """A narrow model with the same parts, whose heads fall on ranks as the large one's do. `layout` is shrunk, too."""
    heads, kv_heads = _shrunk_heads(shape, layout.tensor)
    head_width = 4
    width = heads * head_width
    if shape.heads * shape.head_width != shape.width:
        width += 6
    # Where the large model's ranks have unequal parts, so have the small one's; the vocabulary's always are.
    ffn = 4 * layout.tensor if shape.ffn % layout.tensor == 0 else 4 * layout.tensor + 1
    layers = sum(layout.stage_layers) or (2 * SHRUNK_SHARING if shape.shared_kv_layers else 2)
    sequence = 2 * layout.context * max(2, -(-6 // layout.context)) + (layout.context == 1)
    return replace(
        shape,
        layers=layers,
        mixture=shrunk_mixture(shape.mixture, layers, ffn, layout.expert) if shape.mixture else None,
        objectives=shrunk_objectives(shape.objectives, shape.layers, layers),
        windows=_shrunk_windows(shape, layers),
        **shrunk_positions(shape, layers, head_width),
        **shrunk_unlike_layers(shape, kv_heads, head_width, 4 * ffn),
        learned_positions=sequence + 3 if shape.learned_positions else 0,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        ffn=2 * ffn,
        vocabulary=8 * layout.tensor + 45,
        sequence=sequence,
        adapter=replace(shape.adapter, rank=min(shape.adapter.rank, SHRUNK_RANK)) if shape.adapter else None,
        latent=shrunk_latent(shape.latent, shape.head_width) if shape.latent else None,
        delta=shrunk_delta(shape.delta, shape.layers, layers, layout.tensor) if shape.delta else None,
    )


def _shrunk_windows(shape: ModelShape, layers: int) -> tuple[int, ...]:
    """Windows shorter than the small model's sequences: in every layer, or in every second one where the large model
    has layers without, and in the last one if the large model has one there."""
    if not any(shape.windows):
        return ()
    first = (layers + (shape.windows[-1] > 0)) % 2
    return tuple(SHRUNK_WINDOW * (min(shape.windows) > 0 or (layer + first) % 2 == 0) for layer in range(layers))


def plan_for_device(plan: Plan, device: DeviceName, precision: Precision) -> Plan:
    """A shrunk plan on a machine's own devices: with dims large enough for the kernels that large models use."""
    if device == "cpu":
        return replace(plan, arithmetic=replace(plan.arithmetic, precision=precision))
    old = plan.job.shape
    sequence = 64 * plan.placement.layout.context
    shape = replace(
        old,
        width=8 * old.width,
        head_width=8 * old.head_width,
        ffn=8 * old.ffn,
        rotary_width=8 * old.rotary_width,
        full_attention=replace(full, head_width=8 * full.head_width) if (full := old.full_attention) else None,
        delta=replace(delta, key_width=8 * delta.key_width, value_width=8 * delta.value_width)
        if (delta := old.delta)
        else None,
        layer_input_width=8 * old.layer_input_width,
        shared_kv_ffn=8 * old.shared_kv_ffn,
        **longrope_for(old, 8 * (old.rotary_width or old.head_width)),
        mixture=replace(old.mixture, expert_ffn=8 * old.mixture.expert_ffn) if old.mixture else None,
        latent=widened_latent(old.latent, 8) if old.latent else None,
        vocabulary=8 * old.vocabulary,
        learned_positions=sequence + 3 if old.learned_positions else 0,
        sequence=sequence,
    )
    return replace(
        plan,
        machines=replace(plan.machines, device=device),
        arithmetic=replace(plan.arithmetic, precision=precision),
        job=replace(plan.job, shape=shape, sequence=sequence),
    )


def _shrunk_heads(shape: ModelShape, tensor: int) -> tuple[int, int]:
    """The fewest query and key/value heads for which queries, and ranks, share keys if they do in the large model."""
    group = min(2, shape.heads // shape.kv_heads)
    if shape.kv_heads % tensor == 0:
        kv_heads = max(tensor, min(2, shape.kv_heads))
    else:
        kv_heads = shape.kv_heads if shape.kv_heads <= tensor else 3 if tensor % 3 else 5
    return lcm(tensor, group * kv_heads), kv_heads


def shrunk_shares(shares: tuple[int, ...], batch_sequences: int) -> tuple[int, ...]:
    """The shares scaled to a smaller batch, in which every rank still has a sequence."""
    small = [1] * len(shares)
    for _ in range(batch_sequences - len(small) if shares else 0):
        neediest = max(range(len(small)), key=lambda part: shares[part] / (small[part] + 1))
        small[neediest] += 1
    return tuple(small)


def shrunk_plan(
    config: RunConfig,
    shape: ModelShape,
    layout: Layout,
    shares: tuple[int, ...] = (),
    optimizer: OptimizerKind | None = None,
) -> Plan:
    """A plan of ten steps in float64, one thread per rank; its shares and micro-batches always have unequal sizes.
    Without an `optimizer` it has the recipe's, AdamW if that is "auto"."""
    named = "adamw" if config.optimizer.kind == "auto" else config.optimizer.kind
    small = shrunk_layout(layout)
    tiny = shrunk_shape(shape, small)
    micros, parts = max(3, small.pipeline), small.data_parallel_degree
    # No multiple of the parts, and a part of it no multiple of a micro-batch: neither comes out equal.
    batch_sequences = parts * (2 * micros - 1) - parts // 2
    return Plan(
        job=TrainingJob(
            shape=tiny,
            sequence=tiny.sequence,
            batch_sequences=batch_sequences,
            budget=Amount(2 * STEPS_PER_OPTIMIZER, "steps"),
            steps=2 * STEPS_PER_OPTIMIZER,
            optimizer=with_usual_numbers(
                config.optimizer,
                optimizer or named,
                lr=CHECK_LR,
                clip=None if config.optimizer.clip == "never" else CHECK_CLIP,
                warmup_steps=2,
            ),
            corpus="",
            corpus_hash="",
            documents="mask",
        ),
        placement=Placement(
            layout=small,
            threads=1,
            micro_sequences=2,
            micro_limits=tuple(2 - part % 2 for part in range(parts)) if parts > 1 else (),
            shares=shrunk_shares(shares, batch_sequences),
        ),
        arithmetic=RunArithmetic(precision="float64", compile="off"),
        machines=Machines(device="cpu", peak_flops=None, fingerprint={}),
        cadence=Cadence(
            checkpoint_every=Every(2 * STEPS_PER_OPTIMIZER, "steps"),
            checkpoint_keep=1,
            report_every_steps=1,
            evaluate_every_steps=0,
        ),
        forecast=None,
        step_s=None,
        recipe_hash="",
        reasons=(),
    )
