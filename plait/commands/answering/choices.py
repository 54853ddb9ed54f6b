"""`plait eval … --choices`: a model's answers to multiple-choice questions."""

from __future__ import annotations

from pathlib import Path

from plait.checked_json import printable
from plait.commands.evaluate import Evaluation
from plait.commands.evaluating.measure import run_evaluation
from plait.commands.models.found_model import find_model
from plait.data.choices import choice_rows, judge_choices, read_questions
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def ask_choices(
    name: str,
    file: Path,
    *,
    sequence: int | None = None,
    adapter: str | None = None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Evaluation:
    """The keys step, questions, choices_accuracy, choices_accuracy_per_byte for a run or a model's folder, on all
    workers; `file` is in the format of data/choices.py. A folder's step is 0. Raises PlaitError for a file that holds
    no questions."""
    questions = read_questions(file)
    with screen.progress() as show:
        show(0, 0, f"opening {printable(Path(name).name)}")
        found = find_model(name, working, sequence, adapter)
        rows = choice_rows(questions, found.tokenizer, found.stored.shape.sequence)
        like = found.run.plan if found.run else None
        measured = run_evaluation(found, rows, like=like, show=show, working=working)
    scores = judge_choices(questions, rows, measured.row_losses)
    return Evaluation(
        step=found.step,
        questions=scores.questions,
        choices_accuracy=scores.choices_accuracy,
        choices_accuracy_per_byte=scores.choices_accuracy_per_byte,
    )
