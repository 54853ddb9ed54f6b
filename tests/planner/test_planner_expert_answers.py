"""Does the planner answer as an expert would? Thirty problems from 1 to 16,384 devices, each with the answer and its
reason; where one is given, a published run has the same layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from plait.commands.planning.plan_report import make_plan_report
from plait.machines.cluster import read_cluster
from plait.planner.derive.resources import on_paper
from tests.planner.machines import recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is asked, and what an expert would sign."""

    size: str
    cluster: str
    sequence: int
    batch_tokens: str
    answer: str
    """A pattern that the layout in words matches."""
    reason: str


PLAIN_OR_ZERO_1 = r"(replicate \(DP\)|shard \(ZeRO-1\)) \d+, "
ONE_DEVICE = r"one device, "
FSDP = r"shard \(FSDP\) \d+, splitting parameters, (recompute selective, )?\d"
HSDP_WITHIN_256 = r"(replicate \(DP\) \d+ × )?shard \(FSDP\) (64|128|256), "
FSDP_TP_INSIDE = r"(replicate \(DP\) \d+ × )?shard \(FSDP\) \d+ × tensor \(TP\) [248], "
PIPELINE = r"pipeline \(PP\) \d+( × (replicate \(DP\)|shard \(ZeRO-1\)) \d+)*, "
PIPELINE_TP_INSIDE = r"pipeline \(PP\) \d+ × ((replicate \(DP\)|shard \(ZeRO-1\)) \d+ × )*tensor \(TP\) [48], "


def problem(size: str, cluster: str, sequence: int, batch: str, answer: str, reason: str) -> Problem:
    return Problem(size=size, cluster=cluster, sequence=sequence, batch_tokens=batch, answer=answer, reason=reason)


