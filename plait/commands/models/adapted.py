"""A base with one of several adapters: a run's own, another run's, a folder of PEFT's, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from plait.checkpoint.store import newest_good
from plait.checkpoint.transfer import read_tensor
from plait.commands.models.opened_model import NO_ADAPTER, OpenedModel, open_base, open_model
from plait.commands.planning.run_folder import find_run
from plait.errors import PlaitError
from plait.interop.adapted_model import with_adapter
from plait.interop.adapter_in import LoadedAdapter, is_adapter_folder, read_adapter
from plait.interop.base_fingerprint import base_fingerprint
from plait.interop.base_model import BaseModel
from plait.model.weights import trained_weights
from plait.working_folder import WorkingFolder


def open_adapted(
    name: str, working: WorkingFolder, sequence: int | None = None, adapter: str | None = None
) -> OpenedModel:
    """The model of a run or a folder with the adapter of this name ("none": without); None: as the name says. Raises
    PlaitError where there is no such adapter, and where it is of another base."""
    if adapter is None:
        return open_model(name, working, sequence)
    return next(open_each(name, (adapter,), working, sequence))


def open_each(
    name: str, adapters: Sequence[str], working: WorkingFolder, sequence: int | None = None
) -> Iterator[OpenedModel]:
    """The model with each of these adapters in turn; its weights are in memory once."""
    opened, base = open_base(name, working, sequence)
    fingerprint = base_fingerprint(base)
    for adapter in adapters:
        if adapter == NO_ADAPTER:
            yield opened
            continue
        loaded = find_adapter(adapter, base, working)
        if loaded.base and loaded.base != fingerprint:
            raise PlaitError(
                f'the adapter "{adapter}" is of another base than {base.folder}: their weights differ; name the model '
                "that it was trained on"
            )
        yield replace(opened, model=with_adapter(opened.model, loaded))


def find_adapter(name: str, base: BaseModel, working: WorkingFolder) -> LoadedAdapter:
    """The adapter of a run's newest checkpoint, or of a folder in PEFT's format; raises PlaitError where there is none
    or where it does not fit the base."""
    folder = working.path / name
    if is_adapter_folder(folder):
        return read_adapter(folder, base.family, base.shape)
    run = find_run(name, working)
    plan, found = run.saved_plan(), newest_good(run.checkpoints)
    if plan.shape.adapter is None:
        raise PlaitError(f'"{name}" trained all weights and has no adapter; name a run of finetune.method = "lora"')
    if found is None:
        raise PlaitError(f'"{run.path}" has no checkpoint yet; train it for a while first')
    if replace(plan.shape, adapter=None, sequence=base.shape.sequence) != base.shape:
        raise PlaitError(
            f'the adapter "{name}" is of another base than {base.folder}: their shapes differ; name the model that it '
            f"was trained on, {Path(plan.base).name}"
        )
    weights = {one: read_tensor(found.path, found.manifest, f"model/{one}") for one in trained_weights(plan.shape)}
    return LoadedAdapter(shape=plan.shape.adapter, weights=weights, base=plan.base_fingerprint)
