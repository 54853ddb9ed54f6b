"""The cost model's constants: each says what it is and where it comes from, and somebody uses it."""

from __future__ import annotations

from dataclasses import fields
from datetime import date
from pathlib import Path

import pytest

from plait.planner.calibration.constants import constant, constant_fields, constant_rows, constant_table
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.step_time.device_rates import KernelEfficiency

PLANNER = "\n".join(path.read_text() for path in (Path(__file__).parents[2] / "plait" / "planner").rglob("*.py"))


@pytest.mark.parametrize("name", constant_table())
def test_a_constant_says_where_it_was_read_and_is_used(name: str) -> None:
    entry = constant_table()[name]
    assert set(entry) == {"value", "unit", "what", "read_on", "date", "source"}
    assert isinstance(entry["date"], date)
    assert all(entry[key] for key in ("unit", "what", "read_on", "source"))
    assert f'("{name}")' in PLANNER, "nobody uses it"


def test_groups_name_fields_that_exist() -> None:
    profile = {field.name for field in fields(SoftwareProfile)}
    assert set(constant_fields("software_profile")) <= profile
    assert set(constant_fields("software_profile_plait")) <= profile
    for kind in ("gpu", "tpu", "cpu"):
        assert set(constant_fields(f"kernels_{kind}")) == {field.name for field in fields(KernelEfficiency)}
    assert constant("stream_share") < 1 < len(constant_rows("tile_sizes"))
