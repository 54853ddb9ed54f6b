"""How a machine is used: workers and threads worth a measurement, and what a worker takes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from plait.cluster.topology import Machine
from plait.errors import PlaitError
from plait.model.shape import ModelShape, parameter_count
from plait.recipe.schema import RunConfig

CPU_MICRO_TOKENS = 4096


BYTES_PER_PARAMETER = 16
"""Weights, gradients and AdamW's two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to use a machine: so many workers with so many threads, and how long a step took so (None: not yet)."""

    workers: int
    threads: int
    step_s: float | None = None


def candidate_splits(
    config: RunConfig, machine: Machine, batch: int, shape: ModelShape, why: list[str]
) -> tuple[Split, ...]:
    """The numbers of workers worth a measurement; one when it was named or the devices decide."""
    named = config.layout.replicate
    if machine.device == "cuda":
        if named not in ("auto", machine.devices):
            raise PlaitError(
                f"layout.replicate = {named}, but this machine has {machine.devices} GPUs; choose {machine.devices}, "
                "or hide the others with CUDA_VISIBLE_DEVICES"
            )
        candidates = [machine.devices]
    else:
        powers = [2**k for k in range(machine.cores.bit_length()) if 2**k <= machine.cores]
        candidates = sorted({*powers, machine.cores}) if named == "auto" else [named]
    if candidates[0] > batch:
        raise PlaitError(
            f"{candidates[0]} workers cannot share {batch} sequences a step: each needs one; raise train.batch_tokens "
            f"to {candidates[0]} sequences or lower layout.replicate"
        )
    if named != "auto" and machine.device == "cpu" and named > machine.cores:
        why.append(f"{named} workers on {machine.cores} cores: as asked, though they will take turns")
    need = BYTES_PER_PARAMETER * parameter_count(shape)
    if machine.device == "cpu" and need * candidates[0] > machine.memory_bytes:
        raise PlaitError(
            f"{candidates[0]} copies of this model need {need * candidates[0] / 2**30:.1f} GiB for weights and "
            f"optimizer, and the machine has {machine.memory_bytes / 2**30:.1f}; choose a smaller model.size"
        )
    fitting = [n for n in candidates if n <= batch and (n == 1 or need * n < 0.5 * machine.memory_bytes)]
    workers = fitting if machine.device == "cpu" and named == "auto" else candidates
    return tuple(Split(workers=n, threads=max(1, machine.cores // n)) for n in workers)


def micro_sequences(config: RunConfig, machine: Machine, batch: int, workers: int, shape: ModelShape) -> int:
    """Sequences a worker takes at a time."""
    part = ceil(batch / workers)
    asked = config.layout.micro_sequences
    if asked != "auto":
        return min(asked, part)
    if machine.device == "cpu":
        limit = max(1, CPU_MICRO_TOKENS // shape.sequence)
    else:
        # Activations of a layer kept for backward in bf16 with flash attention: about 34 bytes a token and width
        # (Korthikanti et al. 2022, arXiv 2205.05198), plus what SwiGLU keeps.
        free = 0.8 * machine.memory_bytes - BYTES_PER_PARAMETER * parameter_count(shape)
        per_sequence = shape.sequence * shape.layers * (34 * shape.width + 6 * shape.ffn)
        if free < per_sequence:
            raise PlaitError(
                f"a GPU of {machine.memory_bytes / 2**30:.0f} GiB does not hold this model, its optimizer and one "
                "sequence; choose a smaller model.size or train.sequence"
            )
        limit = max(1, min(int(free / per_sequence), 65536 // shape.sequence))
    return ceil(part / ceil(part / limit))
