"""Does the description of Sailor's program give the layer times and steps that Sailor published?"""

from __future__ import annotations

import pytest

from benchmarks.rent import WITHIN, priced_layer, priced_run, rows_of


def test_layers_on_the_a100_take_what_sailor_timed():
    layers = [priced_layer(row) for row in rows_of("sailor_layers.csv") if row["device"].startswith("A100")]
    assert len(layers) == 12
    assert all(layer["plait_ms"] == pytest.approx(layer["timed_ms"], rel=0.1) for layer in layers)


@pytest.mark.parametrize(
    ("model", "nodes", "pipeline"), [("OPT-350M", 16, 1), ("OPT-350M", 32, 4), ("GPT-Neo-2.7B", 8, 2)]
)
def test_steps_that_sailor_ran_are_forecast_within_the_bar(model: str, nodes: int, pipeline: int):
    [row] = [
        row
        for row in rows_of("sailor_runs.csv")
        if (row["model"], row["nodes"], row["pipeline"]) == (model, str(nodes), str(pipeline))
    ]
    assert abs(float(str(priced_run(row)["error"]))) <= WITHIN
