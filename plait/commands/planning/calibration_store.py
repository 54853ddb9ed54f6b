"""Where runs leave what they teach of forecasts: a small file for each machine, software and precision, in the cache.

Deleting `.plait/calibration` forgets all of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.cluster.topology import Machine, usable_cores
from plait.commands.preparing.corpus import CACHE
from plait.planner.calibration.factors import Calibration, ForecastBasis, Observation, calibration_from
from plait.report.atomic import replace_file

OBSERVATIONS_FORMAT = 1
FORMULAS = 2
"""Counted up when formulas change by so much that what runs taught of the last ones would mislead."""
OBSERVATIONS_KEPT_ON_DISK = 20
"""Lessons in a file; a forecast takes the last few of them, and people may look at the others."""


def calibration_key(machines: Sequence[Machine], precision: str, basis: ForecastBasis) -> str:
    """The name that lessons of such runs go by: what they teach holds for no other machines or software.

    Behind the first machine they may stand in any order: a plan may have changed it.
    """
    first, *others = (machine.fingerprint() for machine in machines)
    what = [[first, *sorted(others, key=lambda one: json.dumps(one, sort_keys=True))], precision, basis]
    what += [FORMULAS] if basis == "formulas" else []
    return f"{precision}-{basis}-{sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}"


def load_calibration(ground: str) -> Calibration:
    """What the runs on a ground have taught so far."""
    return calibration_from(ground, read_observations(ground))


def add_observation(ground: str, lesson: Observation) -> None:
    """Add a run's lesson; raises RunFailed where the disk says no."""
    kept = [*read_observations(ground), lesson][-OBSERVATIONS_KEPT_ON_DISK:]
    path = _file(ground)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"format": OBSERVATIONS_FORMAT, "lessons": [asdict(one) for one in kept]}
    replace_file(path, (json.dumps(values, indent=1) + "\n").encode())


def read_observations(ground: str) -> tuple[Observation, ...]:
    """All lessons of a ground, the oldest first; a file that is none of ours counts as not there."""
    try:
        values: Any = json.loads(_file(ground).read_bytes())
        if values["format"] != OBSERVATIONS_FORMAT:
            return ()
        return tuple(_lesson(one) for one in values["lessons"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def crowding() -> float | None:
    """Programs that wanted to run per core over the last minutes; None where that does not tell of this run's cores."""
    cores = os.cpu_count() or 1
    if usable_cores() < cores:
        return None
    try:
        return os.getloadavg()[1] / cores
    except OSError:
        return None


def _file(ground: str) -> Path:
    return CACHE / "calibration" / f"{ground}.json"


def _lesson(values: dict[str, Any]) -> Observation:
    names = [field.name for field in fields(Observation)]
    factors = [values[name] for name in ("compute", "messages") if values[name] is not None]
    if not all(isinstance(factor, int | float) and math.isfinite(factor) and factor > 0 for factor in factors):
        raise ValueError("a factor that is no factor")
    return Observation(**{name: values[name] for name in names})
