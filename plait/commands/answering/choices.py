"""`plait eval … --choices`: a model's answers to multiple-choice questions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from plait.commands.evaluate import Evaluation, evaluation_windows
from plait.commands.models.adapted import open_adapted
from plait.data.choices import choice_rows, judge_choices, read_questions
from plait.model.matmul import select_matmul_library
from plait.parallel.sharded_model import unsharded
from plait.screen.screen import Screen
from plait.trainer.assemble import make_autocast, make_runners
from plait.trainer.choices import choice_micro
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
    """The keys step, questions, choices_accuracy, choices_accuracy_per_byte for a run or a model's folder; `file` is
    in the format of data/choices.py. A folder's step is 0. Raises PlaitError for a file that holds no questions."""
    questions = read_questions(file)
    opened = open_adapted(name, working, sequence, adapter)
    model, plan = opened.model, opened.run.plan if opened.run else None
    device = next(model.parameters()).device
    select_matmul_library(plan.matmul_backend if plan else "default")
    _, evaluate_micros = make_runners(unsharded(model), make_autocast(plan.precision if plan else "float32", device))
    samples = replace(evaluation_windows(model.shape.sequence, plan, device), micro_sequences=1)
    rows, losses = choice_rows(questions, opened.tokenizer, model.shape.sequence), list[float]()
    with screen.progress() as show:
        for number, row in enumerate(rows):
            show(number, len(rows), "asking")
            losses.append(float(evaluate_micros([choice_micro(row, samples, opened.tokenizer.eot)])[0]))
    scores = judge_choices(questions, rows, losses)
    return Evaluation(
        step=opened.run.checkpoint.manifest.step if opened.run and adapter is None else 0,
        questions=scores.questions,
        choices_accuracy=scores.choices_accuracy,
        choices_accuracy_per_byte=scores.choices_accuracy_per_byte,
    )
