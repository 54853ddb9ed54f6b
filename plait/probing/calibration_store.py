"""The files in which runs leave their observations of forecasts: one for each machine, software and precision, in
the cache. Deleting `.plait/calibration` forgets all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.checked_json import parse_object, typed_value
from plait.machines.machine import Machine, usable_cores
from plait.model.parts.mixture import MixtureShape
from plait.planner.calibration.factors import Calibration, ForecastBasis, Observation, calibration_from
from plait.private_folder import make_private_folder
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

OBSERVATIONS_FORMAT = 1
FORMULA_VERSION = 2
"""Raised when the formulas change by so much that observations of the earlier ones would mislead."""
OBSERVATIONS_KEPT_ON_DISK = 20
"""Observations in a file; a forecast uses the last few, the others are there for people."""


def calibration_key(machines: Sequence[Machine], precision: str, basis: ForecastBasis) -> str:
    """The name under which observations of such runs are stored: they hold for no other machines or software.

    The order of the machines behind the first does not matter: a plan may have changed it.
    """
    first, *others = (machine.fingerprint() for machine in machines)
    what = [[first, *sorted(others, key=lambda one: json.dumps(one, sort_keys=True))], precision, basis]
    what += [FORMULA_VERSION] if basis == "formulas" else []
    return f"{precision}-{basis}-{sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}"


def load_calibration(key: str, working: WorkingFolder = CURRENT_FOLDER) -> Calibration:
    """The calibration that follows from all observations stored under a key."""
    return calibration_from(key, read_observations(key, working))


def add_observation(key: str, observation: Observation, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Add a run's observation; raises RunFailed where the disk refuses it."""
    kept = [*read_observations(key, working), observation][-OBSERVATIONS_KEPT_ON_DISK:]
    path = _observations_path(key, working)
    make_private_folder(path.parent)
    values = {"format": OBSERVATIONS_FORMAT, "lessons": [asdict(one) for one in kept]}
    replace_file(path, (json.dumps(values, indent=1) + "\n").encode())


def read_observations(key: str, working: WorkingFolder = CURRENT_FOLDER) -> tuple[Observation, ...]:
    """All observations under a key, the oldest first; a file that is not ours counts as missing."""
    try:
        values = parse_object(read_regular_file(_observations_path(key, working)))
        if values["format"] != OBSERVATIONS_FORMAT:
            return ()
        return tuple(_observation_from(one) for one in values["lessons"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def store_expert_load(mixture: MixtureShape, load: float, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Keep what a run measured of such experts: the busiest one's tokens over the mean. Raises RunFailed where the disk
    refuses it."""
    path = _expert_load_path(mixture, working)
    make_private_folder(path.parent)
    replace_file(path, (json.dumps({"format": OBSERVATIONS_FORMAT, "expert_load": load}) + "\n").encode())


def read_expert_load(mixture: MixtureShape, working: WorkingFolder = CURRENT_FOLDER) -> float | None:
    """The last run's measurement for such experts; None if there is none, or the file is not ours."""
    try:
        values = parse_object(read_regular_file(_expert_load_path(mixture, working)))
        load = float(values["expert_load"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return load if values.get("format") == OBSERVATIONS_FORMAT and 1 <= load <= mixture.experts else None


def _expert_load_path(mixture: MixtureShape, working: WorkingFolder) -> Path:
    digest = sha256(json.dumps(asdict(mixture), sort_keys=True).encode()).hexdigest()[:16]
    return working.cache / "calibration" / f"experts-{digest}.json"


def load_per_core() -> float | None:
    """Load per core over the last minutes (programs that wanted to run, of any user); None where this process may
    use only some of the cores, which the load does not tell apart."""
    cores = os.cpu_count() or 1
    if usable_cores() < cores:
        return None
    try:
        return os.getloadavg()[1] / cores
    except OSError:
        return None


def _observations_path(key: str, working: WorkingFolder) -> Path:
    return working.cache / "calibration" / f"{key}.json"


def _observation_from(values: dict[str, Any]) -> Observation:
    observation = typed_value(Observation, values)
    factors = [factor for factor in (observation.compute, observation.messages) if factor is not None]
    if not all(factor > 0 for factor in factors):
        raise ValueError("a factor that is no factor")
    return observation
