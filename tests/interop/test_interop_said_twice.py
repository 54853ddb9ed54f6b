"""What a model's folder says twice: in two tables of positions, in two tensors, in an index and a single file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.config_in import shape_of_config
from plait.interop.tensor_files import list_tensors, same_numbers
from tests.interop.folders import write_model

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_positions_are_read_from_either_table_and_from_both_that_agree(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    table = {"factor": 2.0, "original_max_position_embeddings": 16}
    of_4 = {"rope_theta": 500.0, "rope_scaling": {"type": kind, **table}}
    of_5 = {"rope_parameters": {"rope_type": kind, "rope_theta": 500, **table}}
    shapes = [shape_of_config({**values, "rope_parameters": None, **keys}) for keys in (of_4, of_5, of_4 | of_5)]
    assert shapes[0].rope_theta == 500 and shapes[0].rope is not None and shapes[0].rope.kind == kind
    assert shapes[0] == shapes[1] == shapes[2]


def test_one_file_with_an_index_of_its_own_is_one_set(tmp_path: Path) -> None:
    write_model(tmp_path)
    before = read_base_model(tmp_path).places
    places = dict.fromkeys(load_file(tmp_path / WHOLE), WHOLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert read_base_model(tmp_path).places == before


@pytest.mark.parametrize("at", [0, 999, 1000, -1])
def test_tensors_are_compared_to_the_last_byte(at: int, tmp_path: Path) -> None:
    one = torch.arange(3000, dtype=torch.float64).reshape(30, 100)
    other = one.clone()
    other.view(-1)[at] += 1
    named = {"one": one, "same": one.clone(), "other": other, "turned": one.t().contiguous(), "half": one.half()}
    save_file(named, tmp_path / WHOLE)
    found = list_tensors(tmp_path)
    answers = {name: same_numbers(found["one"], found[name], 1000) for name in named}
    assert answers == {"one": True, "same": True, "other": False, "turned": False, "half": False}


def test_a_tied_head_that_differs_in_its_last_number_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / WHOLE)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / WHOLE)
    with pytest.raises(PlaitError, match="ties head and embedding, and the files hold two unlike ones"):
        read_base_model(tmp_path)


def test_a_file_that_goes_while_it_is_compared_is_one_sentence(tmp_path: Path) -> None:
    write_model(tmp_path)
    one = list_tensors(tmp_path)["model.norm.weight"]
    with pytest.raises(PlaitError, match="gone cannot be read"):
        same_numbers(one, replace(one, file=tmp_path / "gone"))
