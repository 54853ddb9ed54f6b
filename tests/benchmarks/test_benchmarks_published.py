"""Does the scorer of published runs keep its written rules, and does the model keep its word on a sample of them?"""

from __future__ import annotations

import csv
import tomllib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.published import __main__ as published
from benchmarks.published.figures import families, memory_by_family, priced_as_plait, ranges
from benchmarks.published.pricing import cases_of, price
from benchmarks.published.reading import read_rows
from benchmarks.published.scoring import fitted_errors, fitting_half, held_out_errors, jobs, kendall_tau, scalar
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.search.model_error import ERRORS_FILE

HERE = Path(published.__file__).parent
ROWS = read_rows(HERE / "rows.csv")


def sample(*ids: str) -> list:
    chosen = [row for row in ROWS if row["id"] in ids]
    cases, unread = cases_of(chosen)
    assert not unread
    return price(cases)


def source(name: str) -> list:
    return sample(*(row["id"] for row in ROWS if row["id"].rpartition("-")[0] == name))


def test_halves_follow_the_checksum_of_the_id():
    assert not fitting_half("meg21-001")
    assert {fitting_half(f"meg21-{number:03d}") for number in range(1, 9)} == {True, False}


def test_a_small_source_is_scored_unfitted_and_a_large_one_on_its_odd_half():
    few, many = source("fa"), source("meg21")
    assert scalar(few) is None
    assert len(fitted_errors(few, None)) == 3
    factor = scalar(many)
    assert factor is not None
    assert len(fitted_errors(many, factor)) == sum(not fitting_half(row.case.id) for row in many)


def test_held_out_errors_are_of_odd_halves_and_a_small_source_weighs_as_much_as_a_large_one():
    few, many = source("fa"), source("meg21")
    found = held_out_errors([*few, *many])
    assert found["each_row"]["rows"] == sum(not fitting_half(row.case.id) for row in (*few, *many))
    assert found["each_source"]["sources"] == 2
    repeated = held_out_errors([*few * 99, *many])
    assert repeated["each_source"] == found["each_source"]
    assert repeated["each_row"]["p90"] != found["each_row"]["p90"]


def test_the_same_rows_priced_as_plait_keep_their_work_and_take_plait_s_constants():
    rows = source("meg21")
    as_plait = priced_as_plait(rows)
    assert [row.case.workload for row in as_plait] == [row.case.workload for row in rows]
    assert {row.case.profile for row in as_plait} == {replace(PLAIT_PROFILE, launch_mode="ahead")}
    assert any(one.step_s != other.step_s for one, other in zip(rows, as_plait, strict=True))


def test_tau_counts_pairs_that_differ():
    assert kendall_tau([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1
    assert kendall_tau([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]) == -1
    assert kendall_tau([2.0, 1.0, 3.0], [1.0, 1.01, 3.0]) == 1  # the first two are too close to say


@pytest.mark.slow
def test_blank_cells_are_counted_and_every_row_is_priced():
    dense, blank = sample("vtrmulti-001")[0], sample("v6e-019")[0]
    assert (dense.case.guessed, blank.case.guessed) == (False, True)
    assert blank.step_s > 0
    cases, unread = cases_of(ROWS)
    assert not unread
    assert all(row.step_s > 0 for row in price(cases))


def test_sources_that_must_hold_hold():
    for name, most in (("meg21", 0.08), ("ievo", 0.10), ("vtrmulti", 0.10)):
        rows = source(name)
        found = sorted(fitted_errors(rows, scalar(rows)))
        assert found[len(found) // 2] < most, name


def test_the_best_layout_that_the_model_names_is_nearly_the_best_measured():
    found = jobs(source("vtrmulti"))
    assert len(found) == 2
    assert all(job.regret < 0.10 and job.tau > 0.6 and job.multi_node for job in found)


def test_published_out_of_memory_is_refused_and_what_ran_is_not():
    rows = source("bloom")
    assert not [row.case.id for row in rows if row.case.step_s and not row.fits]
    assert sum(not row.fits for row in rows if row.case.ran_out) >= 4


def test_what_the_planner_says_of_its_error_is_what_the_scorer_finds():
    priced = price(cases_of(read_rows(HERE / "rows.csv", HERE / "sweeps.csv"))[0])
    found, memory = families(priced), memory_by_family(priced)
    told = tomllib.loads(ERRORS_FILE.read_text(encoding="utf-8"))
    for family, values in found.items():
        for stated, read in ((told[family], values), (told[family]["memory"], memory[family])):
            assert stated["rows"] == read["rows"]
            for name in ("median", "p90") if read["rows"] else ():
                assert stated[name] == pytest.approx(read[name], abs=5e-4), (family, name)
    text = published.errors_text({"families": found, "memory": memory, "ranges": ranges(priced)}, told["date"])
    assert tomllib.loads(text) == told


def test_programs_are_told_apart_by_what_is_known_of_them():
    profiles = {row.case.id: row.case.profile for row in sample("bloom-045", "vtrmulti-027", "nvb-045", "nvb-046")}
    assert [profiles[id].launch_mode for id in ("bloom-045", "vtrmulti-027")] == ["blocking", "ahead"]
    assert [profiles[id].name for id in ("nvb-045", "nvb-046")] == ["nemo 2026", "nemo"]  # a rack, a node of eight


@pytest.mark.parametrize("empty", [False, True])
def test_the_report_is_written_for_a_few_rows_and_for_none(tmp_path: Path, capsys: pytest.CaptureFixture, empty: bool):
    table, out, picture = tmp_path / "rows.csv", tmp_path / "out.json", tmp_path / "out.svg"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows([] if empty else ROWS[:20])
    published.main(["--rows", str(table), "--json", str(out), "--plot", str(picture)])
    assert "unfitted" in capsys.readouterr().out
    assert '"median_abs_err"' in out.read_text(encoding="utf-8")
    drawn = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    timed = 0 if empty else sum(bool(row["step_time_s"] or row["tokens_per_s_per_gpu"]) for row in ROWS[:20])
    assert f"{timed} published runs" in "".join(drawn.itertext())
