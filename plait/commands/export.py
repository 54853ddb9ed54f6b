"""`plait export`: a run's newest checkpoint as a folder in Hugging Face's format or a .gguf file, or its adapter in
PEFT's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from plait.checkpoint.transfer import read_tensor
from plait.commands.models.end_tokens import GENERATION_CONFIG, end_ids, generation_config, one_or_list
from plait.commands.models.exported_run import (
    ExportedRun,
    find_exported,
    merged_reader,
    name_end_of_turn,
    write_learnt_template,
)
from plait.commands.models.model_card import model_card
from plait.commands.preparing.base import GGUF
from plait.data.conversations.chat_template import find_template, special_tokens, tokenizer_settings
from plait.data.preparation.end_tokens import learnt_end_of_turn, learnt_ends
from plait.data.preparation.tokens import corpus_tokenizer, load_tokenizer, written_before_texts
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError, disk_advice
from plait.interop.adapter_out import write_adapter
from plait.interop.base_model import read_config
from plait.interop.config_in import family_of, is_around_text, shape_of_config
from plait.interop.config_out import config_of_shape
from plait.interop.families import MODEL_FAMILIES
from plait.interop.gguf_out import GgufType, gguf_tensors, write_gguf
from plait.interop.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from plait.interop.small_files import LICENCES, TOKENIZER, copy_small_files
from plait.interop.write_weights import SHARD_BYTES, files_bytes, write_weights, written_tensors
from plait.model.shape import ModelShape
from plait.planner.plan import Plan
from plait.planner.problem.model_words import objectives_left_out, without_objectives
from plait.run_folder import find_run
from plait.screen.screen import Screen
from plait.units import format_bytes
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_CODES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
Exported = Literal["model", "adapter", "merged"]
"""What is written: of a run of adapters "model" is the merged one."""
_KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")


def write_export(
    run: str,
    to: Path,
    *,
    dtype: str = "float32",
    what: Exported = "model",
    screen: Screen,
    shard_bytes: int = SHARD_BYTES,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Path:
    """Write the folder `to`, or the file where its name ends with .gguf, and return it; it must not exist. A checkpoint
    of any layout will do. float32 keeps every bit. Raises PlaitError, and leaves nothing behind, where that cannot be
    done."""
    folder = find_run(run, working)
    plan, target = folder.saved_plan(), (working.path / to).absolute()
    _check_request(run, plan, to, target, dtype, what)
    source = find_exported(folder, plan)
    corpus = open_corpus(working.path / plan.job.corpus)
    tokenizer = corpus_tokenizer(corpus)

    def write(staging: Path) -> str:
        if what == "adapter":
            kind = _write_adapter(staging, source, corpus, dtype)
        elif target.suffix == GGUF:  # beside what it takes in, and then alone
            _write_small_files(staging, source, corpus, _token_ids(source, corpus, _config_of_base(source)), "model")
            kind = ""
        else:
            kind = _write_model(staging, target, source, corpus, dtype, shard_bytes)
        name_end_of_turn(staging, learnt_end_of_turn(corpus, tokenizer))
        write_learnt_template(staging, corpus, folder.saved_config().data.chat_template)
        return kind or _write_gguf(staging, target, source, corpus, cast(GgufType, dtype))

    with screen.progress() as show:
        show(0, 0, "writing the weights")
        kind = _written(target, write)
    screen.print(f"exported {folder.path} at step {source.found.manifest.step} to {to}: {kind}, {dtype}")
    return target


def _check_request(run: str, plan: Plan, to: Path, target: Path, dtype: str, what: Exported) -> None:
    known = get_args(GgufType) if to.suffix == GGUF else _CODES
    if dtype not in known:
        raise PlaitError(f"dtype = {dtype} is none of {', '.join(known)}; {_other_dtype(dtype, to)}")
    if to.suffix == GGUF and what == "adapter":
        raise PlaitError(f"{to.name} would hold a whole model; take --adapter out, or name a folder for the adapter")
    if what != "model" and plan.job.shape.adapter is None:
        raise PlaitError(f'"{run}" trained all weights and has no adapter; export it without --{what}')
    if target.exists() or target.is_symlink():
        raise PlaitError(f"{to} exists already; name a new {'file' if to.suffix == GGUF else 'folder'}")
    if not target.parent.is_dir():
        raise PlaitError(f"there is no folder {to.parent} to export into; make it first")


def _other_dtype(dtype: str, to: Path) -> str:
    if to.suffix == GGUF and dtype.lower() in get_args(GgufType):
        return f"write {dtype.lower()}"
    if dtype in get_args(GgufType):
        return f"{dtype} is for a file whose name ends with {GGUF}"
    if to.suffix == GGUF and dtype.lower().startswith(("q", "iq")):
        return (
            "plait makes no other blocks: export with float16, and then run llama.cpp's "
            f"llama-quantize {to.name} SMALL.gguf {dtype.upper()}"
        )
    return "choose one of these"


def _written(target: Path, write: Callable[[Path], str]) -> str:
    """Fill a folder beside the target by `write`, and then give it, or the file in it, the target's name; returns what
    `write` says it is."""
    staging = target.with_name(f".{target.name}.part")
    try:
        staging.mkdir()
    except FileExistsError:
        raise PlaitError(
            f"{staging} is there: another export is writing it, or was killed; remove it if none is running"
        ) from None
    except OSError as error:
        raise _unwritten(target, error) from error
    try:
        kind = write(staging)
        made = staging / target.name if target.suffix == GGUF else staging
        if target.exists() or target.is_symlink():
            raise PlaitError(f"{target} has appeared meanwhile; export to another name")
        made.rename(target)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritten(target, error) from error
        raise
    shutil.rmtree(staging, ignore_errors=True)  # what was taken in by a file
    return kind


def _unwritten(target: Path, error: OSError) -> PlaitError:
    # numpy, by which gguf writes, leaves errno out where a disk is full.
    return PlaitError(f"{target} cannot be written ({error.strerror or error}); {disk_advice(error)}, and export again")


def _write_model(staging: Path, target: Path, source: ExportedRun, corpus: Corpus, dtype: str, shard_bytes: int) -> str:
    """The whole model, an adapter added to the weights beside it; returns its family."""
    kept = _config_of_base(source)
    shape = _exported_shape(replace(without_objectives(source.plan.job.shape), adapter=None), kept)
    config = config_of_shape(shape, dtype, family_of(kept) if kept else "")
    tensors = written_tensors(shape, MODEL_FAMILIES[config["model_type"]])
    _require_room(target, files_bytes(tensors, _CODES[dtype]))
    ids = _token_ids(source, corpus, kept)
    _write_small_files(staging, source, corpus, ids, "model")
    _write_json(staging / "config.json", {**config, **ids})
    write_weights(staging, tensors, _CODES[dtype], merged_reader(source), shard_bytes)
    merged = ", the adapter merged" if source.base else ""
    return f"{config['model_type']}{merged}{objectives_left_out(source.plan.job.shape)}"


def _write_gguf(staging: Path, target: Path, source: ExportedRun, corpus: Corpus, dtype: GgufType) -> str:
    """The whole model as one file, with the tokenizer and the chat template that lie in the folder already; returns
    its architecture."""
    kept = _config_of_base(source)
    shape = _exported_shape(replace(without_objectives(source.plan.job.shape), adapter=None), kept)
    _require_room(target, sum(one.nbytes for one in gguf_tensors(shape, dtype)))
    tokenizer = gguf_tokenizer((staging / "tokenizer.json").read_text(encoding="utf-8"), shape.vocabulary)
    template = find_template([staging])
    before = written_before_texts(corpus_tokenizer(corpus).backend, tokenizer_settings(staging))
    if len(before) > 1:
        raise PlaitError(
            f"the tokenizer begins texts with {len(before)} tokens, and a .gguf names one; export a folder"
        )
    architecture = write_gguf(
        staging / target.name,
        shape,
        dtype,
        merged_reader(source),
        tokenizer,
        name=source.folder.path.name,
        special=_special_ids(staging, tokenizer, _token_ids(source, corpus, kept), before),
        adds_beginning="yes" if before else "no",
        chat_template=template.text if template else "",
    )
    merged = ", the adapter merged" if source.base else ""
    return f"{architecture} as GGUF{merged}{objectives_left_out(source.plan.job.shape)}"


def _special_ids(
    folder: Path, tokenizer: GgufTokenizer, ids: Mapping[str, Any], before: Sequence[int]
) -> dict[str, int]:
    """Special tokens by a .gguf file's names. "bos" is the one that stands `before` texts, if one does. "eos" is the
    one that the chat template means by it, "eot" the next one that ends an answer."""
    ends = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    named = special_tokens(tokenizer_settings(folder)).get("eos_token")
    eos = tokenizer.tokens.index(named) if named in tokenizer.tokens else ends[0]
    found = {"bos": before[0] if before else ids.get("bos_token_id"), "eos": eos, "pad": ids.get("pad_token_id")}
    found["eot"] = next((one for one in ends if one != eos), None)
    return {key: number for key, number in found.items() if isinstance(number, int) and number >= 0}


def _config_of_base(source: ExportedRun) -> dict[str, Any]:
    return read_config(source.folder.base) if source.folder.base.is_dir() else {}


def _write_adapter(staging: Path, source: ExportedRun, corpus: Corpus, dtype: str) -> str:
    """The adapter alone, with what a chat needs beside it; returns what it is."""
    base = source.base
    assert base is not None and source.plan.job.shape.adapter is not None
    if is_around_text(base.config):
        raise PlaitError(
            f"{base.folder} is a model of text and pictures, in which PEFT looks for adapters under other names; "
            "export the model with --merged"
        )
    named = source.folder.saved_config().model.from_ or str(base.folder)
    write_adapter(
        staging,
        source.plan.job.shape,
        base.family,
        lambda name: read_tensor(source.found.path, source.found.manifest, f"model/{name}"),
        base=named.removeprefix("hub:"),
        fingerprint=source.plan.job.base_fingerprint,
        dtype=getattr(torch, dtype),
    )
    kept = _config_of_base(source)
    _write_small_files(staging, source, corpus, _token_ids(source, corpus, kept), "adapter")
    return f"{source.plan.job.shape.adapter.variant} adapter of {base.family}"


def _exported_shape(shape: ModelShape, base: Mapping[str, Any]) -> ModelShape:
    """The run's shape; its longest sequence is at least that of the model that it went on from."""
    longest = shape_of_config(base).sequence if base else 0
    return replace(shape, sequence=max(shape.sequence, longest, shape.learned_positions))