PROBLEMS = (
    problem("125M", "4090", 1024, "512K", ONE_DEVICE + r"\d\d", "it fits many times over; no recomputation"),
    problem(
        "125M", "2x4090", 1024, "512K", PLAIN_OR_ZERO_1, "two copies: gradients are small beside half a million tokens"
    ),
    problem(
        "350M", "4090+3090@10G", 1024, "256K", PLAIN_OR_ZERO_1, "both cards, by their speed: 10 Gbit/s carries 350M"
    ),
    problem(
        "1B", "8x4090", 2048, "512K", r"shard \(ZeRO-1\) 8, ", "sixteen bytes a parameter leave too little of 24 GB"
    ),
    problem(
        "1B", "2x(1x4090)@1G", 2048, "256K", ONE_DEVICE, "gigabytes a step over 1 Gbit/s cost more than a card gains"
    ),
    problem(
        "125M",
        "2x(1x3090)@1G",
        1024,
        "256K",
        PLAIN_OR_ZERO_1,
        "half a gigabyte a step is less than the other half of it",
    ),
    problem("1B", "H100", 2048, "512K", ONE_DEVICE + r"\d+ seq", "it fits; accumulate"),
    problem("1B", "8xH100", 4096, "2M", PLAIN_OR_ZERO_1, "it fits beside NVLink: plain copies"),
    problem("7B", "8xH100", 4096, "4M", FSDP, "112 GB of state: FSDP in the node (torchtitan, OLMo)"),
    problem("7B", "8xA100", 4096, "2M", FSDP, "the same on A100"),
    problem(
        "7B", "64xH100", 4096, "4M", FSDP, "FSDP alone up to some hundred GPUs (torchtitan, Llama 3 8B on 64 and 128)"
    ),
    problem("7B", "8x4090", 4096, "256K", PIPELINE, "PCIe cannot carry gathered parameters: stages"),
    problem("13B", "64xA100-40GB", 2048, "4M", FSDP, "FSDP; part of each layer again for want of memory"),
    problem("13B", "16xH100", 4096, "4M", FSDP, "FSDP over two nodes"),
    problem("30B", "64xH100", 4096, "4M", FSDP, "FSDP: 64 × 64K tokens hide the gathering"),
    problem(
        "70B",
        "64xH100",
        8192,
        "4M",
        f"{FSDP_TP_INSIDE}|{PIPELINE_TP_INSIDE}",
        "64K tokens a GPU and 1.1 TB of state: cut layers in the node",
    ),
    problem(
        "70B",
        "256xH100",
        8192,
        "8M",
        f"{FSDP_TP_INSIDE}|{HSDP_WITHIN_256}",
        "FSDP with TP in the node (torchtitan's 70B on 256)",
    ),
    problem(
        "70B",
        "512xB200",
        8192,
        "8M",
        f"{HSDP_WITHIN_256}|{FSDP_TP_INSIDE}",
        "two sequences a GPU: HSDP, not one group of 512",
    ),
    problem("70B", "72xGB200", 8192, "8M", FSDP, "one NVLink domain: FSDP over all of it"),
    problem("70B", "1024xH100", 8192, "16M", FSDP_TP_INSIDE, "HSDP with TP in the node, so that groups stay at 256"),
    problem(
        "175B",
        "512xA100",
        2048,
        "3145728",
        f"{FSDP_TP_INSIDE}|{PIPELINE_TP_INSIDE}",
        "TP in the node, and FSDP or stages between",
    ),
    problem(
        "405B",
        "16384xH100",
        8192,
        "16M",
        r"pipeline \(PP\) 16 × .*tensor \(TP\) 8",
        "as Llama 3 was trained: TP 8, PP 16 (2407.21783)",
    ),
    problem("405B", "1024xH100", 8192, "16M", PIPELINE_TP_INSIDE, "TP 8 in the node, stages between"),
    problem(
        "8B", "64xH100", 131072, "8M", r"(.*)context \(CP\) (8|16|32)", "one sequence of 128K exceeds a GPU: context"
    ),
    problem(
        "8B",
        "8xH100",
        32768,
        "4M",
        r"(.*)(tensor \(TP\) [248]|context \(CP\) [248])",
        "32K beside FSDP: cut activations in the node",
    ),
    problem(
        "70B",
        "256xTPUv5p",
        8192,
        "4M",
        r"shard \(FSDP\) 64 × (context \(CP\)|tensor \(TP\)) 4, ",
        "half a sequence a chip: one more axis of the torus",
    ),
    problem(
        "8B",
        "32xTPUv5e",
        4096,
        "1M",
        r"shard \(FSDP\) \d+( × tensor \(TP\) [24])?, ",
        "16 GB chips: FSDP, at most with a little TP",
    ),
    problem(
        "1B",
        "128xV100",
        1024,
        "1M",
        r"(replicate \(DP\) \d+ × )?shard \((FSDP|ZeRO-1)\) \d+, ",
        "float32 on V100: split state, or more",
    ),
    problem("7B", "32xMI300X", 4096, "4M", PLAIN_OR_ZERO_1, "192 GB hold 7B with its gradients: split the state alone"),
    problem("3B", "4x(2x4090)@10G", 2048, "512K", PIPELINE, "10 Gbit/s: only stages' results are small enough"),
)
FAST = PROBLEMS[::6]


def check(one: Problem, folder: Path) -> None:
    asked = (f"model.size={one.size}", "model.vocabulary=50304", f"train.sequence={one.sequence}")
    config = recipe(folder, *asked, f"train.batch_tokens={one.batch_tokens}", "train.budget=20B tokens")
    layout = make_plan_report(config, on_paper(read_cluster(one.cluster)), top=0).layout
    assert re.match(one.answer, layout), f"{one.size} on {one.cluster}: {layout}; an expert: {one.answer}, {one.reason}"


@pytest.mark.parametrize("one", FAST, ids=lambda one: f"{one.size}-{one.cluster}")
def test_plans_are_an_experts(one: Problem, tmp_path: Path) -> None:
    check(one, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: f"{one.size}-{one.cluster}")
def test_all_plans_are_an_experts(one: Problem, tmp_path: Path) -> None:
    check(one, tmp_path)
