"""One worker of an evaluation: it has the whole model, and takes its turn of the micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from plait.accelerator import accelerator_name
from plait.commands.evaluating.request import EvaluationAnswer, EvaluationRequest, read_rows, write_answer
from plait.commands.models.opened_model import load_stored
from plait.data.choices import ChoiceRow
from plait.data.loader import Micro, SampleSelection, heldout_micros
from plait.data.shards import Corpus, open_corpus
from plait.launch.values.job import RankContext
from plait.model.matmul import select_matmul_library
from plait.parallel.sharded_model import unsharded
from plait.trainer.assemble import EvaluateMicros, make_autocast, make_runners
from plait.trainer.choices import choice_micro

PROGRESS_EVERY_S = 0.2


def run_evaluation_rank(context: RankContext, argument: str) -> None:
    """Entry of each worker; the argument is an EvaluationRequest's JSON. Rank 0 also sends "progress" messages."""
    request = EvaluationRequest.from_json(argument)
    torch.set_num_threads(context.threads)
    torch.set_flush_denormal(True)  # as training does
    device = torch.device("cpu")
    if request.gpus:
        device = torch.device(accelerator_name() or "cpu", request.gpus[context.local_rank])
    if device.type == "cpu":
        select_matmul_library(request.matmul_backend)
    model = load_stored(request.model, device)
    _, evaluate = make_runners(unsharded(model), make_autocast(request.precision, device))
    samples, turns = _samples(request, device), _Turns(context, evaluate)
    text, rows = list[tuple[float, float]](), list[tuple[float, float]]()
    if request.corpus:
        corpus = _measured_text(request)
        if corpus.layout != "stream":
            samples = replace(samples, documents="mask")
        micros = heldout_micros(corpus, samples, request.overlong)
        text = turns.take("measuring the loss", micros, corpus.heldout_tokens)
    else:
        asked = read_rows(request.folder)
        rows = turns.take("asking", _row_micros(asked, samples, request.eot), len(asked))
    answer = EvaluationAnswer(
        text_losses=tuple(loss for loss, _ in text),
        text_tokens=tuple(tokens for _, tokens in text),
        row_losses=tuple(loss for loss, _ in rows),
    )
    write_answer(request.folder, context.rank, answer)


class _Turns:
    """This worker's turns among the micro-batches."""

    def __init__(self, context: RankContext, evaluate: EvaluateMicros) -> None:
        self._context, self._evaluate, self._told_at = context, evaluate, 0.0

    def take(self, stage: str, micros: Iterable[Micro], total: int) -> list[tuple[float, float]]:
        """(loss in nats, number of tokens) of every micro-batch that is this worker's. `total` is what to show
        progress in: the tokens of the text, or the number of choices."""
        context, found, done = self._context, list[tuple[float, float]](), 0
        for micro in islice(micros, context.rank, None, context.world_size):
            if context.rank == 0 and (not found or time.monotonic() > self._told_at + PROGRESS_EVERY_S):
                self._told_at = time.monotonic()
                context.send("progress", done=min(done, total), total=total, stage=stage)
            loss, tokens = self._evaluate([micro]).tolist()
            found.append((loss, tokens))
            done += context.world_size * (1 if stage == "asking" else micro.targets.numel())
        return found


def _samples(request: EvaluationRequest, device: torch.device) -> SampleSelection:
    """All windows, as one worker alone would take them."""
    return SampleSelection(
        sequence=request.model.shape.sequence,
        sequences_per_replica=(1,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=request.micro_sequences,
        documents=request.documents,
        device=device,
    )


def _measured_text(request: EvaluationRequest) -> Corpus:
    """The corpus whose held-out part is the text to measure."""
    corpus = open_corpus(Path(request.corpus))
    return corpus if request.part == "heldout" else replace(corpus, train=(), heldout=corpus.train)


def _row_micros(rows: Iterable[ChoiceRow], samples: SampleSelection, eot: int) -> Iterator[Micro]:
    for row in rows:
        yield choice_micro(row, samples, eot)
