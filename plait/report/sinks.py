"""Destinations of reports: one interface, and its leaves for files in the run's folder, TensorBoard, and several at
once."""

from __future__ import annotations

import csv
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from plait.checked_json import one_line
from plait.errors import PlaitError
from plait.regular_file import SpaceAhead, append_to_file, follow_no_link
from plait.report.atomic import append_line, cannot_write, replace_file
from plait.report.metrics import EvalReport, StepReport, read_metrics
from plait.report.samples_file import SampleReport, trim_samples


class Sink(Protocol):
    """An observer of a run: it gets finished reports, in the order of steps, and returns nothing."""

    def step(self, report: StepReport) -> None: ...

    def evaluation(self, report: EvalReport) -> None: ...

    def sample(self, report: SampleReport) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Several:
    """Hands everything to each of its sinks in turn."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def step(self, report: StepReport) -> None:
        for sink in self._sinks:
            sink.step(report)

    def evaluation(self, report: EvalReport) -> None:
        for sink in self._sinks:
            sink.evaluation(report)

    def sample(self, report: SampleReport) -> None:
        for sink in self._sinks:
            sink.sample(report)

    def note(self, text: str) -> None:
        for sink in self._sinks:
            sink.note(text)

    def close(self) -> None:
        """Close all, also where one of them fails."""
        failures: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]


class BestEffort:
    """A sink that a run can do without: its first failure is reported in one sentence and ends it."""

    def __init__(self, what: str, make: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._sink: Sink | None = None
        with self._saying():
            self._sink = make()

    def step(self, report: StepReport) -> None:
        if self._sink is not None:
            with self._saying():
                self._sink.step(report)

    def evaluation(self, report: EvalReport) -> None:
        if self._sink is not None:
            with self._saying():
                self._sink.evaluation(report)

    def sample(self, report: SampleReport) -> None:
        if self._sink is not None:
            with self._saying():
                self._sink.sample(report)

    def note(self, text: str) -> None:
        if self._sink is not None:
            with self._saying():
                self._sink.note(text)

    def close(self) -> None:
        if self._sink is not None:
            with self._saying():
                self._sink.close()

    @contextmanager
    def _saying(self) -> Iterator[None]:
        try:
            yield
        except (PlaitError, OSError) as error:
            self._sink = None
            self._say(f"warning  the run goes on without {self._what}: {one_line(str(error))}")


class MetricsFile:
    """Appends to metrics.jsonl, each line by one system call: a kill loses no line and tears at most the last one.

    Call `trim_metrics` first where a run goes on. Notes are not kept here. Raises RunFailed on a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor = self._descriptor = follow_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._space = SpaceAhead(descriptor)

    def step(self, report: StepReport) -> None:
        self._append(report.to_line())

    def evaluation(self, report: EvalReport) -> None:
        self._append(report.to_line())

    def sample(self, report: SampleReport) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        """Wait until the disk has all lines; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._space.release()
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe or a device has nothing to wait for
                    raise cannot_write(self._path, error) from error
            finally:
                os.close(descriptor)

    def _append(self, line: str) -> None:
        assert self._descriptor is not None, "written to after close"
        data = line.encode()
        try:
            self._space.require(len(data))
            if os.write(self._descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self._path, error) from error


class SamplesFile:
    """Appends samples to samples.jsonl; samples that an earlier start wrote for repeated steps are removed."""

    def __init__(self, path: Path, steps_done: int) -> None:
        self._path = path
        trim_samples(path, steps_done)

    def step(self, report: StepReport) -> None:
        pass

    def evaluation(self, report: EvalReport) -> None:
        pass

    def sample(self, report: SampleReport) -> None:
        append_line(self._path, report.to_line())

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        """Does nothing: the file is open only while a sample is written."""


class CsvFile:
    """metrics.csv for spreadsheets: a row for each step, with the evaluation after it in the same row.

    A row is written once the next step is known, or at the end. The file is made again from metrics.jsonl, which was
    cut back before, wherever a run begins or goes on.
    """

    def __init__(self, path: Path, metrics: Path) -> None:
        self._path = path
        self._row: dict[str, object] = {}
        steps, evaluations = read_metrics(metrics)
        evaluated = {one.step: one for one in evaluations}
        rows = [_values(one) | (_values(evaluated[one.step]) if one.step in evaluated else {}) for one in steps]
        replace_file(
            path, "".join(map(_csv_line, [dict(zip(_CSV_COLUMNS, _CSV_COLUMNS, strict=True)), *rows])).encode()
        )
        self._file = append_to_file(path, buffering=1)

    def step(self, report: StepReport) -> None:
        self._write_row()
        self._row = _values(report)

    def evaluation(self, report: EvalReport) -> None:
        self._row |= _values(report)

    def sample(self, report: SampleReport) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        """Write the last row; a second call does nothing."""
        if not self._file.closed:
            self._write_row()
            self._file.close()

    def _write_row(self) -> None:
        if self._row:
            self._file.write(_csv_line(self._row))
            self._row = {}


_CSV_COLUMNS = tuple(dict.fromkeys(one.name for kind in (StepReport, EvalReport) for one in fields(kind)))


def _values(report: StepReport | EvalReport) -> dict[str, object]:
    return {one.name: value for one in fields(report) if (value := getattr(report, one.name)) is not None}


def _csv_line(row: Mapping[str, object]) -> str:
    line = StringIO()
    csv.writer(line, lineterminator="\n").writerow([_csv_cell(row.get(name)) for name in _CSV_COLUMNS])
    return line.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, Mapping):
        return json.dumps(value)
    return "" if value is None or (isinstance(value, float) and not isfinite(value)) else value


class TensorBoard:
    """Writes scalars, settings and samples to a separate event file in `folder`, without a thread, each event by one
    system call. `settings` are what the HPARAMS tab compares runs by.

    `steps_done` is where this start goes on from: what earlier starts wrote about later steps is purged by the
    reader, so that curves do not double back. Raises RunFailed on a full disk.
    """

    def __init__(
        self, folder: Path, steps_done: int = 0, settings: Mapping[str, float | str | bool] | None = None
    ) -> None:
        # A quarter of a second to import: the fork server does it ahead (workers.py), and commands never.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._proto: Any = event_pb2
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Readers take the files in the order of their names; a number sorts starts within one second, a clock not.
            number = 1 + max((int(path.name.split(".")[3]) for path in folder.glob(f"{_EVENTS}*.plait")), default=-1)
            self._path = folder / f"{_EVENTS}{number:010d}.plait"
            self._file = self._path.open("xb")
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._records, self._space = RecordWriter(self._file), SpaceAhead(self._file.fileno())
        self._write(file_version="brain.Event:2")
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._write(step=steps_done + 1, session_log=start)
        if settings:
            self._write(summary={"value": list(_hparams(settings))})

    def step(self, report: StepReport) -> None:
        self._scalars(report)

    def evaluation(self, report: EvalReport) -> None:
        self._scalars(report)

    def sample(self, report: SampleReport) -> None:
        shown = "".join(f"    {line}\n" for line in f"{report.prompt}{report.text}".splitlines())  # Markdown: as it is
        text = {"dtype": _STRING, "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [shown.encode()]}
        self._write(
            step=report.step,
            summary={"value": [{"tag": "sample/text_summary", "metadata": _plugin("text", b""), "tensor": text}]},
        )

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self._file.closed:
            self._space.release()
        try:
            self._file.close()
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def _scalars(self, report: StepReport | EvalReport) -> None:
        values = {field.name: getattr(report, field.name) for field in fields(report)}
        values |= values.pop("auxiliary_losses", None) or {}
        shown = [
            {"tag": tag, "simple_value": value}
            for tag, value in values.items()
            if tag not in ("step", "tokens") and value is not None
        ]
        self._write(step=report.step, summary={"value": shown})

    def _write(self, **event: object) -> None:
        data = self._proto.Event(wall_time=time.time(), **event).SerializeToString()
        try:
            self._space.require(len(data) + _RECORD_BYTES)
            self._records.write(data)
            self._records.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error


def _hparams(settings: Mapping[str, float | str | bool]) -> Iterator[Mapping[str, object]]:
    """The summaries that TensorBoard's HPARAMS tab reads: which settings and metrics there are, and this run's."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    api: Any = api_pb2  # its classes are made when it is imported
    plugin_data: Any = plugin_data_pb2
    kinds = {bool: "DATA_TYPE_BOOL", str: "DATA_TYPE_STRING"}
    experiment = api.Experiment(
        hparam_infos=[{"name": name, "type": kinds.get(type(v), "DATA_TYPE_FLOAT64")} for name, v in settings.items()],
        metric_infos=[{"name": {"tag": tag}} for tag in ("loss", "eval_loss", "eval_nats_per_byte", "tokens_per_s")],
    )
    session = plugin_data.SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        if isinstance(value, bool):
            session.hparams[name].bool_value = value
        elif isinstance(value, str):
            session.hparams[name].string_value = value
        else:
            session.hparams[name].number_value = value
    data = plugin_data.HParamsPluginData
    for tag, content in (
        ("_hparams_/experiment", data(version=0, experiment=experiment)),
        ("_hparams_/session_start_info", data(version=0, session_start_info=session)),
    ):
        yield {"tag": tag, "metadata": _plugin("hparams", content.SerializeToString())}


def _plugin(name: str, content: bytes) -> Mapping[str, object]:
    return {"plugin_data": {"plugin_name": name, "content": content}}


_STRING = "DT_STRING"
_EVENTS = "events.out.tfevents."
_RECORD_BYTES = 16  # length and two checksums, TFRecord
