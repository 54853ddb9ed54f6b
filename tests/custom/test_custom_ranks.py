"""Whole runs on several ranks: the numbers of one process in every layout, resumed on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import Job
from tests.matrix import few_fast
from tests.report.trace_rules import check_trace
from tests.shared_ranks import RanksOf

LAYOUTS = ["replicate", "shard optimizer", "shard parameters"]
ONE_QUICK = [pytest.param(layout, marks=[] if layout == "shard optimizer" else pytest.mark.slow) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.run_entries")


def told_by(server: RanksOf, entry: str, ranks: int, **asked: Any) -> list[dict[str, Any]]:
    found: list[tuple[int, dict[str, Any]]] = []
    job = Job(entry=entry, argument=json.dumps(asked), world_size=ranks, threads=1)
    server.run(job, on_message=lambda message: found.append((message.rank, dict(message.values))))
    return [values for _, values in sorted(found, key=lambda pair: pair[0])]


def trained(server: RanksOf, folder: Path, ranks: int, **asked: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    (told,) = told_by(server, "train", ranks, folder=str(folder), **asked)
    return [*told["losses"], told["held_out"]], load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def alone(server: RanksOf, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(server, tmp_path_factory.mktemp("alone"), 1, layout="replicate")


def check_equal(found: tuple[list[float], dict[str, torch.Tensor]], expected: Any, last: int | None = None) -> None:
    """Losses (the last ones of them) and weights agree to 1e-10."""
    losses = expected[0] if last is None else expected[0][-last:]
    assert found[0] == pytest.approx(losses, abs=1e-10)
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        assert float((found[1][name] - weight).abs().max()) < 1e-10, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_has_the_numbers_of_one_process(server: RanksOf, tmp_path: Path, alone: Any, layout: str) -> None:
    check_equal(trained(server, tmp_path, 2, layout=layout, shares=[1, 2], accumulate=2, recompute="full"), alone)


@pytest.mark.parametrize("layout", ONE_QUICK)
def test_a_run_resumes_to_the_bit_and_on_another_number_of_ranks(
    server: RanksOf, tmp_path: Path, alone: Any, layout: str
) -> None:
    whole = trained(server, tmp_path, 2, layout=layout)
    saved = str(tmp_path / "saved")
    trained(server, tmp_path, 2, layout=layout, stop=4, save=saved)
    rest = trained(server, tmp_path, 2, layout=layout, resume=saved)
    assert rest[0] == whole[0][4:]
    assert all(torch.equal(weight, whole[1][name]) for name, weight in rest[1].items())
    other = LAYOUTS[(LAYOUTS.index(layout) + 1) % 3]
    check_equal(trained(server, tmp_path, 3, layout=other, resume=saved), alone, last=len(rest[0]))
    check_equal(trained(server, tmp_path, 1, layout="replicate", resume=saved), alone, last=len(rest[0]))


def test_an_embedding_that_shortens_its_rows_is_refused(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match=r"0 has max_norm = 0\.5, with which each worker would shorten only the rows"):
        told_by(server, "renormed", 2)


@pytest.mark.parametrize("after", few_fast([0, 20], 0))
def test_a_weight_that_one_rank_changes_alone_is_told(server: RanksOf, after: int) -> None:
    with pytest.raises(PlaitError, match=r"layers\.1\.1\.weight is no longer the same on all workers"):
        told_by(server, "drift_apart", 2, after=after)


def test_a_rank_that_skips_a_step_is_told(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match="one of them skipped a step"):
        told_by(server, "skip_a_step", 2)


def test_layers_that_examples_choose_are_told_where_weights_are_sharded(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match=r"worker \d has come to the weights of layers\.\d, worker \d to"):
        told_by(server, "choose_by_example", 2, layout="shard parameters")
    told_by(server, "choose_by_example", 2, layout="shard optimizer")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_is_converted_later_is_told(server: RanksOf, layout: str) -> None:
    told_by(server, "convert_later", 2, layout=layout, to="float64", when="after")
    with pytest.raises(
        PlaitError, match=r"enter\.weight was torch\.float64 at plait\.spread and is torch\.float16 now"
    ):
        told_by(server, "convert_later", 2, layout=layout, to="float16", when="after")


@pytest.mark.parametrize("layout", few_fast(LAYOUTS, "shard parameters"))
def test_a_model_that_is_converted_before_its_first_step_is_told(server: RanksOf, layout: str) -> None:
    with pytest.raises(PlaitError, match=r"enter\.weight was torch\.float64 at plait\.spread and is torch\.bfloat16"):
        told_by(server, "convert_later", 2, layout=layout, to="bfloat16", when="before")


@pytest.mark.parametrize(
    ("call", "layout"),
    [
        ("run.save", "replicate"),
        ("run.evaluate", "shard parameters"),
        pytest.param("run.verify", "shard optimizer", marks=pytest.mark.slow),
        pytest.param("run.plan", "replicate", marks=pytest.mark.slow),
    ],
)
def test_a_call_of_one_rank_alone_is_told(server: RanksOf, tmp_path: Path, call: str, layout: str) -> None:
    words = f"calls run.step while another one calls {call};|calls {call} while another one calls run.step;"
    with pytest.raises(PlaitError, match=words.replace(".", r"\.")):
        told_by(server, "call_alone", 2, call=call, layout=layout, folder=str(tmp_path))


def test_a_part_that_is_called_alone_is_told(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match="without a call of the whole model"):
        told_by(server, "call_a_part", 2)


def test_layouts_that_cannot_carry_a_program_say_so(server: RanksOf) -> None:
    first, second = told_by(server, "refuse", 2)
    assert first == second
    mixed, memory, whole, across = first["told"]
    assert "gathers weights of one dtype together" in mixed
    assert "views of one memory" in memory
    assert "Custom may need all of them" in whole
    assert "is shared by" in across


@pytest.mark.parametrize("layout", ONE_QUICK)
def test_gradients_may_travel_rounded(server: RanksOf, layout: str) -> None:
    (told,) = told_by(server, "travel", 2, layout=layout)
    assert 1e-5 < told["error"] < 1e-2


def test_unlike_models_are_told(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match="have built different models"):
        told_by(server, "unlike_models", 2)


def test_a_rank_that_raises_ends_the_others(server: RanksOf) -> None:
    with pytest.raises(RunFailed, match="no such label"):
        told_by(server, "worker_that_raises", 2)


@pytest.mark.parametrize("kind", few_fast(["plain", "norms", "shards"], "plain"))
def test_a_slow_rank_gets_less(server: RanksOf, kind: str) -> None:
    first, second = told_by(server, "measured_shares", 2, kind=kind)
    assert first["sizes"][0] == second["sizes"][0] == 12
    assert first["shares"] == second["shares"]
    assert second["sizes"][-1] < 12 < first["sizes"][-1]  # how much less is told in test_custom_shares.py
    assert all(one + other == 24 for one, other in zip(first["sizes"], second["sizes"], strict=True))
    assert first["losses"] == second["losses"]


def test_a_share_of_fewer_examples_than_parts_keeps_nobody_waiting(server: RanksOf, tmp_path: Path) -> None:
    first, second = told_by(server, "parts_of_a_small_share", 2)
    assert first == second and len(first["losses"]) == 3
    asked = {"layout": "shard parameters", "shares": [7, 1]}
    few = trained(server, tmp_path, 2, accumulate=4, **asked)
    check_equal(few, trained(server, tmp_path, 2, **asked))


def test_values_go_from_rank_to_rank(server: RanksOf) -> None:
    assert told_by(server, "helpers", 2) == [{"ok": True}] * 2


def test_a_batch_that_grows_warms_the_rate_up_and_a_timeline_has_all_workers(server: RanksOf, tmp_path: Path) -> None:
    ((told),) = told_by(server, "grown_batch", 2, trace=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    updates = [(event["tid"], event["args"]["step"]) for event in events if event["name"] == "update"]
    assert updates == [(rank, step) for rank in range(2) for step in range(6)]
    assert told["sizes"] == [4] * 6
    warm = 15  # five passes of three steps
    assert told["factors"] == pytest.approx([1 + (step + 1) / warm for step in range(6)], rel=1e-6)


@pytest.mark.parametrize("layout", ["replicate", "shard optimizer", "shard parameters"])
def test_recorded_steps_show_all_workers_and_change_no_number(server: RanksOf, tmp_path: Path, layout: str) -> None:
    trace = tmp_path / "trace.json"
    told = [told_by(server, "recorded_steps", 2, layout=layout, trace=one) for one in ("", str(trace))]
    assert told[0] == told[1]
    events = json.loads(trace.read_text())
    check_trace(events)
    seen = {(event["pid"], event["name"]) for event in events["traceEvents"] if event["ph"] == "X"}
    for rank in range(2):
        assert {(rank, name) for name in ("forward 1", "backward 1", "sum of gradients", "optimizer update")} <= seen
    assert ("gathering weights" in {name for _, name in seen}) == (layout != "replicate")
