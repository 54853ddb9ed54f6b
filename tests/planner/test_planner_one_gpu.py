"""The planner's forecasts for plait on one H100 and one H200, beside what the cards took (`make bench-gpu`)."""

from __future__ import annotations

import json

import pytest

from benchmarks.pairing import RESULTS
from benchmarks.peers.gpu_loop import SIZES
from benchmarks.plait_gpu import model_shape
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import workload_of
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import estimate_step_time

READ = {
    "1xH100": json.loads((RESULTS / "one-gpu-2026-11-26.json").read_text()),
    "1xH200": json.loads((RESULTS / "one-gpu-2026-11-26-h200.json").read_text()),
}


@pytest.mark.parametrize(
    ("card", "size", "slower", "more"),
    [
        ("1xH100", "125M", 0.06, -0.012),
        ("1xH100", "1B", 0.03, -0.006),
        ("1xH100", "3B", -0.02, 0.003),
        ("1xH100", "LoRA 8B", 0.12, 0.012),
        ("1xH200", "125M", 0.04, -0.012),
        ("1xH200", "1B", 0.01, -0.006),
        ("1xH200", "7B", -0.08, 0.001),
    ],
)
def test_forecasts_for_one_card_are_near_what_it_took(card: str, size: str, slower: float, more: float) -> None:
    """By so much more time, and so much more memory, than the card took, as docs/guide-gpu.md and the log say."""
    work, took, cluster = SIZES[size], READ[card][size]["turns"]["plait"][0], read_cluster(card)
    workload = workload_of(model_shape(size, work), sequence=work.sequence, batch_sequences=work.sequences_per_rank)
    row = {**Layout().degrees, "recompute": "none", "micro_sequences": work.sequences_per_rank}
    candidates, profile = Candidates.from_rows([row], layer_split="balanced"), PLAIT_PROFILE.for_cluster(cluster)
    inputs = CostInputs(workload=workload, cluster=cluster, candidates=candidates, profile=profile)
    step_s, needs = estimate_step_time(inputs).step_s, estimate_memory(workload, candidates, profile)
    assert step_s[0] / took["step_s"] - 1 == pytest.approx(slower, abs=0.02)
    assert needs.allocated[0] / took["peak_bytes"] - 1 == pytest.approx(more, abs=0.005)
