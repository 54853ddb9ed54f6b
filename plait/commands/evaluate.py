"""`plait eval`: the exact loss of a run or of a model's folder, on held-out text or on other files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from math import exp, inf, isfinite, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from plait.checked_json import printable
from plait.commands.evaluating.measure import MeasuredText, run_evaluation
from plait.commands.models.found_model import FoundModel, TrainedBy, find_model, template_folders
from plait.commands.preparing.base import is_model_source
from plait.commands.preparing.corpus import data_request
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer, encode_alike
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.planner.plan import Plan
from plait.run_folder import find_run
from plait.screen.screen import Screen, ShowProgress
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_LARGEST_EXPONENT = 709.0
"""The largest exponent for which float64's exp is finite."""
_COMPARED_TOKENS = 1 << 18
"""Tokens of held-out text that are encoded again where a model's tokenizer.json is not that of the text: a second."""


class Evaluation(dict[str, float]):
    """A run's loss, with the keys step, eval_loss and eval_nats_per_byte (in nats), tokens, bytes."""

    def __str__(self) -> str:
        """One line of JSON, as `plait eval` prints it."""
        return json.dumps(self)

    @property
    def perplexity(self) -> float:
        """exp of the loss per token; not a number when multiple-choice questions were asked."""
        loss = self.get("eval_loss", nan)
        return exp(loss) if loss < _LARGEST_EXPONENT else inf if loss >= _LARGEST_EXPONENT else nan

    def in_words(self) -> str:
        """The result, in a sentence."""
        if "questions" in self:
            return (
                f"{self['choices_accuracy']:.1%} of {self['questions']:,} questions were answered correctly, and "
                f"{self['choices_accuracy_per_byte']:.1%} when answers are compared by log-probability per byte"
            )
        return (
            f"over {self['tokens']:,} tokens the loss is {self['eval_loss']:.4g} nats per token, a perplexity of "
            f"{self.perplexity:.4g}; that is {self['eval_nats_per_byte']:.4g} nats per byte of text"
        )

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{value:.6g}</td></tr>" for key, value in self.items())
        return f"<table>{rows}</table>"


def evaluate(
    name: str,
    files: Sequence[str | Source],
    *,
    heldout_of: str | None = None,
    sequence: int | None = None,
    adapter: str | None = None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
    given_as: str = "--files",
) -> Evaluation:
    """The loss of a run or of a model's folder on all workers, with windows of `sequence` tokens and an `adapter` as in
    find_model; raises PlaitError where nothing can be measured. The step of a folder, and of another adapter than a
    run's own, is 0.

    The text is `files`, or what the run `heldout_of` held out, else what the run itself did. `given_as` is what its
    caller calls the files, for sentences about them.
    """
    other_run = "--heldout-of" if given_as.startswith("-") else "heldout_of"
    if files and heldout_of:
        raise PlaitError(f"{given_as} and {other_run} name two texts; leave one of them out")
    if not files and not heldout_of and is_model_source(name, working):
        raise PlaitError(
            f"{name} is a model and no run, which would have held-out text; name files with {given_as}, or a run that "
            f"held out text with {other_run}"
        )
    plan = None if files else _plan_with_heldout(heldout_of or name, working, given_as)
    with TemporaryDirectory(prefix="plait-eval-") as cache, screen.progress() as show:
        show(0, 0, f"opening {printable(Path(name).name)}")
        found = find_model(name, working, sequence or (plan.job.sequence if plan and heldout_of else None), adapter)
        if plan:
            text, nbytes = _heldout_text(plan, found, working, given_as)
        else:
            usual = _usual_field(found.run)
            sources = tuple(Source(o, field=usual, given_as=given_as) if isinstance(o, str) else o for o in files)
            text, nbytes = _prepare_files(sources, found, working, Path(cache), show)
        like = plan or (found.run.plan if found.run else None)
        measured = run_evaluation(found, text, like=like, show=show, working=working)
    if not measured.tokens:
        raise PlaitError(f"the text holds no token to predict; name a longer one with {given_as}")
    if not isfinite(measured.loss_sum):
        raise PlaitError(
            f"{found.origin} gives a loss of {measured.loss_sum / measured.tokens}: its run diverged; delete it if "
            "there is an older one, or train again with a lower optimizer.lr and another run.name"
        )
    return evaluation_of(found.step, measured.loss_sum, measured.tokens, nbytes)


