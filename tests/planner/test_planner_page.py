"""What the page's pictures show is what the search found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.model.sizes import MODEL_SIZES, named_shape
from plait.planner.explain.changes import is_quick
from plait.planner.explain.compared_layouts import best_of_kinds
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.report.bandwidth import Sweep, bandwidth_sweep, sweep_caption
from plait.planner.report.bars import (
    ACTIONS_DRAWN,
    memory_bars,
    memory_caption,
    pipeline_caption,
    pipeline_picture,
    waterfall,
    waterfall_caption,
)
from plait.planner.report.figures import time_words
from plait.planner.report.layout_map import DOTS_DRAWN, SLOWEST_DRAWN, Dot, LayoutMap, layout_map, map_caption
from plait.planner.search.cost_breakdown import message_seconds, time_items
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import kind_text, layout_text
from plait.planner.search.search import search
from tests.matrix import few_fast

SweepOf = Callable[[str], Sweep | None]

CASES = {
    "two machines": ("macbook+4090@1G", "350M", 1024, 256),
    "one box": ("8x4090", "1.3B", 2048, 256),
    "two nodes": ("2x(8xA100)+400G", "7B", 4096, 512),
    "many": ("512xH100", "70B", 8192, 512),
    "one device": ("H100", "125M", 1024, 64),
}


def workload(size: str, sequence: int, batch: int) -> Workload:
    shape = named_shape(size, vocabulary=MODEL_SIZES[size].vocabulary, sequence=sequence)
    return workload_of(shape, sequence=sequence, batch_sequences=batch)


@pytest.fixture(scope="module")
def searches() -> dict[str, Search]:
    return {name: search(workload(*asked), read_cluster(cluster)) for name, (cluster, *asked) in CASES.items()}


@pytest.fixture(scope="module")
def sweep_of(searches: dict[str, Search]) -> SweepOf:
    """The sweep of a search by its name, made once."""
    return cache(lambda name: bandwidth_sweep(searches[name]))


@pytest.fixture(params=CASES)
def found(request: pytest.FixtureRequest, searches: dict[str, Search]) -> Search:
    return searches[request.param]


def piped(schedule: str, virtual: int, *, size: str = "7B", batch: int = 64) -> Search:
    """Four stages, as a person may ask for them; 32 layers and a head do not deal out evenly."""
    degrees = Layout(pipeline=4, tensor=2)
    pins = Constraints(degrees=degrees, knobs={"schedule": schedule, "virtual": virtual, "micro_sequences": 1})
    return search(workload(size, 2048, batch), read_cluster("8xH100"), constraints=pins)


def test_the_first_bar_is_the_chosen_layout_and_each_adds_up_to_what_it_needs(found: Search) -> None:
    bars = memory_bars(found)
    by_words = {layout_text(found.candidates.row(row)): row for row in range(len(found.candidates))}
    assert bars.layouts[0] == layout_text(found.candidates.row(found.chosen))
    for place, words in enumerate(bars.layouts):
        whole = sum(item.bytes_per_device[place] for item in bars.items)
        assert whole == pytest.approx(found.bytes_per_device(by_words[words]))
        assert whole <= max(island.device.memory_bytes for island in found.cluster.islands)
    assert bars.capacities[0][1] == min(island.device.memory_bytes for island in found.cluster.islands)
    assert bars.items[0].name in memory_caption(bars) or len(bars.items) > 1


def test_unequal_devices_have_a_line_each(searches: dict[str, Search]) -> None:
    bars = memory_bars(searches["two machines"])
    assert [name for name, _ in bars.capacities] == ["Apple M4", "RTX 4090"]
    assert "that one Apple M4 has" in memory_caption(bars) and "least room left" in memory_caption(bars)


def test_each_item_falls_from_where_the_last_ended_to_the_end_of_the_step(found: Search) -> None:
    told = waterfall(found)
    ends = [fall.start_s + fall.spent_s for fall in told.falls]
    assert [fall.start_s for fall in told.falls] == pytest.approx([0.0, *ends[:-1]])
    assert ends[-1] == pytest.approx(told.step_s) == pytest.approx(found.step_s[found.chosen])
    assert (told.hidden_s, told.exposed_s) == message_seconds(found, found.chosen)
    linked = sum(fall.spent_s for fall in told.falls if fall.group == "links")
    assert linked <= told.exposed_s * (1 + 1e-9) < linked + 0.03 * told.step_s
    assert max(told.falls, key=lambda fall: fall.spent_s).name in waterfall_caption(told)


def test_without_a_pipeline_a_sentence_says_so(searches: dict[str, Search]) -> None:
    assert pipeline_picture(searches["two nodes"]) is None
    assert "no pipeline" in pipeline_caption(None)


@pytest.mark.parametrize(
    ("schedule", "virtual", "size"),
    [("gpipe", 1, "7B"), ("1f1b", 1, "7B"), ("interleaved", 4, "7B"), ("zero-bubble", 1, "7B"), ("1f1b", 1, "3B")],
)
def test_the_timeline_ends_when_the_step_does(schedule: str, virtual: int, size: str) -> None:
    found = piped(schedule, virtual, size=size, batch=32)
    picture = pipeline_picture(found)
    assert picture and picture.drawn == picture.micros == 32
    assert len(picture.timeline.ranks) == 4 and picture.virtual == virtual
    for spans in picture.timeline.ranks:
        assert len(spans) == 32 * virtual * (3 if schedule == "zero-bubble" else 2)
    # The search simulates the first round and adds the busiest rank's time for each micro-batch beyond.
    assert picture.timeline.duration_s + picture.once_s == pytest.approx(float(found.step_s[found.chosen]), rel=0.01)
    assert 0 < picture.waiting < 0.5


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_the_timeline_of_unequal_devices_is_that_of_their_own_stages(schedule: str) -> None:
    pins = Constraints(degrees=Layout(pipeline=4, tensor=2), knobs={"schedule": schedule, "micro_sequences": 1})
    found = search(workload("1.3B", 2048, 32), read_cluster("4x4090+4x3090@10G"), constraints=pins)
    layers = found.stage_layers(found.chosen)
    assert layers[0] > 2 * layers[-1], "the slower devices and the head are at the end"
    picture = pipeline_picture(found)
    assert picture and picture.drawn == picture.micros == 32
    assert picture.timeline.duration_s + picture.once_s == pytest.approx(float(found.step_s[found.chosen]), rel=0.01)


def test_of_very_many_micro_batches_few_are_drawn_and_it_is_said() -> None:
    picture = pipeline_picture(piped("interleaved", 8, batch=4096))
    assert picture and 8 <= picture.drawn < picture.micros == 4096
    assert sum(len(spans) for spans in picture.timeline.ranks) <= ACTIONS_DRAWN
    assert f"Only {picture.drawn} micro-batches are drawn" in pipeline_caption(picture)
    assert picture.waiting < picture.timeline.bubble


def test_the_chosen_layout_is_the_lowest_dot_in_the_band(found: Search) -> None:
    told = layout_map(found)
    band = [dot for dot in told.dots if dot.step_s <= told.enough_s]
    assert told.chosen in band and told.chosen.points == min(dot.points for dot in band)
    assert told.chosen.words == layout_text(found.candidates.row(found.chosen))
    assert told.fastest.step_s == min(dot.step_s for dot in told.dots)
    assert len(told.dots) <= DOTS_DRAWN + 50 and told.n_beyond <= told.n_layouts - len(told.dots)
    drawn = {dot.step_s for dot in told.dots}
    within = [row for row in best_of_kinds(found) if found.step_s[row] <= SLOWEST_DRAWN * told.fastest.step_s]
    assert {float(found.step_s[row]) for row in within} <= drawn
    assert ("an even sample" in map_caption(told)) == (len(told.dots) + told.n_beyond < told.n_layouts)


def test_each_dot_says_why_it_lost(searches: dict[str, Search]) -> None:
    found = searches["two nodes"]
    told = layout_map(found)
    assert told.chosen.why.startswith("chosen")
    assert told.fastest.why == "the fastest, 1 point more complicated than the chosen layout"
    assert told.chosen.step_s > told.fastest.step_s and "slower than the fastest" in told.chosen.why
    slower = [dot for dot in told.dots if dot.step_s > 1.01 * told.chosen.step_s]
    assert slower and all("the fastest, with " in dot.why and " than the chosen one, " in dot.why for dot in slower)
    for row in best_of_kinds(found):
        if found.step_s[row] > 1.01 * told.chosen.step_s:
            assert longest_delay(found, int(row)) in dot_of(found, told, int(row)).why


def test_a_dot_of_a_pipeline_says_how_much_longer_it_waits() -> None:
    """Where pipelines were simulated, that is in no closed form."""
    degrees = Layout(pipeline=4, tensor=2)
    found = search(workload("7B", 2048, 16), read_cluster("8xH100"), constraints=Constraints(degrees=degrees))
    told = layout_map(found)
    rows = np.flatnonzero(
        (found.step_s > 1.01 * told.chosen.step_s) & (found.step_s < SLOWEST_DRAWN * told.fastest.step_s)
    )
    whys = [dot_of(found, told, int(row)).why for row in rows]
    assert all(longest_delay(found, int(row)) in why for row, why in zip(rows, whys, strict=True))
    assert any("more for waiting for other pipeline stages" in why for why in whys)


def dot_of(found: Search, told: LayoutMap, row: int) -> Dot:
    [dot] = [dot for dot in told.dots if dot.words == layout_text(found.candidates.row(row))]
    return dot


def longest_delay(found: Search, row: int) -> str:
    here, there = time_items(found, found.chosen), time_items(found, row)
    return f"with {time_words(max(there[name] - here[name] for name in here))} more"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two machines", "one box", "two nodes", "many"])
def test_at_the_present_bandwidth_the_sweep_is_the_search(
    name: str, searches: dict[str, Search], sweep_of: SweepOf
) -> None:
    found, sweep = searches[name], sweep_of(name)
    assert sweep and sweep.where == ("inside the node" if name == "one box" else "between the nodes")
    middle = len(sweep.bandwidths) // 2
    assert sweep.bandwidths[middle] == pytest.approx(sweep.present)
    assert chosen_at(sweep, sweep.present) == kind_text(found.candidates.row(found.chosen))
    best = {kind_text(found.candidates.row(int(row))): found.step_s[row] for row in best_of_kinds(found)}
    for line in sweep.lines:
        assert line.step_s[middle] == pytest.approx(best[line.words])
    assert "(dashed)" in sweep_caption(sweep) and f"{sweep.present:.3g} {sweep.unit}" in sweep_caption(sweep)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two machines", "two nodes", "many"])
@pytest.mark.parametrize("factor", [0.01, 0.15, 4.0])
def test_on_another_link_the_sweep_chooses_what_a_whole_search_would(
    name: str, factor: float, searches: dict[str, Search], sweep_of: SweepOf
) -> None:
    found, sweep = searches[name], sweep_of(name)
    assert sweep and is_quick(found) == (name != "many")
    place = int(np.abs(np.log(np.array(sweep.bandwidths) / sweep.present / factor)).argmin())
    exact = sweep.bandwidths[place] / sweep.present
    link = replace(found.cluster.between, bytes_per_s=found.cluster.between.bytes_per_s * exact)
    other = search(found.workload, replace(found.cluster, between=link), tolerance=found.tolerance)
    words, whole = chosen_at(sweep, sweep.bandwidths[place]), kind_text(other.candidates.row(other.chosen))
    # Among very many layouts only representatives are tried, which may miss which of two equals is a hair faster.
    own = np.array([kind_text(other.candidates.row(int(row))) for row in best_of_kinds(other)]) == words
    best = int(best_of_kinds(other)[own][0])
    assert words == whole or (name == "many" and other.step_s[best] < 1.02 * other.step_s[other.chosen])
    shown = {line.words: line.step_s[place] for line in sweep.lines}
    assert shown[words] == pytest.approx(float(other.step_s[best]), rel=0.03)


@pytest.mark.parametrize("name", few_fast([name for name in CASES if name != "one device"], "two machines"))
def test_no_layout_gets_slower_on_a_faster_link_and_bands_leave_no_gap(name: str, sweep_of: SweepOf) -> None:
    sweep = sweep_of(name)
    assert sweep
    for line in sweep.lines:
        assert (np.diff(line.step_s) <= 1e-9 * line.step_s[0]).all(), line.words
    assert [band.last for band in sweep.bands[:-1]] == [band.first for band in sweep.bands[1:]]
    assert (sweep.bands[0].first, sweep.bands[-1].last) == (sweep.bandwidths[0], sweep.bandwidths[-1])


def test_one_device_has_no_link(sweep_of: SweepOf) -> None:
    assert sweep_of("one device") is None
    assert "one device" in sweep_caption(None)


def chosen_at(sweep: Sweep, bandwidth: float) -> str:
    [words] = [sweep.lines[band.line].words for band in sweep.bands if band.first <= bandwidth <= band.last]
    return words
