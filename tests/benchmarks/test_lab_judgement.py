"""Are turns cut when they should be, rounds fair, and regret, simplicity's price and errors right?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.lab.cut import LONGEST, Cutting, Turn
from benchmarks.lab.demands import demands, demands_text
from benchmarks.lab.journal import append_line, read_lines
from benchmarks.lab.picture import curves, pictures
from benchmarks.lab.report import case_table, summary, summary_text, verdict, verdict_text
from benchmarks.lab.trial import in_rounds
from plait.errors import PlaitError

FIRST = Cutting(steps=5, fastest_s=float("inf"))
LATER = Cutting(steps=5, fastest_s=1.0)


def test_a_turn_ends_with_its_last_full_step():
    assert FIRST.verdict([9.0, 1.0, 1.0, 1.0, 1.0], 0.1, allowed_s=90.0) is None
    assert FIRST.verdict([9.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0, allowed_s=90.0) == "finished"
    assert FIRST.kept([9.0, 1.0, 1.1, 1.2, 1.3, 1.4], "finished", 0.0, allowed_s=90.0) == (1.0, 1.1, 1.2, 1.3, 1.4)


def test_twice_the_fastest_is_enough_after_one_full_step():
    assert LATER.verdict([9.0], 0.1, allowed_s=90.0) is None, "the first step warms up, whatever it takes"
    assert LATER.verdict([9.0, 2.0], 0.1, allowed_s=90.0) is None
    assert LATER.verdict([9.0, 2.1], 0.1, allowed_s=90.0) == "cut"
    assert LATER.kept([9.0, 2.1], "cut", 0.1, allowed_s=90.0) == (2.1,)
    assert LATER.verdict([9.0, 1.5, 7.0], 5.0, allowed_s=90.0) is None, (
        "a slow step later is noise, not a hopeless layout"
    )


def test_a_turn_goes_on_until_enough_steps_were_quiet_and_counts_those():
    steps, noisy = [9.0, 1.0, 1.5, 1.0, 1.0, 1.0], [0.5, 0.0, 0.2, 0.01, 0.0, 0.0]
    assert FIRST.verdict(steps, 0.0, noisy, allowed_s=90.0) is None, "one of five was disturbed"
    assert FIRST.verdict([*steps, 1.1], 0.0, [*noisy, 0.02], allowed_s=90.0) == "finished"
    assert FIRST.kept([*steps, 1.1], "finished", 0.0, [*noisy, 0.02], allowed_s=90.0) == (1.0, 1.0, 1.0, 1.0, 1.1)
    never = [0.1] * (1 + LONGEST * 5)
    assert FIRST.verdict([1.0] * len(never), 0.0, never, allowed_s=90.0) == "finished", "a machine that is never quiet"
    assert len(FIRST.kept([1.0] * len(never), "finished", 0.0, never, allowed_s=90.0)) == LONGEST * 5


def test_a_slow_step_of_a_disturbed_machine_is_not_held_against_a_layout_until_there_are_three():
    assert LATER.verdict([9.0, 5.0], 0.1, [0.0, 0.3], allowed_s=90.0) is None
    assert LATER.verdict([9.0, 5.0, 2.5], 0.1, [0.0, 0.3, 0.0], allowed_s=90.0) == "cut"
    assert LATER.kept([9.0, 5.0, 2.5], "cut", 0.1, [0.0, 0.3, 0.0], allowed_s=90.0) == (2.5,)
    assert LATER.verdict([9.0, 5.0, 4.0, 6.0], 0.1, [0.0, 0.3, 0.3, 0.3], allowed_s=90.0) == "cut"
    assert LATER.kept([9.0, 5.0, 4.0, 6.0], "cut", 0.1, [0.0, 0.3, 0.3, 0.3], allowed_s=90.0) == (4.0,)


def test_a_step_that_does_not_end_is_a_lower_bound():
    def verdict(seconds: list[float], waiting_s: float, cutting: Cutting = LATER) -> str | None:
        return cutting.verdict(seconds, waiting_s, allowed_s=90.0)

    assert verdict([9.0], 4.1) == "longer"
    assert LATER.kept([9.0], "longer", 4.1, allowed_s=90.0) == (4.1,)
    assert verdict([], 4.1) is None, "start-up is in there"
    assert verdict([], 94.1) == "longer"
    assert LATER.kept([], "longer", 94.1, allowed_s=90.0) == (pytest.approx(4.1),)
    assert verdict([], 1e6, FIRST) is None


class Contenders:
    """Takes turns from a table of step times, and notes who was asked when, and beside what."""

    def __init__(self, **step_s: float) -> None:
        self.step_s, self.asked = step_s, []

    def take(self, name: str, fastest_s: float) -> Turn:
        self.asked.append((name, fastest_s))
        seconds = self.step_s[name]
        return Turn(seconds=(seconds,), ended="cut" if seconds > 2 * fastest_s else "finished")


def test_later_rounds_are_for_the_near_ones_and_the_planners_own_and_begin_with_another():
    contenders = Contenders(a=1.2, b=1.0, c=1.05, hopeless=3.0, slow=1.5)
    turns = in_rounds(["a", "b", "c", "hopeless", "slow"], contenders.take, rounds=3, always=("a",))
    assert {name: len(taken) for name, taken in turns.items()} == {"a": 3, "b": 3, "c": 3, "hopeless": 1, "slow": 1}
    names = [name for name, _ in contenders.asked]
    assert names[5:] == ["b", "c", "a", "c", "a", "b"]
    assert contenders.asked[1] == ("b", 1.2) and contenders.asked[3] == ("hopeless", 1.0)


def test_a_contender_that_failed_is_not_asked_again():
    def take(name: str, fastest_s: float) -> Turn:
        if name == "broken":
            return Turn(seconds=(), ended="failed", sentence="it broke")
        return Turn(seconds=(1.0,), ended="finished")

    turns = in_rounds(["broken", "good"], take, rounds=2, always=("broken",))
    assert len(turns["broken"]) == 1 and len(turns["good"]) == 2


LARGE = {"layers": 8, "width": 320, "vocabulary": 2048}


def line(rate: Any = 50e6, **times: tuple[float, float, str]) -> dict[str, Any]:
    """A finished case; of each layout (measured, predicted, how its turn ended)."""
    layouts = {
        name.replace("_", " "): {
            "layout": {}, "step_s": predicted, "tensor_bytes": 90.0, "all_bytes": 100.0,
            "turns": [turn(seconds, ended)],
        }
        for name, (seconds, predicted, ended) in times.items()
    }  # fmt: skip
    return {
        "key": str(rate),
        "case": {"name": f"case at {rate}", "group": "a group", "rate": rate, "cores": [1.0, 1.0], "shape": LARGE},
        "alone": [[turn(0.7, "finished"), turn(0.9, "finished")]],
        "carried_bits_per_s": [9e9, 8e9], "fastest": "pipeline 2, 1f1b", "chosen": "replicate 2",
        "crossings": [[3e8, "pipeline 2", "replicate 2"]], "layouts": layouts,
        "baselines": {"ddp": [turn(1.8, "finished")], "hf-trainer": [turn(0.0, "failed")]},
    }  # fmt: skip


def turn(seconds: float, ended: Any) -> dict[str, Any]:
    figures = (0.9 * seconds, seconds, 1.1 * seconds) if ended == "finished" else (seconds,) if seconds else ()
    return asdict(
        Turn(
            seconds=figures,
            ended=ended,
            sentence="no" if ended == "failed" else "",
            peak_tensor_bytes=100,
            peak_rss_bytes=125,
            sent_bytes=5e6,
            others=0.5 if seconds == 1.1 else 0.0,
        )
    )


JUDGED = {
    "replicate_2": (1.2, 1.05, "finished"),
    "pipeline_2, 1f1b": (1.1, 1.0, "finished"),
    "tensor_2": (1.0, 1.5, "finished"),
    "context_2": (4.0, 5.0, "longer"),
}


def test_regret_simplicity_and_errors():
    found = verdict(line(**JUDGED))
    assert found.fastest == "tensor 2"
    assert found.regret == pytest.approx(0.1)
    assert found.simplicity_paid == pytest.approx(1.2 / 1.1 - 1)
    assert found.simplicity_said == pytest.approx(0.05)
    assert sorted(found.step_errors) == pytest.approx([1.05 / 1.2 - 1, 1.0 / 1.1 - 1, 0.5])
    assert found.choice_error == pytest.approx(1.05 / 1.2 - 1)
    assert found.memory_errors == pytest.approx([-0.1, -0.1, -0.1])
    assert found.process_errors == pytest.approx([-0.2, -0.2, -0.2])
    assert found.over_floor == pytest.approx(1.2 / 0.8 - 1), "5 MB at 50 Mbit/s are sent in as long as a host computes"
    assert found.disturbed == pytest.approx(0.25)
    assert found.baselines == {"ddp": pytest.approx(1.5)}
    over_all = summary([found, found])
    assert over_all.regret == pytest.approx((0.1, 0.1, 0.1))
    assert over_all.step_error and over_all.step_error[2] == pytest.approx(0.5)
    assert "regret | 10.0% | 10.0% | 10.0%" in summary_text(over_all)
    assert "ddp takes 1.50 × the choice" in verdict_text(found)


def test_memory_is_judged_by_what_the_run_itself_planned_and_for_models_that_are_large_enough():
    dealt = line(**JUDGED)
    for one in dealt["layouts"].values():
        one["turns"][0] |= {"planned_tensor_bytes": 102.0, "planned_rss_bytes": 130.0}
    assert verdict(dealt).memory_errors == pytest.approx([0.02, 0.02, 0.02]), "its shares may be unequal"
    assert verdict(dealt).process_errors == pytest.approx([0.04, 0.04, 0.04])
    dealt["case"]["shape"] = LARGE | {"width": 128}
    assert verdict(dealt).memory_errors == () and len(verdict(dealt).process_errors) == 3


def test_what_is_demanded_stands_beside_what_was_reached():
    found = [verdict(line(rate, **JUDGED)) for rate in (50e6, 1e9)]
    told = {one.what: one for one in demands(summary(found), found)}
    assert told["regret of the predicted fastest, median"].reached == pytest.approx(0.1)
    assert not told["regret of the predicted fastest, median"].met
    assert told["price of simplicity beyond what was said, worst"].reached == pytest.approx(1.2 / 1.1 - 1.05)
    assert told["over the floor at 1 Gbit/s, worst"].reached == pytest.approx(0.5)
    assert not any("50 Mbit/s" in what for what in told), "no floor is demanded there"
    assert told["the choice over the best baseline"].met and told["the choice over the best baseline"].most == 1.0
    assert "| over the floor at 1 Gbit/s, worst | 15.0% | 50.0% | missed |" in demands_text(list(told.values()))


def test_the_floor_is_the_bytes_where_they_take_longer_and_unknown_for_unequal_hosts():
    narrow = line(1e7, **JUDGED)
    assert verdict(narrow).over_floor == pytest.approx(1.2 / 4.0 - 1)
    narrow["layouts"]["replicate 2"]["turns"].append(turn(2.4, "finished"))
    narrow["alone"].append([turn(5.0, "finished")] * 2)
    assert verdict(narrow).over_floor == pytest.approx((1.2 / 4 + 2.4 / 5) / 2 - 1), "each turn by what stood beside it"
    narrow["alone"][1] = [turn(0.0, "failed")]
    assert verdict(narrow).over_floor == pytest.approx(1.2 / 4.0 - 1)
    narrow["alone"] = [turn(5.0, "finished")]
    assert verdict(narrow).over_floor == pytest.approx(1.74 / 5 - 1), "once, at the end, in older files"
    narrow["case"]["cores"] = [1.0, 0.5]
    assert verdict(narrow).over_floor is None


def test_a_choice_that_did_not_run_is_no_success():
    broken = line(**JUDGED | {"pipeline_2, 1f1b": (0.0, 1.0, "failed")})
    assert verdict(broken).regret is None and verdict(broken).simplicity_paid is None
    with pytest.raises(ValueError, match="no layout"):
        verdict(line(**{"replicate_2": (0.0, 1.0, "failed"), "pipeline_2, 1f1b": (0.0, 1.0, "failed")}))


def test_a_table_tells_bounds_and_failures():
    told = case_table(line(**JUDGED))
    assert "| context 2 | > 4 |" in told and "| hf-trainer | failed |" in told
    assert told.splitlines()[2].startswith("| tensor 2 | 1 |")


def test_lines_survive_a_torn_end(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    append_line(out, {"key": "a"})
    with out.open("a") as file:
        file.write('{"key": "to')
    assert [one["key"] for one in read_lines(out)] == ["a"]
    append_line(out, {"key": "b"})
    assert [one["key"] for one in read_lines(out)] == ["a", "b"]


def test_another_file_is_not_taken_for_results(tmp_path: Path):
    (tmp_path / "x").write_text("hello\n")
    with pytest.raises(PlaitError, match="no file of the lab's results"):
        read_lines(tmp_path / "x")


def test_the_picture_shows_each_layout_over_rates_and_the_predicted_crossing():
    lines = [line(50e6, **JUDGED), line(1e9, **JUDGED), line("unshaped", **JUDGED)]
    drawn = curves(lines)
    assert drawn[0].name == "tensor 2" and {curve.name for curve in drawn} >= {"ddp", "replicate 2", "pipeline 2"}
    assert [rate for rate, _ in drawn[0].measured] == [50e6, 1e9, 8e9]
    ((path, text),) = pictures(lines, Path("out.jsonl")).items()
    assert path.name == "out-a-group.svg"
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "predicted: pipeline 2 → replicate 2 at 300 M" in text
    assert pictures(lines[:1], Path("out.jsonl")) == {}
