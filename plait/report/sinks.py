"""Where reports go: one interface, and its leaves for a JSON-lines file, TensorBoard, and several at once."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from plait.regular_file import SpaceAhead, follow_no_link
from plait.report.atomic import cannot_write
from plait.report.metrics import EvalReport, StepReport


class Sink(Protocol):
    """An observer of a run: it gets finished reports, in the order of steps, and returns nothing."""

    def step(self, report: StepReport) -> None: ...

    def evaluation(self, report: EvalReport) -> None: ...

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


class TensorBoard:
    """Writes scalars to an event file of its own in `folder`, without a thread, each event by one system call.

    `steps_done` is where this start goes on from: what earlier starts wrote about later steps is purged by the
    reader, so that curves do not double back. Raises RunFailed on a full disk.
    """

    def __init__(self, folder: Path, steps_done: int = 0) -> None:
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

    def step(self, report: StepReport) -> None:
        self._scalars(report)

    def evaluation(self, report: EvalReport) -> None:
        self._scalars(report)

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


_EVENTS = "events.out.tfevents."
_RECORD_BYTES = 16  # length and two checksums, TFRecord
