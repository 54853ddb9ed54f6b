"""For whom a plan was made: the recipe but for its name and place, the text, the machine and the workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.launch.job import Job, JobResult
from plait.plan.grounds import Given
from plait.run.crew import OnMessage
from plait.run.planning import plan_key
from tests.plan.machines import LAPTOP
from tests.run.other_values import OTHER_VALUES, base_recipe, changed_recipe


class NobodyYet:
    """A crew that runs nothing."""

    def __init__(self, given: Given | None = None) -> None:
        self.given = given

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        raise AssertionError("a key needs no worker")


@pytest.mark.parametrize("key", sorted(OTHER_VALUES))
def test_name_and_place_do_not_count_and_all_else_does(tmp_path: Path, key: str) -> None:
    base, other = (
        plan_key(config, "text", LAPTOP, NobodyYet())
        for config in (base_recipe(tmp_path), changed_recipe(tmp_path, key))
    )
    assert (base == other) == (key in ("run.name", "data.files"))


def test_text_machine_and_given_workers_count(tmp_path: Path) -> None:
    config = base_recipe(tmp_path)
    keys = [
        plan_key(config, "text", LAPTOP, NobodyYet()),
        plan_key(config, "other text", LAPTOP, NobodyYet()),
        plan_key(config, "text", replace(LAPTOP, cores=7), NobodyYet()),
        plan_key(config, "text", replace(LAPTOP, versions=(("torch", "3"),)), NobodyYet()),
        plan_key(config, "text", LAPTOP, NobodyYet(Given(workers=2, threads=1))),
        plan_key(config, "text", LAPTOP, NobodyYet(Given(workers=3, threads=1))),
    ]
    assert len(set(keys)) == len(keys)
    assert plan_key(config, "text", LAPTOP, NobodyYet()) == keys[0]


def test_a_few_pages_of_memory_more_are_the_same_machine(tmp_path: Path) -> None:
    config = base_recipe(tmp_path)
    moved = replace(LAPTOP, memory_bytes=LAPTOP.memory_bytes + 40_960)
    assert plan_key(config, "text", moved, NobodyYet()) == plan_key(config, "text", LAPTOP, NobodyYet())