def _token_ids(source: ExportedRun, corpus: Corpus, base: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of config.json: special tokens as the base has them. Text ends with the token that ends a learned turn, with
    those that the base ends text with, and with the end of a learned document."""
    tokenizer = corpus_tokenizer(corpus)
    *turn, end_of_text = learnt_ends(corpus, tokenizer)
    kept = {key: base[key] for key in _KEPT_KEYS if key in base} or {"bos_token_id": tokenizer.beginning[0]}
    of_base = end_ids(generation_config(source.folder.base)) or end_ids(kept)
    return {**kept, "eos_token_id": one_or_list([*turn, *of_base, end_of_text])}


def _require_room(target: Path, nbytes: int) -> None:
    disk = os.statvfs(target.parent)
    if (free := disk.f_bavail * disk.f_frsize) < nbytes:
        raise PlaitError(
            f"{target} needs {format_bytes(nbytes)}, and {format_bytes(free)} are free there; free some space, or name "
            "a folder on another disk"
        )


def _write_small_files(
    staging: Path, source: ExportedRun, corpus: Corpus, ids: Mapping[str, Any], what: Exported
) -> None:
    """Write licences, generation_config.json, tokenizer and model card; `ids` are the special tokens' keys."""
    folder, tokenizer = source.folder, corpus_tokenizer(corpus)
    licences = copy_small_files(folder.base, staging, LICENCES)
    named = {key: ids[key] for key in ids if key.endswith("_token_id") and ids[key] is not None}
    of_base = generation_config(folder.base)
    _write_json(staging / GENERATION_CONFIG, {**(of_base or named), "eos_token_id": ids["eos_token_id"]})
    is_same = (folder.base / "tokenizer.json").exists() and load_tokenizer(folder.base).hash == tokenizer.hash
    if is_same:
        copy_small_files(folder.base, staging, TOKENIZER)
    else:
        tokenizer.save(staging)
        texts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eot_text}
        texts |= {"bos_token": tokenizer.bos_text} if tokenizer.bos else {}
        _write_json(staging / "tokenizer_config.json", texts)
    answers = _how_answers_end(learnt_end_of_turn(corpus, tokenizer), what)
    card = model_card(folder.saved_config(), source.plan, source.found.manifest, licences, answers=answers)
    (staging / "README.md").write_text(card, encoding="utf-8")


def _how_answers_end(token: str | None, what: Exported) -> str:
    """A sentence of the model card; empty for a run without chats."""
    if token is None:
        return ""
    if what != "adapter":
        return f"Each answer of a chat ends with the token `{token}`, where `generate` stops."
    return (
        f"Each answer of a chat ends with the token `{token}`. `generate` takes its settings from the base and may not "
        f'know it: pass `eos_token_id=tokenizer.convert_tokens_to_ids("{token}")`.'
    )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
