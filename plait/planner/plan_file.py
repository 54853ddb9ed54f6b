"""plan.json: a plan on disk, written by the newest format and read by every format since the first release.

Runs before 2026-11-24 wrote format 2, in which three fields of a forecast and the host order have other names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.layout import Layout
from plait.model.shape import ModelShape
from plait.planner.calibration.factors import Calibration, StepItems
from plait.planner.plan import Forecast, HostShare, OptimizerPlan, Plan
from plait.report.atomic import replace_file
from plait.units import Amount, Every

PLAN_FORMAT = 3
_AGAIN = "start the run under a new run.name"


def plan_text(plan: Plan) -> str:
    """The text of plan.json."""
    return json.dumps({"format": PLAN_FORMAT, **asdict(plan)}, indent=2) + "\n"


def write_plan(plan: Plan, path: Path) -> None:
    """Write plan.json atomically: a reader sees all of it or none. Raises PlaitError where the disk refuses, because no
    work has begun then."""
    replace_file(path, plan_text(plan).encode(), failure=PlaitError)


def read_plan(path: Path) -> Plan:
    """Read plan.json of this format or an earlier one; raises PlaitError when it is not one."""
    try:
        values = json.loads(path.read_text())
        written = values.pop("format")
        if written != PLAN_FORMAT and written not in _OLDER:
            raise PlaitError(f'"{path}" was written by another version of plait; {_AGAIN}')
        for older in range(written, PLAN_FORMAT):
            values = _OLDER[older](values)
        return _plan(values)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise PlaitError(f'"{path}" is not a usable plan ({error}); {_AGAIN}') from None


def _from_format_2(values: dict[str, Any]) -> dict[str, Any]:
    forecast = {
        "probed": "probe_digest",
        "lookup_layers": "embedding_cost_in_layers",
        "head_layers": "head_cost_in_layers",
    }
    renamed = _renamed(values, {"seats": "host_order"})
    return renamed | {"forecast": values["forecast"] and _renamed(values["forecast"], forecast)}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


_OLDER: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {2: _from_format_2}
"""For each older format the function that converts its values to the next format."""


def _plan(values: dict[str, Any]) -> Plan:
    optimizer, layout = values["optimizer"], values["layout"]
    return Plan(
        **{
            **values,
            "layout": Layout(**{**layout, "stage_layers": tuple(layout["stage_layers"])}),
            "hosts": tuple(HostShare(**host) for host in values["hosts"]),
            "left_out": tuple(HostShare(**host) for host in values.get("left_out", ())),
            "shape": ModelShape(**values["shape"]),
            "optimizer": OptimizerPlan(**{**optimizer, "betas": tuple(optimizer["betas"])}),
            "budget": Amount(**values["budget"]),
            "forecast": _forecast(values["forecast"]) if values["forecast"] else None,
            "checkpoint_every": Every(**values["checkpoint_every"]),
            "reasons": tuple(values["reasons"]),
            "shares": tuple(values.get("shares", ())),
            "host_order": tuple(values.get("host_order", ())),
            "micro_limits": tuple(values.get("micro_limits", ())),
        }
    )


def _forecast(values: dict[str, Any]) -> Forecast:
    items, learned = values.get("items"), values.get("calibration", {})
    return Forecast(**{**values, "items": StepItems(**items) if items else None, "calibration": Calibration(**learned)})
