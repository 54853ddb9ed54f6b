"""The items of a step's time and of a device's memory by the names that people read, and what binds."""

from __future__ import annotations

from math import fsum

from plait.machines.cluster import Cluster
from plait.planner.problem.workload import PricedPrecision
from plait.planner.search.found import Search
from plait.planner.step_time.device_rates import peak_flops

TIME_NAMES = {
    "products": "matrix products of the layers",
    "scores": "attention",
    "stream": "passes over memory (norms, activations)",
    "head": "the head and the loss",
    "recompute": "computing a second time",
    "tensor": "adding up matrices cut across devices",
    "context": "exchanging keys of cut sequences",
    "experts": "sending tokens to their experts",
    "passes": "handing over between pipeline stages",
    "parameters": "gathering parameters",
    "gradients": "adding up gradients",
    "bubble": "waiting for other pipeline stages",
    "host": "launching kernels",
    "optimizer": "the optimizer's update",
}
MEMORY_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered layers",
    "activations": "activations kept for the backward pass",
    "logits": "logits",
    "fixed": "buffers",
    "reserve": "the allocator's and the driver's own",
}
ROUNDING = 1e-12
"""Share of a step's time below which a difference of sums is rounding (`sum` rounds otherwise from Python 3.12 on)."""
BOTTLENECKS = {
    "arithmetic": ("products", "scores", "head", "recompute"),
    "memory bandwidth": ("stream", "optimizer"),
    "links": ("tensor", "context", "experts", "passes", "parameters", "gradients"),
    "the pipeline's waiting (bubble)": ("bubble",),
    "launching kernels": ("host",),
}
"""Possible bottlenecks, with the items of time that show them."""


def time_items(found: Search, index: int) -> dict[str, float]:
    """Seconds by item; the difference between the simulated pipeline and the closed form is added to the bubble."""
    priced = found.step_time(index)
    items = {name: float(getattr(priced, name)[0]) for name in TIME_NAMES}
    step_s = float(found.step_s[index])
    beyond = step_s - fsum(items.values())
    if abs(beyond) > ROUNDING * step_s:
        items["bubble"] += beyond
    return items


def memory_items(found: Search, index: int) -> dict[str, float]:
    """Bytes by item on the device with least room left; "reserve" is what allocator and driver take on top."""
    needed = found.memory(index)
    items = {name: float(getattr(needed, name)[0]) for name in MEMORY_NAMES if name != "reserve"}
    return items | {"reserve": found.bytes_per_device(index) - sum(items.values())}


def bottlenecks(items: dict[str, float]) -> list[tuple[str, float]]:
    """The bottlenecks, with their shares of the step, the largest first."""
    whole = sum(items.values())
    parts = [(what, sum(items[name] for name in names) / whole) for what, names in BOTTLENECKS.items()]
    return sorted(parts, key=lambda part: -part[1])


def message_seconds(found: Search, index: int) -> tuple[float, float]:
    """Seconds of a step's communication: what runs under arithmetic, and what devices wait for."""
    items = time_items(found, index)
    return float(found.step_time(index).hidden[0]), sum(items[name] for name in BOTTLENECKS["links"])


def model_flops_utilisation(found: Search, index: int) -> tuple[float, float]:
    """Model FLOPs utilisation: with all of attention's scores counted, and with the half that causal models use."""
    w = found.workload
    peak = cluster_peak_flops(found.cluster, w.precision)
    per_s = w.batch_tokens / float(found.step_s[index]) / peak
    return w.flops_per_token("full") * per_s, w.flops_per_token("causal") * per_s


def cluster_peak_flops(cluster: Cluster, precision: PricedPrecision) -> float:
    """Arithmetic peak of all devices of a cluster together, in FLOP/s."""
    return sum(island.n_devices * peak_flops(island.device, precision) for island in cluster.islands)
