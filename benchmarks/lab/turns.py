"""Runs one contender once on a lab's hosts and follows its steps."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from benchmarks.lab.checks import LOOK_EVERY_S, until
from benchmarks.lab.cut import BEGUN_PATIENCE_S, FIRST_PATIENCE_S, QUIET, Cutting, Ended, Turn
from benchmarks.lab.hosts import Lab
from benchmarks.lab.orders import PORT, Party
from benchmarks.lab.startup import Startup
from benchmarks.machine import ProcessorSeconds
from plait.errors import PlaitError

LISTENS_WITHIN_S = 90.0
QUIET_LOOK_S, QUIET_WITHIN_S = 2.0, 40.0
LIMIT_S = 2400.0
"""Of a whole turn, whatever it does."""


def take_turn(lab: Lab, party: Party, cutting: Cutting, logs: Path, warmed_up: Callable[[], int] | None = None) -> Turn:
    """Start the party, follow it until it told enough, and leave nobody running.

    `warmed_up` tells at the end after how many steps those begin that count, where fewer than the cutting waited for
    would have done.
    """
    logs.mkdir(parents=True, exist_ok=True)
    _await_quiet(lab)
    startup = Startup(lab, party, logs / "host0.log")
    try:
        startup.look()
        started = start_party(lab, party, logs)
        follower = _Follower(lab, party)
        ended = follower.until_enough(started, cutting, startup)
    except PlaitError as error:
        return Turn(seconds=(), ended="failed", sentence=str(error))
    finally:
        lab.end_commands()
        startup.end()
    if warmed_up is not None:
        cutting = replace(cutting, warm_up=min(cutting.warm_up, warmed_up()))
    return Turn(
        seconds=cutting.kept(
            follower.seconds, ended, follower.waiting_s, follower.others, allowed_s=follower.allowed_s
        ),
        ended=ended,
        sentence=last_words(logs) if ended == "failed" else "",
        processor_s=follower.a_step([stamp.processor_s for stamp in follower.stamps]),
        sent_bytes=follower.a_step([stamp.sent_bytes for stamp in follower.stamps]),
        others=_share_of_others(follower.others[cutting.warm_up :]),
        product_s=follower.pace_after(cutting.warm_up),
        **_peaks(party.peaks_file),
        **_planned(party.begun_file),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What the hosts and the machine had done at a moment."""

    processor_s: float
    others_s: float
    """In programs on no host."""
    sent_bytes: int
    stolen_s: float
    """By other machines beside this virtual one."""
    at_s: float

    @staticmethod
    def of(lab: Lab) -> Stamp:
        """Now."""
        return Stamp(
            processor_s=lab.processor_s(),
            others_s=lab.other_programs_s(),
            sent_bytes=lab.sent_bytes(),
            stolen_s=ProcessorSeconds.now().stolen_s,
            at_s=time.monotonic(),
        )


