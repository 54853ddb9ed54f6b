"""`plait eval`: a run's exact loss on its held-out text, or on other files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

from plait.commands.planning.run_folder import find_run
from plait.commands.sample import corpus_of_run, load_model
from plait.data.index import damaged
from plait.data.loader import Micro, heldout_micros
from plait.data.preparation.prepare import DataRequest, prepare_corpus
from plait.data.preparation.tokens import corpus_tokenizer
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.matmul import select_matmul_library
from plait.parallel.sharded_model import unsharded
from plait.planner.plan import Plan
from plait.screen.screen import Screen, ShowProgress
from plait.trainer.assemble import make_autocast, make_runners, select_samples
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def evaluate(
    run: str, files: Sequence[str], *, screen: Screen, working: WorkingFolder = CURRENT_FOLDER
) -> dict[str, float]:
    """The keys step, eval_loss, eval_nats_per_byte, tokens, bytes; raises PlaitError where nothing can be measured."""
    folder = find_run(run, working)
    plan = folder.saved_plan()
    corpus = corpus_of_run(plan, working)
    if not files and not corpus.heldout_tokens:
        raise PlaitError("this run held out no text (data.holdout = 0); name a file with --files")
    if not files:
        corpus.verify("heldout")
    model, found = load_model(folder)
    with TemporaryDirectory(prefix="plait-eval-") as name, screen.progress() as show:
        text = _prepare_files(files, corpus, Path(name), show) if files else corpus
        total, tokens = _loss_and_tokens(model, text, plan, show)
    if not isfinite(total):
        raise PlaitError(
            f"{found.path} gives a loss of {total / tokens}: its run diverged; delete it if there is an older one, "
            "or train again with a lower optimizer.lr and another run.name"
        )
    nbytes = text.heldout_bytes
    if not nbytes:
        raise damaged(text.folder, "it counts no bytes of held-out text")
    return evaluation_values(found.manifest.step, total, int(tokens), nbytes)


def evaluation_values(step: int, loss_sum: float, tokens: int, nbytes: int) -> dict[str, float]:
    """The result as plain values; `loss_sum` is in nats."""
    result = {"step": step, "eval_loss": loss_sum / tokens, "eval_nats_per_byte": loss_sum / nbytes}
    return {**result, "tokens": tokens, "bytes": nbytes}


def evaluation_line(step: int, loss_sum: float, tokens: int, nbytes: int) -> str:
    """The result as one line of JSON."""
    return json.dumps(evaluation_values(step, loss_sum, tokens, nbytes))


def _prepare_files(files: Sequence[str], corpus: Corpus, cache: Path, show: ShowProgress) -> Corpus:
    """Other text, all of it as held-out text, in the run's own tokens."""
    corpus_tokenizer(corpus)  # raises where it is not the run's
    request = DataRequest(
        sources=tuple(Source(path=path) for path in files),
        tokenizer=str(corpus.tokenizer_path.parent),
        vocabulary=None,
        holdout=0.0,
    )
    other = open_corpus(prepare_corpus(request, cache, show))
    return replace(other, train=(), heldout=other.train, heldout_bytes=other.train_bytes)


def _loss_and_tokens(model: GPT, corpus: Corpus, plan: Plan, show: ShowProgress) -> tuple[float, float]:
    """The summed loss and the number of tokens, by one process."""
    select_matmul_library(plan.matmul_backend)
    device = next(model.parameters()).device
    _, evaluate_micros = make_runners(unsharded(model), make_autocast(plan.precision, device))
    lean = replace(plan, micro_sequences=min(plan.micro_limits or (plan.micro_sequences,)))
    windows = heldout_micros(corpus, select_samples(lean, Layout(), rank=0, device=device))
    loss_sum, tokens = evaluate_micros(_counted(windows, corpus.heldout_tokens, show)).tolist()
    return loss_sum, tokens


def _counted(micros: Iterator[Micro], total_tokens: int, show: ShowProgress) -> Iterator[Micro]:
    """The micro-batches as they are, showing how many of the tokens went by."""
    done = 0
    for micro in micros:
        show(min(done, total_tokens), total_tokens, "measuring the loss")
        yield micro
        done += micro.targets.numel()
