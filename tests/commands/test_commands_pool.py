"""`plait plan` with a pool, as a person types it: the table, the JSON contract, the page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.errors import PlaitError

RECIPE = """
[data]
files = "text.txt"
[model]
size = "125M"
[train]
budget = "500M tokens"
sequence = 1024
batch_tokens = 131072
"""
POOL = """
[[device]]
name = "A100-40GB"
count = 4
per_node = 4
zone = "east"
price = 3.0
spot_price = 1.0
[[device]]
name = "T4"
count = 2
zone = "west"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "pool.toml").write_text(POOL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_pool_from_the_command_to_json_and_page(folder: Path) -> None:
    said = plan(
        "recipe.toml", "plan.objective=balanced", "--pool", "pool.toml", "--json", "out.json", "--html", "out.html",
        "--availability", "seed:3",
    )  # fmt: skip
    assert "take     all 4 A100 SXM 40GB in east, as spot machines: " in said
    assert "vs. the" in said
    assert "spot     pays here: with availability drawn with seed 3 the run takes " in said
    assert "T4 at $0.53 an hour (AWS on-demand list price, undated: g4dn.xlarge)" in said or "T4 is not used" in said
    values = json.loads((folder / "out.json").read_text())
    best = values["choices"][values["recommended"]]
    assert best["devices"] == {"east": {"A100 SXM 40GB": 4}} and best["purchase"] == "spot"
    keys = {"devices", "layout", "step_s", "days", "cost", "currency", "tokens_per_cost", "assumed", "why"}
    assert all(keys <= choice.keys() for choice in values["choices"])
    assert (best["currency"], best["step_s"]) == ("USD", values["step_s"])
    assert best["cost"] == pytest.approx(values["run"]["cost_usd"]) and best["cost"] > 0
    assert best["tokens_per_cost"] == pytest.approx(values["run"]["tokens"] / best["cost"])
    assert values["over_time"]["pays"] is True and values["over_time"]["cost"] > 0
    page = (folder / "out.html").read_text()
    assert "Time against money" in page and "Which machines of pool.toml" in page


def test_the_catalogues_prices_are_printed_without_a_recipe() -> None:
    said = plan("--prices")
    assert "H100 SXM " in said and "AWS on demand, us-east-1, 2026-11-09: p5.48xlarge" in said


def test_bounds_are_kept(folder: Path) -> None:
    del folder
    said = plan("recipe.toml", "--from", "4xA100-40GB", "plan.deadline=100 days")
    assert "take     2 of your 4 A100 SXM 40GB: " in said and "the cheapest" in said


def test_bounds_without_a_pool_are_said_to_change_nothing(folder: Path) -> None:
    del folder
    said = " ".join(plan("recipe.toml", "plan.max_cost=5", "--cluster", "4xT4").split())
    assert "plan.max_cost changed nothing here: name machines to choose from with --pool or --from" in said
    assert "changed nothing" not in plan("recipe.toml", "--cluster", "4xT4")


BAD = {
    ("--from", "4xA100", "--pool", "pool.toml"): "--pool and --from both name a pool",
    ("--from", "4xA100", "--cluster", "8xH100"): "leave --cluster and --measured out",
    ("--from", "4xZ9"): "is not a device of the catalogue",
    ("--from", "-4xA100"): "has no devices",
    ("--from", "4xT4", "plan.max_cost=0.001"): "nothing in 4xT4 meets plan.max_cost = less than $0.01: the nearest is",
    ("--from", "4xT4", "plan.max_cost=-3"): "plan.max_cost",
    ("--from", "4xT4", "plan.deadline=soon"): "plan.deadline",
    ("--from", "4xT4", "plan.objective=best"): "plan.objective",
    ("--from", "1xMI250X", "plan.objective=cheapest"): "neither the pool nor the catalogue has one for MI250X",
    ("--from", "1xT4", "model.size=70B"): "T4",
    ("--from", "4xT4", "--availability", "seed:1"): "add spot_price to a [[device]]",
    ("--pool", "pool.toml", "--availability", "none.csv"): "cannot read the availability none.csv",
    ("--pool", "pool.toml", "--availability", "seed:x"): "has no seed",
    # Read before anything is planned: a model of 70B would be refused as well.
    ("--pool", "pool.toml", "model.size=70B", "--availability", "none.csv"): "cannot read the availability none.csv",
    ("--pool", "none.toml"): "cannot read the pool none.toml",
    ("--pool", "."): "cannot read the pool",
    ("--availability", "seed:1"): "name one with --pool or --from",
    ("--from", "4xT4", "--prove", "2"): "leave --cluster, --pool, --from, --html and --measured out",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_sentence_and_exit_code_2(folder: Path, arguments: tuple[str, ...]) -> None:
    del folder
    error = CliRunner().invoke(app, ["plan", "recipe.toml", *arguments]).exception
    assert isinstance(error, PlaitError) and error.exit_code == 2
    assert BAD[arguments] in str(error) and "\n" not in str(error)
