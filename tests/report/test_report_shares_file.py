"""shares.jsonl: what was recorded is read again, a torn end is dropped, anything else is refused with its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import PlaitError, RunFailed
from plait.report.shares_file import SharesLine, append_shares, check_lines, read_shares

LINE = SharesLine(step=21, shares=(11, 5), reason="host b is slower", speeds=(2.5, 1.0))


def test_lines_come_back_and_a_torn_end_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "shares.jsonl"
    assert read_shares(path) == ()
    append_shares(path, LINE)
    assert read_shares(path) == (LINE,)
    with path.open("ab") as file:
        file.write(b'{"step": 31, "shares": [8, 8], "reas')
    assert read_shares(path) == (LINE,)
    later = replace(LINE, step=31, shares=(8, 8))
    append_shares(path, later)
    assert read_shares(path) == (LINE, later)
    assert path.read_bytes().count(b"\n") == 2


def test_a_last_line_that_lacks_its_newline_only_is_obeyed(tmp_path: Path) -> None:
    """As an editor may leave it: to drop it without a word would be another run."""
    path = tmp_path / "shares.jsonl"
    append_shares(path, LINE)
    path.write_bytes(path.read_bytes()[:-1])
    assert read_shares(path) == (LINE,)
    later = replace(LINE, step=31, shares=(8, 8))
    append_shares(path, later)
    assert read_shares(path) == (LINE, later)
    path.write_bytes(b'{"shares": [16, 0]}')
    with pytest.raises(PlaitError, match=r"shares\.jsonl:1 is no line of shares; "):
        read_shares(path)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b"7",
        b'{"step": 31, "shares": [16, 0], "reason": "", "speeds": []}',
        b'{"step": 31, "shares": [8.0, 8], "reason": "", "speeds": []}',
        b'{"step": 21, "shares": [8, 8], "reason": "", "speeds": []}',
        b'{"step": 31, "shares": [8, 8], "reason": "", "speeds": [], "more": 1}',
    ],
)
def test_a_line_that_cannot_be_obeyed_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "shares.jsonl"
    append_shares(path, LINE)
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(PlaitError, match=r"shares\.jsonl:2 is no line of shares; "):
        read_shares(path)


def test_lines_for_another_layout_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "shares.jsonl"
    append_shares(path, LINE)
    check_lines(path, (8, 8))
    for parts in ((8, 4, 4), (8, 7)):
        with pytest.raises(PlaitError, match="take the file away"):
            check_lines(path, parts)


def test_layers_of_stages_come_back_and_must_go_with_the_plans(tmp_path: Path) -> None:
    path = tmp_path / "shares.jsonl"
    line = replace(LINE, shares=(16,), stage_layers=(5, 1))
    append_shares(path, line)
    assert read_shares(path) == (line,)
    check_lines(path, (16,), (3, 3))
    for stage_layers, sentence in (
        ((2, 3), r"cuts 6 layers into 2 stages from step 21 on, and the plan 5 into 2"),
        ((2, 2, 2), r"cuts 6 layers into 2 stages from step 21 on, and the plan 6 into 3"),
        ((), r"moves layers between stages from step 21 on, which only a pipeline .* does; take the file away"),
    ):
        with pytest.raises(PlaitError, match=sentence):
            check_lines(path, (16,), stage_layers)
    path.write_text('{"step": 31, "shares": [16], "reason": "", "speeds": [], "stage_layers": [6, 0]}\n')
    with pytest.raises(PlaitError, match=r"shares\.jsonl:1 is no line of shares; "):
        read_shares(path)


def test_a_disk_that_says_no_stops_the_run_with_a_sentence() -> None:
    with pytest.raises(RunFailed, match=r"could not write /proc/self/shares\.jsonl"):
        append_shares(Path("/proc/self/shares.jsonl"), LINE)
