"""What a run can do without: samples and CSV, written again after a resume, and a sink that fails is left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from plait.errors import PlaitError
from plait.report.metrics import EvalReport, StepReport, trim_metrics
from plait.report.samples_file import SampleReport, read_samples
from plait.report.sinks import BestEffort, CsvFile, MetricsFile, SamplesFile, Several, Sink, TensorBoard
from tests.report.test_report_metrics import eval_report, step_report


def sample_after(step: int, text: str = " is the winter") -> SampleReport:
    return SampleReport(step=step, prompt="Now", text=text)


def run_steps(folder: Path, steps: range, evaluated: int) -> None:
    """What rank 0 writes of these steps, with an evaluation after one of them."""
    metrics = folder / "metrics.jsonl"
    trim_metrics(metrics, steps.start - 1)
    sink = Several([MetricsFile(metrics), CsvFile(folder / "metrics.csv", metrics)])
    for step in steps:
        sink.step(step_report(step))
        if step == evaluated:
            sink.evaluation(eval_report(step))
    sink.close()


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "metrics.csv").open(newline="")))


def test_a_row_of_the_csv_holds_its_steps_evaluation(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 4), evaluated=2)
    rows = table(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [float(row["loss"]) for row in rows] == [step_report(step).loss for step in (1, 2, 3)]
    assert [row["eval_loss"] for row in rows] == ["", str(eval_report(2).eval_loss), ""]


def test_the_csv_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    run_steps(tmp_path, range(1, 6), evaluated=2)
    run_steps(tmp_path, range(4, 7), evaluated=6)
    rows = table(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [bool(row["eval_loss"]) for row in rows] == [False, True, False, False, False, True]


def test_samples_of_steps_that_are_done_again_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = SamplesFile(path, steps_done=0)
    for step in (0, 10, 20):
        first.sample(sample_after(step))
    SamplesFile(path, steps_done=10).sample(sample_after(20, " again"))
    assert read_samples(path) == [sample_after(0), sample_after(10), sample_after(20, " again")]
    SamplesFile(path, steps_done=0)
    assert read_samples(path) == []


class FullDisk:
    """A sink whose disk is full from the second step on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, report: StepReport) -> None:
        self.calls.append(f"step {report.step}")
        if report.step == 2:
            raise OSError(28, "No space left on device")

    def evaluation(self, report: EvalReport) -> None:
        self.calls.append("evaluation")

    def sample(self, report: SampleReport) -> None:
        self.calls.append("sample")

    def note(self, text: str) -> None:
        self.calls.append("note")

    def close(self) -> None:
        self.calls.append("close")


def test_a_sink_that_fails_is_said_once_and_left_alone() -> None:
    sink, said = FullDisk(), list[str]()
    kept = BestEffort("metrics.csv", lambda: sink, said.append)
    for step in (1, 2, 3):
        kept.step(step_report(step))
    kept.sample(sample_after(3))
    kept.close()
    assert sink.calls == ["step 1", "step 2"]
    assert said == ["warning  the run goes on without metrics.csv: [Errno 28] No space left on device"]


def test_a_sink_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    said: list[str] = []

    def opened() -> Sink:
        raise PlaitError("the disk is full")

    BestEffort("TensorBoard", opened, said.append).step(step_report(1))
    assert said == ["warning  the run goes on without TensorBoard: the disk is full"]


def test_tensorboard_has_the_settings_and_the_samples(tmp_path: Path) -> None:
    settings = {"optimizer.lr": 0.004, "optimizer.kind": "adamw", "train.deterministic": True, "layout.tensor": 2}
    sink = TensorBoard(tmp_path, 0, settings)
    sink.step(step_report(1))
    sink.sample(sample_after(1, " is\nthe `winter`"))
    sink.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    [event] = read.Tensors("sample/text_summary")
    assert event.step == 1
    assert event.tensor_proto.string_val[0].decode() == "    Now is\n    the `winter`\n"
    assert read.SummaryMetadata("sample/text_summary").plugin_data.plugin_name == "text"
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()} == settings
    content = read.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    assert {info.name for info in experiment.hparam_infos} == settings.keys()
    assert "eval_loss" in {info.name.tag for info in experiment.metric_infos}


@pytest.mark.parametrize("line", ["{", '{"step": 1}', "[]"])
def test_a_damaged_line_of_samples_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f"{sample_after(0).to_line()}\n{line}\n{sample_after(2).to_line()}")
    with pytest.raises(PlaitError, match=r"samples.jsonl:2 is not a sample of a run"):
        read_samples(path)


def test_a_sample_in_short_is_one_line() -> None:
    short = sample_after(7, " a\n\nb" * 100).in_short()
    assert short.startswith("sample   step 7: Now a b a b") and "\n" not in short and len(short) < 200
