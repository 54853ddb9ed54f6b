"""A model ready to read and write text: of a run's newest checkpoint, or of a folder in Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plait.checkpoint.fitting import check_model, check_weights
from plait.checkpoint.store import FoundCheckpoint, newest_good
from plait.cluster.requested_workers import RequestedDevices
from plait.commands.planning.run_folder import RunFolder, find_run
from plait.commands.preparing.base import is_model_source, model_folder
from plait.data.index import damaged
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer, load_tokenizer
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.read_weights import load_model_from
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, weight_sizes
from plait.planner.plan import Plan
from plait.report.metrics import read_metrics
from plait.trainer.checkpointing.persist import load_weights
from plait.working_folder import WorkingFolder

USUAL_SEQUENCE = 2048
"""Longest text that a model of a folder is prepared for where nobody asks for more: its keys and values take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBy:
    """The run that a model comes from."""

    folder: RunFolder
    plan: Plan
    corpus: Corpus
    checkpoint: FoundCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A whole model in this process, on the first GPU that it may use, else on the processor."""

    model: GPT
    tokenizer: Tokenizer
    tokenizer_folder: Path
    """Holds tokenizer.json and, of a model's own folder, tokenizer_config.json and the chat template."""
    origin: Path
    """The checkpoint or the folder, for sentences."""
    run: TrainedBy | None = None


def open_model(name: str, working: WorkingFolder, sequence: int | None = None) -> OpenedModel:
    """The model of a run (its name or folder) or of a model's folder, for texts of up to `sequence` tokens; raises
    PlaitError where there is none, or where it cannot take such texts."""
    if not is_model_source(name, working):
        return _model_of_run(find_run(name, working), working, sequence)
    folder = model_folder(name, working)
    base = read_base_model(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocabulary > base.shape.vocabulary:
        raise PlaitError(
            f"the tokenizer in {folder} has {tokenizer.vocabulary} entries and the model {base.shape.vocabulary}; "
            "bring the tokenizer that the model was trained with"
        )
    device = device_to_sample_on("auto", torch.cuda.device_count())
    model = load_model_from(base, sequence or min(USUAL_SEQUENCE, base.shape.sequence), device)
    return OpenedModel(model=model, tokenizer=tokenizer, tokenizer_folder=folder, origin=folder)


def _model_of_run(folder: RunFolder, working: WorkingFolder, sequence: int | None) -> OpenedModel:
    plan = folder.saved_plan()
    corpus = open_corpus(working.path / plan.corpus)
    if corpus.content_hash != plan.corpus_hash:
        raise damaged(corpus.folder, "they are not those that this run was trained on")
    found = newest_good(folder.checkpoints)
    if found is None:
        raise PlaitError(f'"{folder.path}" {_why_no_checkpoint(folder)}')
    check_model(found.manifest, plan.shape.to_dict())
    check_weights(found.manifest, weight_sizes(plan.shape))
    device = device_to_sample_on(folder.saved_config().run.devices, torch.cuda.device_count())
    model = GPT(plan.shape if sequence is None else _for_sequence(plan.shape, sequence))
    load_weights(model, found.path, found.manifest)
    return OpenedModel(
        model=model.to(device).eval(),
        tokenizer=corpus_tokenizer(corpus),
        tokenizer_folder=corpus.tokenizer_path.parent,
        origin=found.path,
        run=TrainedBy(folder=folder, plan=plan, corpus=corpus, checkpoint=found),
    )


def _for_sequence(shape: ModelShape, sequence: int) -> ModelShape:
    """The same model for other sequences; raises PlaitError where its table of positions is too short."""
    table = shape.size_of("positions") if shape.positions == "learned" else 0
    return replace(shape, sequence=sequence, learned_positions=table)


def _why_no_checkpoint(folder: RunFolder) -> str:
    steps, _ = read_metrics(folder.metrics)
    if steps and not steps[-1].is_finite:
        return "diverged before its first checkpoint; train again with a lower optimizer.lr and another run.name"
    return "has no checkpoint yet; train it for a while first"


def device_to_sample_on(requested: RequestedDevices, present: int) -> torch.device:
    """The first of a run's devices; where the run was brought to another machine, that one's first GPU, or its
    processor."""
    if requested == "cpu" or not present:
        return torch.device("cpu")
    first = 0 if requested == "auto" else requested[0]
    return torch.device("cuda", first if first < present else 0)
