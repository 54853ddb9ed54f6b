"""The process that passes one run's files on to one tool while the run works: `python -m plait.tracking.follow`.

Note [a separate process]: these libraries start threads and processes, wait for networks and try again for minutes.
None of that may stop a run or take time from its steps. So nothing in the ranks knows of them: this process reads
metrics.jsonl and samples.jsonl as they grow, and ends soon after the run, or when the command that started it is gone.

tracker-NAME.json records what has arrived. When the run is resumed, these steps are not sent again, and steps that a
failed network held back are sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from plait.checked_json import one_line, parse_json, parse_object, typed_value
from plait.planner.settings import run_settings
from plait.recipe.load import flat_values
from plait.regular_file import append_to_file, read_regular_file
from plait.report.atomic import replace_file
from plait.report.growing_file import GrowingFile
from plait.report.samples_file import SampleReport
from plait.run_folder import RunFolder
from plait.tracking.trackers import TRACKING_TOOLS, MetricRow, OpenTracker, TrackedRun, Tracker

PASS_ON_EVERY_S = 1.0
FINISH_WITHIN_S = 600.0
"""A tool that takes longer is abandoned: the next start of the run sends the rest."""
_MOST_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """How much of a run a tool has received."""

    run_id: str = ""
    step: int = 0
    """The last step whose metrics have arrived."""
    evaluated: int = 0
    """The last step whose evaluation has arrived."""
    sampled: int = -1


def arrived_file(folder: Path, name: str) -> Path:
    """The file that records how much of the run in this folder a tool has received."""
    return folder / f"tracker-{name}.json"


def read_arrived(path: Path) -> Arrived:
    """The recorded value; nothing has arrived if the file is missing or damaged."""
    try:
        return typed_value(Arrived, parse_object(read_regular_file(path)))
    except (OSError, ValueError):
        return Arrived()


class Follower:
    """Passes on new lines of a run's files, in the order of steps."""

    def __init__(self, folder: RunFolder, note: Path, tracker: Tracker) -> None:
        self._tracker, self._note = tracker, note
        known = read_arrived(note)
        known = known if known.run_id == tracker.run_id else Arrived(run_id=tracker.run_id)
        self._arrived = _moved(known, step=max(known.step, tracker.last_step))
        self._metrics, self._samples = GrowingFile(folder.metrics), GrowingFile(folder.samples)

    def pass_on(self) -> None:
        """Send everything new; raises whatever the tool raises, after recording what was sent before."""
        # A sample follows its step's line, and the next step's line follows the sample: read in this order, none is
        # found after a later step was sent, which W&B would not take.
        blocks = list(self._metrics.blocks())
        samples = list(self._new_samples())
        for block in blocks:
            rows: list[MetricRow] = []
            reached = self._arrived
            for line in block.splitlines():
                values = _parsed(line)
                step, kind = values.get("step"), "evaluated" if "eval_loss" in values else "step"
                if not isinstance(step, int) or step <= getattr(reached, kind):
                    continue
                if (samples and samples[0].step < step) or len(rows) == _MOST_ROWS:
                    self._send(rows, reached)
                    rows = []
                while samples and samples[0].step < step:
                    self._send_sample(samples.pop(0))
                    reached = _moved(reached, sampled=self._arrived.sampled)
                reached = _moved(reached, **{kind: step})
                rows.append((step, _numbers(values)))
            self._send(rows, reached)
        for report in samples:
            self._send_sample(report)

    def _new_samples(self) -> Iterator[SampleReport]:
        for block in self._samples.blocks():
            for line in block.splitlines():
                with suppress(ValueError):
                    report = typed_value(SampleReport, parse_json(line))
                    if report.step > self._arrived.sampled:
                        yield report

    def _send(self, rows: Sequence[MetricRow], reached: Arrived) -> None:
        if rows:
            self._tracker.log(rows)
            self._keep(reached)

    def _send_sample(self, report: SampleReport) -> None:
        self._tracker.sample(report)
        self._keep(_moved(self._arrived, sampled=report.step))

    def _keep(self, arrived: Arrived) -> None:
        self._arrived = arrived
        replace_file(self._note, (json.dumps(asdict(arrived)) + "\n").encode())


def _moved(arrived: Arrived, **to: int) -> Arrived:
    return replace(arrived, **to)  # pyright: ignore[reportArgumentType]  only steps


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        values = parse_json(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _numbers(values: Mapping[str, Any]) -> Mapping[str, float]:
    """A line's finite numbers by name; numbers of a nested table by "table/name"."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in _numbers(value).items()}
        elif name != "step" and isinstance(value, int | float) and isfinite(value):
            found[name] = float(value)
    return found


def follow(
    folder: RunFolder,
    name: str,
    open_tracker: OpenTracker,
    wait: Callable[[float], bool],
    say: Callable[[str], None],
) -> None:
    """Pass a run on to the tool until `wait(seconds)` returns True, because the run has ended; then send the rest. The
    first failure is reported in one sentence, and ends this function."""
    title = TRACKING_TOOLS[name].title
    note = arrived_file(folder.path, name)
    with _alone(folder.path / f".tracker-{name}.lock"):
        try:
            while not folder.has_begun:
                if wait(PASS_ON_EVERY_S):
                    return
            run = TrackedRun(
                folder=folder.path,
                name=folder.path.name,
                project=folder.path.resolve().parents[1].name or "plait",
                settings=run_settings(flat_values(folder.saved_config()), folder.saved_plan()),
            )
            tracker = open_tracker(run, read_arrived(note).run_id)
            say(f"{name:<8} {_without_passwords(tracker.address)}")
            follower = Follower(folder, note, tracker)
            while not wait(PASS_ON_EVERY_S):
                follower.pass_on()
            follower.pass_on()
            tracker.finish("finished" if folder.is_finished else "stopped")
        except Exception as error:  # from a library: whatever it is, the run goes on
            why = _without_passwords(one_line(str(error)).rstrip(".")) or type(error).__name__
            later = "the missing steps are sent when the run is resumed"
            say(f"warning  the run goes on without {title}: {why[:300]}; {later}")


def _without_passwords(text: str) -> str:
    """The text without names and passwords in addresses, such as that of an MLflow server."""
    return re.sub(r"(://)[^/@\s]+@", r"\1…@", text)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process follows the run: the one of an earlier start may still be sending its last steps."""
    with append_to_file(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """`python -m plait.tracking.follow FOLDER NAME`: ends once its standard input does. Messages for the user go to
    standard output, one a line; whatever the library prints goes to standard error."""
    folder, name = RunFolder(Path(sys.argv[1])), sys.argv[2]
    sentences = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    ended = threading.Event()

    def read_to_end() -> None:
        sys.stdin.buffer.read()
        ended.set()
        threading.Timer(FINISH_WITHIN_S, os._exit, (1,)).start()

    threading.Thread(target=read_to_end, daemon=True).start()

    def say(text: str) -> None:
        with suppress(OSError):  # the command may have ended
            print(text, file=sentences)

    def open_tracker(run: TrackedRun, run_id: str) -> Tracker:
        return TRACKING_TOOLS[name].open()(run, run_id)

    follow(folder, name, open_tracker, ended.wait, say)
    with suppress(OSError):
        sentences.close()
    os._exit(0)  # whatever threads the library has left


if __name__ == "__main__":
    main()
