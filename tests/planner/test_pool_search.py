"""Choosing from a pool: the search that leaves most selections out finds what pricing all of them finds."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from plait.machines.pool import Pool, pool_from_toml
from plait.planner.pools.answer import PoolJob, pool_job
from plait.planner.pools.choice import Aims, Objective, best_choice, missing
from plait.planner.pools.exploring import explore
from plait.planner.pools.pricing import PoolPricer
from tests.matrix import few_fast
from tests.planner.machines import WEB, recipe
from tests.planner.pools import all_choices, random_pool

JOB = ("model.size=350M", "train.sequence=1024", "train.batch_tokens=131072", "train.budget=2B tokens")
SEEDS = list(range(34))


def pricer_of(folder: Path, pool: Pool) -> PoolPricer:
    config = recipe(folder, *JOB)
    job: PoolJob = pool_job(config, WEB, pool)
    return PoolPricer(job.config, WEB, job.sized, pool, job.steps)


@pytest.mark.parametrize("seed", few_fast(SEEDS, 3))
def test_exhaustive_search_agrees_for_each_objective_and_bound(tmp_path: Path, seed: int) -> None:
    pool = random_pool(seed)
    pricer = pricer_of(tmp_path, pool)
    everything = all_choices(pool, pricer)
    times = sorted(choice.wall_s for choice in everything)
    costs = sorted(choice.cost for choice in everything if choice.cost is not None)
    middle_s, middle_cost = times[len(times) // 2], costs[len(costs) // 2]
    aims = [
        Aims(objective="fastest"),
        Aims(objective="cheapest"),
        Aims(objective="balanced"),
        Aims(objective="cheapest", deadline_s=middle_s),
        Aims(objective="fastest", max_cost=middle_cost),
        Aims(objective="cheapest", min_tokens_per_s=pricer.work.tokens / middle_s),
        Aims(objective="balanced", deadline_s=middle_s, max_cost=middle_cost),
        Aims(objective="cheapest", deadline_s=times[0] / 2),  # which nothing meets
    ]
    for aim in aims:
        whole = best_choice(everything, aim)
        found = best_choice(explore(pool, pricer.price, pricer.price_bound, aim), aim)
        assert (found.selection.counts, found.purchase) == (whole.selection.counts, whole.purchase), aim
        assert (found.step_s, found.cost) == (whole.step_s, whole.cost)
        assert bool(missing(found, aim)) == bool(missing(whole, aim))


FIVE_ZONES = "".join(
    f'[[device]]\nname = "{name}"\ncount = {count}\nper_node = 4\nzone = "{zone}"\n'
    for zone in "abcde"
    for name, count in (("A100-40GB", 32), ("V100", 40), ("T4", 32))
) + "".join(
    f'[[link]]\nfrom = "{one}"\nto = "{other}"\nbandwidth = {1.2e9 if other == "e" else 6e9}\n'
    for one, other in combinations("abcde", 2)
)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["fastest", "cheapest", "balanced"])
def test_520_devices_of_three_kinds_in_five_zones_take_few_searches(tmp_path: Path, objective: Objective) -> None:
    """2.2 to 2.5 s of processor time on a busy machine; the number of searches is what a test can hold."""
    pool = pool_from_toml(FIVE_ZONES.encode(), "five zones")
    pricer = pricer_of(tmp_path, pool)
    aims = Aims(objective=objective)
    best = best_choice(explore(pool, pricer.price, pricer.price_bound, aims), aims)
    assert pricer.clusters_searched <= 70
    assert "e" not in best.selection.zones, "the zone behind the slow link"
