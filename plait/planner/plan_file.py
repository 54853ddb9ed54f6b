"""plan.json: a plan on disk. From version 0.2.0 on every later version will read the formats before its own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.errors import PlaitError
from plait.planner.plan import Plan
from plait.planner.plan_check import check_plan
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file

PLAN_FORMAT = 4
_AGAIN = "start the run under a new run.name"


def plan_text(plan: Plan) -> str:
    """The text of plan.json."""
    return sealed_text({"format": PLAN_FORMAT, **asdict(plan)})


def write_plan(plan: Plan, path: Path) -> None:
    """Write plan.json atomically: a reader sees all of it or none. Raises PlaitError where the disk refuses, because no
    work has begun then."""
    replace_file(path, plan_text(plan).encode(), failure=PlaitError)


def read_plan(path: Path) -> Plan:
    """Read plan.json; raises PlaitError where it is none, or of another format."""
    try:
        values = parse_object(read_regular_file(path))
        written = values.pop("format", None)
        if written != PLAN_FORMAT:
            raise PlaitError(f'"{path}" was written by another version of plait; {_AGAIN}')
        plan = typed_value(Plan, values)
        check_plan(plan)
        return plan
    except OSError as error:
        raise PlaitError(f'"{path}" cannot be read ({error.strerror}); bring it back, or {_AGAIN}') from None
    except ValueError as error:
        raise PlaitError(f'"{path}" is not a usable plan ({error}); bring it back, or {_AGAIN}') from None
