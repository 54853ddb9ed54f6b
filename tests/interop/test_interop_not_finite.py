"""Weights that are NaN or infinite are named with their file when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import PlaitError
from plait.interop.adapter_in import read_adapter
from plait.interop.base_model import read_base_model
from plait.interop.read_weights import load_model_from, read_boxes
from plait.partition.boxes import Box
from tests.interop.folders import write_model
from tests.interop.test_interop_latent import deepseek_model, random_deepseek
from tests.interop.test_interop_peft import random_adapter, written

CPU = torch.device("cpu")
NAME = "model.layers.2.mlp.up_proj.weight"


def spoiled(folder: Path, name: str, value: float, place: int = -1) -> Path:
    """Put the value at a place of the tensor, whichever file of the folder holds it; returns that file."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(-1)[place] = value
            save_file(tensors, file, metadata={"format": "pt"})
            return file
    raise AssertionError(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infin")]
)
@pytest.mark.parametrize("place", [0, -1, 700])
def test_the_tensor_and_its_file_are_named(
    dtype: torch.dtype, value: float, word: str, place: int, tmp_path: Path
) -> None:
    write_model(tmp_path, shard_size="20KB").to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    base = read_base_model(tmp_path)
    load_model_from(base, 8, CPU)
    file = spoiled(tmp_path, NAME, value, place)
    with pytest.raises(PlaitError) as refused:
        load_model_from(base, 8, CPU)
    assert str(refused.value).startswith(f"{NAME} in {file} holds {word}")
    assert refused.value.exit_code == 2 and "learning rate" not in str(refused.value)


def test_large_numbers_that_cancel_out_are_weights(tmp_path: Path) -> None:
    """Their sum in float32 is no number, each of them is."""
    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME].view(-1)[::2], tensors[NAME].view(-1)[1::2] = 3e38, -2e38
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_model_from(read_base_model(tmp_path), 8, CPU).get_parameter("layers.2.feedforward.up.weight")
    assert torch.equal(found, tensors[NAME])


def test_a_number_too_large_for_float32_is_named(tmp_path: Path) -> None:
    write_model(tmp_path).double().save_pretrained(tmp_path)
    spoiled(tmp_path, NAME, 1e300)
    base = read_base_model(tmp_path)
    with pytest.raises(PlaitError, match=f"{NAME} in .* holds infinity"):
        load_model_from(base, 8, CPU)
    into = torch.empty(48, 32, dtype=torch.float64)
    read_boxes(base, [("layers.2.feedforward.up.weight", Box(shape=(48, 32), offset=(0, 0), extent=(48, 32)), into)])
    assert into[-1, -1] == 1e300


def test_a_routers_bias_is_checked_as_well(tmp_path: Path) -> None:
    deepseek_model(random_deepseek(1)).save_pretrained(tmp_path)
    biases = [n for n in load_file(tmp_path / "model.safetensors") if n.endswith("e_score_correction_bias")]
    spoiled(tmp_path, biases[0], float("nan"))
    with pytest.raises(PlaitError, match=f"{biases[0]} in .* holds NaN"):
        load_model_from(read_base_model(tmp_path), 8, CPU)


def test_an_adapters_weights_are_checked_as_well(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    base = read_base_model(tmp_path / "base")
    folder = written(tmp_path / "adapter", base, random_adapter(base))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    spoiled(folder, name, float("nan"))
    with pytest.raises(PlaitError, match=f"{name} in .*adapter_model.safetensors holds NaN or infinity"):
        read_adapter(folder, base.family, base.shape)
