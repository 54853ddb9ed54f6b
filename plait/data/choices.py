"""Multiple-choice questions: read from JSON lines, made into rows of tokens, and judged by the losses of the rows.

A model's score of a choice is the sum of the log-probabilities of its tokens after the question's text, so it takes no
words of an answer, only which of the given texts the model finds likeliest (Brown et al. 2020, and the Language Model
Evaluation Harness).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from plait.checked_json import parse_json
from plait.errors import PlaitError, RunFailed
from plait.regular_file import read_regular_text
from plait.units import counted


class EncodesText(Protocol):
    """The parts of a tokenizer that choices need."""

    @property
    def beginning(self) -> tuple[int, ...]: ...
    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceQuestion:
    """A text, the choices that may follow it, and the number of the right one, from 0."""

    text: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """One choice after its question as token ids, of which those from `first` on are the choice's."""

    tokens: tuple[int, ...]
    first: int
    text_bytes: int
    """Bytes of the choice's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScores:
    """Share of questions whose right choice has the highest log-probability, and the highest one a byte of its
    text."""

    questions: int
    choices_accuracy: float
    choices_accuracy_per_byte: float


def read_questions(path: Path) -> tuple[ChoiceQuestion, ...]:
    """The questions of a JSON-lines file; raises PlaitError that names the line which is none."""
    return parse_questions(read_choices_text(path), str(path))


def read_choices_text(path: Path) -> str:
    """The text of a file of questions; raises PlaitError where there is none."""
    try:
        return read_regular_text(path)
    except FileNotFoundError:
        raise PlaitError(f'there is no file of choices "{path}"; check its path') from None
    except UnicodeDecodeError:
        raise PlaitError(f'the choices "{path}" are not UTF-8 text; save the file as UTF-8') from None
    except OSError as error:
        raise PlaitError(f'the choices "{path}" cannot be read ({error.strerror}); name a JSON-lines file') from None


def parse_questions(text: str, where: str) -> tuple[ChoiceQuestion, ...]:
    """The questions in JSON lines; `where` names them in errors. Raises PlaitError."""
    found: list[ChoiceQuestion] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.append(_question(parse_json(line)))
            except ValueError as error:
                raise PlaitError(f"{where}:{number}: {error}; correct that line") from None
    if not found:
        raise PlaitError(f'the choices "{where}" hold no question; write one JSON object a line')
    return tuple(found)


def _question(values: Any) -> ChoiceQuestion:
    """Raises ValueError, in words, for values that are no question."""
    if not isinstance(values, dict):
        raise ValueError("a question is a JSON object")
    texts = [values[key] for key in ("context", "question") if key in values]
    if not texts or not all(isinstance(text, str) for text in texts) or not any(text.strip() for text in texts):
        raise ValueError('a question needs its text under "question" or "context"')
    choices = values.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise ValueError('"choices" is a list of two or more texts')
    if len(set(choices)) < len(choices):
        raise ValueError("two choices are the same text")
    answer = values.get("answer")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f'"answer" is the right choice or its number, 0 to {len(choices) - 1}')
    return ChoiceQuestion(text="\n".join(texts), choices=tuple(choices), answer=answer)


def choice_rows(questions: Sequence[ChoiceQuestion], tokenizer: EncodesText, sequence: int) -> tuple[ChoiceRow, ...]:
    """Every choice of every question, in order, behind what the tokenizer's texts begin with.

    A space stands between question and choice where neither has one. A question that leaves no room in a window of
    `sequence` tokens loses its beginning. Raises PlaitError for a choice that is longer than a window.
    """
    starts = [question.text for question in questions]
    wholes = [_joined(question.text, choice) for question in questions for choice in question.choices]
    encoded = tokenizer.encode_pieces([*starts, *wholes])
    known, rows = encoded[: len(starts)], iter(encoded[len(starts) :])
    found = []
    for question, start in zip(questions, known, strict=True):
        for choice in question.choices:
            ids = next(rows)
            # The last token of the question may be another one where a choice follows: then it is the choice's.
            shared = min(_common_prefix(start, ids), len(ids) - 1)
            if len(ids) - shared > sequence:
                raise PlaitError(
                    f'the choice "{choice[:40]}…" has {len(ids) - shared} tokens, more than a window of {sequence}; '
                    "shorten it, or give a longer --sequence"
                )
            whole = [*tokenizer.beginning, *ids][-(sequence + 1) :]
            first = len(whole) - (len(ids) - shared)
            found.append(ChoiceRow(tokens=tuple(whole), first=first, text_bytes=len(choice.encode())))
    return tuple(found)


def _joined(text: str, choice: str) -> str:
    return text + choice if text[-1:].isspace() or choice[:1].isspace() else f"{text} {choice}"


def _common_prefix(some: Sequence[int], others: Sequence[int]) -> int:
    same = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        same += 1
    return same


def judge_choices(
    questions: Sequence[ChoiceQuestion], rows: Sequence[ChoiceRow], losses: Sequence[float]
) -> ChoiceScores:
    """How often the right choice wins, from the summed loss of each row in nats; the first of equal ones wins.

    Raises RunFailed for a loss that is not finite.
    """
    if not all(isfinite(loss) for loss in losses):
        raise RunFailed("the model's scores of choices are not finite: its run diverged; choose a lower optimizer.lr")
    right = right_per_byte = place = 0
    for question in questions:
        own = range(place, place + len(question.choices))
        place = own.stop
        right += min(own, key=lambda at: losses[at]) == own[question.answer]
        right_per_byte += min(own, key=lambda at: losses[at] / rows[at].text_bytes) == own[question.answer]
    assert place == len(rows) == len(losses), f"{counted(place, 'choice')} and {counted(len(losses), 'loss')}"
    count = len(questions)
    return ChoiceScores(
        questions=count, choices_accuracy=right / count, choices_accuracy_per_byte=right_per_byte / count
    )
