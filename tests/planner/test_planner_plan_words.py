"""The words of a plan are true, counted rightly, and read well on a terminal of 80 columns."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from plait.commands.planning.plan_report import make_plan_report, plan_report_text, plan_summary_text
from plait.errors import PlaitError, installing, installing_by
from plait.layout import Layout, layout_summary
from plait.machines.cluster import read_cluster
from plait.planner.derive.resources import on_paper
from plait.planner.problem.candidates import SHARDED_STATES, Candidates
from plait.planner.report.report_json import report_values
from plait.planner.report.text import comparison_table
from plait.planner.search.layout_kinds import layout_sentences, layout_text
from plait.units import (
    compared_text,
    counted,
    format_bytes,
    format_count,
    format_duration,
    format_si,
    more_or_less,
    plain_number,
    power_of_ten,
    slower_text,
)
from tests.matrix import few_fast
from tests.planner.machines import recipe

ROOT = Path(__file__).parents[2]
SMALL = ("model.size=11M", "train.sequence=256", "train.batch_tokens=16384", "train.budget=500 steps")


def row(**columns: int) -> dict[str, int | str]:
    whole = {"micro_sequences": 1, **columns}
    return dict(Candidates.from_rows([whole]).row(0))


def test_a_count_of_one_is_singular() -> None:
    assert [counted(number, "thread") for number in (0, 1, 2)] == ["0 threads", "1 thread", "2 threads"]
    assert counted(3, "copy") == "3 copies" and counted(1200, "batch", ",") == "1,200 batches"
    assert "1 sequence at a time" in layout_text(row()) and "2 sequences at a time" in layout_text(
        row(micro_sequences=2)
    )


def test_what_shard_splits_has_one_name_everywhere() -> None:
    optimizer, parameters = (SHARDED_STATES.index(what) for what in ("optimizer", "parameters"))
    for what, name, words in (
        (optimizer, "ZeRO-1", "splitting optimizer state"),
        (parameters, "FSDP", "splitting parameters"),
    ):
        told = layout_text(row(shard=2, shard_what=what))
        ours = layout_summary(Layout(shard=2, shard_what="optimizer" if what == optimizer else "parameters"))
        assert f"shard ({name}) 2, {words}" == ours and f"shard ({name}) 2, {words}" in told


def test_devices_of_a_cut_model_are_not_said_to_keep_all_of_it() -> None:
    shard = {"shard": 128, "shard_what": SHARDED_STATES.index("optimizer")}
    [whole] = layout_sentences(row(**shard), 48)
    assert "each of 128 devices keeps the whole model" in whole
    part = layout_sentences(row(**shard, pipeline=16, tensor=8), 48)[0]
    assert "keeps the same part of the model (1/128 of it)" in part and "whole model" not in part


def test_a_difference_says_which_way() -> None:
    assert (more_or_less(0.647), more_or_less(-0.03)) == ("64.7% more", "3.0% less")


def test_a_schedule_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path, *SMALL, "layout.schedule=gpipe", "layout.replicate=2")
    with pytest.raises(PlaitError, match=r"set layout\.pipeline above 1, too, or leave the schedule out"):
        make_plan_report(config, on_paper(read_cluster("2x4090")), top=0)
    free = recipe(tmp_path, *SMALL, "layout.schedule=gpipe")
    report = make_plan_report(free, on_paper(read_cluster("1x4090")), top=0)
    assert "layout.schedule changes nothing: layout.pipeline is 1" in report.notes


def test_headings_are_plain(tmp_path: Path) -> None:
    text = plan_report_text(make_plan_report(recipe(tmp_path, *SMALL), on_paper(read_cluster("8x4090")), top=3))
    headings = re.findall(r"^(\w[\w ]{7}) ", text, re.MULTILINE)
    assert [heading.strip() for heading in headings] == [
        *("plan", "time", "memory", "money", "batch", "layout", "step", "why"),
        *("others", "compared", "limits", "what if", "accuracy"),
    ]


def test_time_memory_and_money_stand_second_and_the_reasons_only_where_asked_for(tmp_path: Path) -> None:
    report = make_plan_report(recipe(tmp_path, *SMALL), on_paper(read_cluster("8x4090")), top=3)
    short, whole = plan_summary_text(report, 80).splitlines(), plan_report_text(report, 80).splitlines()
    for lines in (short, whole):
        assert [line.split()[0] for line in lines if not line.startswith(" ")][:4] == [
            "plan",
            "time",
            "memory",
            "money",
        ]
    assert len(short) <= 16 and all(line in whole for line in short if not line.startswith(" "))
    assert "sequence 256: usual" not in " ".join(short)
    assert report_values(report)["run"] == asdict(report.run)
    assert report.run.steps == 500 and report.run.tokens == 500 * 16384


def test_the_command_that_installs_can_be_pasted_and_is_that_of_the_tool_which_made_the_environment() -> None:
    python = "/home/me/my tools/plait/bin/python"
    assert installing_by("pyarrow", "pip", python) == f"'{python}' -m pip install pyarrow"
    assert installing_by("pyarrow", "pipx", python) == "pipx inject plait pyarrow"
    assert installing_by("pyarrow", "uv", python) == f"uv pip install --python '{python}' pyarrow"
    assert installing("pyarrow") in [installing_by("pyarrow", tool, sys.executable) for tool in ("pip", "uv")]


@pytest.mark.parametrize("columns", few_fast([80, 60], 60))
def test_lines_break_between_words_and_never_inside_an_amount(tmp_path: Path, columns: int) -> None:
    config = recipe(tmp_path, *SMALL)
    reports = [make_plan_report(config, on_paper(read_cluster(text)), top=8) for text in ("8x4090", "2x(8xA100)+400G")]
    wide = " ".join(" ".join(plan_report_text(reports[1]).split()).split())
    for text in (plan_report_text(reports[1], columns), comparison_table(reports, columns)):
        assert max(map(len, text.splitlines())) <= columns
    narrow = plan_report_text(reports[1], columns)
    assert " ".join(narrow.split()) == wide
    amounts = set(re.findall(r"\d[\d.,]* (?:s|[KMG]iB|Gbit/s)\b", wide))
    assert amounts and all(amount in narrow for amount in amounts)


def test_a_terminal_of_80_columns_shows_whole_words(tmp_path: Path) -> None:
    recipe(tmp_path, *SMALL)
    (tmp_path / "recipe.toml").write_text('[data]\nfiles = "text.txt"\n')
    leader, follower = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "plait",
        "plan",
        "recipe.toml",
        *SMALL,
        "--cluster",
        "8x4090",
        "--cluster",
        "8xH100",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=follower, stderr=follower) as process:
        os.close(follower)
        shown = b""
        while chunk := _read(leader):
            shown += chunk
    os.close(leader)
    lines = shown.decode().splitlines()
    assert process.returncode == 0 and max(map(len, lines)) <= 80, shown.decode()
    assert not [line for line in lines if line.endswith(" a pa")]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (plain_number(48_000), "48,000"),
        (plain_number(48_213), "48,200"),
        (plain_number(999.96), "1,000"),
        (plain_number(1.230), "1.23"),
        (plain_number(0.0000123), "0.0000123"),
        (plain_number(0), "0"),
        (plain_number(123.4, 2), "120"),
        (power_of_ten(3.14e18), "3.1 × 10^18"),
        (format_count(4.8e16), "48,000T"),
        (format_si(4.8e13, "bit/s"), "48 Tbit/s"),
        (format_si(1.2e21, "FLOP/s"), "1,200 EFLOP/s"),
        (format_bytes(2.0**52), "4,100 TiB"),
        (format_duration(1.3e-6), "1.3 µs"),
        (format_duration(3600 * 12_345), "12,345 h 0 min"),
        (slower_text(1.05), "5.0% slower"),
        (slower_text(162.474), "162 times as slow"),
        (compared_text(1.12, "slower", "faster"), "12% slower"),
        (compared_text(0.25, "slower", "faster"), "4 times as fast"),
        (compared_text(162.0, "slower", "faster", than="forecast"), "162 times as slow as forecast"),
        (compared_text(0.4, "more", "less", than="forecast"), "60% less than forecast"),
        (compared_text(2.5, "longer", "shorter"), "2.5 times as long"),
    ],
)
def test_figures_have_no_exponents_and_no_silly_per_cents(text: str, expected: str) -> None:
    assert text == expected
