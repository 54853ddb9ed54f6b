"""Does `plait plan --measured` find a cause that was planted, with its true size, and say so word for word?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from plait.commands.plan import plan
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.model.sizes import named_shape
from plait.planner.problem.candidates import RECOMPUTE_MODES
from plait.planner.problem.workload import workload_of
from plait.planner.report.diagnosis import (
    chosen_layout,
    diagnose,
    explanation_lines,
    layout_step_s,
    seconds_of,
    verdict_text,
    waited_s,
)
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.search import search
from plait.planner.step_time.cost_inputs import CostInputs
from plait.screen.terminal import TerminalScreen

GOLDEN = Path(__file__).parents[1] / "golden"


def found(size: str, cluster: str, batch: int, sequence: int = 2048, **pins: Any) -> Search:
    shape = named_shape(size, vocabulary=32000, sequence=sequence)
    work = workload_of(shape, sequence=sequence, batch_sequences=batch)
    return search(work, read_cluster(cluster), constraints=Constraints(**pins))


@pytest.fixture(scope="module")
def narrow() -> Search:
    """Two nodes whose sums of gradients take a good part of a step, in small portions."""
    return found(
        "1B", "2x(8xH100)+50G", 256, degrees=Layout(shard=16), knobs={"micro_sequences": 4, "recompute": "none"}
    )


def told_of(search: Search, planted: Callable[[CostInputs], CostInputs]) -> dict[str, str]:
    """What explains the step that a planted change makes, as needs by name."""
    told = diagnose(search, layout_step_s(planted(chosen_layout(search))))
    return {one.name: f"{one.needs} | {one.look}" for one in told.explanations}


def with_cluster(priced: CostInputs, **changes: Any) -> CostInputs:
    return replace(priced, cluster=replace(priced.cluster, **changes))


def with_profile(priced: CostInputs, **changes: Any) -> CostInputs:
    return replace(priced, profile=replace(priced.profile, **changes))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_a_slow_link_is_found_with_its_rate(narrow: Search) -> None:
    between = narrow.cluster.between
    slow = replace(between, bytes_per_s=between.bytes_per_s / 3)
    needs = told_of(narrow, lambda priced: with_cluster(priced, between=slow))["the link between nodes"]
    there, here = numbers(needs)[:2]
    assert here / there == pytest.approx(3, rel=0.1) and "adding up gradients" in needs


def test_slow_products_are_found_with_their_share_of_the_peak(narrow: Search) -> None:
    profile = narrow.profile
    slower = {"product_share": profile.product_share / 1.6, "flash_share": profile.flash_share / 1.6}
    needs = told_of(narrow, lambda priced: with_profile(priced, **slower))["arithmetic"]
    there, here = numbers(needs)[:2]
    assert here / there == pytest.approx(1.6, rel=0.05)


def test_one_slow_device_is_found_with_its_speed(narrow: Search) -> None:
    def slow(priced: CostInputs) -> CostInputs:
        island = priced.cluster.islands[0]
        device = replace(island.device, memory_bytes_per_s=island.device.memory_bytes_per_s / 1.3)
        return with_cluster(priced, islands=(replace(island, speed=1 / 1.3, device=device),))

    assert numbers(told_of(narrow, slow)["one slow device"])[0] == pytest.approx(30, abs=2)


def test_slow_passes_over_memory_are_found_with_their_rate() -> None:
    busy = found("350M", "8xH100", 256)

    def slow(priced: CostInputs) -> CostInputs:
        island = priced.cluster.islands[0]
        device = replace(island.device, memory_bytes_per_s=island.device.memory_bytes_per_s / 2)
        return with_cluster(priced, islands=(replace(island, device=device),))

    there, here = numbers(told_of(busy, slow)["passes over memory"].replace(",", ""))[:2]
    assert here / there == pytest.approx(2, rel=0.05)


def test_a_slow_host_is_found_with_its_time_per_kernel() -> None:
    small = found(
        "25M", "8xH100", 64, 512, degrees=Layout(replicate=8), knobs={"micro_sequences": 1, "recompute": "none"}
    )
    profile = small.profile
    needs = told_of(
        small, lambda priced: with_profile(priced, launch_s=profile.launch_s * 3, micro_s=profile.micro_s * 3)
    )
    there, here = numbers(needs["the host"])[:2]
    assert there / here == pytest.approx(3, rel=0.1)


def test_messages_that_hide_no_more_are_found() -> None:
    sharded = found("1B", "2x(8xH100)+100G", 128, degrees=Layout(shard=16),
                    knobs={"shard_what": "parameters", "micro_sequences": 2, "recompute": "none"})  # fmt: skip
    planted = {"hides_gradients": 0.1, "hides_updates": 0.1, "hides_parameters": 0.1}
    needs = told_of(sharded, lambda priced: with_profile(priced, **planted))["messages under arithmetic"]
    bare = with_profile(chosen_layout(sharded), **planted)
    assert numbers(needs)[0] == pytest.approx(waited_s(bare), rel=0.05)


@pytest.mark.parametrize("what", ["recompute", "micro_sequences", "precision"])
def test_another_way_to_run_is_found(narrow: Search, what: str) -> None:
    def other(priced: CostInputs) -> CostInputs:
        if what == "precision":
            return replace(priced, workload=replace(priced.workload, precision="float32"))
        value = RECOMPUTE_MODES.index("full") if what == "recompute" else 1
        return replace(priced, candidates=replace(priced.candidates, **{what: np.array([value])}))

    priced = other(chosen_layout(narrow))
    told = diagnose(narrow, layout_step_s(priced))
    name = {
        "recompute": 'recompute "full" in place of "none"',
        "micro_sequences": "1 sequence at a time in place of 4",
        "precision": "products in float32 in place of bf16",
    }[what]
    assert name in {one.name for one in told.explanations}, told
    assert next(one.strain for one in told.explanations if one.name == name) < 1.1


def test_the_likeliest_come_first_and_each_says_what_to_look_at(narrow: Search) -> None:
    told = diagnose(narrow, 1.3 * float(narrow.step_s[narrow.chosen]))
    strains = [one.strain for one in told.explanations]
    assert strains == sorted(strains) and len(strains) > 2
    assert all(one.look and one.needs for one in told.explanations)
    assert not {one.name for one in told.explanations} & {one.name for one in told.excluded}


def test_what_cannot_explain_it_would_not_reach_it(narrow: Search) -> None:
    told = diagnose(narrow, 2.0 * float(narrow.step_s[narrow.chosen]))
    assert any(one.bound == "at most" for one in told.excluded)
    assert all(one.step_s < told.measured_s for one in told.excluded if one.bound == "at most")


def test_faster_than_forecast_is_explained_within_what_physics_allows(narrow: Search) -> None:
    priced = chosen_layout(narrow)
    profile = priced.profile
    quick = with_profile(priced, product_share=profile.product_share * 1.2, flash_share=profile.flash_share * 1.2)
    needs = told_of(narrow, lambda _: quick)["arithmetic"]
    there, here = numbers(needs)[:2]
    assert there / here == pytest.approx(1.2, rel=0.05) and there <= 100
    hopeless = diagnose(narrow, 0.1 * float(narrow.step_s[narrow.chosen]))
    assert hopeless.verdict == "faster" and not hopeless.explanations and hopeless.mfu > 1
    assert all(one.step_s > hopeless.measured_s for one in hopeless.excluded)
    assert "another model, batch or machine" in " ".join(explanation_lines(hopeless))


@pytest.mark.parametrize("part", [-0.9, 0.0, 0.9])
def test_inside_the_error_bar_there_is_nothing_to_explain(narrow: Search, part: float) -> None:
    told = diagnose(narrow, (1 + part * narrow.tolerance) * float(narrow.step_s[narrow.chosen]))
    assert told.verdict == "as forecast" and not told.explanations and not told.excluded
    assert "inside this forecast's error bar" in verdict_text(told) and not explanation_lines(told)


def test_the_price_of_the_chosen_layout_is_that_of_the_search() -> None:
    for search_ in (
        found("7B", "8xH100", 64),
        found("13B", "16x(8x4090)+100G", 256, degrees=Layout(pipeline=4, shard=32)),
    ):
        assert layout_step_s(chosen_layout(search_)) == pytest.approx(float(search_.step_s[search_.chosen]), rel=1e-9)


MEASURED = {
    "two-nodes-slower": ("2x(8xH100)+25G", ("1B", 2048, 128), ("layout.shard=16",), "480ms"),
    "4090s-faster": ("8x4090", ("350M", 1024, 256), (), "0.9 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_words_for_a_measured_step(name: str, tmp_path: Path) -> None:
    text, values = measured_plan(name, tmp_path)
    golden = GOLDEN / f"measured-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"
    told = values["measured"]
    assert told["measured_s"] / told["forecast_s"] == told["factor"]
    assert {"verdict", "explanations", "excluded", "experiment", "error"} <= set(told)


def measured_plan(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The section that the command prints, and its JSON."""
    cluster, (size, sequence, batch), layout, measured = MEASURED[name]
    (folder / "recipe.toml").write_text('[data]\nfiles = "text.txt"\n')
    asked = (f"model.size={size}", f"train.sequence={sequence}", f"train.batch_tokens={sequence * batch}", *layout)
    with (folder / "out.txt").open("w") as out:
        plan(folder / "recipe.toml", asked, clusters=[cluster], top=0, json_file=folder / "o.json", measured=measured,
             screen=TerminalScreen(Console(file=out, width=200)))  # fmt: skip
    text = (folder / "out.txt").read_text()
    return text[text.index("\nmeasured ") + 1 :], json.loads((folder / "o.json").read_text())


