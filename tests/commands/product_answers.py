"""What a processor's workers answer when they are asked how fast and how exact their products are."""

from __future__ import annotations

from collections.abc import Mapping

from plait.launch.values.job import Job, Message
from plait.machines.machine import Machine
from plait.machines.measured import Arithmetic, ProductRate, ProductRates

FLOAT32, ROUNDED = 2e-7, 2e-3
"""Errors of float32 products, and of products of bfloat16 factors."""


def rates_of(machine: Machine, gains: Mapping[Arithmetic, float], error: float = FLOAT32) -> ProductRates:
    """Rates of a worker with one of the machine's cores, by `gains` over 1e11 FLOP/s; oneDNN makes this `error`."""
    errors: dict[Arithmetic, float] = {"default": FLOAT32, "onednn": error, "bf16": ROUNDED}
    speeds: dict[Arithmetic, float] = {"default": 1.0, **gains}
    return ProductRates(
        machine=machine.digest(),
        workers=machine.cores,
        library="MKL",
        rates={
            name: ProductRate(flops=1e11 * gain, error=errors[name], error_ratio=errors[name] / FLOAT32)
            for name, gain in speeds.items()
        },
    )


def product_message(job: Job, *hosts: ProductRates) -> Message:
    """The answer of all workers of a job; `hosts` have equally many."""
    ranks = [hosts[rank * len(hosts) // job.world_size] for rank in range(job.world_size)]
    return Message(rank=0, kind="products", values={"ranks": [one.to_values() for one in ranks]})
