"""Plans with some of their fields changed, wherever in the plan these stand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from plait.planner.plan import Plan

_PARTS = ("job", "placement", "arithmetic", "machines", "cadence")


def changed(plan: Plan, **values: Any) -> Plan:
    """The plan with other values of its own fields or of those of its parts."""
    for part in _PARTS:
        old = getattr(plan, part)
        own = {field.name: values.pop(field.name) for field in fields(old) if field.name in values}
        plan = replace(plan, **{part: replace(old, **own)})
    return replace(plan, **values)
