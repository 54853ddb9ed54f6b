"""What runs teach: lessons, what several of them agree on, and the words about a step that came as foretold or not."""

from __future__ import annotations

import random
from statistics import median

import pytest

from plait.planner.calibration.factors import (
    LARGEST_CORRECTION,
    Calibration,
    Observation,
    StepItems,
    calibration_from,
    calibration_text,
    disturbance_text,
    observation_of_items,
    observation_of_step,
    step_items,
    with_calibration,
    without_calibration,
)
from plait.planner.calibration.predicted_vs_measured import (
    Observed,
    comparison_text,
    deviation_text,
    memory_comparison_text,
)
from plait.planner.step_time.step_time import StepTime

SAID = StepItems(compute_s=1.45, messages_s=0.1, optimizer_s=0.06)


def lesson(compute: float, messages: float | None = None) -> Observation:
    return Observation(date="2026-11-21", compute=compute, messages=messages)


def came(step_s: float, items: StepItems | None = None, data_s: float = 0.0) -> Observed:
    return Observed(steps=5, step_s=step_s, data_s=data_s, items=items)


def test_the_items_of_a_forecast_add_up_to_its_step() -> None:
    names = [name for name in StepTime.__slots__ if name not in ("sent", "hidden", "step_s", "waiting")]
    seconds = {name: float(place + 1) for place, name in enumerate(names)}
    items = step_items(seconds)
    assert items.step_s == pytest.approx(sum(seconds.values()))
    assert items.bubble_s == seconds["bubble"] and items.optimizer_s == seconds["optimizer"]
    assert items.messages_s == seconds["parameters"] + seconds["gradients"]
    assert items.within_s == sum(seconds[name] for name in ("tensor", "context", "experts", "passes"))


def test_runs_on_a_slower_machine_teach_both_kinds_apart_whatever_was_known_when_they_were_planned() -> None:
    true = Calibration(compute=1.3, messages=0.7, runs=0)
    lessons: list[Observation] = []
    for _ in range(4):
        known = calibration_from("here", lessons)
        foretold = with_calibration(SAID, known)
        learned = observation_of_items(without_calibration(foretold, known), with_calibration(SAID, true), "2026-11-21")
        assert learned is not None
        lessons.append(learned)
    agreed = calibration_from("here", lessons)
    assert (agreed.compute, agreed.messages, agreed.runs) == pytest.approx((1.3, 0.7, 4))
    assert with_calibration(SAID, agreed).step_s == pytest.approx(with_calibration(SAID, true).step_s)


def test_few_lessons_count_in_part_and_one_odd_run_changes_nothing_later() -> None:
    assert calibration_from("here", ()).compute == 1.0
    assert calibration_from("here", [lesson(1.44)]).compute == pytest.approx(1.2)
    assert 1.2 < calibration_from("here", [lesson(1.44)] * 2).compute < 1.44
    assert calibration_from("here", [lesson(1.1)] * 4 + [lesson(9.0)]).compute == 1.1
    assert calibration_from("here", [lesson(50.0)] * 3).compute == LARGEST_CORRECTION
    assert calibration_from("here", [lesson(0.01)] * 3).compute == 1 / LARGEST_CORRECTION
    # The last ones count, so that a machine that became faster is believed.
    assert calibration_from("here", [lesson(2.0)] * 9 + [lesson(1.0)] * 5).compute == 1.0


def test_noisy_runs_bring_the_forecast_closer_and_keep_it_there() -> None:
    draw = random.Random(7)
    lessons: list[Observation] = []
    errors: list[float] = []
    for _ in range(40):
        factor = calibration_from("here", lessons).compute
        measured = 1.25 * draw.lognormvariate(0, 0.04)
        errors.append(abs(factor / measured - 1))
        lessons.append(lesson(measured))
    assert errors[0] > 0.15 and max(errors[1:3]) < errors[0]
    assert median(errors[5:]) < 0.05 and max(errors[5:]) < 0.15


def test_waits_within_a_group_are_part_of_its_computing_as_a_clock_sees_it() -> None:
    measured = StepItems(compute_s=1.8, messages_s=0.5, optimizer_s=0.12)
    piped = StepItems(compute_s=1.0, messages_s=0.25, optimizer_s=0.1, within_s=0.1, bubble_s=0.4)
    learned = observation_of_items(piped, measured, "")
    assert learned is not None
    assert learned.compute == pytest.approx((1.8 + 0.12 - 0.1) / 1.5) and learned.messages == pytest.approx(2.0)
    assert piped.measurable_items()["compute_s"] == pytest.approx(1.5)
    blurred = StepItems(compute_s=1.0, messages_s=0.1, optimizer_s=0.1, within_s=0.6)
    assert observation_of_items(blurred, measured, "") is None
    little = observation_of_items(StepItems(compute_s=1.0, messages_s=0.01, optimizer_s=0.1), measured, "")
    assert little is not None and little.messages is None
    assert "computing and waiting within groups" in comparison_text(piped, came(1.9))


