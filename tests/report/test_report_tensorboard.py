"""TensorBoard's own reader sees each step once, also after a kill and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plait.errors import RunFailed
from plait.report.metrics import EvalReport, StepReport
from plait.report.sinks import TensorBoard


def report(step: int, loss: float, mfu: float | None = 0.5) -> StepReport:
    return StepReport(
        step=step,
        tokens=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        step_s=0.1,
        tokens_per_s=9.0,
        mfu=mfu,
        data_wait_s=0.0,
    )


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def write(folder: Path, steps: range, loss: float, evaluated: int | None = None) -> TensorBoard:
    sink = TensorBoard(folder, steps_done=steps.start - 1)
    for step in steps:
        sink.step(report(step, loss))
    if evaluated:
        sink.evaluation(EvalReport(step=evaluated, eval_loss=2.0, eval_nats_per_byte=1.0))
    return sink


def test_all_tags_arrive_without_closing(tmp_path):
    sink = write(tmp_path, range(1, 4), loss=3.0, evaluated=3)
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert sorted(tags) == sorted(
        ["loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "data_wait_s", "eval_loss", "eval_nats_per_byte"]
    )
    assert curve(tmp_path, "loss") == [(1, 3.0), (2, 3.0), (3, 3.0)]
    assert curve(tmp_path, "eval_nats_per_byte") == [(3, 1.0)]
    sink.close()
    sink.close()


def test_curves_do_not_double_back_after_a_resume(tmp_path):
    write(tmp_path, range(1, 9), loss=3.0, evaluated=4)
    write(tmp_path, range(5, 7), loss=2.0)
    write(tmp_path, range(6, 8), loss=1.0).close()
    assert curve(tmp_path, "loss") == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 2.0), (6, 1.0), (7, 1.0)]
    assert curve(tmp_path, "eval_loss") == [(4, 2.0)]


def test_a_torn_file_of_a_killed_start_does_not_hide_the_next(tmp_path):
    write(tmp_path, range(1, 4), loss=3.0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    write(tmp_path, range(3, 5), loss=2.0).close()
    assert curve(tmp_path, "loss") == [(1, 3.0), (2, 3.0), (3, 2.0), (4, 2.0)]


def test_no_mfu_is_no_curve(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.step(report(1, 1.0, mfu=None))
    sink.note("not shown")
    assert "mfu" not in EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]


def test_a_full_disk_is_a_clean_stop(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFailed, match="could not write"):
        TensorBoard(tmp_path / "file")
