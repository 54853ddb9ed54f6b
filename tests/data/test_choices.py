"""Multiple-choice questions: what a file may hold, which tokens count, and who wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.data.choices import ChoiceQuestion, choice_rows, judge_choices, parse_questions, read_questions
from plait.errors import PlaitError, RunFailed


class Letters:
    """One token a letter, but for " a", which is one token with its space."""

    beginning = (0,)

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        return [[ord(sign) for sign in piece.replace(" a", "\x01").replace("b ", "\x02")] for piece in pieces]


QUESTION = ChoiceQuestion(text="b", choices=("xyz", "x"), answer=0)


def test_a_file_names_the_right_choice_by_number_or_by_its_text() -> None:
    lines = """{"question": "q", "choices": ["a", "b"], "answer": 1}

{"context": "c", "choices": ["a", "b"], "answer": "a"}
"""
    assert [(one.text, one.answer) for one in parse_questions(lines, "f")] == [("q", 1), ("c", 0)]
    both = parse_questions('{"context": "c", "question": "q", "choices": ["a", "b"], "answer": 0, "id": 7}', "f")
    assert both[0].text == "c\nq"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "JSON object"),
        ("{", "not JSON"),
        ('{"choices": ["a", "b"], "answer": 0}', "needs its text"),
        ('{"question": "q", "choices": ["a"], "answer": 0}', "two or more"),
        ('{"question": "q", "choices": ["a", "a"], "answer": 0}', "same text"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "0 to 1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": true}', "0 to 1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": "c"}', "0 to 1"),
    ],
)
def test_a_line_that_is_no_question_is_named(line: str, said: str) -> None:
    with pytest.raises(PlaitError, match=rf"f:1: .*{said}"):
        parse_questions(line, "f")


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, said in (
        ("none.jsonl", "there is no file"),
        ("empty.jsonl", "hold no question"),
        (".", "cannot be read"),
    ):
        with pytest.raises(PlaitError, match=said):
            read_questions(tmp_path / name)


def test_the_choices_tokens_are_those_after_what_question_and_whole_share() -> None:
    first, second = choice_rows([QUESTION], Letters(), 16)
    # "b " became one token, so the question's last token is counted with the choice.
    assert first.tokens == (0, 2, *map(ord, "xyz")) and first.first == 1 and first.text_bytes == 3
    assert second.tokens == (0, 2, ord("x")) and second.first == 1


def test_a_long_question_loses_its_beginning_and_a_long_choice_is_refused() -> None:
    (row, _) = choice_rows([ChoiceQuestion(text="0123456789", choices=("ab", "ac"), answer=0)], Letters(), 4)
    assert len(row.tokens) == 5 and row.tokens[row.first :] == (1, ord("b")) and row.first == 3
    with pytest.raises(PlaitError, match="more than a window of 4"):
        choice_rows([ChoiceQuestion(text="q", choices=("0123456789", "x"), answer=0)], Letters(), 4)


def test_the_least_loss_wins_alone_and_a_byte() -> None:
    rows = choice_rows([QUESTION, QUESTION], Letters(), 16)
    # First question: "x" has less loss, and more a byte than "xyz". Second: "xyz" wins both ways.
    scores = judge_choices([QUESTION, QUESTION], rows, [3.0, 2.0, 1.0, 2.0])
    assert (scores.questions, scores.choices_accuracy, scores.choices_accuracy_per_byte) == (2, 0.5, 1.0)
    with pytest.raises(RunFailed, match="not finite"):
        judge_choices([QUESTION], rows[:2], [float("nan"), 1.0])
