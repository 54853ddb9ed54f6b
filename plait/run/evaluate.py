"""`plait eval`: a run's exact loss on its held-out text, or on other files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from plait.data.loader import Micro, heldout_micros
from plait.data.prepare import DataRequest, prepare
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.parallel.woven import LocalGradients, Woven
from plait.plan.plan import Plan
from plait.run.folder import finished_run
from plait.run.sample import load_model
from plait.train.assemble import make_autocast
from plait.train.step import counted, micro_loss


def evaluate(run: str, files: Sequence[str]) -> str:
    """One line of JSON: step, eval_loss, eval_nats_per_byte, tokens, bytes; raises PlaitError where nothing can be."""
    folder = finished_run(run)
    plan = folder.begun_plan()
    corpus = open_corpus(Path(plan.corpus))
    if not files and not corpus.heldout_tokens:
        raise PlaitError("this run held out no text (data.holdout = 0); name a file with --files")
    model, found = load_model(folder)
    woven = Woven(model=model, gradients=LocalGradients(model))
    with TemporaryDirectory(prefix="plait-eval-") as name:
        text = _prepared(files, corpus, Path(name)) if files else corpus
        total, tokens = _sums(woven, plan, _windows(text, plan))
    nbytes = text.heldout_bytes
    told = {"step": found.manifest.step, "eval_loss": total / tokens, "eval_nats_per_byte": total / nbytes}
    return json.dumps({**told, "tokens": int(tokens), "bytes": nbytes})


def _prepared(files: Sequence[str], corpus: Corpus, cache: Path) -> Corpus:
    """Other text, all of it as held-out text, in the run's own tokens."""
    request = DataRequest(
        sources=tuple(Source(path=path) for path in files),
        tokenizer=str(corpus.tokenizer_path.parent),
        vocabulary=None,
        holdout=0.0,
    )
    other = open_corpus(prepare(request, cache, lambda done, total, stage: None))
    return replace(other, train=(), heldout=other.train, heldout_bytes=other.train_bytes)


def _windows(corpus: Corpus, plan: Plan) -> Iterable[Micro]:
    return heldout_micros(
        corpus,
        sequence=plan.sequence,
        micro_sequences=plan.micro_sequences,
        part=0,
        parts=1,
        documents=plan.documents,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )


def _sums(woven: Woven, plan: Plan, micros: Iterable[Micro]) -> tuple[float, float]:
    """The summed loss and the number of tokens."""
    total = tokens = 0.0
    autocast = make_autocast(plan.precision, next(woven.model.parameters()).device)
    with torch.no_grad():
        for micro in micros:
            total += float(micro_loss(micro, woven, autocast))
            tokens += float(counted(micro))
    return total, tokens
