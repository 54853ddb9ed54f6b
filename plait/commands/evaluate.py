"""`plait eval`: the exact loss of a run or of a model's folder, on held-out text or on other files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from plait.commands.models.opened_model import OpenedModel, TrainedBy, open_model, template_folders
from plait.commands.planning.run_folder import RunFolder, find_run
from plait.commands.preparing.base import is_model_source
from plait.commands.preparing.corpus import data_request
from plait.data.loader import Micro, SampleSelection, heldout_micros
from plait.data.preparation.prepare import DataRequest, prepare_corpus
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.model.matmul import select_matmul_library
from plait.parallel.sharded_model import unsharded
from plait.planner.plan import Plan
from plait.screen.screen import Screen, ShowProgress
from plait.trainer.assemble import make_autocast, make_runners
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

MICRO_TOKENS = 4096
"""Tokens that a model of a folder reads at a time, about: what a processor's cache holds well."""


class Evaluation(dict[str, float]):
    """A run's loss, with the keys step, eval_loss and eval_nats_per_byte (in nats), tokens, bytes."""

    def __str__(self) -> str:
        """One line of JSON, as `plait eval` prints it."""
        return json.dumps(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{value:.6g}</td></tr>" for key, value in self.items())
        return f"<table>{rows}</table>"


def evaluate(
    name: str,
    files: Sequence[str],
    *,
    sequence: int | None = None,
    field: str | None = None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
    given_as: str = "--files",
) -> Evaluation:
    """The loss of a run or of a model's folder, with windows of `sequence` tokens; raises PlaitError where nothing can
    be measured. A folder's step is 0. `field` is the column of the files' text; None: that of the run's own text.

    `given_as` is what its caller calls the files, for sentences about them.
    """
    if not files and is_model_source(name, working):
        raise PlaitError(f"{name} is a model and no run, which would have held-out text; name files with {given_as}")
    if not files:
        _verify_heldout(find_run(name, working), working, given_as)
    opened = open_model(name, working, sequence)
    run = opened.run
    with TemporaryDirectory(prefix="plait-eval-") as cache, screen.progress() as show:
        sources = tuple(Source(path, field=field or _usual_field(run), given_as=given_as) for path in files)
        text = run.corpus if run and not files else _prepare_files(sources, opened, working, Path(cache), show)
        total, tokens = _loss_and_tokens(opened, text, show)
    if not tokens:
        raise PlaitError(f"the text holds no token to predict; name a longer one with {given_as}")
    if not isfinite(total):
        raise PlaitError(
            f"{opened.origin} gives a loss of {total / tokens}: its run diverged; delete it if there is an older one, "
            "or train again with a lower optimizer.lr and another run.name"
        )
    return evaluation_of(run.checkpoint.manifest.step if run else 0, total, int(tokens), text.heldout_bytes)


def _verify_heldout(folder: RunFolder, working: WorkingFolder, given_as: str) -> None:
    corpus = open_corpus(working.path / folder.saved_plan().corpus)
    if not corpus.heldout_tokens:
        raise PlaitError(f"this run held out no text (data.holdout = 0); name a file with {given_as}")
    corpus.verify("heldout")


def evaluation_of(step: int, loss_sum: float, tokens: int, nbytes: int) -> Evaluation:
    """The result for a sum of losses in nats over so many tokens, which are so many bytes of text."""
    per_token, per_byte = loss_sum / tokens, loss_sum / nbytes
    named = {"nats_per_token": per_token, "nats_per_byte": per_byte, "tokens": tokens, "bytes": nbytes}
    return Evaluation(step=step, eval_loss=per_token, eval_nats_per_byte=per_byte, **named)


def _usual_field(run: TrainedBy | None) -> str:
    """The field or column of a run's own text, where all its sources have the same one."""
    fields = {source.field for source in data_request(run.folder.saved_config()).sources} if run else {"text"}
    return fields.pop() if len(fields) == 1 else "text"


def _prepare_files(
    sources: tuple[Source, ...], opened: OpenedModel, working: WorkingFolder, cache: Path, show: ShowProgress
) -> Corpus:
    """Other text or chats, all of it as held-out text, in the model's own tokens and by its own chat template."""
    request = DataRequest(
        sources=sources,
        tokenizer=str(opened.tokenizer_folder),
        vocabulary=None,
        holdout=0.0,
        template_folders=tuple(template_folders(opened, working)),
    )
    other = open_corpus(prepare_corpus(request, cache, show))
    return replace(other, train=(), heldout=other.train, heldout_bytes=other.train_bytes)


def _loss_and_tokens(opened: OpenedModel, corpus: Corpus, show: ShowProgress) -> tuple[float, float]:
    """The summed loss and the number of tokens, by one process."""
    model, plan = opened.model, opened.run.plan if opened.run else None
    device = next(model.parameters()).device
    select_matmul_library(plan.matmul_backend if plan else "default")
    autocast = make_autocast(plan.precision if plan else "float32", device)
    _, evaluate_micros = make_runners(unsharded(model), autocast)
    windows = evaluation_windows(model.shape.sequence, plan, device)
    if corpus.layout == "whole":
        windows = replace(windows, documents="mask")
    overlong = opened.run.folder.saved_config().data.overlong if opened.run else "refuse"
    micros = heldout_micros(corpus, windows, overlong)
    loss_sum, tokens = evaluate_micros(_counted(micros, corpus.heldout_tokens, show)).tolist()
    return loss_sum, tokens


def evaluation_windows(sequence: int, plan: Plan | None, device: torch.device) -> SampleSelection:
    """All windows of so many tokens, for one process, in micro-batches of about as many tokens as in the run."""
    most = min(plan.micro_limits or (plan.micro_sequences,)) * plan.sequence if plan else MICRO_TOKENS
    return SampleSelection(
        sequence=sequence,
        sequences_per_replica=(1,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=max(1, most // sequence),
        documents=plan.documents if plan else "mask",
        device=device,
    )


def _counted(micros: Iterator[Micro], total_tokens: int, show: ShowProgress) -> Iterator[Micro]:
    """The micro-batches as they are, showing how many of the tokens went by."""
    done = 0
    for micro in micros:
        show(min(done, total_tokens), total_tokens, "measuring the loss")
        yield micro
        done += micro.targets.numel()
