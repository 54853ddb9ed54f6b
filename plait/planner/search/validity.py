"""Whether a layout can carry a model and a batch on a machine, or one sentence that says what to do."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import PlaitError
from plait.layout import Layout, conflict_sentence
from plait.machines.machine import Machine
from plait.model.names import Dim
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.shape import ModelShape
from plait.model.weights import active_ahead_products, active_layer_products
from plait.planner.problem.candidates import RECOMPUTE_MODES, SCHEDULES, SHARDED_STATES, Candidates
from plait.planner.problem.stage_partition import balanced_stages_by_cost, balanced_with_heads
from plait.units import counted

STAGES_WITHOUT_PIPELINE = (
    "layout.stage_layers and layout.virtual_stages cut a pipeline; set layout.pipeline above 1, too"
)
"""Why stages cannot be named where no pipeline is."""


def balanced_stages(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Layers of each stage that minimize the cost of the most expensive stage; the head counts with the last stage,
    heads in the middle and prediction ahead where they stand.

    Costs are those of the matrix products: looking up the embedding is all but free, the head is a product with the
    whole vocabulary.
    """
    if stages > shape.layers:
        raise PlaitError(
            f"a pipeline of {stages} stages needs as many layers, and the model has {shape.layers}; lower "
            "layout.pipeline or layout.virtual_stages, or raise model.layers"
        )
    layer, objectives = active_layer_products(shape) / shape.layers, shape.objectives
    head = shape.vocabulary * shape.width / layer
    end = head * (1 + objectives.ahead) + active_ahead_products(shape) / layer
    if objectives.heads:
        return balanced_with_heads((shape.layers, head, end), stages, objectives.heads)
    return balanced_stages_by_cost(shape.layers, stages, end)


def check_layout(layout: Layout, shape: ModelShape, *, sequence: int, batch_sequences: int) -> None:
    """Raise PlaitError where a layout cannot carry this model and batch exactly."""
    if reason := conflict_sentence(layout):
        raise PlaitError(reason)
    _check_tensor(layout.tensor, shape)
    _check_norm_width(layout.tensor, shape)
    _check_expert(layout, shape)
    if shape.delta is not None:
        _check_delta(layout, shape.delta)
    if layout.context > 1 and sequence % (2 * layout.context):
        raise PlaitError(
            f"layout.context = {layout.context} cuts each sequence into {2 * layout.context} equal pieces, and "
            f"train.sequence is {sequence}; choose a multiple of {2 * layout.context}"
        )
    _check_stages(layout, shape)
    if layout.pipeline > 1 and (shape.shared_kv_layers or shape.layer_input_width):
        raise PlaitError(
            f"layout.pipeline = {layout.pipeline} separates layers that share keys and values, or need inputs made of "
            "the embedding; choose layout.pipeline = 1, and layout.shard or layout.tensor to divide the model"
        )
    if (parallel := layout.data_parallel_degree) > batch_sequences:
        raise PlaitError(
            f"{parallel} workers cannot share {counted(batch_sequences, 'sequence')} a step: each needs one; raise "
            f"train.batch_tokens to {parallel} sequences or lower layout.replicate or layout.shard"
        )


def check_shares(shares: tuple[int, ...], layout: Layout, batch_sequences: int) -> None:
    """Raise PlaitError where named shares do not divide a step's sequences among the data-parallel
    ranks. Empty shares are equal ones, which `check_layout` has checked."""
    if not shares:
        return
    parts = layout.data_parallel_degree
    if len(shares) != parts:
        raise PlaitError(
            f"layout.shares = {list(shares)} should be {counted(parts, 'number')}, one for each of "
            f"replicate {layout.replicate} × shard {layout.shard}; change the shares or the degrees, or leave the "
            "shares out"
        )
    if min(shares) < 1:
        raise PlaitError(f"layout.shares = {list(shares)} leave a worker nothing to do; give each at least 1 sequence")
    if sum(shares) != batch_sequences:
        raise PlaitError(
            f"layout.shares add up to {sum(shares)}, and a step has {counted(batch_sequences, 'sequence')} "
            "(train.batch_tokens / "
            f"train.sequence); change a share, or set train.batch_tokens to {counted(sum(shares), 'sequence')}"
        )


def check_devices(layout: Layout, machine: Machine) -> None:
    """Raise PlaitError where GPUs would be left over or missing; workers on processors may be as many as are named."""
    if machine.has_accelerators and layout.world_size != machine.devices:
        raise PlaitError(
            f"the layout {layout} needs {counted(layout.world_size, 'GPU')}, and this machine has "
            f"{machine.devices}; name degrees "
            f"whose product is {machine.devices}, or choose GPUs with run.devices"
        )


