"""Another program's configuration of a run in one vocabulary; values that it does not give are None."""

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
"""The programs; with a year for older versions whose cost differs."""
WeightNumbers = Literal["float32", "16 bits"]
"""The precision in which trained weights are kept, in addition to the compute dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A run of another program, as its configuration describes it."""

    program: ForeignProgram
    model: str | None = None
    """A hub id, a name, or a folder with a config.json."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the model that the configuration itself gives, named as in `Workload`."""
    sequence: int | None = None
    micro_sequences: int | None = None
    accumulation: int | None = None
    batch_sequences: int | None = None
    devices: int | None = None
    per_node: int | None = None
    layout: Layout = field(default_factory=Layout)
    """The degrees that are given; data-parallel ranks are the remaining devices."""
    virtual: int = 1
    """Pipeline stages per rank."""
    shards_over: Literal["all data ranks", "layout.shard"] = "all data ranks"
    """The ranks that shard the states named by `sharded`."""
    sharded: ShardedState = "nothing"
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    precision: PricedPrecision = "bf16"
    weights: WeightNumbers = "float32"
    has_master_weights: bool = False
    """Whether the optimizer keeps float32 weights in addition to 16-bit ones."""
    optimizer: str = "adamw"
    adapter_rank: int = 0
    adapter_targets: tuple[AdapterTarget, ...] = ()
    quantized_bits: int = 0
    """Bits per frozen weight of the layers; 0: not quantized."""
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
    """Assumptions that fill gaps of the configuration, as sentences."""
    not_priced: tuple[str, ...] = ()
    """Keys that change memory or time by an amount unknown to the forecast."""
    unknown: tuple[str, ...] = ()
    """Keys that this program's configurations do not have, each with the nearest existing one."""
