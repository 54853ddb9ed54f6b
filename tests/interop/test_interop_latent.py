"""DeepSeek-V3's models compute the same here, and go back to transformers: latent attention beside experts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from plait.commands.preparing.base import base_facts
from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.config_in import shape_of_config
from plait.interop.config_out import config_of_shape
from plait.interop.families import MODEL_FAMILIES
from plait.interop.read_weights import file_tensors, load_model_from, read_boxes
from plait.interop.write_weights import write_weights, written_tensors
from plait.model.gpt import GPT
from plait.partition.boxes import whole_box
from plait.recipe.schema import DataSection, ModelSection, RunConfig
from plait.trainer.generate import generate
from plait.working_folder import WorkingFolder
from tests.interop.random_models import SEQUENCE, VOCABULARY, random_model, rope_values
from tests.interop.test_interop_families import Float64Rotary, in_float64
from tests.matrix import CASES

EVERY_DAY, ALL = range(4), range(4, 4 + CASES)
VERSIONS = ("deepseek_v2", "deepseek_v3")
CPU = torch.device("cpu")


def random_deepseek(seed: int) -> DeepseekV3Config:
    """A config of the family with its odd corners: no latent of queries, all layers dense, groups, stretched positions
    with their factor of scores, values wider than keys."""
    draw = random.Random(2000 + seed)
    groups, each = draw.choice((1, 2, 4)), draw.choice((2, 3, 4))
    chosen = draw.randint(1, groups)
    layers, heads = draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 4))
    rope = rope_values(draw)
    if rope["rope_type"] != "default" and draw.random() < 0.5:
        rope |= {"mscale": draw.choice((1.0, 0.7)), "mscale_all_dim": draw.choice((1.0, 0.5))}
    return DeepseekV3Config(
        hidden_size=draw.choice((24, 33)),
        intermediate_size=draw.choice((33, 80)),
        moe_intermediate_size=draw.choice((7, 24)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_shared_experts=draw.choice((1, 2)),
        n_routed_experts=groups * each,
        num_experts_per_tok=draw.randint(1, chosen * each),
        n_group=groups,
        topk_group=chosen,
        routed_scaling_factor=draw.choice((1.0, 2.5)),
        norm_topk_prob=draw.random() < 0.7,
        first_k_dense_replace=draw.choice((0, 0, 1, layers)),
        kv_lora_rank=draw.choice((5, 16)),
        q_lora_rank=draw.choice((None, 7, 12)),
        qk_rope_head_dim=draw.choice((2, 4, 8)),
        qk_nope_head_dim=draw.choice((2, 4, 6, 10)),
        v_head_dim=draw.choice((3, 6, 8, 20)),
        vocab_size=VOCABULARY,
        max_position_embeddings=draw.choice((SEQUENCE, 4 * SEQUENCE)),
        rms_norm_eps=draw.choice((1e-5, 1e-6)),
        tie_word_embeddings=draw.random() < 0.5,
        rope_parameters=rope,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",  # the eager one has an island of float32, too
    )


LIKE_V3 = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "n_shared_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
    "routed_scaling_factor", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters",
)  # fmt: skip


def random_deepseek_v2(seed: int) -> DeepseekV2Config:
    """A config of the family before, with the same corners and both ways to choose experts."""
    like, draw = random_deepseek(seed), random.Random(3000 + seed)
    return DeepseekV2Config(
        **{name: getattr(like, name) for name in LIKE_V3} | {"hidden_size": 24},  # its heads have to divide it
        topk_method=draw.choice(("greedy", "group_limited_greedy")),
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def random_of(family: str, seed: int) -> DeepseekV2Config | DeepseekV3Config:
    return random_deepseek_v2(seed) if family == "deepseek_v2" else random_deepseek(seed)


def deepseek_model(config: DeepseekV2Config | DeepseekV3Config) -> PreTrainedModel:
    """A model whose routers' biases are random, too."""
    model = random_model(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.2)
    return model