def _check_tensor(tensor: int, shape: ModelShape) -> None:
    if shape.heads % tensor:
        fitting = [str(number) for number in range(1, shape.heads + 1) if shape.heads % number == 0]
        raise PlaitError(
            f"layout.tensor = {tensor} does not divide {counted(shape.heads, 'head')}; choose one of "
            f"{', '.join(fitting)}"
        )
    dims: tuple[Dim, ...] = ("ffn", "vocabulary", *(("expert_ffn",) if shape.mixture else ()))
    for dim in dims:
        if shape.size_of(dim) < tensor:
            raise PlaitError(
                f"layout.tensor = {tensor} is more than the model's {dim}, {shape.size_of(dim)}; "
                f"lower it or raise model.{dim}"
            )


def _check_expert(layout: Layout, shape: ModelShape) -> None:
    if layout.expert == 1:
        return
    if shape.mixture is None:
        raise PlaitError(
            f"layout.expert = {layout.expert} shares out experts, and the model has none; name model.experts, or take "
            "layout.expert out"
        )
    number = shape.mixture.experts
    if number % layout.expert:
        fitting = [str(n) for n in range(1, number + 1) if number % n == 0]
        raise PlaitError(
            f"layout.expert = {layout.expert} does not divide {number} experts; choose one of {', '.join(fitting)}"
        )


def _check_norm_width(tensor: int, shape: ModelShape) -> None:
    if tensor > 1 and shape.qk_norm and shape.qk_norm_width == "all heads":
        raise PlaitError(
            f"layout.tensor = {tensor} parts the heads, and this model norms the queries of all heads as one; choose "
            "layout.tensor = 1"
        )


def _check_delta(layout: Layout, delta: DeltaAttentionShape) -> None:
    if layout.context > 1:
        raise PlaitError(
            f"layout.context = {layout.context} cuts sequences, and the states of this model's linear attention pass "
            "from token to token; choose layout.context = 1"
        )
    if delta.key_heads % layout.tensor:
        fitting = [str(number) for number in range(1, delta.key_heads + 1) if delta.key_heads % number == 0]
        raise PlaitError(
            f"layout.tensor = {layout.tensor} does not divide the {delta.key_heads} key heads of linear attention; "
            f"choose one of {', '.join(fitting)}"
        )


def _check_stages(layout: Layout, shape: ModelShape) -> None:
    stages = layout.stage_layers
    if not stages:
        return
    if layout.pipeline == 1:
        raise PlaitError(STAGES_WITHOUT_PIPELINE)
    if len(stages) % layout.pipeline or sum(stages) != shape.layers:
        raise PlaitError(
            f"layout.stage_layers = {list(stages)} should be {layout.pipeline} numbers (or a multiple of it) that add "
            f"up to the model's {counted(shape.layers, 'layer')}; change them or leave them out"
        )
    if shape.adapter and min(stages) < 1:
        raise PlaitError(
            f"layout.stage_layers = {list(stages)} leave a worker without layers, and so without an adapter to train; "
            "give each stage at least 1"
        )
    if layout.virtual_stages > 1 and layout.schedule != "interleaved":
        raise PlaitError(
            f'{layout.virtual_stages} stages on a worker need layout.schedule = "interleaved", '
            f'not "{layout.schedule}"; change it, or give each worker one stage'
        )
    if layout.virtual_stages > 1 and shape.objectives.weights and layout.gathers_weights:
        raise PlaitError(
            "several stages on a worker use one output matrix for their heads, which "
            f'layout.shard_what = "{layout.shard_what}" '
            'gathers for each stage apart; choose layout.shard_what = "optimizer", or layout.schedule = "1f1b"'
        )
    if layout.virtual_stages == 1 and layout.schedule == "interleaved":
        raise PlaitError(
            'layout.schedule = "interleaved" needs several stages on each worker; set layout.virtual_stages = 2, or '
            'choose layout.schedule = "1f1b"'
        )


def layout_of_candidate(candidates: Candidates, index: int, stage_layers: tuple[int, ...]) -> Layout:
    """One candidate as the layout that runs; `stage_layers` only where it has a pipeline."""
    degrees = candidates.degrees(index)
    what = SHARDED_STATES[int(candidates.shard_what[index])]
    return replace(
        degrees,
        expert=int(candidates.expert[index]),
        shard_what="optimizer" if what == "nothing" else what,
        schedule=SCHEDULES[int(candidates.schedule[index])] if degrees.pipeline > 1 else "1f1b",
        stage_layers=stage_layers,
        recompute=RECOMPUTE_MODES[int(candidates.recompute[index])],
    )
