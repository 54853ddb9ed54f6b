"""What is wrong with a model's folder is one sentence that names the file, the key or the weight."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import PlaitError
from plait.interop.base_model import BaseModel, read_base_model
from plait.interop.read_weights import read_boxes
from plait.model.shape import weight_sizes
from plait.partition.boxes import Box
from tests.interop.folders import write_model

Break = Callable[[Path], None]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def config(**changes: object) -> Break:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        kept = {key: value for key, value in values.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def weights(**changes: object) -> Break:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in changes.items():
            name = name.replace("__", ".")
            if isinstance(tensor, torch.Tensor):
                tensors[name] = tensor
            else:
                del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


def bytes_of(change: Callable[[bytes], bytes]) -> Break:
    def break_file(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return break_file


def index(places: dict[str, str]) -> Break:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": places})) and None


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def two_sets(folder: Path) -> None:
    path = folder / "model.safetensors"
    (folder / "shard.safetensors").write_bytes(path.read_bytes())
    index(dict.fromkeys(load_file(path), "shard.safetensors"))(folder)


CASES: dict[str, tuple[Break, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no config.json in"),
    "a config that is no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, "is not usable"),
    "an unknown family": (
        config(model_type="qwen3_next"),
        "is none that plait reads.*the nearest in architecture is llama",
    ),
    "no family": (config(model_type="absent"), "model_type None"),
    "a missing key": (config(hidden_size="absent"), "config.json lacks hidden_size"),
    "an odd number": (config(num_hidden_layers=2.5), "num_hidden_layers in config.json is 2.5"),
    "an activation": (config(hidden_act="gelu"), "hidden_act in config.json is 'gelu', and plait computes silu"),
    "a type of positions": (config(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "'longrope'"),
    "a part of a head": (config(partial_rotary_factor=0.5), "rotates 0.5 of each head"),
    "two types of positions": (
        config(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}),
        "rope_parameters and rope_scaling in config.json disagree: rope_type is 'default' in one and 'linear'",
    ),
    "another factor of positions": (
        config(
            rope_theta=500,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500},
            rope_scaling={"type": "linear", "factor": 2.0},
        ),
        "disagree: factor is 4.0 in one and 2.0 in the other",
    ),
    "a theta that rope_scaling hides": (
        config(
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500},
            rope_scaling={"type": "linear", "factor": 2.0},
        ),
        "rope_theta in config.json is only in rope_parameters",
    ),
    "two thetas": (
        config(
            rope_theta=700,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500},
            rope_scaling={"type": "linear", "factor": 2.0},
        ),
        "rope_theta in config.json is 500 in rope_parameters and 700.0 beside rope_scaling",
    ),
    "no theta": (config(rope_parameters=None, rope_theta=0), "rope_theta in config.json is 0; it should be a number"),
    "two heads": (
        config(tie_word_embeddings=True),
        "ties head and embedding, and the files hold two unlike ones, lm_head.weight and model.embed_tokens.weight; "
        "set tie_word_embeddings to false in config.json, or remove lm_head.weight",
    ),
    "two sets of weights": (
        two_sets,
        "holds two sets of weights: model.safetensors, and the files that model.safetensors.index.json names; remove",
    ),
    "quantized": (config(quantization_config={"bits": 4}), "is of quantized weights, which plait does not read; take"),
    "quantized by AWQ": (
        config(quantization_config={"quant_method": "awq", "bits": 4}),
        r"is of quantized weights \(awq\), which plait does not read; take the model in bf16 .*method = \"qlora\"",
    ),
    "too many layers": (config(num_hidden_layers=5), r"lacks the weight model.layers.4.input_layernorm.weight"),
    "too few layers": (config(num_hidden_layers=3), r"has a weight model.layers.3.* that its config.json does not ask"),
    "another width": (config(intermediate_size=40), r"has the shape \[48, 32\], and config.json asks for \[40, 32\]"),
    "a bias that it lacks": (config(attention_bias=True), "lacks the weight model.layers.0.self_attn.q_proj.bias"),
    "a weight too many": (weights(extra=torch.zeros(2)), "has a weight extra that"),
    "a weight too few": (weights(model__norm__weight=None), "lacks the weight model.norm.weight"),
    "a dtype": (
        weights(model__norm__weight=torch.zeros(32, dtype=torch.int8)),
        "stored as I8.*convert the model to bf16",
    ),
    "a file that is cut off": (bytes_of(lambda data: data[:-10]), "is damaged: it has .* bytes instead of"),
    "a header that is cut off": (bytes_of(lambda data: data[:50]), "is damaged: its header is cut off"),
    "a header of no size": (bytes_of(lambda data: struct.pack("<Q", 2**62) + data[8:]), "its header is cut off"),
    "a header of noise": (bytes_of(lambda data: data[:8] + b"?" + data[9:]), "is damaged: it is not JSON"),
    "an empty file": (bytes_of(lambda data: b""), "its header is cut off"),
    "pickles only": (pickled, "pytorch_model.bin only, a pickle.*save_pretrained"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "an index of a missing file": (
        index({"lm_head.weight": "model-1.safetensors"}),
        "names model-1.safetensors, which",
    ),
    "an index of a file outside": (index({"x": "../model.safetensors"}), "not a safetensors file of its own folder"),
    "an index with a path": (index({"x": "/etc/passwd"}), "not a safetensors file of its own folder"),
    "an index that is wrong": (index({"x": "model.safetensors"}), "says that x is in model.safetensors, and it is not"),
    "an index of nothing": (lambda folder: (folder / INDEX).write_text("[]") and None, "index.json is damaged"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_read_is_refused(case: str, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "model")
    change, words = CASES[case]
    change(folder)
    with pytest.raises(PlaitError, match=words) as refused:
        read_base_model(folder)
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)


def test_a_head_that_is_the_embedding_may_lie_there_twice(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "model")
    config(tie_word_embeddings=True)(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    weights(lm_head__weight=embedding.clone())(folder)
    assert "head.weight" not in read_base_model(folder).places


def test_a_bare_decoder_has_no_prefix(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): x for name, x in tensors.items()}, folder / "model.safetensors")
    assert read_base_model(folder).places["norm.weight"].stored.name == "norm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_box_of_any_weight_is_read_from_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_model(tmp_path, shard_size="20KB").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    base = read_base_model(tmp_path)
    assert len({place.stored.file for place in base.places.values()}) > 3
    check_boxes(base, {name: x.detach() for name, x in model.named_parameters()})


def check_boxes(base: BaseModel, theirs: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, sizes in weight_sizes(base.shape).items():
        place = base.places[name]
        whole = theirs[place.stored.name]
        whole = whole.t() if place.name.order == "in out" else whole
        whole = whole.narrow(0, place.first, sizes[0])
        for _ in range(3):
            offset = tuple(int(torch.randint(size, (), generator=generator)) for size in sizes)
            extent = tuple(
                int(torch.randint(size - first + 1, (), generator=generator))
                for size, first in zip(sizes, offset, strict=True)
            )
            into = torch.full(extent, 7.0, dtype=torch.float64)
            read_boxes(base, [(name, Box(shape=sizes, offset=offset, extent=extent), into)])
            wanted = whole[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
            assert torch.equal(into, wanted.double()), name


def test_a_rank_reads_no_more_than_its_rows_and_wide_columns(tmp_path: Path) -> None:
    """Counted by the system, for a matrix whose rows are far longer than a page."""
    rows, width = 64, 1 << 16
    model = write_model(tmp_path, hidden_size=32, intermediate_size=width, num_hidden_layers=1)
    base, sizes = read_base_model(tmp_path), (32, width)
    assert rows and base.places["layers.0.feedforward.down.weight"].stored.shape == sizes
    for box in (
        Box(shape=sizes, offset=(8, 0), extent=(8, width)),
        Box(shape=sizes, offset=(0, width // 4), extent=(32, width // 4)),
    ):
        into = torch.empty(box.extent)
        before = bytes_read()
        read_boxes(base, [("layers.0.feedforward.down.weight", box, into)])
        assert bytes_read() - before < into.numel() * 4 + 4096
        first, second = (slice(at, at + size) for at, size in zip(box.offset, box.extent, strict=True))
        assert torch.equal(into, model.model.layers[0].mlp.down_proj.weight[first, second])


def bytes_read() -> int:
    """Bytes that this process read by calls so far; nothing is mapped."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_longer_sequences_than_the_model_was_made_for_are_refused(whole: Path) -> None:
    with pytest.raises(PlaitError, match=r"choose train\.sequence = 64 or less"):
        read_base_model(whole).shape_for(65)
