"""metrics.jsonl: its lines, their order, and what is left of them after a kill."""

from __future__ import annotations

import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PlaitError, RunFailed
from plait.report.metrics import EvalReport, StepReport, read_last_metrics, read_metrics, trim_metrics
from plait.report.samples_file import SampleReport
from plait.report.sinks import MetricsFile, Several, TensorBoard


def step_report(step: int, **changes: float | None) -> StepReport:
    report = StepReport(
        step=step,
        tokens=step * 1024,
        loss=4.5 / step,
        grad_norm=1.25,
        lr=1e-3,
        step_s=0.05,
        tokens_per_s=20480.0,
        mfu=0.5,
        data_wait_s=0.001,
    )
    return replace(report, **changes)


def eval_report(step: int) -> EvalReport:
    return EvalReport(step=step, eval_loss=4.0, eval_nats_per_byte=1.6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with steps 1 to 4 and an evaluation after each second one."""
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path)
    for step in range(1, 5):
        sink.step(step_report(step))
        if step % 2 == 0:
            sink.evaluation(eval_report(step))
    sink.note("is not kept here")
    sink.close()
    return path


def test_auxiliary_losses_are_kept_by_name_and_apart_from_the_loss(tmp_path: Path) -> None:
    told = replace(step_report(1), auxiliary_losses={"layer_4": 2.5, "ahead_1": None})
    assert told.to_line().endswith('"auxiliary_losses": {"layer_4": 2.5, "ahead_1": null}}\n')
    (tmp_path / "metrics.jsonl").write_text(told.to_line())
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == [told]


def test_the_lines_have_these_keys_in_this_order():
    assert step_report(1).to_line() == (
        '{"step": 1, "tokens": 1024, "loss": 4.5, "grad_norm": 1.25, "lr": 0.001, "step_s": 0.05, '
        '"tokens_per_s": 20480.0, "mfu": 0.5, "data_wait_s": 0.001}\n'
    )
    assert eval_report(2).to_line() == '{"step": 2, "eval_loss": 4.0, "eval_nats_per_byte": 1.6}\n'


@settings(deadline=None)
@given(st.floats(), st.none() | st.floats())
def test_every_number_survives_and_what_is_not_finite_is_null(loss: float, mfu: float | None):
    line = step_report(1, loss=loss, mfu=mfu).to_line()
    values = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert values["loss"] == (loss if math.isfinite(loss) else None)
    assert values["mfu"] == (mfu if mfu is not None and math.isfinite(mfu) else None)


def test_what_was_written_is_read(path):
    steps, evaluations = read_metrics(path)
    assert steps == [step_report(step) for step in range(1, 5)]
    assert evaluations == [eval_report(2), eval_report(4)]
    assert read_metrics(path.with_name("not-there")) == ([], [])


def test_null_is_read_as_not_a_number_but_for_mfu(path):
    path.write_text(step_report(1, loss=math.inf, mfu=None).to_line())
    (report,) = read_metrics(path)[0]
    assert math.isnan(report.loss) and report.mfu is None


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[1]", "nonsense", '{"step": 1}', '{"step": 1.0, "eval_loss": 1, "eval_nats_per_byte": 1}', "\0" * 9],
)
def test_a_line_that_is_no_metrics_is_named(path, line):
    path.write_text(step_report(1).to_line() + line + "\n" + step_report(2).to_line())
    with pytest.raises(PlaitError, match=r"metrics.jsonl:2 is not a line of metrics"):
        read_metrics(path)
    trim_metrics(path, 9)
    assert [report.step for report in read_metrics(path)[0]] == [1, 2]


def test_a_line_in_the_middle_of_being_written_is_not_read(path):
    with path.open("a") as file:
        file.write('{"step": 5, "tok')
    assert len(read_metrics(path)[0]) == 4


def test_a_bad_number_of_tokens_is_refused(path):
    path.write_text(step_report(1).to_line().replace("1024", "null"))
    with pytest.raises(PlaitError, match=r"metrics\.jsonl:1"):
        read_metrics(path)


@pytest.mark.parametrize(("last_step", "steps", "evaluations"), [(4, 4, 2), (3, 3, 1), (2, 2, 1), (1, 1, 0), (0, 0, 0)])
def test_trimming_keeps_what_the_checkpoint_knows(path, last_step, steps, evaluations):
    trim_metrics(path, last_step)
    kept = read_metrics(path)
    assert (len(kept[0]), len(kept[1])) == (steps, evaluations)
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_torn_file_goes_on_as_if_nothing_had_happened(path):
    whole = path.read_bytes()
    for cut in [*range(0, len(whole), 7), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:cut])
        trim_metrics(path, 1)
        known = [report.step for report in read_metrics(path)[0]]
        sink = MetricsFile(path)
        for step in range(len(known) + 1, 5):
            sink.step(step_report(step))
        sink.close()
        assert [report.step for report in read_metrics(path)[0]] == [1, 2, 3, 4]


def test_trimming_changes_nothing_in_a_file_that_needs_none(path):
    before = path.read_bytes()
    trim_metrics(path, 4)
    assert path.read_bytes() == before
    trim_metrics(path.with_name("not-there"), 4)
    assert not path.with_name("not-there").exists()


def test_a_full_disk_is_a_clean_stop_with_a_sentence(tmp_path):
    sink = MetricsFile(Path("/dev/full"))
    with pytest.raises(RunFailed, match=r"could not write /dev/full .No space left on device.; free some space"):
        sink.step(step_report(1))
    sink.close()
    sink.close()
    with pytest.raises(RunFailed, match="could not write"):
        MetricsFile(tmp_path / "no-such-folder" / "metrics.jsonl")


@pytest.mark.parametrize("kind", [MetricsFile, TensorBoard])
def test_a_disk_that_takes_half_a_line_is_noticed_at_that_line(tmp_path, kind):
    sink = kind(tmp_path / "metrics")
    child = os.fork()
    if child == 0:
        # Room for one and a half reports: the second write is cut short without an error of its own.
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES[kind], ROOM_BYTES[kind]))
        sink.step(step_report(1))
        try:
            sink.step(step_report(2))
        except RunFailed:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    sink.close()


ROOM_BYTES = {MetricsFile: 200, TensorBoard: 280}


def test_trimming_on_a_full_disk_leaves_the_file_as_it_was(path):
    (path.parent / f".metrics.jsonl.{os.getpid()}.new").symlink_to("/dev/full")
    before = path.read_bytes()
    with pytest.raises(RunFailed, match="No space left"):
        trim_metrics(path, 2)
    assert path.read_bytes() == before


class Memory:
    """A sink that remembers."""

    def __init__(self, failing: bool = False) -> None:
        self.seen: list[object] = []
        self._failing = failing

    def step(self, report: StepReport) -> None:
        self.seen.append(report)

    def evaluation(self, report: EvalReport) -> None:
        self.seen.append(report)

    def sample(self, report: SampleReport) -> None:
        self.seen.append(report)

    def note(self, text: str) -> None:
        self.seen.append(text)

    def close(self) -> None:
        self.seen.append("closed")
        if self._failing:
            raise RunFailed("no")


def test_several_sinks_get_everything_in_order_and_all_are_closed():
    sinks = [Memory(failing=True), Memory()]
    several = Several(sinks)
    several.step(step_report(1))
    several.evaluation(eval_report(1))
    several.note("hello")
    with pytest.raises(RunFailed, match="no"):
        several.close()
    assert all(sink.seen == [step_report(1), eval_report(1), "hello", "closed"] for sink in sinks)


def test_a_worker_of_an_earlier_start_writes_into_a_file_that_nobody_reads(tmp_path):
    """It was frozen, and comes back after the next start has begun at the very step that it had written last."""
    path = tmp_path / "metrics.jsonl"
    zombie = MetricsFile(path)
    zombie.step(step_report(1))
    trim_metrics(path, 1)
    zombie.step(step_report(2))
    assert [report.step for report in read_metrics(path)[0]] == [1]


@settings(deadline=None, max_examples=40)
@given(
    n_steps=st.integers(0, 1500),
    evaluate_every=st.integers(1, 700),
    wanted=st.integers(1, 80),
    within=st.integers(1, 2000),
    torn=st.integers(0, 100),
)
def test_the_last_lines_read_from_the_end_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, n_steps: int, evaluate_every: int, wanted: int, within: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("end") / "metrics.jsonl"
    lines: list[StepReport | EvalReport] = []
    for step in range(1, n_steps + 1):
        lines += [step_report(step), *([eval_report(step)] if step % evaluate_every == 0 else [])]
    path.write_text("".join(line.to_line() for line in lines) + step_report(n_steps + 1).to_line()[:torn])
    steps, evaluation = read_last_metrics(path, n_steps=wanted, evaluation_within=within)
    all_steps, evaluations = read_metrics(path)
    assert list(steps) == all_steps[-wanted:]
    behind = next((n for n, line in enumerate(reversed(lines)) if isinstance(line, EvalReport)), math.inf)
    if behind < within:
        assert evaluation == evaluations[-1]
    elif behind >= max(within, wanted + wanted // evaluate_every + 2):
        assert evaluation is None


def test_what_is_no_line_near_the_end_is_named_and_one_endless_line_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_last_metrics(path, n_steps=5, evaluation_within=5) == ([], None)
    path.write_text(f"{step_report(1).to_line()}nonsense\n{step_report(2).to_line()}")
    with pytest.raises(PlaitError, match="line 2 from its end, is not a line of metrics"):
        read_last_metrics(path, n_steps=5, evaluation_within=5)
    assert [one.step for one in read_last_metrics(path, n_steps=1, evaluation_within=1)[0]] == [2]
    path.write_bytes(b"x" * (1 << 22))
    with pytest.raises(PlaitError, match="it has a line that is too long"):
        read_last_metrics(path, n_steps=5, evaluation_within=5)