def test_whole_steps_teach_where_nearly_all_is_computing() -> None:
    alone = StepItems(compute_s=0.9, messages_s=0.0, optimizer_s=0.1)
    whole = observation_of_step(alone, 1.2, "")
    assert whole is not None and whole.compute == pytest.approx(1.2) and whole.messages is None
    assert observation_of_step(StepItems(compute_s=0.7, messages_s=0.2, optimizer_s=0.1), 1.2, "") is None


def test_only_quiet_runs_teach() -> None:
    draw = random.Random(3)
    quiet = [draw.lognormvariate(0, 0.05) for _ in range(50)]
    assert disturbance_text(quiet, None) is None and disturbance_text(quiet, 1.0) is None
    assert disturbance_text(quiet[:9], None) == "it had fewer than 10 steps after the first ones"
    assert disturbance_text(quiet, 1.8) == "other programs were running"
    unsteady = [draw.lognormvariate(0, 0.3) for _ in range(50)]
    assert (disturbance_text(unsteady, None) or "").startswith("the times of its steps differed by ")


def test_the_words_for_what_was_learnt() -> None:
    three = Calibration(ground="g", compute=1.08, messages=1.08, runs=3)
    assert calibration_text(three, with_calibration(SAID, three), "formulas") == (
        "the forecast is 8% longer than the formulas say: the last 3 runs here taught it"
    )
    one = Calibration(ground="g", compute=0.9, runs=1)
    assert calibration_text(one, with_calibration(SAID, one), "clock") == (
        "the forecast is 9% shorter than the probe's times say: the last run here taught it, and half of what it said "
        "is taken until there are more"
    )
    assert calibration_text(Calibration(compute=1.001, runs=5), SAID, "formulas") is None
    assert calibration_text(Calibration(), SAID, "formulas") is None


def test_a_step_as_foretold_is_one_line() -> None:
    measured = StepItems(compute_s=1.41, messages_s=0.09, optimizer_s=0.06)
    assert comparison_text(SAID, came(1.56, measured)) == (
        "the plan said 1.61 s a step (1.45 s computing, 0.1 s messages, 0.06 s optimizer); 5 steps took 1.56 s each "
        "(1.41 s computing, 0.09 s messages, 0.06 s optimizer): 3% faster"
    )
    assert comparison_text(SAID, came(1.612)).endswith("5 steps took 1.61 s each: as planned")
    assert deviation_text(SAID, came(1.56, measured), 0.05, "clock") is None


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (StepItems(compute_s=2.2, messages_s=0.2, optimizer_s=0.06), "computing takes 2.2 s, and the plan said 1.45 s"),
        (
            StepItems(compute_s=1.5, messages_s=0.9, optimizer_s=0.06),
            "waiting for messages and other ranks takes 0.9 s",
        ),
        (
            StepItems(compute_s=1.5, messages_s=0.1, optimizer_s=0.5),
            "the optimizer and the rest of a step take 0.5",
        ),
        (StepItems(compute_s=1.5, messages_s=0.1, optimizer_s=0.1, data_s=0.4), "waiting for samples takes 0.4 s"),
        (
            StepItems(compute_s=1.0, messages_s=0.08, optimizer_s=0.06),
            "computing takes 1 s, and the plan said 1.45 s: ",
        ),
    ],
)
def test_a_step_that_is_off_names_the_item_that_explains_most_of_it(measured: StepItems, words: str) -> None:
    for basis in ("clock", "formulas"):
        told = deviation_text(SAID, came(measured.step_s, measured), 0.05, basis)
        assert told is not None and told.startswith(words), told


def test_what_to_do_about_a_slow_step_goes_by_what_the_forecast_came_from() -> None:
    slow = came(2.5, StepItems(compute_s=2.34, messages_s=0.1, optimizer_s=0.06))
    fixes = {source: deviation_text(SAID, slow, 0.05, source) or "" for source in ("clock", "formulas", "steps")}
    assert "probes the hosts again" in fixes["clock"]
    assert "the formulas are off here" in fixes["formulas"]
    assert "--replan, which times steps again" in fixes["steps"]
    fast = came(1.0, StepItems(compute_s=0.84, messages_s=0.1, optimizer_s=0.06))
    for source in ("clock", "formulas"):
        assert "the next plan here takes it into account" in (deviation_text(SAID, fast, 0.05, source) or "")
    assert "--replan times them again" in (deviation_text(SAID, fast, 0.05, "steps") or "")


def test_whole_steps_name_the_data_where_it_explains_most() -> None:
    assert "waiting for samples takes 0.4 s" in (deviation_text(SAID, came(2.1, data_s=0.4), 0.05, "clock") or "")
    assert "a step takes 2.1 s" in (deviation_text(SAID, came(2.1, data_s=0.01), 0.05, "clock") or "")


def test_memory_is_told_where_it_is_not_as_planned() -> None:
    assert memory_comparison_text(100 * 2**20, 104 * 2**20) is None
    assert memory_comparison_text(100 * 2**20, 120 * 2**20) == (
        "tensors take up to 120 MiB a device, and the plan said 100 MiB: 20% more; a smaller layout.micro_sequences "
        "needs less, if memory is short"
    )
    assert (memory_comparison_text(100 * 2**20, 80 * 2**20) or "").endswith("100 MiB: 20% less")
