"""Is every layout that can be run on a case's hosts tried, with the planner's own knobs, and as a recipe that loads?"""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from benchmarks.lab.forecast import Forecast, cluster_of_case, forecast, products, recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.trial import best_of
from plait.layout import AXES
from plait.recipe.load import load_recipe


def case(hosts: int, **changes: object) -> Case:
    values = {
        "cores": (1.0,) * hosts, "rate": 1e8, "model": "tiny", "batch_sequences": 8, "sequence": 128, "files": "own",
        "shape": {"layers": 4, "width": 128, "heads": 4, "vocabulary": 512}, "baselines": (),
    }  # fmt: skip
    return Case(**values | changes)  # type: ignore[arg-type]


def told(one: Case, folder: Path, bits_per_s: float = 1e8) -> Forecast:
    return forecast(one, cluster_of_case(one, [5e10] * one.hosts, bits_per_s), folder)


@pytest.mark.parametrize(("hosts", "count"), [(2, 5), (3, 5), (4, 15)])
def test_all_products_of_degrees(hosts: int, count: int):
    found = products(hosts)
    assert len(found) == count == len({tuple(sorted(degrees.items())) for degrees in found})
    assert all(prod(degrees.values()) == hosts and set(degrees) <= set(AXES) for degrees in found)


@pytest.mark.slow
def test_every_layout_is_tried_or_refused_with_a_reason(tmp_path: Path):
    found = told(case(4, batch_sequences=2), tmp_path)
    tried = {tuple(sorted((axis, d) for axis, d in one.layout.items() if axis in AXES)) for one in found.priced}
    assert tried | {_degrees(text) for text in found.refused} == {tuple(sorted(d.items())) for d in products(4)}
    assert "cannot share 2 sequences" in found.refused["replicate 4"]


def test_layouts_differ_and_stand_in_order_of_their_price(tmp_path: Path):
    found = told(case(2), tmp_path)
    assert len({one.name for one in found.priced}) == len(found.priced)
    prices = [one.step_s for one in found.priced if one.step_s is not None]
    assert prices == sorted(prices) and found.of(found.fastest).step_s == prices[0]
    assert found.of(found.chosen).step_s


@pytest.mark.slow
def test_a_quick_lab_keeps_the_likeliest_layouts_and_the_planners_own(tmp_path: Path):
    whole = told(case(4), tmp_path)
    few = best_of(whole, 3)
    assert len(few.priced) == 3 and {few.fastest, few.chosen} <= {one.name for one in few.priced}
    assert few.priced[0] == whole.priced[0] and best_of(whole, None) is whole


@pytest.mark.slow
def test_each_layout_is_a_recipe_that_loads_and_says_it_all(tmp_path: Path):
    one = case(2, cores=(1.0, 0.5))
    for priced in told(one, tmp_path).priced:
        path = tmp_path / "r.toml"
        path.write_text(recipe_text(one, priced.layout, name="x", steps=6))
        config = load_recipe(path)
        asked = {key: value for key, value in config.layout.model_dump().items() if value != "auto"}
        assert {
            key: list(value) if isinstance(value, tuple) else value for key, value in asked.items()
        } == priced.layout
        assert config.train.batch_tokens == 8 * 128 and config.train.budget == "6 steps"


@pytest.mark.slow
def test_a_wide_road_makes_another_layout_the_fastest_and_the_crossing_is_foretold(tmp_path: Path):
    heavy = case(2, shape={"layers": 8, "width": 320, "heads": 8, "vocabulary": 2048}, sequence=256)
    narrow, wide = told(heavy, tmp_path, 1e7), told(heavy, tmp_path, 3e10)
    first = {axis: degree for axis, degree in narrow.of(narrow.fastest).layout.items() if axis in AXES}
    last = {axis: degree for axis, degree in wide.of(wide.fastest).layout.items() if axis in AXES}
    assert first != last
    assert wide.crossings and all(below != above for _, below, above in wide.crossings)
    rates = [rate for rate, _, _ in wide.crossings]
    assert rates == sorted(rates)


def test_unequal_hosts_are_islands_of_their_own():
    one = case(2, cores=(1.0, 0.5))
    cluster = cluster_of_case(one, [8e10, 4e10], 1e9)
    rates = [island.device.peak_flops["float32"] for island in cluster.islands]
    assert rates == [8e10, 4e10] and cluster.n_devices == 2


@pytest.mark.slow
def test_unequal_hosts_also_get_a_pipeline_of_unequal_stages(tmp_path: Path):
    unequal = told(case(2, cores=(1.0, 0.5)), tmp_path)
    named = [one for one in unequal.priced if "stage_layers" in one.layout]
    assert [one.layout["stage_layers"] for one in named] == [[3, 1]] and "layers 3 + 1" in named[0].name
    assert not any("stage_layers" in one.layout for one in told(case(2), tmp_path).priced)


def _degrees(text: str) -> tuple[tuple[str, int], ...]:
    words = [part.split() for part in text.split(" × ")]
    return tuple(sorted((axis, int(degree)) for axis, degree in words))
