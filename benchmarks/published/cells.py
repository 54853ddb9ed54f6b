"""Cells of the tables of published runs as numbers, hardware and layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from plait.layout import Recompute
from plait.machines.catalog import Device, Link, find_device, find_link
from plait.machines.cluster import Cluster, Island
from plait.planner.problem.candidates import ShardedState
from plait.planner.problem.workload import PricedPrecision

Row = Mapping[str, str]

HARDWARE = (
    ("96gb hbm2e", "H100 96GB"),
    ("h100.*pcie", "H100 PCIe"),
    ("h100 nvl", "H100 NVL"),
    ("gh200", "H200"),
    ("a40(?!0)", "RTX A6000"),
    ("mi250", "MI250X"),
    ("a100.*pcie.*40gb", "A100 PCIe 40GB"),
    ("a100.*pcie", "A100 PCIe"),
    ("a100.*40gb", "A100 40GB"),
    ("a100", "A100 80GB"),
    ("v100.*(sxm3|32gb)", "V100 32GB"),
    ("tpu v7x|ironwood", "TPU v7x"),
    (r"\b((?:gb|[abhv])\d{2,3}|l4|l40s|a10g|mi\d{3}x|[345]0[6-9]0(?: ti)?|tpu v\d[ep]?)\b", r"\1"),
)
"""What a hardware cell says, the first match counting, and the catalogue's name for it."""

BETWEEN_BYTES_PER_S = 25e9
"""Network card per device where a row of several nodes does not tell: 200 Gbit/s, the commonest of these tables."""
BETWEEN_REACHED = 0.73
"""Of a card's line rate (sweeps of all-reduces over four nodes, stas00/ml-engineering)."""
BETWEEN_LATENCY_S = 8e-6


def number(row: Row, column: str) -> float | None:
    """A cell as a number; None where it is blank or says nothing countable."""
    try:
        return float(row.get(column) or "")
    except ValueError:
        return None


def count(row: Row, column: str) -> int | None:
    """A cell as a whole number of at least 1, else None."""
    value = number(row, column)
    return int(value) if value and value >= 1 else None


def is_tpu(row: Row) -> bool:
    """Whether the hardware says TPU."""
    return "tpu" in row["hardware"].lower()


def is_sparse(row: Row) -> bool:
    """Whether the row is a mixture of experts: an expert axis, or notes that say so."""
    return (count(row, "ep") or 1) > 1 or bool(re.search(r"\bmoe\b", row["notes"].split("MoE: ffn")[0], re.IGNORECASE))


def published_device(row: Row) -> Device:
    """The catalogue's device of a row."""
    return _device_named(row["hardware"].lower())


@cache
def _device_named(text: str) -> Device:
    for pattern, name in HARDWARE:
        if found := re.search(pattern, text):
            return find_device(found.expand(name))
    return find_device(text)


def published_cluster(row: Row) -> Cluster:
    """The machines of a row: equal nodes, a card for each device."""
    chosen = published_device(row)
    devices = count(row, "n_devices") or 64
    per_node = min(count(row, "gpus_per_node") or chosen.per_node or 8, devices)
    island = Island(
        device=chosen, per_node=per_node, nodes=-(-devices // per_node), inside=find_link(chosen.inside), speed=1.0
    )
    return Cluster(name=row["id"], islands=(island,), between=published_between(row, per_node))


def published_between(row: Row, per_node: int) -> Link:
    """The network between nodes, from the cell's words."""
    rate, reached = _card(row.get("inter_bw") or "", per_node)
    return Link(
        name="network",
        bytes_per_s=rate,
        latency_s=BETWEEN_LATENCY_S,
        reached=reached,
        all_reduce_reached=reached,
        shape="switch",
        source="the row",
    )


def _card(text: str, per_node: int) -> tuple[float, float]:
    if found := re.search(r"~?([\d.]+)\s*Gbps/node achieved", text):
        return float(found[1]) * 1e9 / 8 / per_node, 1.0
    if found := re.search(r"([\d.]+)\s*GB/s per GPU", text) or re.search(r"\(([\d.]+)\s*GB/s", text):
        return float(found[1]) * 1e9, BETWEEN_REACHED
    if found := re.search(r"([\d.]+)\s*Gbps/node", text):
        return float(found[1]) * 1e9 / 8 / per_node, BETWEEN_REACHED
    if found := re.search(r"(\d+)x\s*(\d+)\s*GB/s", text):
        return float(found[2]) * 1e9, BETWEEN_REACHED
    if found := re.search(r"(\d+)x\s*[A-Za-z-]*\s*(\d+)", text):
        return float(found[1]) * float(found[2]) * 1e9 / 8 / per_node, BETWEEN_REACHED
    if found := re.search(r"([\d.]+)\s*Gb/s per GPU", text):
        return float(found[1]) * 1e9 / 8, BETWEEN_REACHED
    if found := re.search(r"([\d.]+)\s*Gb(?:it/s|/s|ps)?\b", text):
        return float(found[1]) * 1e9 / 8 / per_node, BETWEEN_REACHED
    if "DCN" in text:
        return 6.25e9, BETWEEN_REACHED  # 25 GB/s for each host of four chips (scaling-book)
    return BETWEEN_BYTES_PER_S, BETWEEN_REACHED


def published_precision(row: Row) -> PricedPrecision:
    """What the linear layers multiply in."""
    text = row["precision"].lower()
    if "quantised run" in row["notes"]:  # the table's own word on a rate that its precision cannot reach
        return "fp8"
    if "rowwise" in text:  # scaled by row, fp8 gained nothing over bf16 in torchtitan's own tables of that time
        return "bf16"
    for mark, precision in PRECISIONS.items():
        if mark in text:
            return precision
    return "bf16"


PRECISIONS: Mapping[str, PricedPrecision] = {
    "fp4": "fp4",
    "fp8": "fp8",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "float32",
}
"""What a precision cell says, the first match counting."""


def published_recompute(row: Row) -> Recompute | None:
    """What the row says of recomputation; None where it does not, or refers to a recipe."""
    text = row["recompute"].lower()
    if text.startswith(("full", "yes")):
        return "full"
    if text.startswith(("none", "no")):
        return "none"
    if text.startswith(("sel", "minimal", "custom", "qkv", "op", "norm")):
        return "selective"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What a row's sharding cell says: of what, and over how many ranks (None: all that there are)."""

    what: ShardedState
    ranks: int | None


def published_sharding(row: Row) -> Sharding | None:
    """What is sharded over how many ranks; None where the row does not tell."""
    text = row["fsdp_or_zero"].lower()
    if not text.strip():
        return None
    ranks = re.search(r"(?:fsdp |\(shard |group of |within )(\d+)", text)
    size = int(ranks[1]) if ranks else None
    if text.startswith(("none", "zero0", "ddp")):
        return Sharding(what="nothing", ranks=None)
    if "zero2" in text or "grad_op" in text:
        return Sharding(what="gradients", ranks=size)
    if "fsdp" in text or "zero3" in text:
        return Sharding(what="parameters", ranks=size)
    return Sharding(what="optimizer", ranks=size)
