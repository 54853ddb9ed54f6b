"""The receipt: in and out, as a table, and the speed that goes into it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import pytest

from plait.errors import PlaitError, RunFailed
from plait.layout import Layout
from plait.report.bottleneck import Remedy, RunBottleneck
from plait.report.metrics import Speed, StepReport, median_speed
from plait.report.receipt import Receipt, receipt_rows
from plait.report.receipt_file import read_receipt, write_receipt

RECEIPT = Receipt(
    steps=600,
    tokens=2_457_600,
    world_size=2,
    layout=Layout(replicate=2).degrees,
    train_loss=3.21098,
    eval_loss=3.9,
    eval_nats_per_byte=1.5123,
    step_s_median=0.4125,
    predicted_step_s=0.4,
    tokens_per_s=9929.7,
    mfu=0.6012,
    mfu_causal=0.5811,
    peak_tensor_bytes=[150_000_000, 157_286_400],
    predicted_peak_bytes_per_device=160_000_000.0,
    peak_rss_bytes=[600_000_000, 644_245_094],
    wall_s=251.4,
    device_hours=0.1397,
    one_device_step_s=0.66,
    cost_usd=0.42,
    energy_wh=None,
    versions={"plait": "0.1.0", "torch": "2.13.0"},
    device="Xeon, 2 cores",
)


def report(step: int, step_s: float, mfu: float | None = None) -> StepReport:
    return StepReport(
        step=step, tokens=0, loss=0, grad_norm=0, lr=0, step_s=step_s, tokens_per_s=100 / step_s, mfu=mfu, data_wait_s=0
    )


def test_a_receipt_comes_back_as_it_was(tmp_path):
    path = tmp_path / "receipt.json"
    write_receipt(RECEIPT, path)
    assert read_receipt(path) == RECEIPT
    assert list(json.loads(path.read_text())) == [
        *Receipt.__slots__, "step_error", "memory_error", "rss_error", "speedup_vs_one", "efficiency", "sha256",
    ]  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["receipt.json"]


def test_a_bottleneck_is_written_as_the_contract_says(tmp_path):
    path = tmp_path / "receipt.json"
    remedy = Remedy(change="keeping activations", gain=1.31, setting="layout.recompute=none")
    found = RunBottleneck(cause="recomputation", share=0.24, sentence="It takes 24% of each step.", remedies=(remedy,))
    write_receipt(replace(RECEIPT, bottleneck=found), path)
    assert json.loads(path.read_text())["bottleneck"] == {
        "cause": "recomputation",
        "share": 0.24,
        "sentence": "It takes 24% of each step.",
        "remedies": [
            {"change": "keeping activations", "gain": 1.31, "setting": "layout.recompute=none", "factor": 1.0}
        ],
    }
    back = read_receipt(path)
    assert back.bottleneck == found
    text = "It takes 24% of each step. Faster would be keeping activations: 1.3 times as fast."
    assert dict(receipt_rows(back))["bottleneck"] == text


def test_what_is_not_known_is_null(tmp_path):
    path = tmp_path / "receipt.json"
    write_receipt(replace(RECEIPT, eval_loss=None, mfu=None, train_loss=math.nan, predicted_step_s=None), path)
    back = read_receipt(path)
    assert back.eval_loss is None and back.mfu is None and math.isnan(back.train_loss)
    assert json.loads(path.read_text())["train_loss"] is None
    assert json.loads(path.read_text())["step_error"] is None and "forecast" not in str(back)


def test_a_missing_or_broken_receipt_is_a_sentence(tmp_path):
    with pytest.raises(PlaitError, match=r"receipt.json is missing: the run has not finished"):
        read_receipt(tmp_path / "receipt.json")
    for text in ("", "[]", "{}", '{"steps": 3}', "\xff"):
        (tmp_path / "receipt.json").write_text(text)
        with pytest.raises(PlaitError, match="is not a receipt"):
            read_receipt(tmp_path / "receipt.json")


def test_a_full_disk_leaves_the_old_receipt(tmp_path):
    path = tmp_path / "receipt.json"
    write_receipt(RECEIPT, path)
    (tmp_path / f".receipt.json.{os.getpid()}.new").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"could not write .*receipt.json .No space left on device."):
        write_receipt(replace(RECEIPT, steps=1), path)
    assert read_receipt(path) == RECEIPT


def test_the_table_reads_like_this():
    assert str(RECEIPT).splitlines() == [
        "trained          600 steps, 2.46M tokens",
        "on               Xeon, 2 cores, 2 ranks (replicate 2)",
        "training loss    3.2110 nats per token in the last step",
        "held-out loss    3.9000 nats per token, 1.5123 per byte",
        "speed            9.93K tokens/s, 0.412 s a step (median)",
        "forecast         0.4 s a step: the run was 3.1% slower than forecast; 153 MiB of tensors: 1.7% less than "
        "forecast",
        "speed-up         1.60 times one device alone (estimated): 80% of 2 workers",
        "MFU              60.1% (58.1% with causal attention)",
        "peak of tensors  150 MiB on the fullest device",
        "peak of memory   614 MiB on the fullest device",
        "time             4 min 11 s, 0.14 device hours",
        "cost             $0.42",
        "versions         plait 0.1.0, torch 2.13.0",
    ]
    short = replace(RECEIPT, eval_loss=None, eval_nats_per_byte=None, mfu=None, mfu_causal=None, world_size=1)
    assert "held-out" not in str(short) and "MFU" not in str(short) and "1 rank (" in str(short)


def test_the_median_leaves_out_the_first_steps_of_each_start():
    slow, fast = [report(step, 10.0) for step in (1, 2, 3)], [report(step, 1.0, mfu=0.5) for step in (4, 5)]
    again = [report(step, 10.0) for step in (6, 7, 8)] + [report(9, 3.0, mfu=0.7)]
    assert median_speed(slow + fast) == Speed(step_s_median=1.0, tokens_per_s=100.0, mfu=0.5)
    assert median_speed(slow + fast + again, starts=(0, 5)).step_s_median == 1.0
    assert median_speed(slow + again, starts=(0, 5)) == Speed(step_s_median=3.0, tokens_per_s=100 / 3.0, mfu=0.7)


def test_a_run_of_warm_up_steps_only_still_has_a_speed():
    assert median_speed([report(1, 2.0), report(2, 4.0)]).step_s_median == 3.0
    assert math.isnan(median_speed([]).step_s_median)


def test_a_difference_from_the_forecast_says_which_way_it_goes():
    table = str(replace(RECEIPT, predicted_step_s=0.4125, timed_step_s=0.3, predicted_rss_bytes=590_000_000.0))
    assert "0.412 s a step: the run was as forecast; timed before the run 0.3 s: 37.5% slower than timed" in table
    assert "614 MiB on the fullest device; forecast 563 MiB: 9.2% more than forecast" in table
    taught = str(replace(RECEIPT, predicted_step_s=0.55, untimed_step_s=0.2, taught_by_runs=1))
    assert (
        "0.55 s a step (timed before the run, formulas said 0.2 s; corrected by 1 earlier run): the run was" in taught
    )
    assert "the run was 25.0% faster than forecast" in taught


@pytest.mark.parametrize(("mfu", "doubted"), [(0.98, False), (1.0, False), (1.039, True)])
def test_more_than_the_peak_is_said_to_be_impossible(mfu: float, doubted: bool):
    table = str(replace(RECEIPT, mfu=mfu))
    assert ("not possible: the peak is too low, probably measured while other programs ran" in table) == doubted


@pytest.mark.parametrize(("one_device_step_s", "doubted"), [(0.8, False), (0.828, False), (1.23, True)])
def test_more_speed_up_than_workers_is_doubted(one_device_step_s: float, doubted: bool):
    table = str(replace(RECEIPT, one_device_step_s=one_device_step_s))
    assert ("% of 2 workers; hardly possible with 2: one device alone is probably faster" in table) == doubted
