"""What a run that is exported holds: a checkpoint's weights, or a base's with the run's adapter added to them, and the
chat template that it learned by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.store import FoundCheckpoint, newest_good
from plait.checkpoint.transfer import read_slice, read_tensor
from plait.commands.models.stored_adapter import base_of_plan
from plait.data.conversations.chat_template import find_template, special_tokens, tokenizer_settings
from plait.data.preparation.whole import TEMPLATE_FILE
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.interop.base_model import BaseModel
from plait.interop.read_weights import read_boxes, read_whole
from plait.interop.write_weights import ReadPart
from plait.model.adapters import merged_weight
from plait.model.names import ADAPTER_A, ADAPTER_B
from plait.model.quantization import dequantized
from plait.model.weights import is_quantized, stored_sizes
from plait.partition.boxes import Box
from plait.planner.plan import Plan
from plait.run_folder import RunFolder
from plait.trainer.checkpointing.fits import check_fits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedRun:
    """A run and the checkpoint of it that is written."""

    folder: RunFolder
    plan: Plan
    found: FoundCheckpoint
    base: BaseModel | None
    """The base of the run's adapter; None for a run that trained all weights."""


def find_exported(folder: RunFolder, plan: Plan) -> ExportedRun:
    """The newest checkpoint of a run; raises PlaitError where there is none, where it is of another model, or where the
    base of an adapter is gone or another one now."""
    found = newest_good(folder.checkpoints)
    if found is None:
        raise PlaitError(f'"{folder.path}" has no checkpoint yet; train it for a while first')
    check_fits(found.manifest, plan)
    base = None if plan.job.shape.adapter is None else base_of_plan(plan, folder.path)
    return ExportedRun(folder=folder, plan=plan, found=found, base=base)


def merged_reader(source: ExportedRun) -> ReadPart:
    """A function that reads rectangles of the run's whole weights, an adapter's product added in float64 to the base
    as the run computed with it: dequantized where it was quantized."""
    path, manifest, base, adapter = source.found.path, source.found.manifest, source.base, source.plan.job.shape.adapter
    if base is None or adapter is None:
        return lambda name, offset, extent: read_slice(path, manifest, f"model/{name}", offset, extent)
    shape = source.plan.job.shape
    sizes, trained = stored_sizes(shape), {part.tensor for part in manifest.parts}

    @lru_cache(maxsize=1)
    def trained_beside(name: str) -> Tensor:
        return dequantized(read_whole(base, name), adapter.quantization)

    def read_base(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        if is_quantized(name, shape):
            top, left = offset
            return trained_beside(name)[top : top + extent[0], left : left + extent[1]]
        own = torch.empty(extent)
        read_boxes(base, [(name, Box(shape=sizes[name], offset=offset, extent=extent), own)])
        return own

    def read(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        if f"model/{name}" in trained:
            return read_slice(path, manifest, f"model/{name}", offset, extent)
        own = read_base(name, offset, extent)
        layer = name.rpartition(".")[0]
        if name != f"{layer}.weight" or f"model/{layer}.{ADAPTER_A}" not in trained:
            return own
        a, b = (read_tensor(path, manifest, f"model/{layer}.{letter}") for letter in (ADAPTER_A, ADAPTER_B))
        rows, columns = (slice(first, first + count) for first, count in zip(offset, extent, strict=True))
        return merged_weight(own, a[:, columns], b[rows], adapter.scale)

    return read


def name_end_of_turn(folder: Path, token: str | None) -> None:
    """Let the tokenizer in an export's folder have the end of a learned turn as its eos_token, unless its chat template
    writes another eos_token in other places; nothing for None."""
    template = find_template([folder])
    if token is None or (template and "eos_token" in template.text and template.special.get("eos_token") != token):
        return
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if not file.is_file():
            continue
        settings = json.loads(file.read_bytes())
        if file.name == "tokenizer_config.json" or "eos_token" in settings:
            entry = settings.get("eos_token")
            settings["eos_token"] = {**entry, "content": token} if isinstance(entry, dict) else token
            file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_learnt_template(folder: Path, corpus: Corpus, requested: str = "auto") -> None:
    """Write the chat template that a run learned by into an export's folder, where none came with the tokenizer or the
    recipe requested another (`data.chat_template`). Special tokens that the tokenizer's settings name otherwise are set
    in it, so that it writes the text that was learned."""
    learned = find_template([corpus.folder]) if corpus.template else None
    if learned is None or (requested == "auto" and find_template([folder])):
        return
    known = special_tokens(tokenizer_settings(folder))
    missing = {key: text for key, text in learned.special.items() if key in learned.text and known.get(key) != text}
    lines = [
        f"{{% set {key} = {json.dumps(text, ensure_ascii=False)} %}}\n"
        for key, text in missing.items()
        if key.isidentifier()
    ]
    (folder / TEMPLATE_FILE).write_text("".join(lines) + learned.text, encoding="utf-8")
