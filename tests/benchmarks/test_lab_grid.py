"""Does a grid file become the cases that it says, and is a contradiction said in one sentence?"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab.grid import rate_of_text, read_grid
from plait.errors import PlaitError

STANDARD = Path(__file__).parents[2] / "benchmarks" / "lab" / "grid.toml"
SMALL = """
[model.tiny]
layers = 2
width = 64
[[case]]
cores = [[1.0, 1.0], [1.0, 0.5]]
rate = ["50M", "unshaped"]
model = "tiny"
batch_sequences = [4, 8]
sequence = 64
"""


def grid_of(folder: Path, text: str):
    path = folder / "grid.toml"
    path.write_text(text)
    return read_grid(path)


def test_the_standard_grid_covers_what_was_asked():
    cases = read_grid(STANDARD).cases
    assert len(cases) >= 24
    assert {case.hosts for case in cases} == {2, 4}
    assert {case.model for case in cases} == {"1M", "11M", "50M"}
    rates = [case.rate for case in cases]
    assert min(rate for rate in rates if rate != "unshaped") == 50e6 and "unshaped" in rates
    assert len({case.key for case in cases}) == len({case.name for case in cases}) == len(cases)
    assert all(sum(case.cores) <= 2 for case in cases), "more than the two cores that the lab was made for"
    assert read_grid(STANDARD).steps >= 5


def test_lists_are_multiplied_out(tmp_path: Path):
    cases = grid_of(tmp_path, SMALL).cases
    assert len(cases) == 8
    assert {(case.cores, case.rate, case.batch_sequences) for case in cases} == {
        (cores, rate, batch) for cores in ((1.0, 1.0), (1.0, 0.5)) for rate in (50e6, "unshaped") for batch in (4, 8)
    }
    assert {case.files for case in cases} == {"own"}


def test_a_case_is_known_again_only_while_nothing_of_it_changes(tmp_path: Path):
    first, again = grid_of(tmp_path, SMALL).cases, grid_of(tmp_path, SMALL).cases
    other = grid_of(tmp_path, SMALL.replace("width = 64", "width = 128")).cases
    assert [case.key for case in first] == [case.key for case in again]
    assert not {case.key for case in first} & {case.key for case in other}


def test_cases_that_differ_in_the_rate_alone_are_a_group(tmp_path: Path):
    cases = grid_of(tmp_path, SMALL).cases
    assert len({case.group for case in cases}) == 4


@pytest.mark.parametrize(("text", "bits_per_s"), [("50M", 50e6), ("2.5G", 2.5e9), ("800K", 8e5)])
def test_rates(text: str, bits_per_s: float):
    assert rate_of_text(text) == bits_per_s


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"50M"', '"50 Mbit"'), '"50 Mbit" is no rate'),
        (('"50M"', '"0M"'), '"0M" is no rate'),
        (("cores = [[1.0, 1.0], [1.0, 0.5]]", "cores = [1.0]"), "two or more shares"),
        (('model = "tiny"', 'model = "huge"'), 'model "huge" is not described'),
        (("sequence = 64", ""), "a case lacks sequence"),
        (("sequence = 64", "sequence = 64\nspeed = 3"), "a case has no key speed"),
        (("[[case]]", "[[case"), "is not a grid"),
        (("[[case]]", "[other]"), "holds no [[case]]"),
        (("[model.tiny]", "steps = 0\n[model.tiny]"), "must be 1 or more"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, change: tuple[str, str], sentence: str):
    with pytest.raises(PlaitError) as raised:
        grid_of(tmp_path, SMALL.replace(*change))
    assert sentence in str(raised.value)


def test_the_quick_grid_has_ten_cases_of_the_same_models_and_tries_few_layouts():
    quick, standard = read_grid(STANDARD.with_name("grid-quick.toml")), read_grid(STANDARD)
    assert len({case.key for case in quick.cases}) == 10 and quick.layouts == 4 and standard.layouts is None
    shapes = {case.model: case.shape for case in standard.cases}
    assert all(case.shape == shapes[case.model] for case in quick.cases)


def test_a_grid_that_tries_no_layout_is_refused(tmp_path: Path):
    with pytest.raises(PlaitError, match="layouts = 0 must be 1 or more"):
        grid_of(tmp_path, "layouts = 0\n" + SMALL)
