"""plan.json: a plan on disk, written by the newest format and read by every format since the first release.

Runs before 2026-11-24 wrote format 2, in which three fields of a forecast and the host order have other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.errors import PlaitError
from plait.planner.plan import Plan
from plait.planner.plan_check import check_plan
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file

PLAN_FORMAT = 3
_AGAIN = "start the run under a new run.name"


def plan_text(plan: Plan) -> str:
    """The text of plan.json."""
    return sealed_text({"format": PLAN_FORMAT, **asdict(plan)})


def write_plan(plan: Plan, path: Path) -> None:
    """Write plan.json atomically: a reader sees all of it or none. Raises PlaitError where the disk refuses, because no
    work has begun then."""
    replace_file(path, plan_text(plan).encode(), failure=PlaitError)


def read_plan(path: Path) -> Plan:
    """Read plan.json of this format or an earlier one; raises PlaitError when it is not one."""
    try:
        values = parse_object(read_regular_file(path))
        written = values.pop("format", None)
        if not isinstance(written, int) or (written != PLAN_FORMAT and written not in _OLDER):
            raise PlaitError(f'"{path}" was written by another version of plait; {_AGAIN}')
        for older in range(written, PLAN_FORMAT):
            values = _OLDER[older](values)
        plan = typed_value(Plan, values)
        check_plan(plan)
        return plan
    except OSError as error:
        raise PlaitError(f'"{path}" cannot be read ({error.strerror}); bring it back, or {_AGAIN}') from None
    except ValueError as error:
        raise PlaitError(f'"{path}" is not a usable plan ({error}); bring it back, or {_AGAIN}') from None


def _from_format_2(values: dict[str, Any]) -> dict[str, Any]:
    forecast = {
        "probed": "probe_digest",
        "lookup_layers": "embedding_cost_in_layers",
        "head_layers": "head_cost_in_layers",
    }
    renamed, written = _renamed(values, {"seats": "host_order"}), values.get("forecast")
    return renamed | {"forecast": _renamed(written, forecast) if isinstance(written, dict) else written}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


_OLDER: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {2: _from_format_2}
"""For each older format the function that converts its values to the next format."""
