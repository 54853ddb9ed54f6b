"""Families with parts of their own go back to transformers and to PEFT, are counted exactly, and are refused where a
config.json says more than plait computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plait.errors import PlaitError
from plait.interop.adapter_in import read_adapter, with_adapter
from plait.interop.base_model import BaseModel, WeightPlace, read_base_model
from plait.interop.config_in import shape_of_config
from plait.interop.config_out import config_of_shape
from plait.interop.families import MODEL_FAMILIES
from plait.interop.mxfp4 import unpacked
from plait.interop.read_weights import READ_BYTES, blocks_of, file_tensors, load_model_from
from plait.interop.stored_names import StoredName
from plait.interop.tensor_files import StoredTensor
from plait.interop.write_weights import write_weights, written_tensors
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import training_flops_per_token
from plait.partition.boxes import whole_box
from plait.planner.derive.adapters import adapter_for
from plait.recipe.finetune import FinetuneSection
from plait.report.memory import LiveTensorPeak
from plait.trainer.generate import generate
from tests.interop.random_models import LATER_NAMES, SEQUENCE, VOCABULARY, random_later_config, random_model
from tests.interop.test_interop_peft import logits_of, random_adapter, written
from tests.matrix import few_fast

CPU = torch.device("cpu")
ADAPTED_NAMES = [name for name in LATER_NAMES if name != "gpt_oss"]
"""Those of dense models: experts have no adapters."""
GUIDE = Path(__file__).parents[2] / "docs" / "guide-models.md"


def saved(folder: Path, family: str) -> BaseModel:
    random_model(random_later_config(LATER_NAMES.index(family))).save_pretrained(folder)
    return read_base_model(folder)


@pytest.mark.parametrize("family", LATER_NAMES)
def test_weights_go_back_and_are_counted(family: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "theirs", family)
    ours = dict(file_tensors(load_model_from(base, SEQUENCE, CPU)))

    def read(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        return ours[name][tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]

    (folder := tmp_path / "ours").mkdir()
    values = config_of_shape(base.shape, "float32", preferred=family)
    assert values["model_type"] == family
    # Some classes have a padding token beyond this small vocabulary.
    (folder / "config.json").write_text(json.dumps({**values, "pad_token_id": 0}))
    write_weights(folder, written_tensors(base.shape, MODEL_FAMILIES[family]), "F32", read)
    files = [load_file(one / "model.safetensors") for one in (folder, tmp_path / "theirs")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert parameter_count(base.shape) == sum(one.numel() for one in again.parameters())
    assert parameter_count(base.shape) == sum(one.numel() for one in GPT(base.shape_for(SEQUENCE)).parameters())


@pytest.mark.parametrize("family", few_fast(ADAPTED_NAMES, "phi3", "glm4"))
def test_an_adapter_is_read_back(family: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", family)
    adapter = random_adapter(base)
    found = read_adapter(written(tmp_path / "adapter", base, adapter), family, base.shape)
    assert found.weights.keys() == adapter.weights.keys()
    for name, weight in adapter.weights.items():
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ADAPTED_NAMES)
def test_peft_computes_the_same(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = saved(tmp_path / "base", family)
    own = load_model_from(base, SEQUENCE, CPU)
    adapter = random_adapter(base)
    folder = written(tmp_path / "adapter", base, adapter)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    wanted = logits_of(with_adapter(own, adapter))
    with torch.no_grad():
        found = theirs(tokens()).logits.flatten(0, 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))
    assert not torch.allclose(wanted, logits_of(own), atol=1e-2)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))


def values_of(family: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    config = random_later_config(LATER_NAMES.index(family) + seed * len(LATER_NAMES))
    return {**json.loads(json.dumps(config.to_dict(), default=str)), **changes}


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping in config.json is 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in config.json is 50.0"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, "tables for these two only"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention in config.json is True"),
        ("olmo2", {"residual_multiplier": 0.5}, "residual_multiplier .* models of the family olmo2 have no such part"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 10_000.0}, "transformers 5 uses 500000 for layers with a"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "disagree|factors"),
        (
            "phi3",
            {"partial_rotary_factor": 0.3, "rope_parameters": None, "head_dim": 4},
            "plait rotates an even number of them",
        ),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers in config.json is not a list of"),
        ("granite", {"logits_scaling": 0}, "logits_scaling in config.json is 0; it should be a number above 0"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta .* is None"),
        ("glm4", {"logit_scale": 0.1}, "logit_scale in config.json is 0.1"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping in config.json is 0; it should be a number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention in config.json is True"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit in config.json is 5.0, and plait computes 7.0"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantized weights \(fp8\), which plait does not",
        ),
        ("olmo2", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantized weights \(mxfp4\), which plait does"),
        (
            "gemma4_text",
            {"enable_moe_block": True},
            "enable_moe_block in config.json is True, and plait computes False",
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention in config.json is 'all'"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 40},
            "num_kv_shared_layers in config.json is 40; it should be a whole",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 1, "layer_types": ["full_attention"]}, "list of|below the number of"),
        ("gemma4_text", {"rope_theta": 500.0}, "rope_theta in config.json is 500.0"),
        ("gemma4_text", {"per_layer_config": {"0": {"hidden_size": 8}}}, "changes more of layer 0 than head_dim and"),
        ("gemma4_text", {"per_layer_config": {"77": {}}}, "names a layer 77"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9},
            "plait computes models with one vocabulary for both",
        ),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"]}, "each full_attention or linear_attention"),
        ("qwen3_5_text", {"linear_num_value_heads": 7, "linear_num_key_heads": 2}, "2 key heads and 7 value heads"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim in config.json is 0"),
        ("olmo2", {"full_attention_interval": 4}, "models of the family olmo2 have no such part"),
        ("gemma3_text", {"attention_k_eq_v": True}, "models of the family gemma3_text have no such part"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act in config.json is 'relu', and plait computes gelu_pytorch_tanh"),
        ("gemma", {"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "around a gemma;"),
    ],
)
def test_what_is_not_computed_is_named(family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        shape_of_config(values_of(family, **changes))


@pytest.mark.parametrize("old_names", [True, False])
def test_the_text_of_a_model_of_text_and_pictures_is_read(old_names: bool, tmp_path: Path) -> None:
    inner = values_of("gemma3_text")
    picture = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes = {"image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = CONFIG_MAPPING["gemma3"](
        text_config=inner, vision_config={**picture, **sizes}, mm_tokens_per_image=4,
        tie_word_embeddings=inner["tie_word_embeddings"], image_token_index=VOCABULARY - 1,
    )  # fmt: skip
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    if old_names != any(name.startswith("language_model.") for name in names):
        save_file(
            {_renamed(name, old_names): one for name, one in names.items()},
            tmp_path / "model.safetensors",
            metadata={"format": "pt"},
        )
    base = read_base_model(tmp_path)
    assert base.family == "gemma3_text"
    tokens_bt = tokens() % (VOCABULARY - 1)
    with torch.no_grad():
        ours = load_model_from(base, SEQUENCE, CPU)
        scores, wanted = ours.logits(ours(tokens_bt)), theirs(tokens_bt).logits.flatten(0, 1)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_the_text_of_gemma_4_is_read_with_keys_that_nothing_reads(tmp_path: Path) -> None:
    """The published files of the small models hold keys and values of layers that use those of others."""
    inner = {
        **values_of("gemma4_text"), "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "per_layer_config": None, "rope_parameters": None,
        "tie_word_embeddings": True,
    }  # fmt: skip
    del inner["per_layer_config"]
    theirs = random_model(CONFIG_MAPPING["gemma4"](text_config=inner, vision_config=None, audio_config=None))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for module in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.language_model.layers.3.self_attn.{module}.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    base = read_base_model(tmp_path)
    assert base.family == "gemma4_text" and base.shape.shared_kv_layers == 2
    tokens_bt = tokens() % (VOCABULARY - 1)
    with torch.no_grad():
        ours = load_model_from(base, SEQUENCE, CPU)
        scores, wanted = ours.logits(ours(tokens_bt)), theirs(tokens_bt).logits.flatten(0, 1)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    tensors["model.language_model.layers.0.self_attn.x_proj.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlaitError, match=r"has a weight model.layers.0.self_attn.x_proj.weight that its config.json"):
        read_base_model(tmp_path)


def _renamed(name: str, old: bool) -> str:
    """A tensor's name as versions before 4.52 of transformers wrote it, or as later ones do."""
    if old:
        head = name.replace("lm_head.", "language_model.lm_head.")
        return head.replace("model.language_model.", "language_model.model.").removeprefix("model.vision")
    return name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "model.language_model.")


