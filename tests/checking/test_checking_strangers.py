"""Another author's programs: `plait check` says of each what strangers/expected.toml says, written before it ran."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from forked_rank import check_in_forks

HERE = Path(__file__).with_name("strangers")
EXPECTED = tomllib.loads((HERE / "expected.toml").read_text(encoding="utf-8"))


def assert_fault_is_named(name: str) -> None:
    expected = EXPECTED["faulty"][name]
    report = check_in_forks(HERE / "faulty" / f"{name}.py", 2)
    if report.outcome == "cannot judge" and report.exit_code == expected.get("documented"):
        return
    assert report.outcome == "differs", report
    assert [one.kind in expected["kinds"] for one in report.faults] == [True], report
    assert report.faults[0].parameter == expected.get("parameter", report.faults[0].parameter), report


def assert_proven(name: str) -> None:
    report = check_in_forks(HERE / "sound" / f"{name}.py", 2)
    assert report.exit_code in (0, EXPECTED["sound"][name].get("documented")), report


def test_a_wrong_and_a_sound_program_of_a_stranger() -> None:
    assert_fault_is_named("seed_plus_rank")
    assert_proven("lora_frozen")


def test_every_program_is_expected_to_be_something() -> None:
    for kind in ("faulty", "sound"):
        assert {path.stem for path in (HERE / kind).glob("*.py")} == set(EXPECTED[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED["faulty"])
def test_a_fault_that_a_stranger_planted_is_named(name: str) -> None:
    _require_packages("faulty", name)
    assert_fault_is_named(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED["sound"])
def test_a_sound_program_of_a_stranger_is_proven(name: str) -> None:
    _require_packages("sound", name)
    assert_proven(name)


def _require_packages(kind: str, name: str) -> None:
    text = (HERE / kind / f"{name}.py").read_text(encoding="utf-8")
    for package in ("accelerate", "transformers"):
        if f"from {package} import" in text:
            pytest.importorskip(package)
