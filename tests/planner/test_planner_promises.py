"""Does the planner promise no more of a GPU than the best published run of it has reached?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import benchmarks.published
from benchmarks.published.pricing import cases_of
from benchmarks.published.reading import read_rows
from plait.errors import PlaitError
from plait.machines.cluster import read_cluster
from plait.model.sizes import named_shape
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search.cost_breakdown import model_flops_utilisation
from plait.planner.search.search import search
from plait.planner.step_time.device_rates import GPU_KERNELS, peak_flops
from plait.planner.step_time.gradient_sync import data_parallel_sync_s

ROWS = Path(benchmarks.published.__file__).parent / "rows.csv"
MORE_THAN_THE_BEST = 0.05
BATCH_TOKENS = 4_194_304


@cache
def best_published_mfu(device: str) -> float:
    """Of dense runs in 16 bits, all of attention counted, from the measured time of a step."""
    return max(mfu for name, mfu in _published() if name.startswith(device))


def _published() -> Iterator[tuple[str, float]]:
    for case in cases_of(read_rows(ROWS))[0]:
        [island] = case.cluster.islands
        if case.kind == "dense" and case.step_s and case.workload.precision in ("bf16", "fp16"):
            done = case.workload.flops_per_token("full") * case.workload.batch_tokens / case.step_s
            yield island.device.name, done / case.cluster.n_devices / peak_flops(island.device, "bf16")


def work(size: str, sequence: int) -> Workload:
    shape = named_shape(size, vocabulary=32000, sequence=sequence)
    return workload_of(shape, sequence=sequence, batch_sequences=BATCH_TOKENS // sequence)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["A100", "H100"])
def test_no_model_is_promised_more_than_the_best_published_run(device: str) -> None:
    tried = []
    for devices in (8, 64, 512):
        for size in ("1.3B", "7B", "13B", "65B"):
            for sequence in (2048, 8192):
                try:
                    found = search(work(size, sequence), read_cluster(f"{devices}x{device}"))
                except PlaitError:  # too large for so few
                    continue
                for index in (found.chosen, found.fastest):
                    tried.append((model_flops_utilisation(found, index)[0], devices, size, sequence))
    assert len(tried) > 30
    assert max(tried)[0] < best_published_mfu(device) + MORE_THAN_THE_BEST, max(tried)


@pytest.mark.slow
def test_the_best_published_runs_are_those_of_the_table() -> None:
    assert best_published_mfu("A100") == pytest.approx(0.637, abs=0.002)
    assert best_published_mfu("H100") == pytest.approx(0.625, abs=0.002)


def test_messages_that_arithmetic_hides_slow_it_down() -> None:
    found = search(work("65B", 2048), read_cluster("64xA100"))
    inputs = found.cost_inputs.with_candidates(found.candidates.select(found.candidates.shard >= 32))
    layer, none = inputs.device_time.layer_time(inputs.candidates), np.zeros(len(inputs.candidates))
    sync = (inputs, layer, none, none + 80, none + 8)
    parameters, gradients, hidden = data_parallel_sync_s(*sync)
    assert (hidden > 0).all()
    assert (gradients >= GPU_KERNELS.message_units * hidden).all()
    assert (parameters >= 0).all()
