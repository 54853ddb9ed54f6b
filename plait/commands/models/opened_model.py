"""A model ready to read and write text: of a run's newest checkpoint, or of a folder in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plait.accelerator import accelerator_name, gpu_count
from plait.checkpoint.store import read_manifest
from plait.checkpoint.transfer import read_tensor
from plait.commands.models.end_tokens import stored_ends
from plait.commands.models.found_model import (
    FoundModel,
    StoredModel,
    TrainedBy,
    find_any_model,
    find_model,
    with_stored_adapter,
)
from plait.commands.models.stored_adapter import StoredAdapter
from plait.data.preparation.end_tokens import learnt_ends
from plait.data.preparation.tokens import Tokenizer
from plait.devices import DeviceName
from plait.interop.adapter_in import LoadedAdapter, read_adapter, with_adapter
from plait.interop.base_model import BaseModel, read_base_model
from plait.interop.read_weights import load_model_from
from plait.machines.requested_workers import RequestedDevices
from plait.model.adapter_shape import Quantization
from plait.model.gpt import GPT
from plait.model.quantization import quantize_in_place
from plait.model.weights import trained_weights
from plait.trainer.checkpointing.persist import load_weights
from plait.working_folder import WorkingFolder


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


def open_model(
    name: str, working: WorkingFolder, sequence: int | None = None, adapter: str | None = None
) -> OpenedModel:
    """The model of a run (its name or folder) or of a model's folder, for texts of up to `sequence` tokens, with the
    adapter of that name ("none": without; None: as the run trained it). Raises PlaitError where there is none, or where
    it cannot take such texts."""
    return _opened(find_model(name, working, sequence, adapter))


def open_each(name: str, adapters: Sequence[str], working: WorkingFolder) -> Iterator[OpenedModel]:
    """The model with each of these adapters in turn; its own weights are in memory once, and once more for adapters
    that were trained beside quantized ones. Raises PlaitError, before the first, for one that is not there or does not
    fit."""
    plain = find_any_model(name, working)
    plain = replace(plain, stored=replace(plain.stored, adapter=None))
    found = [with_stored_adapter(plain, one, working) for one in adapters]
    opened, base = _opened(plain), read_base_model(Path(plain.stored.path))
    bases: dict[Quantization, GPT] = {"none": opened.model}
    for one in found:
        model = opened.model
        if one.stored.adapter is not None:
            adapter = load_adapter(one.stored.adapter, base)
            kept = adapter.shape.quantization
            if kept not in bases:
                bases[kept] = deepcopy(opened.model)
                quantize_in_place(bases[kept].layers, kept)
            model = with_adapter(bases[kept], adapter)
        yield replace(opened, model=model, origin=one.origin)


def end_tokens(opened: OpenedModel) -> frozenset[int]:
    """Ids of the tokens at which the model's text ends, as its run taught it or as its files name them; those that a
    folder with an adapter names are among them."""
    own = learnt_ends(opened.run.corpus, opened.tokenizer) if opened.run else stored_ends(opened.tokenizer_folder)
    return frozenset({opened.tokenizer.eot, *own, *stored_ends(opened.origin)})


def _opened(found: FoundModel) -> OpenedModel:
    requested = found.run.devices if found.run else "auto"
    device = device_to_sample_on(requested, accelerator_name(), gpu_count())
    return OpenedModel(
        model=load_stored(found.stored, device),
        tokenizer=found.tokenizer,
        tokenizer_folder=found.tokenizer_folder,
        origin=found.origin,
        run=found.run,
    )


def load_stored(stored: StoredModel, device: torch.device) -> GPT:
    """The whole model on a device, in float32, not to be trained. Whoever found a checkpoint has verified it.

    Raises PlaitError where the files are no longer what they were.
    """
    path = Path(stored.path)
    if stored.kind == "folder":
        base = read_base_model(path)
        model = load_model_from(base, stored.shape.sequence, device)
        if stored.adapter is None:
            return model
        adapter = load_adapter(stored.adapter, base)
        if adapter.shape.quantization != "none":
            quantize_in_place(model.layers, adapter.shape.quantization)
        return with_adapter(model, adapter)
    model = GPT(stored.shape)
    load_weights(model, path, read_manifest(path))
    return model.to(device).eval()


def load_adapter(stored: StoredAdapter, base: BaseModel) -> LoadedAdapter:
    """An adapter's weights, on the processor; raises PlaitError where they are no longer what they were."""
    path = Path(stored.path)
    if stored.shape is None:
        return read_adapter(path, base.family, base.shape)
    manifest, shape = read_manifest(path), replace(base.shape, adapter=stored.shape)
    weights = {name: read_tensor(path, manifest, f"model/{name}") for name in trained_weights(shape)}
    return LoadedAdapter(shape=stored.shape, weights=weights, base="")


def device_to_sample_on(requested: RequestedDevices, kind: DeviceName | None, present: int) -> torch.device:
    """The first of a run's devices; where the run was brought to another machine, that one's first GPU, or its
    processor."""
    if requested == "cpu" or kind is None or not present:
        return torch.device("cpu")
    first = requested[0] if isinstance(requested, tuple) else 0
    return torch.device(kind, first if first < present else 0)


def devices_to_evaluate_on(requested: RequestedDevices, present: int) -> tuple[int, ...]:
    """torch's numbers of a run's GPUs; where the run was brought to another machine, all of that one's; empty for the
    processor."""
    if requested == "cpu" or not present:
        return ()
    everybody = tuple(range(present))
    chosen = tuple(one for one in requested if one < present) if isinstance(requested, tuple) else ()
    return chosen or everybody