def test_kimi_k2_is_a_deepseek_by_another_name() -> None:
    whole = json.loads(json.dumps(CONFIG_MAPPING["deepseek_v3"]().to_dict(), default=str))
    shape = shape_of_config(whole)
    assert shape_of_config({**whole, "model_type": "kimi_k2"}) == shape
    assert config_of_shape(shape, "bfloat16", preferred="kimi_k2")["model_type"] == "deepseek_v3"


def test_a_shape_is_read_back_from_its_values() -> None:
    for family in LATER_NAMES:
        for seed in range(4):
            shape = shape_of_config(values_of(family, seed))
            assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


def test_multipliers_cost_nothing_and_norms_are_counted() -> None:
    shape = shape_of_config(values_of("granite"))
    plain = replace(shape, embedding_multiplier=1.0, residual_multiplier=1.0, logit_divisor=1.0)
    assert parameter_count(shape) == parameter_count(plain)
    assert training_flops_per_token(shape, 64, "full") == training_flops_per_token(plain, 64, "full")
    twice = replace(shape, norm_places="both")
    assert parameter_count(twice) - parameter_count(shape) == 2 * shape.layers * shape.width


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma4_text", "qwen3_5_text"])
def test_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Token by token, from kept keys and values."""
    theirs = random_model(random_later_config(LATER_NAMES.index(family)))
    theirs.save_pretrained(tmp_path)
    ours, prompt = load_model_from(read_base_model(tmp_path), SEQUENCE, CPU), [5, 8, 13]
    with torch.no_grad():
        text = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    wanted = text[0].tolist()
    assert len(wanted) > 8  # it may end early, with the token that ends texts
    assert [*prompt, *generate(ours, prompt, tokens=len(wanted) - 3, temperature=0)] == wanted


def test_packed_experts_are_what_transformers_unpacks(tmp_path: Path) -> None:
    """MXFP4: the same model from packed numbers and from those that transformers makes of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "vocab_size": VOCABULARY}
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    more = {"max_position_embeddings": SEQUENCE, "num_experts_per_tok": 2, "attn_implementation": "eager"}
    theirs = random_model(CONFIG_MAPPING["gpt_oss"](**sizes, **few, **more))
    folders = [tmp_path / "plain", tmp_path / "packed"]
    for folder in folders:
        theirs.save_pretrained(folder)
    plain = load_file(folders[0] / "model.safetensors")
    packed, draw = dict(plain), torch.Generator().manual_seed(3)
    for name in [one for one in plain if one.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw).to(torch.uint8)
        scales = torch.randint(115, 130, (experts, outputs, inputs // 32), generator=draw).to(torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for folder, tensors in zip(folders, (plain, packed), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folders[1] / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "mxfp4"}}))
    wanted, found = (dict(file_tensors(load_model_from(read_base_model(one), SEQUENCE, CPU))) for one in folders)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    del packed["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(packed, folders[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlaitError, match=r"lacks the weight model.layers.1.mlp.experts.down_proj_scales"):
        read_base_model(folders[1])


def test_packed_numbers_are_unpacked_in_little_memory() -> None:
    draw = torch.Generator().manual_seed(3)
    codes, scales = (torch.randint(100, 256, (64, n), generator=draw).to(torch.uint8) for n in (1024, 64))
    unpacked(codes[:1], scales[:1])  # makes the table
    with LiveTensorPeak(CPU, [codes, scales]) as peak:
        found = unpacked(codes, scales.clamp(max=140))
    assert peak.bytes < 2 * found.numel() * 4
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).double()
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[nibbles.long() % 8]
    powers = 2.0 ** (scales.clamp(max=140).double() - 127)
    wanted = torch.where(nibbles >= 8, -magnitude, magnitude) * powers.repeat_interleave(32, dim=1)
    assert torch.equal(found.double(), wanted)


def test_packed_rows_are_read_as_many_at_a_time_as_fit_unpacked(tmp_path: Path) -> None:
    codes = StoredTensor(name="w_blocks", file=tmp_path / "f", dtype="U8", shape=(4096, 1440), begin=0)
    scales = StoredTensor(name="w_scales", file=tmp_path / "f", dtype="U8", shape=(4096, 90), begin=4096 * 1440)
    place = WeightPlace(stored=codes, name=StoredName(name="w"), first=0, scales=scales)
    blocks = list(blocks_of(place, whole_box((4096, 2880)), torch.empty(4096, 2880)))
    assert sum(len(part) for _, part in blocks) == 4096
    assert max(part.numel() for _, part in blocks) * 4 <= READ_BYTES


def test_adapters_of_models_with_experts_are_refused_in_a_sentence() -> None:
    shapes = [shape_of_config(values_of("gpt_oss")), shape_of_config(CONFIG_MAPPING["deepseek_v3"]().to_dict())]
    for shape in shapes:
        with pytest.raises(PlaitError, match="adapters beside experts are not there yet"):
            adapter_for(FinetuneSection(method="lora"), shape, 1000)


def test_the_guide_names_every_family() -> None:
    text = GUIDE.read_text()
    assert [name for name in MODEL_FAMILIES if name not in text] == []
