"""Is every rank of a pipeline weighed, and as the walk through its list of actions finds it?"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from plait.layout import Schedule
from plait.machines.cluster import read_cluster
from plait.partition.pipeline_schedule import schedule_actions
from plait.planner.memory.estimate import bytes_per_rank, estimate_memory
from plait.planner.memory.rank_loads import LOADS, rank_loads
from plait.planner.memory.schedule_walk import TENSOR_SIZES, WALKED_ITEMS, PipelineStages, fullest_moments
from plait.planner.memory.traced_peak import tensor_bytes, traced_peak
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.stage_partition import HeadPlaces
from plait.planner.problem.workload import Workload
from tests.matrix import few_fast

ON_GPUS = PLAIT_PROFILE
ON_PROCESSORS = PLAIT_PROFILE.for_cluster(read_cluster("laptop"))
SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("1f1b", 2), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1),
    ("zero-bubble", 2),
)  # fmt: skip
ISSUE_SPLIT = (2, 5, 5, 5, 4, 4, 4, 3)


def work(layers: int, batch: int = 64, **other: object) -> Workload:
    """A model whose layers weigh far more than its vocabulary."""
    plain = Workload(
        layers=layers,
        width=4096,
        heads=32,
        kv_heads=32,
        head_width=128,
        ffn=11008,
        gated=True,
        vocabulary=32000,
        tied=False,
        sequence=2048,
        batch_sequences=batch,
    )
    return replace(plain, **other)  # type: ignore[arg-type]


def uneven_pipelines(schedule: str, virtual: int) -> list[tuple[tuple[int, ...], int]]:
    """Layers of each stage, and micro-batches: fewer than ranks, as many, more, and numbers that do not divide."""
    draw = random.Random(f"{schedule} {virtual}")
    pipelines = [(ranks, micros) for ranks in (2, 3, 4, 8) for micros in (1, 2, ranks - 1, ranks, 2 * ranks + 1, 24)]
    return [(tuple(draw.randint(1, 6) for _ in range(ranks * virtual)), max(micros, 1)) for ranks, micros in pipelines]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_what_every_rank_keeps_is_what_the_walk_through_its_actions_finds(schedule: Schedule, virtual: int) -> None:
    for layers, micros in uneven_pipelines(schedule, virtual):
        ranks = len(layers) // virtual
        places = HeadPlaces(tables=(1,) * ranks, heads=(0,) * (ranks - 1) + (1,))
        loads = rank_loads(schedule, virtual, micros, layers, places)
        stages = PipelineStages(layers=layers, tied=False, flat_layers=False, flat_tables=False)
        lists = schedule_actions(schedule, ranks=len(layers) // virtual, virtual=virtual, micros=micros)
        for rank, own in enumerate(lists):
            [met] = [fullest_moments(own, stages)[:, WALKED_ITEMS.index("activations")]]
            walked = met[:, [TENSOR_SIZES.index("layer"), TENSOR_SIZES.index("turned")]]
            counted = loads.of_rank(rank).amounts[:, [LOADS.index("kept"), LOADS.index("split")]]
            for ways in ((1, 1), (1, 0.7), (1, 1.4), (1, 8)):
                most = (counted @ ways).max()
                assert most == pytest.approx((walked @ ways).max(), rel=1e-9), (
                    schedule, layers, micros, rank, ways,
                )  # fmt: skip


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("recompute", few_fast(["none", "full"], "none"))
def test_no_rank_holds_more_than_the_one_that_is_told(schedule: Schedule, virtual: int, recompute: str) -> None:
    for layers, micros in uneven_pipelines(schedule, virtual):
        ranks = len(layers) // virtual
        row = {"pipeline": ranks, "virtual": virtual, "schedule": schedule, "recompute": recompute}
        one = Candidates.from_rows([row], layer_split=layers)
        for profile, precision in ((ON_GPUS, "bf16"), (ON_PROCESSORS, "float32")):
            job = work(sum(layers), micros, precision=precision)
            told = estimate_memory(job, one, profile)
            each = bytes_per_rank(job, one, profile)[:, 0]
            assert told.reserved[0] == pytest.approx(each.max(), rel=1e-12), (layers, micros)
            assert each[told.rank[0]] == each.max()


def test_fuller_middles_are_told_as_the_issue_names_them() -> None:
    """The even split needs less than one whose second rank holds a quarter more."""
    job = work(32, 256)
    uneven, even = (
        estimate_memory(job, Candidates.from_rows([{"pipeline": 8}], layer_split=layers), ON_GPUS)
        for layers in (ISSUE_SPLIT, (4,) * 8)
    )
    assert uneven.rank[0] == 1 and even.rank[0] == 0
    assert uneven.allocated[0] > even.allocated[0]


def test_ranks_of_one_model_are_weighed_each_with_its_own_split() -> None:
    """Many candidates at once are told as each alone."""
    rows = [
        {"pipeline": p, "virtual": v, "schedule": s, "micro_sequences": m, "recompute": again}
        for p in (1, 2, 4, 8)
        for s, v in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
        if p > 1 or v == 1
        for m in (1, 2)
        for again in ("none", "selective", "full")
    ]
    for profile, precision in ((ON_GPUS, "bf16"), (ON_PROCESSORS, "float32")):
        job = work(32, precision=precision)
        together = estimate_memory(job, Candidates.from_rows(rows, layer_split="balanced"), profile)
        for index, row in enumerate(rows):
            alone = estimate_memory(job, Candidates.from_rows([row], layer_split="balanced"), profile)
            assert together.reserved[index] == alone.reserved[0] and together.rank[index] == alone.rank[0]


def test_a_rank_in_the_middle_holds_no_vocabulary_and_no_logits() -> None:
    one = Candidates.from_rows([{"pipeline": 4, "schedule": "1f1b"}], layer_split=(8,) * 4)
    wide = work(32, vocabulary=256000)
    first, middle, last = (estimate_memory(wide, one, ON_GPUS, rank=rank) for rank in (0, 1, 3))
    assert first.parameters[0] == last.parameters[0] > middle.parameters[0]
    assert (first.logits[0], middle.logits[0]) == (0, 0) and last.logits[0] > 0
    assert middle.activations[0] == pytest.approx(first.activations[0] * 3 / 4)


def test_gpipe_keeps_every_micro_batch_on_every_rank() -> None:
    one = Candidates.from_rows([{"pipeline": 4, "schedule": "gpipe"}], layer_split=(8,) * 4)
    kept = [estimate_memory(work(32, 16), one, ON_GPUS, rank=rank).activations[0] for rank in range(4)]
    np.testing.assert_allclose(kept, kept[0])


def test_the_ranks_that_are_walked_have_the_fullest_among_them() -> None:
    """On processors only ranks that no other exceeds are followed: the fullest is never left out."""
    for layers in (ISSUE_SPLIT, ISSUE_SPLIT[::-1], (4,) * 8, (1, 1, 9, 1, 9, 1, 1, 9)):
        for schedule in ("gpipe", "1f1b", "zero-bubble"):
            job = work(sum(layers), 32, precision="float32", tied=True)
            one = Candidates.from_rows([{"pipeline": 8, "schedule": schedule, "replicate": 2}], layer_split=layers)
            each = [tensor_bytes(traced_peak(job, one, rank=rank))[0] for rank in range(8)]
            assert tensor_bytes(traced_peak(job, one))[0] == max(each)
