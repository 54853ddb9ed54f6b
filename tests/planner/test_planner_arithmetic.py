"""Which library multiplies, and whether in bf16: by what was measured, never by a processor's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.planner.calibration.factors import UNCALIBRATED, Calibration
from plait.planner.derive.arithmetic import (
    PrecisionChoice,
    ProcessorArithmetic,
    arithmetic_name,
    bf16_price,
    bf16_refusal,
    choose_backend,
    choose_backends,
    choose_precision,
    speed_text,
)
from plait.planner.derive.resources import Resources
from plait.planner.resolve.resolve import draft
from tests.commands.product_answers import ROUNDED, rates_of
from tests.planner.machines import LAPTOP, PEAK_FLOPS, PLAYS, SERVER, recipe

FAST = rates_of(LAPTOP, {"onednn": 2.3, "bf16": 4.6})


def test_a_faster_library_that_is_as_exact_is_taken() -> None:
    assert choose_backend("auto", FAST) == (
        "onednn",
        "matrix products by oneDNN: 2.3 times as fast as MKL on this processor, as exact",
    )


def test_a_slower_one_is_not() -> None:
    found = choose_backend("auto", rates_of(LAPTOP, {"onednn": 0.5}))
    assert found == ("default", "matrix products by MKL: oneDNN is 2.0 times slower than it on this processor")


def test_one_that_rounds_its_factors_is_not_however_fast() -> None:
    backend, reason = choose_backend("auto", rates_of(LAPTOP, {"onednn": 8.0}, error=ROUNDED))
    assert backend == "default" and "oneDNN is less exact on this processor (error 2e-03, MKL 2e-07)" in reason


def test_a_library_that_is_not_there_is_not_taken_and_refused_by_name() -> None:
    nothing = rates_of(LAPTOP, {"bf16": 1.0})
    assert choose_backend("auto", nothing) == (
        "default",
        "matrix products by MKL: this torch has no oneDNN for this processor",
    )
    with pytest.raises(
        PlaitError, match='"onednn", and this torch has no oneDNN for this processor; write "auto" or "default"'
    ):
        choose_backend("onednn", nothing)
    with pytest.raises(PlaitError, match="less exact"):
        choose_backend("onednn", rates_of(LAPTOP, {"onednn": 8.0}, error=ROUNDED))


def test_a_named_library_is_obeyed_with_its_price() -> None:
    assert choose_backend("default", FAST) == ("default", "")
    backend, reason = choose_backend("onednn", rates_of(LAPTOP, {"onednn": 0.5}))
    assert backend == "onednn" and reason.endswith("as asked: 2.0 times slower than MKL on this processor")


def test_unlike_hosts_take_a_library_each() -> None:
    slow = rates_of(SERVER, {"onednn": 0.5, "bf16": 0.5})
    found = choose_backends("auto", "float32", [FAST, FAST, slow])
    assert (found.backend, dict(found.host_backends)) == ("onednn", {SERVER.digest(): "default"})
    assert [reason.startswith("unlike hosts: matrix products by MKL") for reason in found.reasons] == [False, True]
    assert found.bf16_gain == pytest.approx(0.5), "of all hosts the least"
    assert found.gain == pytest.approx(1.0), "the default library's, on the slower host"


def test_bf16_is_for_whole_steps_that_gain_a_quarter() -> None:
    assert choose_precision(1.24).precision == "float32" and choose_precision(1.26).precision == "bf16"
    assert choose_precision(1.6).reason.endswith(
        '1.6 times as fast as in float32, as timed here; train.precision = "float32" keeps float32'
    )
    assert bf16_price(0.5) == "precision bf16, whose products take 2.0 times as long as float32's on this processor"


def test_a_processor_without_bf16_stays_in_float32_and_refuses_bf16_by_name() -> None:
    assert bf16_refusal(2.0) == ""
    assert bf16_refusal(0.5).endswith("bf16 products are 2.0 times slower than its own on this processor")
    found = choose_backends("auto", "float32", [rates_of(LAPTOP, {"onednn": 2.0})])
    assert bf16_refusal(found.bf16_gain) == "precision float32: this processor has no bf16 arithmetic"
    with pytest.raises(PlaitError, match=r'no bf16 arithmetic; write train.precision = "float32"'):
        bf16_price(found.bf16_gain)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (2.3, "2.3 times as fast as"),
        (1.1, "10% faster than"),
        (1.0, "about as fast as"),
        (0.9, "1.1 times slower than"),
    ],
)
def test_gains_in_words(gain: float, words: str) -> None:
    assert speed_text(gain) == words


def chosen(precision: str = "float32") -> ProcessorArithmetic:
    found = choose_backends("auto", "float32", [FAST])
    return found.with_precision(PrecisionChoice(precision="bf16", reason="why")) if precision == "bf16" else found


@pytest.mark.parametrize(("precision", "gain"), [("float32", 2.3), ("bf16", 4.6)])
def test_the_plan_knows_the_arithmetic_and_its_peak(tmp_path: Path, precision: str, gain: float) -> None:
    config = recipe(tmp_path, "model.size=1M", "train.budget=100 steps", "layout.replicate=2")
    peak = PEAK_FLOPS[LAPTOP]
    resources = Resources(machine=LAPTOP, peak_flops=peak).with_arithmetic(chosen(precision))
    plan = draft(config, PLAYS, resources, recipe_hash="").plan
    assert (plan.arithmetic.precision, plan.arithmetic.matmul_backend) == (precision, "onednn")
    assert plan.arithmetic.matmul_flops == pytest.approx(8 * gain * 1e11) and plan.machines.peak_flops == pytest.approx(
        gain * peak
    )
    before = draft(config, PLAYS, Resources(machine=LAPTOP, peak_flops=peak), recipe_hash="").plan
    assert plan.forecast is not None and before.forecast is not None
    assert plan.forecast.step_s < 0.7 * before.forecast.step_s
    assert any(reason.startswith("matrix products by oneDNN") for reason in plan.reasons)
    assert (before.arithmetic.precision, before.arithmetic.matmul_backend, before.arithmetic.matmul_flops) == (
        "float32",
        "default",
        None,
    )


def test_what_runs_teach_stays_with_their_arithmetic(tmp_path: Path) -> None:
    asked: list[str] = []
    config = recipe(tmp_path, "model.size=1M", "train.budget=100 steps")
    for precision in ("float32", "bf16"):
        resources = Resources(
            machine=LAPTOP, peak_flops=4e11, load_calibration=lambda name, basis: calibrated(name, asked)
        )
        draft(config, PLAYS, resources.with_arithmetic(chosen(precision)), recipe_hash="")
    assert set(asked) == {"float32-onednn", "bf16"} and arithmetic_name("float32", "default") == "float32"


def calibrated(name: str, asked: list[str]) -> Calibration:
    asked.append(name)
    return UNCALIBRATED


def test_a_job_without_measurements_takes_what_the_recipe_names(tmp_path: Path) -> None:
    here = Resources(machine=LAPTOP, peak_flops=4e11)
    named = recipe(tmp_path, "model.size=1M", "train.matmul_backend=onednn")
    assert draft(named, PLAYS, here, recipe_hash="").plan.arithmetic.matmul_backend == "onednn"