def test_several_clusters_and_a_measurement_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[data]\nfiles = "text.txt"\n')
    with pytest.raises(PlaitError, match="give a single --cluster") as caught:
        plan(tmp_path / "recipe.toml", [], clusters=["8xH100", "8x4090"], top=0, json_file=None, measured="412ms",
             screen=TerminalScreen(Console()))  # fmt: skip
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("text", "seconds"), [("412ms", 0.412), ("1.3 s", 1.3), (" 2 min", 120.0), ("0.5s", 0.5)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "0ms", "3 steps", "20M tokens", "-1s"])
def test_what_is_no_duration_is_one_sentence(text: str) -> None:
    with pytest.raises(PlaitError, match="is not the duration of a step; write for example 412ms"):
        seconds_of(text)


def test_the_values_are_plain(narrow: Search) -> None:
    told = diagnose(narrow, 1.5 * float(narrow.step_s[narrow.chosen]))
    values = json.loads(json.dumps(asdict(told)))
    assert values["explanations"][0].keys() == {"name", "needs", "look", "strain"}


def test_one_device_waits_for_no_other() -> None:
    told = diagnose(found("350M", "1xH100", 64), 10.0)
    names = {one.name for one in (*told.explanations, *told.excluded)}
    assert names and not names & {"one slow device", "messages under arithmetic", "the link between nodes"}
