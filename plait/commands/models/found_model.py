"""A model by its name, found and not yet loaded: a run's newest checkpoint, or a folder in Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from plait.checkpoint.store import FoundCheckpoint, newest_good
from plait.commands.models.stored_adapter import (
    NO_ADAPTER,
    StoredAdapter,
    base_of_plan,
    find_adapter,
    of_checkpoint,
)
from plait.commands.preparing.base import base_folder, is_model_source, model_folder
from plait.data.index import damaged
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer, load_tokenizer
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.machines.requested_workers import RequestedDevices
from plait.model.shape import ModelShape
from plait.planner.plan import Plan
from plait.planner.problem.model_words import without_objectives
from plait.report.metrics import read_metrics
from plait.run_folder import RunFolder, find_run
from plait.trainer.checkpointing.fits import check_fits
from plait.working_folder import WorkingFolder

USUAL_SEQUENCE = 2048
"""Longest text that a model of a folder is prepared for by default: its keys and values take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBy:
    """The run that a model comes from."""

    folder: RunFolder
    plan: Plan
    corpus: Corpus
    checkpoint: FoundCheckpoint

    @property
    def devices(self) -> RequestedDevices:
        """The devices that its recipe names."""
        return self.folder.saved_config().run.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Where the weights of a model lie, and its shape for the texts that it is to read: all that a process needs to
    load it."""

    kind: Literal["checkpoint", "folder"]
    path: str
    shape: ModelShape
    """Without the adapter."""
    adapter: StoredAdapter | None = None
    """The adapter that belongs to the weights of a folder; None: none."""

    def resolved(self) -> StoredModel:
        """This model with absolute paths."""
        adapter = self.adapter and replace(self.adapter, path=str(Path(self.adapter.path).resolve()))
        return replace(self, path=str(Path(self.path).resolve()), adapter=adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model with its tokenizer, whose weights have not been read yet."""

    stored: StoredModel
    tokenizer: Tokenizer
    tokenizer_folder: Path
    """Holds tokenizer.json and, of a model's own folder, tokenizer_config.json and the chat template."""
    run: TrainedBy | None = None

    @property
    def origin(self) -> Path:
        """The checkpoint or the folder, for sentences."""
        return Path(self.stored.adapter.path if self.stored.adapter else self.stored.path)

    @property
    def step(self) -> int:
        """Steps that a run has trained it for; 0 for a model of a folder, and for another adapter than the run's."""
        return self.run.checkpoint.manifest.step if self.run and self.origin == self.run.checkpoint.path else 0


def find_model(
    name: str, working: WorkingFolder, sequence: int | None = None, adapter: str | None = None
) -> FoundModel:
    """The model of a run (its name or folder) or of a model's folder, for texts of up to `sequence` tokens, with the
    adapter of that name ("none": without; None: as the run trained it). Raises PlaitError where there is none, or where
    it cannot take such texts."""
    found = find_any_model(name, working, sequence)
    if adapter is not None:
        return with_stored_adapter(found, adapter, working)
    _check_rows(found)
    return found


def find_any_model(name: str, working: WorkingFolder, sequence: int | None = None) -> FoundModel:
    """As `find_model` without `adapter`, also where the tokenizer has entries that only an adapter has rows for."""
    if is_model_source(name, working):
        return _model_of_folder(model_folder(name, working), sequence)
    return _model_of_run(find_run(name, working), working, sequence)


def with_stored_adapter(found: FoundModel, name: str, working: WorkingFolder) -> FoundModel:
    """The model with another adapter, or with none; raises PlaitError where there is no such adapter, or where it does
    not go beside these weights."""
    if found.stored.kind == "checkpoint":
        raise PlaitError(
            f"{found.origin} is from a run that trained all weights, so no adapter can be added to them; name the "
            'folder of a model, or a run of finetune.method = "lora"'
        )
    base = None if name == NO_ADAPTER else read_base_model(Path(found.stored.path))
    adapter = None if base is None else find_adapter(name, base, working)
    changed = replace(found, stored=replace(found.stored, adapter=adapter))
    _check_rows(changed)
    return changed


def _check_rows(found: FoundModel) -> None:
    """Raise PlaitError where a model has fewer rows than its tokenizer has entries."""
    adapter = found.stored.adapter
    rows = max(found.stored.shape.vocabulary, adapter.vocabulary if adapter else 0)
    if found.tokenizer.vocabulary <= rows:
        return
    sizes = f"the tokenizer in {found.tokenizer_folder} has {found.tokenizer.vocabulary} entries and the model {rows}"
    if found.run is not None:
        raise PlaitError(f"{sizes}: tokens were added to it, whose rows are with the run's adapter; use that one")
    raise PlaitError(f"{sizes}; bring the tokenizer that the model was trained with")


def template_folders(run: TrainedBy | None, tokenizer_folder: Path, working: WorkingFolder) -> list[Path]:
    """Where a model's chat template may be: a run's folder, the data that it learned by if these were chats, the model
    that it began from, its tokenizer's folder."""
    if run is None:
        return [tokenizer_folder]
    base = base_folder(run.folder.saved_config(), working)
    learned = [run.corpus.folder] if run.corpus.template else []
    return [run.folder.path, *learned, *([base] if base else []), tokenizer_folder]


def _model_of_folder(folder: Path, sequence: int | None) -> FoundModel:
    base = read_base_model(folder)
    tokenizer = load_tokenizer(folder)
    shape = base.shape_for(sequence or min(USUAL_SEQUENCE, base.shape.sequence))
    stored = StoredModel(kind="folder", path=str(folder), shape=shape)
    return FoundModel(stored=stored, tokenizer=tokenizer, tokenizer_folder=folder)


def _model_of_run(folder: RunFolder, working: WorkingFolder, sequence: int | None) -> FoundModel:
    plan = folder.saved_plan()
    corpus = open_corpus(working.path / plan.job.corpus)
    if corpus.content_hash != plan.job.corpus_hash:
        raise damaged(corpus.folder, "they are not those that this run was trained on")
    found = newest_good(folder.checkpoints)
    if found is None:
        raise PlaitError(f'"{folder.path}" {_why_no_checkpoint(folder)}')
    check_fits(found.manifest, plan)
    # Heads in the middle and prediction ahead are there to learn from.
    shape = without_objectives(plan.job.shape)
    shape = shape if sequence is None else _for_sequence(shape, sequence)
    stored = StoredModel(kind="checkpoint", path=str(found.path), shape=shape)
    if shape.adapter is not None:
        own = of_checkpoint(found.path, plan)
        base = base_of_plan(plan, folder.path)
        shape = base.shape_for(shape.sequence)
        stored = StoredModel(kind="folder", path=str(base.folder), shape=shape, adapter=own)
    return FoundModel(
        stored=stored,
        tokenizer=corpus_tokenizer(corpus),
        tokenizer_folder=corpus.tokenizer_path.parent,
        run=TrainedBy(folder=folder, plan=plan, corpus=corpus, checkpoint=found),
    )


def _for_sequence(shape: ModelShape, sequence: int) -> ModelShape:
    """The model with another sequence length; raises PlaitError where its table of positions is too short."""
    table = shape.size_of("positions") if shape.positions == "learned" else 0
    return replace(shape, sequence=sequence, learned_positions=table)


def _why_no_checkpoint(folder: RunFolder) -> str:
    steps, _ = read_metrics(folder.metrics)
    if steps and not (steps[-1].is_finite or steps[-1].is_skipped):
        return "diverged before its first checkpoint; train again with a lower optimizer.lr and another run.name"
    return "has no checkpoint yet; train it for a while first"
