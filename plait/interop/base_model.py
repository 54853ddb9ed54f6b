"""A model's folder, looked at and checked: its shape, and where each of its weights lies. Reads headers, and of the
weights none but a head that lies beside the embedding that it is tied to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.interop.config_in import family_of, is_around_text, shape_of_config
from plait.interop.families import MODEL_FAMILIES, Family
from plait.interop.links import inside
from plait.interop.stored_names import StoredName, fused_name, outputs_in, stored_name
from plait.interop.tensor_files import (
    INDEX,
    ITEM_SIZES,
    PACKED,
    PACKED_GROUP,
    PACKED_SCALES,
    StoredTensor,
    list_tensors,
    same_numbers,
)
from plait.model.names import expert_of
from plait.model.shape import ModelShape
from plait.model.weights import stored_sizes
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file

CONFIG = "config.json"
FUSED_END = ".experts.gate_up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlace:
    """Where one of our weights lies: a tensor, how its dims are ordered, and which part of its outputs."""

    stored: StoredTensor
    name: StoredName
    first: int = 0
    """The first of its outputs in the tensor."""
    scales: StoredTensor | None = None
    """Where numbers are packed (mxfp4.py), their scales; `stored` are their bytes. None: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A model that somebody trained, in a folder of Hugging Face's format."""

    folder: Path
    family: str
    shape: ModelShape
    """Its `sequence` is the longest that the model was made for."""
    config: Mapping[str, Any]
    """config.json as it stands."""
    places: Mapping[str, WeightPlace]
    """Every weight of the shape, and every router's bias, by our name."""
    left_out: int = 0
    """Modules that predict further tokens, whose weights lie there and are not read."""

    def shape_for(self, sequence: int) -> ModelShape:
        """The shape for sequences of this length; raises PlaitError where the model cannot take them."""
        if sequence > self.shape.sequence:
            raise PlaitError(
                f"sequences of {sequence} tokens are longer than the {self.shape.sequence} that {self.folder} was made "
                f"for; choose train.sequence = {self.shape.sequence} or less"
            )
        return replace(self.shape, sequence=sequence)


def needed_files(base: BaseModel) -> tuple[str, ...]:
    """The names of the files in the model's folder that its shape and weights are read from, config.json last."""
    weights = sorted({one.file.name for place in base.places.values() for one in _tensors_of(place)})
    index = [INDEX] if (base.folder / INDEX).exists() else []
    return (*weights, *index, CONFIG)


def _tensors_of(place: WeightPlace) -> list[StoredTensor]:
    return [place.stored, *([] if place.scales is None else [place.scales])]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; raises PlaitError where there is none, and where it is a link out of the folder."""
    return read_json_file(inside(folder, folder / CONFIG), instead="name the folder of a model, a .gguf file or a run")


def read_json_file(file: Path, *, instead: str) -> dict[str, Any]:
    """The JSON object in one of a model's or an adapter's files; `instead` is what to do where it is missing."""
    try:
        values = parse_json(read_regular_file(file, SMALL_FILE_BYTES))
    except FileNotFoundError:
        raise PlaitError(f"there is no {file.name} in {file.parent}; {instead}") from None
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} is not usable ({error}); download it again") from None
    if not isinstance(values, dict):
        raise PlaitError(f"{file} is not a table of keys and values; download it again")
    return values


def read_base_model(folder: Path) -> BaseModel:
    """Look at a folder; raises PlaitError that names the first file, key or weight that does not fit."""
    config = read_config(folder)
    family, shape = family_of(config), shape_of_config(config)
    found = list_tensors(folder)
    found = _of_text(found) if is_around_text(config) else found
    tensors, ahead = _without_modules_ahead(found, MODEL_FAMILIES[family], shape)
    return BaseModel(
        folder=folder,
        family=family,
        shape=shape,
        config=config,
        places=_places(folder, MODEL_FAMILIES[family], shape, tensors),
        left_out=ahead,
    )


_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
"""How the names of a model of text begin within one of text and pictures, older and newer, and how by itself."""


def _of_text(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the model of text within one of text and pictures, by their names in the former."""
    found: dict[str, StoredTensor] = {}
    for name, one in tensors.items():
        for prefix, own in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                by_itself = own + name.removeprefix(prefix)
                found[by_itself] = replace(one, name=by_itself)
    return found


def _without_modules_ahead(
    tensors: Mapping[str, StoredTensor], family: Family, shape: ModelShape
) -> tuple[Mapping[str, StoredTensor], int]:
    """The tensors without those of modules that predict further tokens, which are numbered on after the last layer or
    stand beside the layers, and how many such modules there are."""
    if not family.ahead:
        return tensors, 0
    if "*" not in family.ahead:
        kept = {name: one for name, one in tensors.items() if not name.startswith(f"{family.ahead}.")}
        return kept, int(len(kept) < len(tensors))
    numbered = re.compile(re.escape(family.ahead).replace(r"\*", r"(\d+)") + r"\.")
    found = {name: match[1] for name in tensors if (match := numbered.match(name)) and int(match[1]) >= shape.layers}
    return {name: one for name, one in tensors.items() if name not in found}, len(set(found.values()))


