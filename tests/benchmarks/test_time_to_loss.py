"""What the benchmarks of learning read and write: rows that later sessions extend, and the record's first reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.speedrun import TARGET, read_trial
from benchmarks.time_to_loss import CHOICES, RESULTS, Row, add_row, read_rows, report

ROW = Row(
    choice="adamw", minutes="1", seed=1, share=1.0, parameters=10, tokens=(512, 1024), nats_per_byte=(1.9, 1.6),
    step_s=0.05, steps=2, settings={"lr": 0.002}, measured={"commit": "x"},
)  # fmt: skip


def test_rows_are_added_and_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.json", replace(ROW, choice="muon x2 linear", nats_per_byte=(1.8, 1.5))
    add_row(ROW, path)
    add_row(other, path)
    assert read_rows(path) == [ROW, other]


def test_the_kept_rows_are_of_known_choices_and_each_there_once() -> None:
    rows = read_rows(RESULTS)
    assert rows and {row.choice for row in rows} <= CHOICES.keys()
    assert len({row.key for row in rows}) == len(rows)


def test_a_choice_is_compared_over_the_seeds_that_adamw_has_too() -> None:
    faster = replace(ROW, choice="muon x2 linear", nats_per_byte=(1.8, 1.5), step_s=0.055)
    rows = [
        ROW,
        replace(ROW, seed=2, nats_per_byte=(1.9, 1.7)),
        faster,
        replace(faster, seed=2),
        replace(faster, seed=3),
    ]
    *_, muon, adamw = report(rows).splitlines()
    assert muon == "| 1 | muon x2 linear | 1 | 1, 2, 3 | 1.5000 | 0.1500 (0.1000 … 0.2000) | 1.10 |"
    assert adamw == "| 1 | adamw | 1 | 1, 2 | 1.6500 | 0.0000 (0.0000 … 0.0000) | 1.00 |"


def test_a_choice_that_adamw_was_not_run_beside_is_compared_with_nothing() -> None:
    *_, alone = report([ROW, replace(ROW, minutes="12", choice="derived")]).splitlines()
    assert alone == "| 12 | derived | 1 | 1 | 1.6000 |  |  |"


def test_a_record_ends_with_the_first_reading_at_the_target() -> None:
    lines: list[dict[str, float]] = []
    for step, loss in enumerate((TARGET + 0.1, TARGET, TARGET - 0.1), start=1):
        lines += [{"step": step, "step_s": 2.0, "tokens": 100 * step}, {"step": step, "eval_nats_per_byte": loss}]
    reached = read_trial(1, lines, 9.0)
    assert (reached.step, reached.tokens, reached.train_s, reached.last_loss) == (2, 200, 4.0, TARGET - 0.1)
    missed = read_trial(1, lines[:2], 9.0)
    assert (missed.step, missed.train_s, missed.last_loss) == (None, None, TARGET + 0.1)
