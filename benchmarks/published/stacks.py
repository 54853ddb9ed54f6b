"""Which software ran a published row, by the source's own words."""

from __future__ import annotations

import re

from benchmarks.published.cells import Row, is_tpu
from plait.planner.problem import program_profiles as programs
from plait.planner.problem.software_profile import SoftwareProfile

PROGRAMS: tuple[tuple[str, SoftwareProfile], ...] = (
    ("vtrain", programs.MEGATRON_DEEPSPEED),
    ("bloom", programs.MEGATRON_DEEPSPEED_BLOCKING),
    (
        "narayanan|korthikanti|readme 20(19|20|21)|mt-nlg|mist|nemo-megatron|bignlp|dlperf|oneflow|colossal",
        programs.MEGATRON_2021,
    ),
    ("llm-foundry|mosaic", programs.COMPOSER),
    ("torchtitan|torchao", programs.TORCHTITAN),
    ("internevo", programs.INTERNEVO),
    ("maxtext|jax", programs.MAXTEXT),
    ("fsdp|levanter|tinyllama|nanotron|flash-attention|playbook", programs.FSDP),
    ("megatron-bridge|nemo|dgxc", programs.NEMO),
    ("megatron|simumax|primus", programs.MEGATRON),
)
"""Patterns of what a row names as its paper, repository or notes, the first match counting."""

GRAPHS_SINCE = "26.06"
"""Release of NVIDIA's container from which on layers of experts run as graphs, without the host; on racks (GB200,
GB300) alone, as the recipes have it (`cuda_graph_impl` in Megatron-Bridge's scripts/performance/configs)."""


def published_stack(row: Row) -> SoftwareProfile:
    """The stack of a row; what runs on a TPU is compiled as a whole, and the rest is taken for an FSDP program."""
    if is_tpu(row):
        return programs.MAXTEXT
    if "maxtext" in row["model"].lower():
        return programs.MAXTEXT
    if "fp32 grad accumulation" in row["notes"]:
        return programs.MEGATRON_DEEPSPEED_BF16
    if "tokendrop" in row["model"].lower():
        return programs.NEMO_DROPPING
    container = re.search(r"container (\d+\.\d+)", row["notes"])
    if container and container[1] >= GRAPHS_SINCE and re.match("GB[23]00", row["hardware"]):
        return programs.NEMO_2026
    text = row["paper_or_repo"].lower()
    return next((profile for pattern, profile in PROGRAMS if re.search(pattern, text)), programs.FSDP)