class Float64Gate(nn.Module):
    """The routing of DeepseekV3TopkRouter without its islands of float32."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = self.theirs
        logits = x.reshape(-1, x.shape[-1]) @ one.weight.T
        scores = logits.sigmoid()
        choice = (scores + one.e_score_correction_bias).unflatten(1, (one.num_group, -1))
        best = choice.topk(2, dim=-1).values.sum(-1).topk(one.topk_group, dim=-1).indices
        closed = torch.ones(choice.shape[:2], dtype=torch.bool).scatter(1, best, value=False)
        chosen = choice.masked_fill(closed[..., None], float("-inf")).flatten(1).topk(one.top_k, dim=-1).indices
        gates = scores.gather(1, chosen)
        if one.norm_topk_prob:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        return logits, gates * one.routed_scaling_factor, chosen


class Float64GateV2(nn.Module):
    """The routing of DeepseekV2TopkRouter without its islands of float32."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = self.theirs
        logits = x.reshape(-1, x.shape[-1]) @ one.weight.T
        scores = logits.softmax(-1)
        if one.topk_method == "group_limited_greedy":
            grouped = scores.unflatten(1, (one.num_group, -1))
            best = grouped.amax(-1).topk(one.topk_group, dim=-1).indices
            closed = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, best, value=False)
            scores = grouped.masked_fill(closed[..., None], 0.0).flatten(1)
        gates, chosen = scores.topk(one.top_k, dim=-1)
        return logits, gates * one.routed_scaling_factor, chosen


class ComplexRotary(nn.Module):
    """Rotations as DeepSeek-V2's class has them."""

    def __init__(self, config: Any, theirs: Any) -> None:
        super().__init__()
        self.table = Float64Rotary(config, theirs).tables[None]

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        frequencies, scale = self.table
        angles = position_ids[..., None].double() * frequencies
        return torch.polar(torch.full_like(angles, scale), angles)


def exact_rotary(*arguments: Tensor) -> tuple[Tensor, ...]:
    """transformers' apply_rotary_emb of DeepSeek-V2 without its island of float32."""
    *both, rotation = arguments
    pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * rotation.unsqueeze(1) for x in both]
    return tuple(torch.view_as_real(x).flatten(3) for x in pairs)


GATES: dict[str, type[nn.Module]] = {
    "DeepseekV3TopkRouter": Float64Gate,
    "DeepseekV2TopkRouter": Float64GateV2,
}


