"""Does what fits leave the memory forecast's own error free, and does a tight layout that was named say so?"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.model.sizes import named_shape
from plait.planner.explain.changes import error_with_suggestions
from plait.planner.explain.choice import limits
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.report.report import memory_text
from plait.planner.resolve.constrained_search import constrained_search
from plait.planner.search.enumeration import Constraints
from plait.planner.search.feasibility import DoesNotFit, sparing_budget
from plait.planner.search.found import Search
from plait.planner.search.model_error import memory_error
from plait.planner.search.search import search

LLAMA_65B = Workload(
    layers=80,
    width=8192,
    heads=64,
    kv_heads=64,
    head_width=128,
    ffn=22016,
    gated=True,
    vocabulary=32000,
    tied=False,
    sequence=2048,
    batch_sequences=2048,
)


def small(size: str, batch: int = 64) -> Workload:
    return workload_of(named_shape(size, vocabulary=32768, sequence=2048), sequence=2048, batch_sequences=batch)


def named(micro: int, **knobs: int | str) -> Constraints:
    return Constraints(degrees=Layout(shard=8), knobs={"micro_sequences": micro, "shard_what": "parameters", **knobs})


@pytest.mark.parametrize(
    ("job", "machines"), [(LLAMA_65B, "64xA100"), (small("3B"), "8x4090"), (small("350M"), "laptop")]
)
def test_every_layout_that_may_be_chosen_fits_with_the_forecasts_own_error_to_spare(job: Workload, machines: str):
    cluster = read_cluster(machines)
    found = search(job, cluster)
    capacity = min(island.device.memory_bytes for island in cluster.islands)
    assert (found.judged_bytes * (1 + memory_error(job, cluster)) <= capacity * (1 + 1e-12)).all()
    assert found.fits_sparingly(found.chosen)


def test_a_named_layout_may_be_tight_and_says_so_in_one_sentence():
    job, cluster = replace(small("1.3B"), layers=23), read_cluster("8x4090")
    tight, sure = (_named(job, named(8, recompute=again)) for again in ("selective", "full"))
    assert tight and not tight.fits_sparingly(tight.chosen)
    assert tight.bytes_per_device(tight.chosen) <= tight.capacity_bytes(tight.chosen)
    [line] = [line for line in limits(tight) if "memory is tight" in line]
    assert line.endswith(f"memory forecasts of such runs are off by {memory_error(job, cluster):.1%} in the median")
    assert sure and not any("tight" in line for line in limits(sure))


def test_the_plan_names_the_place_in_the_pipeline_of_its_fullest_device():
    """The second of eight ranks has a quarter more layers than an even share, and but one micro-batch less."""
    job, layers = replace(LLAMA_65B, layers=32, batch_sequences=256), (2, 5, 5, 5, 4, 4, 4, 3)
    pipeline = Constraints(
        degrees=Layout(pipeline=8), knobs={"recompute": "none", "micro_sequences": 1, "schedule": "1f1b"}
    )
    even, uneven = (
        search(job, read_cluster("8xH200"), constraints=replace(pipeline, stage_layers=split))
        for split in ((4,) * 8, layers)
    )
    assert "on the fullest device (place 1 of 8 in the pipeline)" in memory_text(even)
    assert "on the fullest device (place 2 of 8 in the pipeline)" in memory_text(uneven)
    assert uneven.bytes_per_device(uneven.chosen) > even.bytes_per_device(even.chosen)


def test_a_named_layout_is_refused_where_its_tensors_alone_are_more_than_a_device_has():
    asked = named(8, recompute="none")
    with pytest.raises(DoesNotFit) as caught:
        constrained_search(
            small("7B"), read_cluster("8x4090"), search(small("350M"), read_cluster("8x4090")).profile, asked
        )
    refusal = str(error_with_suggestions(caught.value, asked))
    assert re.search(r"what \[layout\] asks for needs .* a device, and .* has", refusal)


def test_of_a_named_layout_more_is_computed_again_before_the_spare_is_used():
    """Degrees alone are named: what plait chooses of it leaves the error free if anything does."""
    job, cluster = small("3B"), read_cluster("8x4090")
    for micro in range(1, 9):
        try:
            found = constrained_search(job, cluster, search(job, cluster).profile, named(micro))
        except PlaitError:
            continue
        sparing = _named(job, named(micro, recompute="full"))
        assert found.fits_sparingly(found.chosen) or (sparing and not sparing.fits_sparingly(sparing.chosen)), micro


def test_where_nothing_fits_the_sentence_counts_the_spare():
    job, cluster = small("13B"), read_cluster("1x4090")
    with pytest.raises(DoesNotFit, match=f"with the {memory_error(job, cluster):.1%} that such forecasts are off by"):
        search(job, cluster)


def test_the_leanest_of_what_does_not_fit_would_fit_a_device_of_so_much():
    job, cluster = small("13B"), read_cluster("1x4090")
    with pytest.raises(DoesNotFit) as error:
        search(job, cluster)
    usable = sparing_budget(job, cluster).usable_bytes(np.array([error.value.least_bytes]))
    assert usable[0] * (1 + memory_error(job, cluster)) == pytest.approx(error.value.least_bytes)


def _named(job: Workload, constraints: Constraints) -> Search | None:
    try:
        return search(job, read_cluster("8x4090"), constraints=constraints)
    except DoesNotFit:
        return None
