"""What another program's configuration says of a run, in one vocabulary; what it leaves unsaid is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.layout import Layout, Recompute
from plait.model.adapter_shape import AdapterTarget
from plait.planner.problem.candidates import ShardedState
from plait.planner.problem.workload import AttentionKernel, PricedPrecision

ForeignProgram = Literal[
    "axolotl", "transformers", "torchtitan", "torchtitan 2024", "megatron", "megatron 2021", "deepspeed", "litgpt"
]
"""The programs; a year where one has changed what it costs since."""
WeightNumbers = Literal["float32", "16 bits"]
"""The numbers in which weights that learn are kept beside what they are multiplied in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A run of another program, as far as its configuration says."""

    program: ForeignProgram
    model: str | None = None
    """A hub id, a name, or a folder with a config.json."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the model that the configuration itself gives, by the names of `Workload`."""
    sequence: int | None = None
    micro_sequences: int | None = None
    accumulation: int | None = None
    batch_sequences: int | None = None
    devices: int | None = None
    per_node: int | None = None
    layout: Layout = field(default_factory=Layout)
    """Degrees that are named; data-parallel ranks are what is left of the devices."""
    virtual: int = 1
    """Stages on each pipeline rank."""
    shards_over: Literal["all data ranks", "layout.shard"] = "all data ranks"
    """How many ranks share out what `sharded` names."""
    sharded: ShardedState = "nothing"
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    precision: PricedPrecision = "bf16"
    weights: WeightNumbers = "float32"
    has_master_weights: bool = False
    """Whether the optimizer keeps float32 weights beside those in 16 bits."""
    optimizer: str = "adamw"
    adapter_rank: int = 0
    adapter_targets: tuple[AdapterTarget, ...] = ()
    quantized_bits: int = 0
    """Bits of a frozen weight of the layers; 0: it is not quantized."""
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    attention: AttentionKernel = "flash"
    loss: Literal["all logits", "in pieces"] = "all logits"
    compiled: bool = False
    steps: int | None = None
    epochs: float | None = None
    samples: int | None = None
    tokens: int | None = None
    assumed: tuple[str, ...] = ()
    """What the configuration does not say and was filled in, as sentences."""
    not_priced: tuple[str, ...] = ()
    """Keys that change memory or time by an amount that the forecast does not know."""
    unknown: tuple[str, ...] = ()
    """Keys that this program's configurations do not have, each with the nearest one that they have."""
