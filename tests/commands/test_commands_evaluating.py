"""An evaluation by several workers gives what one of them gives alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.commands.evaluate import evaluate
from plait.commands.evaluating.measure import (
    MeasuredText,
    bytes_of_worker,
    evaluation_workers,
    put_together,
    run_evaluation,
)
from plait.commands.evaluating.request import EvaluationAnswer, EvaluationRequest
from plait.commands.models.found_model import FoundModel, find_model
from plait.commands.models.opened_model import devices_to_evaluate_on
from plait.data.choices import choice_rows, parse_questions
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.shards import open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.planner.derive.resources import FixedWorkers
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.interop.folders import write_model

QUESTIONS = """{"question": "to be", "choices": ["or not to be", "quite"], "answer": 0}
{"context": "that is", "question": "the", "choices": ["question", "x", "end of it all"], "answer": 0}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FoundModel:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder / "base")
    return find_model("base", WorkingFolder(folder), 16)


def text_of(found: FoundModel, folder: Path) -> MeasuredText:
    (folder / "text.txt").write_text("to be, or not to be, that is the question. " * 9)
    request = DataRequest(
        sources=(Source(str(folder / "text.txt")),),
        tokenizer=str(found.tokenizer_folder),
        vocabulary=None,
        holdout=0.0,
    )
    corpus = open_corpus(prepare_corpus(request, folder / "cache", lambda done, total, stage: None))
    return MeasuredText(folder=corpus.folder, part="train", tokens=corpus.train_tokens)


@pytest.mark.slow
def test_the_number_of_workers_does_not_enter_the_sums(
    found: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers take turns at 25 windows, and at 5 choices; bit for bit, as each has one thread."""
    text, rows = text_of(found, tmp_path), choice_rows(parse_questions(QUESTIONS, "q"), found.tokenizer, 16)
    monkeypatch.setattr("plait.commands.evaluating.measure.MICRO_TOKENS", 16)
    shown: list[tuple[int, int, str]] = []
    results = [
        [
            run_evaluation(
                found,
                what,
                like=None,
                show=lambda *progress: shown.append(progress),
                working=WorkingFolder(tmp_path),
                count=FixedWorkers(workers=workers, threads=1),
            )
            for what in (text, rows)
        ]
        for workers in (1, 3)
    ]
    assert results[0] == results[1]
    (one, asked), _ = results
    assert one.tokens == text.tokens - 1 and 2 < one.loss_sum / one.tokens < 12 and not one.row_losses
    assert len(asked.row_losses) == 5 and min(asked.row_losses) > 0 and asked.tokens == 0
    assert {stage for *_, stage in shown} == {"measuring the loss", "asking"}
    assert all(0 <= done <= total for done, total, _ in shown)


def test_parts_are_added_exactly_and_choices_keep_their_order() -> None:
    whole = put_together(
        [
            EvaluationAnswer(text_losses=(1e16, 1.0), text_tokens=(4.0, 4.0), row_losses=(0.0, 3.0)),
            EvaluationAnswer(text_losses=(1.0,), text_tokens=(4.0,), row_losses=(1.0,)),
            EvaluationAnswer(text_losses=(-1e16,), text_tokens=(1.0,), row_losses=(2.0,)),
        ]
    )
    assert (whole.loss_sum, whole.tokens, whole.row_losses) == (2.0, 13, (0.0, 1.0, 2.0, 3.0))


def test_as_many_workers_as_have_work_and_memory(found: FoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    request = EvaluationRequest(
        model=found.stored, precision="float32", matmul_backend="default", corpus="", part="heldout",
        micro_sequences=1, documents="mask", overlong="refuse", eot=256, gpus=(), folder="",
    )  # fmt: skip
    monkeypatch.setattr("plait.commands.evaluating.measure.usable_cores", lambda: 8)
    each = bytes_of_worker(found.stored.shape, request)
    for free, micros, gpus, workers, threads in (
        (100 * each, 100, (), 8, 1),
        (100 * each, 3, (), 3, 2),
        (100 * each, 0, (), 1, 8),
        (4.5 * each, 100, (), 4, 2),
        (0.5 * each, 100, (), 1, 8),
        (0.5 * each, 100, (0, 3), 2, 4),
        (100 * each, 1, (0, 3), 1, 8),
    ):
        monkeypatch.setattr("plait.commands.evaluating.measure.free_memory_bytes", lambda free=free: free)
        wanted = FixedWorkers(workers=workers, threads=threads)
        assert evaluation_workers(replace(request, gpus=gpus), micros) == wanted, (free, micros, gpus)


def test_all_gpus_of_a_run_are_used_or_where_it_was_brought_to_another_machine_all_of_that_one() -> None:
    asked = (("auto", 2), ("auto", 0), ("cpu", 2), ((1, 0), 2), ((3, 1), 2), ((3,), 2))
    assert [devices_to_evaluate_on(*one) for one in asked] == [(0, 1), (), (), (1, 0), (1,), (0, 1)]


def test_a_text_is_named_once_and_a_run_that_held_it_out_is_there(found: FoundModel) -> None:
    home = WorkingFolder(found.origin.parent)
    for files, run, words in (
        ([], None, r"is a model and no run.*name files with --files, or a run that held out text with --heldout-of"),
        (["text.txt"], "x", "--files and --heldout-of name two texts; leave one of them out"),
        ([], "none", 'there is no run "none"'),
    ):
        with pytest.raises(PlaitError, match=words):
            evaluate("base", files, heldout_of=run, screen=SilentScreen(), working=home)