def texts_of_field(paths: Sequence[str], field: str | None, given_as: str = "--files") -> Sequence[str | Source]:
    """Texts whose column has this name; None: the name that the run's own text has."""
    return paths if field is None else [Source(path, field=field, given_as=given_as) for path in paths]


def evaluation_of(step: int, loss_sum: float, tokens: int, nbytes: int) -> Evaluation:
    """The result for a sum of losses in nats over this many tokens, which are this many bytes of text."""
    per_token, per_byte = loss_sum / tokens, loss_sum / nbytes
    named = {"nats_per_token": per_token, "nats_per_byte": per_byte, "tokens": tokens, "bytes": nbytes}
    return Evaluation(step=step, eval_loss=per_token, eval_nats_per_byte=per_byte, **named)


def _plan_with_heldout(run: str, working: WorkingFolder, given_as: str) -> Plan:
    """The plan of a run whose held-out text is there and whole."""
    plan = find_run(run, working).saved_plan()
    corpus = open_corpus(working.path / plan.job.corpus)
    if corpus.layout == "pairs":
        raise PlaitError(
            f"the run {run} held out pairs of answers, whose loss and accuracy stand in its metrics.jsonl; plait eval "
            f"measures text or chats, so name files with {given_as}"
        )
    if not corpus.heldout_tokens:
        raise PlaitError(f"the run {run} held out no text (data.holdout = 0); name a file with {given_as}")
    corpus.verify("heldout")
    return plan


def _heldout_text(plan: Plan, found: FoundModel, working: WorkingFolder, given_as: str) -> tuple[MeasuredText, int]:
    """The text that a run held out, and its bytes; raises PlaitError where the model has other tokens."""
    corpus = open_corpus(working.path / plan.job.corpus)
    tokenizer, own = corpus_tokenizer(corpus), found.tokenizer
    is_same = (tokenizer.hash, tokenizer.bos) == (own.hash, own.bos)
    if not is_same and not encode_alike(tokenizer, own, _heldout_sample(corpus, tokenizer)):
        raise PlaitError(
            f"{found.origin} has another tokenizer than the held-out text was made with; name the text itself with "
            f"{given_as}"
        )
    tokens = corpus.heldout_tokens
    return MeasuredText(folder=corpus.folder, part="heldout", tokens=tokens), corpus.heldout_bytes


def _heldout_sample(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """Documents of the held-out text, of each shard the first."""
    sample: list[str] = []
    for shard in corpus.heldout:
        tokens = shard.tokens[: _COMPARED_TOKENS // len(corpus.heldout)]
        begins = shard.starts[shard.starts < len(tokens)]
        sample += [tokenizer.decode(part.tolist()) for part in np.split(tokens, begins) if len(part)]
    return sample


def _prepare_files(
    sources: tuple[Source, ...], found: FoundModel, working: WorkingFolder, cache: Path, show: ShowProgress
) -> tuple[MeasuredText, int]:
    """Other text or chats, none of it held out, in the model's own tokens and by its own chat template; and its
    bytes."""
    request = DataRequest(
        sources=sources,
        tokenizer=str(found.tokenizer_folder),
        vocabulary=None,
        holdout=0.0,
        template_folders=tuple(template_folders(found.run, found.tokenizer_folder, working)),
    )
    corpus = open_corpus(prepare_corpus(request, cache, show))
    if corpus.layout == "pairs":
        raise PlaitError(
            f"{sources[0].path} holds pairs of answers; plait eval measures text or chats, name such files"
        )
    return MeasuredText(folder=corpus.folder, part="train", tokens=corpus.train_tokens), corpus.train_bytes


def _usual_field(run: TrainedBy | None) -> str:
    """The field or column of a run's own text, where all its sources have the same one."""
    fields = {source.field for source in data_request(run.folder.saved_config()).sources} if run else {"text"}
    return fields.pop() if len(fields) == 1 else "text"
