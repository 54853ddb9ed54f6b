"""Which software ran a published row, by the source's own words."""

from __future__ import annotations

import re

from benchmarks.published.cells import Row, is_tpu
from plait.plan import stack as stacks
from plait.plan.stack import Stack

PROGRAMS: tuple[tuple[str, Stack], ...] = (
    ("vtrain|bloom", stacks.MEGATRON_DEEPSPEED),
    (
        "narayanan|korthikanti|readme 20(19|20|21)|mt-nlg|mist|nemo-megatron|bignlp|dlperf|oneflow|colossal",
        stacks.MEGATRON_2021,
    ),
    ("llm-foundry|mosaic", stacks.COMPOSER),
    ("torchtitan|torchao", stacks.TORCHTITAN),
    ("internevo", stacks.INTERNEVO),
    ("maxtext|jax", stacks.MAXTEXT),
    ("fsdp|levanter|tinyllama|nanotron|flash-attention|playbook", stacks.FSDP),
    ("megatron-bridge|nemo|dgxc", stacks.NEMO),
    ("megatron|simumax|primus", stacks.MEGATRON),
)
"""Patterns of what a row names as its paper, repository or notes, the first match counting."""


GRAPHS_SINCE = "26.06"
"""Release of NVIDIA's container from which on layers of experts run as graphs, without the host."""


def published_stack(row: Row) -> Stack:
    """The stack of a row; what runs on a TPU is compiled as a whole, and the rest is taken for an FSDP program."""
    if is_tpu(row):
        return stacks.MAXTEXT
    if "maxtext" in row["model"].lower():
        return stacks.MAXTEXT
    if "fp32 grad accumulation" in row["notes"]:
        return stacks.MEGATRON_DEEPSPEED_BF16
    if "tokendrop" in row["model"].lower():
        return stacks.NEMO_DROPPING
    container = re.search(r"container (\d+\.\d+)", row["notes"])
    if container and container[1] >= GRAPHS_SINCE:
        return stacks.NEMO_2026
    text = row["paper_or_repo"].lower()
    return next((stack for pattern, stack in PROGRAMS if re.search(pattern, text)), stacks.FSDP)