def lifted(theirs: PreTrainedModel) -> PreTrainedModel:
    """The same model in float64 throughout."""
    inner: Any = theirs.model
    plain = inner.rotary_emb
    in_float64(theirs)
    if theirs.config.model_type == "deepseek_v2":
        inner.rotary_emb = ComplexRotary(theirs.config, plain)
    for module in list(theirs.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in GATES:
                setattr(module, name, GATES[type(child).__name__](child))
    return theirs


def in_float64_here(folder: Path) -> GPT:
    base = read_base_model(folder)
    ours = GPT(base.shape_for(SEQUENCE)).double()
    read_boxes(base, ((name, whole_box(one.shape), one) for name, one in file_tensors(ours)))
    return ours


def check(family: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_deepseek_v2, "apply_rotary_emb", exact_rotary)
    theirs = deepseek_model(random_of(family, seed))
    theirs.save_pretrained(folder)
    tokens_bt = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ours, wanted = in_float64_here(folder), lifted(theirs)(tokens_bt).logits.flatten(0, 1)
        scores = ours.logits(ours(tokens_bt))
    assert wanted.std() > 0.05
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", VERSIONS)
@pytest.mark.parametrize("seed", EVERY_DAY)
def test_a_deepseek_computes_what_transformers_computes(
    family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(family, seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", VERSIONS)
@pytest.mark.parametrize("seed", ALL)
def test_many_more_do(family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(family, seed, tmp_path, monkeypatch)


def test_every_corner_is_drawn() -> None:
    configs = [random_deepseek(seed) for seed in (*EVERY_DAY, *ALL)]
    assert {config.q_lora_rank is None for config in configs} == {True, False}
    assert {config.first_k_dense_replace >= config.num_hidden_layers for config in configs} == {True, False}
    assert {config.topk_group < config.n_group for config in configs} == {True, False}
    assert {bool(config.rope_parameters.get("mscale_all_dim")) for config in configs} == {True, False}
    assert {config.rope_parameters["rope_type"] for config in configs} == {"default", "linear", "llama3", "yarn"}


@pytest.mark.parametrize("family", VERSIONS)
@pytest.mark.parametrize("seed", range(12))
def test_a_config_is_written_as_it_is_read(family: str, seed: int) -> None:
    shape = shape_of_config(random_of(family, seed).to_dict())
    written = config_of_shape(shape, "float32", preferred=family)
    assert written["model_type"] == family
    assert shape_of_config(json.loads(json.dumps(written))) == shape
    if shape.mixture is not None:  # models without experts are of both families
        assert config_of_shape(shape, "float32")["model_type"] == family


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("deepseek_v3", "F32"), ("deepseek_v2", "F32"), pytest.param("deepseek_v3", "BF16", marks=pytest.mark.slow)],
)
def test_weights_go_back_to_files_that_transformers_reads(family: str, dtype: str, tmp_path: Path) -> None:
    theirs = deepseek_model(random_of(family, 1))
    theirs.save_pretrained(tmp_path / "theirs")
    base = read_base_model(tmp_path / "theirs")
    ours = dict(file_tensors(in_float64_here(tmp_path / "theirs")))

    def read(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        part = ours[name].detach()
        for dim, (first, length) in enumerate(zip(offset, extent, strict=True)):
            part = part.narrow(dim, first, length)
        return part

    (written := tmp_path / "ours").mkdir()
    values = config_of_shape(base.shape, "float32", preferred=base.family)
    (written / "config.json").write_text(json.dumps(values))
    write_weights(written, written_tensors(base.shape, MODEL_FAMILIES[base.family]), dtype, read)
    files = [load_file(folder / "model.safetensors") for folder in (written, tmp_path / "theirs")]
    assert files[0].keys() == files[1].keys()
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    biases = [name for name in theirs.state_dict() if name.endswith("e_score_correction_bias")]
    assert bool(biases) == (family == "deepseek_v3")
    for name in theirs.state_dict() if dtype == "F32" else biases:  # a rounded bias would send tokens elsewhere
        assert torch.equal(theirs.state_dict()[name], again.state_dict()[name]), name


def test_modules_for_tokens_further_ahead_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    theirs = deepseek_model(random_deepseek(2))
    theirs.save_pretrained(tmp_path)
    plain = in_float64_here(tmp_path).state_dict()
    tensors, layers = load_file(tmp_path / "model.safetensors"), theirs.config.num_hidden_layers
    ahead = {f"model.layers.{layers}.{name}.weight": torch.ones(3) for name in ("enorm", "shared_head.head")}
    save_file(tensors | ahead, tmp_path / "model.safetensors")
    for name, weight in in_float64_here(tmp_path).state_dict().items():
        assert torch.equal(weight, plain[name]), name
    config = RunConfig(model=ModelSection.model_validate({"from": str(tmp_path)}), data=DataSection(files="x.txt"))
    facts = base_facts(config, WorkingFolder(tmp_path))
    assert facts is not None
    assert facts.reasons[0].startswith(f"left out: 1 module of {tmp_path.name} for tokens further ahead")


def test_text_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = deepseek_model(random_deepseek(3))
    theirs.save_pretrained(tmp_path)
    ours, prompt = load_model_from(read_base_model(tmp_path), SEQUENCE, CPU), [5, 8, 13]
    with torch.no_grad():
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert [*prompt, *generate(ours, prompt, tokens=12, temperature=0)] == wanted[0].tolist()


def test_other_experts_beside_latents_are_named() -> None:
    shape = shape_of_config(random_deepseek(1).to_dict())
    assert shape.mixture is not None
    other = replace(shape.mixture, router="softmax", balance=(), normalize=True)
    with pytest.raises(PlaitError, match=r"router softmax, balance none.*or as DeepSeek-V3"):
        config_of_shape(replace(shape, mixture=other), "float32")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_interleave": False}, "rope_interleave in config.json is False, and plait computes True"),
        ({"attention_bias": True}, "attention_bias in config.json is True"),
        ({"scoring_func": "softmax"}, "scoring_func in config.json is 'softmax', and plait computes sigmoid"),
        ({"topk_method": "greedy"}, "topk_method in config.json"),
        ({"qk_rope_head_dim": 3, "head_dim": 3}, "rope_head_width is 3; choose an even one"),
        ({"num_key_value_heads": 7}, "kv_heads"),
        ({"kv_lora_rank": 0}, "kv_lora_rank in config.json is 0; it should be a whole number above 0"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions of type 'dynamic'"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace in config.json is -1"),
    ],
)
def test_what_is_not_computed_is_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        shape_of_config({**random_deepseek(1).to_dict(), **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob in config.json is True, and plait computes False"),
        ({"mlp_bias": True}, "mlp_bias in config.json is True"),
        ({"scoring_func": "sigmoid"}, "scoring_func in config.json is 'sigmoid', and plait computes softmax"),
        ({"topk_method": "noaux_tc"}, "topk_method in config.json is 'noaux_tc'"),
    ],
)
def test_what_is_not_computed_of_the_one_before_is_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        shape_of_config({**random_deepseek_v2(1).to_dict(), **changes})
