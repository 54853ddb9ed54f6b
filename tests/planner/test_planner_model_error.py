"""Does the planner say of its own error what published runs say, family by family?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.machines.cluster import read_cluster
from plait.planner.problem.workload import Workload
from plait.planner.report.report import certainty_lines, expected_range_s
from plait.planner.search.model_error import FAMILIES, expected_range, published_errors, run_family, stated_error
from plait.planner.search.search import search

SMALL = Workload(
    layers=8,
    width=512,
    heads=8,
    kv_heads=8,
    head_width=64,
    ffn=2048,
    gated=False,
    vocabulary=32000,
    tied=True,
    sequence=512,
    batch_sequences=64,
)
EXPERTS = replace(SMALL, experts=8, experts_per_token=2, expert_ffn=1024)


@pytest.mark.parametrize(
    ("workload", "cluster", "family", "words"),
    [
        (SMALL, "8xH100", "dense-gpu", "published runs of dense models on GPUs nine of ten took"),
        (EXPERTS, "8xH100", "moe", "published runs of models with experts on GPUs nine of ten took"),
        (EXPERTS, "4xv5p", "tpu", "published runs of models on TPUs nine of ten took"),
        (
            SMALL,
            "laptop",
            "cpu",
            "no run on processors is published; elsewhere, where the model did worst, nine of ten",
        ),
    ],
)
def test_the_tolerance_and_the_sentence_are_those_of_the_family(workload, cluster, family, words):
    machines = read_cluster(cluster)
    assert run_family(workload, machines) == family
    found = search(workload, machines)
    assert found.tolerance == stated_error(workload, machines) == published_errors(family).median
    known, (low_s, high_s) = expected_range(workload, machines), expected_range_s(found)
    assert words in certainty_lines(found)[0]
    assert known.kind == family and low_s < found.chosen_step_s < high_s
    assert f"{known.low:.2f} to {known.high:.2f} times their forecast" in certainty_lines(found)[0]


def test_a_range_is_narrow_where_plait_ran_and_wide_where_a_rate_is_assumed():
    here, there, assumed = (expected_range(SMALL, read_cluster(name)) for name in ("1xH100", "1xA100", "1x4070"))
    assert here.kind == "one card" and here.high / here.low < 1.4 < there.high / there.low
    assert assumed.assumed == ("RTX 4070",) and not there.assumed
    assert assumed.high / assumed.low == pytest.approx(1.25**2 * there.high / there.low)
    assert expected_range(EXPERTS, read_cluster("1xH100")).kind == "moe"


def test_what_nobody_published_is_no_surer_than_the_least_sure():
    known = [published_errors(family) for family in FAMILIES if published_errors(family).rows]
    assert published_errors("cpu").rows == 0
    assert published_errors("cpu").median == max(each.median for each in known)
    assert all(0 < each.median < each.p90 for each in known)