class _Follower:
    """Reads the file of steps as it grows."""

    def __init__(self, lab: Lab, party: Party) -> None:
        self.seconds: list[float] = []
        self.others: list[float] = []
        """What others took of the machine during each step."""
        self.waiting_s = 0.0
        self.allowed_s = FIRST_PATIENCE_S
        """Granted for the first step."""
        self._lab, self._file, self._begun_file = lab, party.steps_file, party.begun_file
        self.stamps: list[Stamp] = []
        """When each step was seen to have ended."""
        self._latest = Stamp.of(lab)

    def a_step(self, values: Sequence[float]) -> float:
        """The growth of a value in a step: between the first that was seen to end and the last."""
        return (values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else 0.0

    def pace_after(self, steps: int) -> tuple[float, ...]:
        """Of the hosts' processors in all later steps; empty where there are none."""
        if len(self.stamps) <= steps:
            return ()
        return self._lab.product_s(self.stamps[steps - 1].at_s, self.stamps[-1].at_s)

    def until_enough(self, started: list[subprocess.Popen[bytes]], cutting: Cutting, startup: Startup) -> Ended:
        began = last_step = time.monotonic()
        while True:
            startup.look()
            gone = [process.poll() for process in started]
            if self._read() or self._has_begun():
                last_step = time.monotonic()
            self.waiting_s = time.monotonic() - last_step
            verdict = cutting.verdict(self.seconds, self.waiting_s, self.others, allowed_s=self.allowed_s)
            if verdict:
                return verdict
            if any(code is not None for code in gone) or time.monotonic() - began > LIMIT_S:
                return "failed"
            time.sleep(LOOK_EVERY_S)

    def _has_begun(self) -> bool:
        """Whether the start-up is over since the last call."""
        news = self._begun_file is not None and self._begun_file.exists() and self.allowed_s != BEGUN_PATIENCE_S
        if news:
            self.allowed_s = BEGUN_PATIENCE_S
        return news

    def _read(self) -> int:
        """How many steps are new."""
        if not self._file.exists():
            return 0
        lines = self._file.read_text().split("\n")[:-1]
        found = [values["step_s"] for line in lines if "step_s" in (values := json.loads(line))]
        new = len(found) - len(self.seconds)
        if new:
            stamp = Stamp.of(self._lab)
            self.stamps += [stamp] * new
            self.others += [others_between(self._latest, stamp)] * new
            self._latest = stamp
        self.seconds = found
        return new


def _await_quiet(lab: Lab) -> None:
    """Give others some time to be done, before a turn that they would spoil."""
    end = time.monotonic() + QUIET_WITHIN_S
    while time.monotonic() < end:
        before = Stamp.of(lab)
        time.sleep(QUIET_LOOK_S)
        if others_between(before, Stamp.of(lab)) <= QUIET:
            return


def start_party(lab: Lab, party: Party, logs: Path) -> list[subprocess.Popen[bytes]]:
    """Start every host's command, the others when the first listens for them."""
    started: list[subprocess.Popen[bytes]] = []
    for host, command, environment in zip(lab.hosts, party.commands, party.environments, strict=False):
        if party.leads and host.index == 1:
            until(
                lambda: lab.listens(lab.hosts[0], PORT) or started[0].poll() is not None,
                "the first host listens for the others",
                LISTENS_WITHIN_S,
            )
        started.append(lab.start(host, command, log=logs / f"host{host.index}.log", environment=environment))
    return started


def _peaks(path: Path | None) -> dict[str, int]:
    if path is None or not path.exists():
        return {}
    values = json.loads(path.read_text())
    return {key: max(values[key], default=0) for key in ("peak_tensor_bytes", "peak_rss_bytes")}


def _planned(path: Path | None) -> dict[str, int]:
    """What a run's plan said of its memory."""
    forecast = json.loads(path.read_text())["forecast"] if path is not None and path.exists() else None
    if forecast is None:
        return {}
    of_forecast = {"planned_tensor_bytes": "tensor_bytes", "planned_rss_bytes": "bytes_per_device"}
    return {name: round(forecast[key]) for name, key in of_forecast.items()}


def others_between(before: Stamp, now: Stamp) -> float:
    """Share of the machine's processor time that programs outside the lab took, or other machines beside a virtual one.

    The system's own time does not count: see Lab.other_programs_s.
    """
    taken_s = max(0.0, now.others_s - before.others_s) + now.stolen_s - before.stolen_s
    return taken_s / max((now.at_s - before.at_s) * (os.cpu_count() or 1), 1e-9)


def _share_of_others(shares: Sequence[float]) -> float:
    """Of the steps that count: the quiet ones, where there are any."""
    return mean([share for share in shares if share <= QUIET] or shares or [0.0])


def last_words(logs: Path) -> str:
    """The sentence that plait ended with, or else the last line of each host's log that says anything."""
    lines = [(path.stem, path.read_text(errors="replace").strip().splitlines()) for path in sorted(logs.glob("*.log"))]
    said = [f"{host}: {line}" for host, told in lines for line in told if line.startswith("plait: ")]
    errors = [f"{host}: {line}" for host, told in lines for line in told if "Error" in line]
    return " | ".join((said or errors or [f"{host}: {told[-1]}" for host, told in lines if told])[:2])[:400]