def _places(
    folder: Path, family: Family, shape: ModelShape, tensors: Mapping[str, StoredTensor]
) -> dict[str, WeightPlace]:
    """The place of each weight; raises PlaitError unless each tensor is used, and each part of it once."""
    # Files of the bare decoder, without its head, lack the prefix.
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    # Files that transformers' models are written to as they are hold all experts of a layer in one tensor.
    fused = bool(family.fused) and any(name.endswith(FUSED_END) for name in tensors)
    tensors = {name: _as_matrix(one) for name, one in tensors.items()} if fused else tensors
    places: dict[str, WeightPlace] = {}
    head = family.names["head.weight"].name
    table = {**family.names, **family.fused} if fused else family.names
    all_sizes = stored_sizes(shape)
    for name, sizes in all_sizes.items():
        stored = fused_name(table, name, shape.size_of("experts")) if fused else stored_name(table, name)
        first, outputs = outputs_in(stored, name, all_sizes)
        own = stored.name if prefix else stored.name.removeprefix(family.prefix)
        if name == "embed.tokens.weight" and shape.tied and own not in tensors and head in tensors:
            own = head  # one table under the head's name alone
        is_packed = family.packed and own not in tensors and own + PACKED in tensors
        if is_packed:
            stored = replace(stored, order="out in")
        for end in (PACKED, PACKED_SCALES) if is_packed else ("",):
            if own + end not in tensors:
                raise PlaitError(
                    f"{folder} lacks the weight {own}{end}; bring all files of the model, and the config.json of it"
                )
            if is_packed and (dtype := tensors[own + end].dtype) != "U8":
                raise PlaitError(
                    f"{own}{end} in {folder} is stored as {dtype}, and packed numbers are bytes (U8); download the "
                    "model again"
                )
        wanted = stored_shape(stored, outputs, sizes)
        if stored.by_expert == "first dim":
            wanted = (shape.size_of("experts"), *wanted)
        found = [
            _expert_part(folder, tensors[own + end], size, name if stored.by_expert == "first dim" else "")
            for end, size in (_packed_shapes(own, wanted) if is_packed else [("", wanted)])
        ]
        if stored.by_channel == "middle dim":
            found = [replace(one, shape=(one.shape[0], one.shape[2])) for one in found]
        scales = found[1] if is_packed else None
        places[name] = WeightPlace(stored=found[0], name=stored, first=first, scales=scales)
    if shape.tied and head in tensors:
        _refuse_another_head(folder, tensors[head], places["embed.tokens.weight"].stored)
    used = {one.name for place in places.values() for one in _tensors_of(place)}
    # Of layers that use the keys and values of others, files may hold some that no program reads.
    alone = stored_sizes(replace(shape, shared_kv_layers=0, shared_kv_ffn=0)) if shape.shared_kv_layers else {}
    used |= {stored_name(table, name).name for name in alone.keys() - all_sizes.keys()}
    for name in tensors:
        tied = shape.tied and name == head
        empty = 0 in tensors[name].shape  # as of no shared experts
        if name not in used and not tied and not empty and not name.endswith(family.ignored):
            raise PlaitError(
                f"{folder} has a weight {name} that its config.json does not ask for; bring the config.json of these "
                "weights, or take that weight out"
            )
    return places


def _packed_shapes(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The two tensors that hold a weight of this shape packed, by the ends of their names."""
    *rows, columns = shape
    if columns % PACKED_GROUP:
        raise PlaitError(
            f"{name} lies there in groups of {PACKED_GROUP} numbers, and config.json asks for rows of {columns}; "
            "bring the config.json of these weights"
        )
    groups = (*rows, columns // PACKED_GROUP)
    return [(PACKED, (*groups, PACKED_GROUP // 2)), (PACKED_SCALES, groups)]  # two numbers in a byte


def _expert_part(folder: Path, stored: StoredTensor, wanted: tuple[int, ...], of_expert: str) -> StoredTensor:
    """A tensor of this shape, or of one with a first dim of experts the part of the expert that a weight is of, as a
    matrix or a vector. Raises PlaitError for another shape."""
    if stored.shape != wanted:
        raise PlaitError(
            f"{stored.name} in {folder} has the shape {list(stored.shape)}, and config.json asks for {list(wanted)}; "
            "bring the config.json of these weights"
        )
    expert = expert_of(of_expert) if of_expert else None
    if expert is None:
        return stored
    own = wanted[1:]
    begin = stored.begin + expert * prod(own) * ITEM_SIZES[stored.dtype]
    return replace(stored, shape=own if len(own) < 2 else (own[0], prod(own[1:])), begin=begin)


def _refuse_another_head(folder: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise PlaitError where the head that lies beside a tied embedding is not the embedding once more."""
    if not same_numbers(head, embedding):
        raise PlaitError(
            f"config.json in {folder} ties head and embedding, and the files hold two unlike ones, {head.name} and "
            f"{embedding.name}; set tie_word_embeddings to false in config.json, or remove {head.name}"
        )


def _as_matrix(one: StoredTensor) -> StoredTensor:
    """A tensor of three dims as a matrix: the first two are one, row after row."""
    first, *last = one.shape
    return replace(one, shape=(first * last[0], last[1])) if len(last) == 2 else one


def stored_shape(stored: StoredName, outputs: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor with this many outputs in which one of our weights, of these sizes, lies."""
    whole = (outputs, *sizes[1:])
    if stored.by_channel == "middle dim":
        return (outputs, 1, *sizes[1:])
    return whole if stored.order == "out in" else whole[::-1]
