"""Multiple choice with a model under any layout: one micro-batch a choice, whose loss is the choice's score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from plait.data.choices import (
    ChoiceQuestion,
    ChoiceRow,
    ChoiceScores,
    choice_rows,
    judge_choices,
    parse_questions,
    read_choices_text,
)
from plait.data.loader import Micro, SampleSelection, make_micro
from plait.data.preparation.tokens import corpus_tokenizer
from plait.data.rows import IGNORED_TARGET
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import first_ones
from plait.trainer.assemble import Assembly


def choice_micro(row: ChoiceRow, samples: SampleSelection, eot: int, divisor: int = 1) -> Micro:
    """A micro-batch of one row, in which only the choice's tokens are targets.

    It is as long as the window, halved while the row still fits and `divisor` divides it: layouts cut rows into parts.
    """
    length, last = samples.sequence, len(row.tokens) - 1
    while length % 2 == 0 and length // 2 >= last and (length // 2) % divisor == 0:
        length //= 2
    inputs = np.full((1, length), eot, dtype=np.int64)
    targets = np.full((1, length), IGNORED_TARGET, dtype=np.int64)
    tokens = np.array(row.tokens, dtype=np.int64)
    inputs[0, :last] = tokens[:-1]
    targets[0, row.first - 1 : last] = tokens[row.first :]
    lengths = np.array([length]) if samples.documents == "mask" else None
    return make_micro(inputs, targets, lengths, replace(samples, sequence=length, predict_ahead=0))


class ChoiceEvaluation:
    """A run's questions on one rank."""

    def __init__(self, questions: Sequence[ChoiceQuestion], rows: Sequence[ChoiceRow]) -> None:
        self._questions, self._rows = questions, rows

    def scores(self, assembly: Assembly) -> ChoiceScores:
        """The model's answers as it is now. Every rank must call it; each data-parallel rank takes every so-maniest
        choice, and all get the same scores."""
        samples, layout, rows = assembly.loader.selection, assembly.plan.placement.layout, self._rows
        replicas = len(samples.sequences_per_replica)
        divisor = 2 * layout.context * layout.tensor
        losses = torch.zeros(len(rows), dtype=torch.float64, device=assembly.device)
        for first in range(0, len(rows), replicas):
            place = first + samples.data_parallel_rank
            micro = choice_micro(rows[min(place, len(rows) - 1)], samples, assembly.corpus.eot, divisor)
            loss = assembly.evaluate_micros([micro])[0]
            if place < len(rows):  # the last turn may have fewer rows than ranks, and all must take part in it
                losses[place] += loss
        return judge_choices(self._questions, rows, assembly.sums(losses).tolist())


def load_choices(assembly: Assembly, file: Path | None, world: Communicator) -> ChoiceEvaluation | None:
    """The questions of a run's file, None for a run without one. Every rank must call it: rank 0 reads the file, which
    other hosts may lack, and the others get its text from there."""
    if file is None:
        return None
    text = first_ones(lambda: read_choices_text(file), world)
    questions = parse_questions(text, str(file))
    rows = choice_rows(questions, corpus_tokenizer(assembly.corpus), assembly.plan.job.sequence)
    return ChoiceEvaluation(questions, rows)
