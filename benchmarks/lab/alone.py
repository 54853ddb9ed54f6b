"""What each host does by itself with its part of the work, all at the same time: hosts of one machine share its memory
bus and caches, so that each alone, one after the other, would be faster than any of them can be in a run of all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.checks import until
from benchmarks.lab.cut import LONGEST, QUIET, WARM_UP, Turn
from benchmarks.lab.forecast import recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab
from benchmarks.lab.orders import Runner
from benchmarks.lab.turns import Stamp, others_between
from plait.errors import PlaitError

BEGINS_WITHIN_S = 120.0
ENDS_WITHIN_S = 900.0
FAIR = 2 * QUIET
"""Where all processors are busy at once, somebody always takes a little."""
ENOUGH_STEPS = 10_000
"""The runs are ended from outside."""


def side_by_side(lab: Lab, runner: Runner, cases: Sequence[Case], work: Path, *, steps: int) -> list[Turn]:
    """A turn for each host with its own case, by steps that all hosts computed through; `work` is the lab's folder.

    While others take part of the machine, up to LONGEST times as many steps are taken. Where a host does not begin, or
    stops, all turns have failed, with the reason. Until they compute, hosts have a processor each: how long a small
    share of one takes to start up is nobody's matter here.
    """
    shares = [lab.granted(host) for host in lab.hosts]
    for host, share in zip(lab.hosts, shares, strict=True):
        lab.grant(host, max(1.0, share))
    files = [_begin(lab, runner, number, case, work) for number, case in enumerate(cases)]
    try:
        until(lambda: all(_seconds(file) for file in files), "all hosts compute", BEGINS_WITHIN_S)
        for host, share in zip(lab.hosts, shares, strict=True):
            lab.grant(host, share)
        before, first = Stamp.of(lab), [len(_seconds(file)) for file in files]
        for count in (steps, LONGEST * steps):
            needed = [at + WARM_UP + count for at in first]
            until(lambda wanted=needed: _all_reached(files, wanted), "all hosts have computed", ENDS_WITHIN_S)
            after = Stamp.of(lab)
            others = others_between(before, after)
            if others <= FAIR:
                break
        taken = [tuple(_seconds(file)[at + WARM_UP :]) for file, at in zip(files, first, strict=True)]
    except PlaitError as error:
        return [Turn(seconds=(), ended="failed", sentence=str(error))] * len(cases)
    finally:
        lab.end_commands()
        for host, share in zip(lab.hosts, shares, strict=True):
            lab.grant(host, share)
    pace = lab.product_s(before.at_s, after.at_s)
    return [Turn(seconds=seconds, ended="finished", others=others, product_s=pace) for seconds in taken]


def _begin(lab: Lab, runner: Runner, number: int, case: Case, work: Path) -> Path:
    """Start a host's own run; answers the file of its steps, as seen from outside."""
    host, name = lab.hosts[number], f"alone{number}-{time.monotonic_ns()}"
    outside = lab.folder_of(host)
    (outside / "recipes").mkdir(exist_ok=True)
    text = recipe_text(case, {"replicate": 1}, name=name, steps=ENOUGH_STEPS)
    (outside / "recipes" / f"{name}.toml").write_text(text)
    party = runner.party(work / "recipes" / f"{name}.toml", work / "runs" / name, [host])
    (work / "logs").mkdir(exist_ok=True)
    lab.start(host, party.commands[0], log=work / "logs" / f"{name}.log", environment=party.environments[0])
    return outside / party.steps_file.relative_to(work)


def _all_reached(files: Sequence[Path], wanted: Sequence[int]) -> bool:
    return all(len(_seconds(file)) >= count for file, count in zip(files, wanted, strict=True))


def _seconds(file: Path) -> list[float]:
    """Of the steps so far."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [values["step_s"] for line in lines if "step_s" in (values := json.loads(line))]
