"""How a machine is used: workers and threads worth a measurement, and what a worker takes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from plait.cluster.topology import Machine
from plait.errors import PlaitError
from plait.layout import Layout
from plait.model.shape import ModelShape, parameter_count
from plait.plan.fit import check_devices, check_layout, layout_of, named_degrees
from plait.recipe.schema import RunConfig

CPU_MICRO_TOKENS = 4096
MICROS_PER_STAGE = 4
BYTES_PER_PARAMETER = 16
"""Weights, gradients and AdamW's two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Workers that somebody else started, each with so many threads."""

    workers: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to use a machine: a layout, threads a worker, and how long a step took so (None: not yet)."""

    layout: Layout
    threads: int
    step_s: float | None = None

    @property
    def workers(self) -> int:
        return self.layout.world_size


def candidate_splits(
    config: RunConfig, machine: Machine, batch: int, shape: ModelShape, why: list[str]
) -> tuple[Split, ...]:
    """The layouts worth a measurement; one when a degree was named or the devices decide. Raises PlaitError."""
    named = named_degrees(config)
    if named:
        layouts = [layout_of(config, shape, named)]
    elif machine.device == "cuda":
        layouts = [layout_of(config, shape, {"replicate": machine.devices})]
    else:
        powers = [2**k for k in range(machine.cores.bit_length()) if 2**k <= machine.cores]
        layouts = [layout_of(config, shape, {"replicate": n}) for n in sorted({*powers, machine.cores})]
    check_devices(layouts[0], machine)
    check_layout(layouts[0], shape, sequence=shape.sequence, batch_sequences=batch)
    if named and machine.device == "cpu" and layouts[0].world_size > machine.cores:
        why.append(f"{layouts[0].world_size} workers on {machine.cores} cores: as asked, though they will take turns")
    _check_memory(layouts[0], machine, shape)
    for key, axis in (("schedule", "pipeline"), ("shard_what", "shard")):
        if getattr(config.layout, key) != "auto" and layouts[0].degrees[axis] == 1:
            why.append(f"layout.{key} changes nothing: layout.{axis} is 1")
    fitting = [
        layout
        for layout in layouts
        if layout.world_size == 1
        or (layout.batch_parts <= batch and _resident_bytes(layout, shape) < 0.5 * machine.memory_bytes)
    ]
    kept = layouts if named or machine.device == "cuda" else fitting
    return tuple(Split(layout=one, threads=max(1, machine.cores // one.world_size)) for one in kept)


def _check_memory(layout: Layout, machine: Machine, shape: ModelShape) -> None:
    need = _resident_bytes(layout, shape)
    if machine.device == "cpu" and need > machine.memory_bytes:
        raise PlaitError(
            f"the layout {layout} needs {need / 2**30:.1f} GiB for weights and optimizer, and the machine has "
            f"{machine.memory_bytes / 2**30:.1f}; choose a smaller model.size, or fewer copies of it"
        )


def _resident_bytes(layout: Layout, shape: ModelShape) -> float:
    """Weights, gradients and moments over all workers together."""
    copies = layout.replicate * layout.context
    weights = layout.shard if layout.shard_what == "optimizer" else 1
    # Of 16 bytes a number 8 are moments, which `shard` splits in either way.
    return copies * parameter_count(shape) * BYTES_PER_PARAMETER * (1 + weights) / 2


def micro_sequences(config: RunConfig, machine: Machine, batch: int, layout: Layout, shape: ModelShape) -> int:
    """Sequences a worker takes at a time."""
    part = ceil(batch / layout.batch_parts)
    asked = config.layout.micro_sequences
    if asked != "auto":
        return min(asked, part)
    limit = _micro_limit(machine, layout, shape)
    if layout.pipeline > 1:
        # A pipeline idles (stages - 1) / (micro-batches + stages - 1) of its time (Huang et al. 2019).
        limit = min(limit, max(1, part // (MICROS_PER_STAGE * layout.pipeline)))
    return ceil(part / ceil(part / limit))


def _micro_limit(machine: Machine, layout: Layout, shape: ModelShape) -> int:
    """The most sequences at a time that a worker holds comfortably."""
    if machine.device == "cpu":
        return max(1, CPU_MICRO_TOKENS * layout.context // shape.sequence)
    # Activations of a layer kept for backward in bf16 with flash attention: about 34 bytes a token and width
    # (Korthikanti et al. 2022, arXiv 2205.05198), plus what SwiGLU keeps.
    parts = layout.pipeline * layout.tensor
    sharded = layout.shard if layout.shard_what == "parameters" else 1
    free = 0.8 * machine.memory_bytes - BYTES_PER_PARAMETER * parameter_count(shape) / (parts * sharded)
    per_sequence = shape.sequence * shape.layers * (34 * shape.width + 6 * shape.ffn) / (parts * layout.context)
    if free < per_sequence:
        raise PlaitError(
            f"a GPU of {machine.memory_bytes / 2**30:.0f} GiB does not hold this model, its optimizer and one "
            "sequence; choose a smaller model.size or train.sequence, or name a layout that splits the model"
        )
    return max(1, min(int(free / per_sequence), 65536 * layout.context // shape.sequence))
