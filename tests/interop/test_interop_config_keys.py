"""Keys of config.json with values of other JSON types, left out, or said twice: read as transformers reads them, or
refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.config_in import family_of, shape_of_config
from plait.interop.read_weights import load_model_from
from plait.model.shape import ModelShape
from tests.interop.random_models import (
    LATER_NAMES,
    SEQUENCE,
    VOCABULARY,
    random_config,
    random_later_config,
    random_mixture_config,
    random_model,
)
from tests.interop.test_interop_latent import random_deepseek, random_deepseek_v2
from tests.matrix import few_fast

CONFIGS: dict[str, Any] = {
    config.model_type: config
    for config in (
        *(random_config(seed) for seed in range(5)),
        *(random_mixture_config(seed) for seed in range(3)),
        random_deepseek(1),
        random_deepseek_v2(1),
        *(random_later_config(seed) for seed in range(len(LATER_NAMES))),
    )
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
ABSENT = "left out"
OTHERS: tuple[Any, ...] = (ABSENT, None, "false", "true", "1", "", 0, 1, 2, -1, 1.0, 0.5, 4.0, True, False, [], {}, [1])
ARITHMETIC = {
    "is_causal", "per_layer_config", "head_dim", "layer_types", "mlp_only_layers", "clip_qkv", "attention_bias",
    "mlp_bias", "partial_rotary_factor", "rope_theta", "num_experts", "num_local_experts", "hidden_size",
    "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "original_max_position_embeddings",
}  # fmt: skip
IGNORED = {
    # of other models, of training, or of what a program does with the text
    "architectures", "dtype", "id2label", "label2id", "model_type", "problem_type", "transformers_version",
    "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "chunk_size_feed_forward",
    "initializer_range", "is_encoder_decoder", "output_hidden_states", "return_dict", "use_cache", "attention_dropout",
    "attn_pdrop", "embd_pdrop",
    "resid_pdrop", "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "reorder_and_upcast_attn",
    "num_mtp_layers", "num_labels", "output_attentions", "tie_encoder_decoder",
}  # fmt: skip


def of_transformers(values: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers' class makes of these values, every key with its value; None where it refuses them."""
    try:
        config = AutoConfig.for_model(**values)
        config.validate()
        return config.to_dict()
    except Exception:  # of several kinds; some come of arithmetic with a text
        return None


def of_plait(values: dict[str, Any]) -> ModelShape | None:
    try:
        return shape_of_config(values)
    except PlaitError as error:
        assert "\n" not in str(error)
        return None


@pytest.mark.parametrize("family", few_fast(CONFIGS, "llama", "gpt2"))
def test_a_key_of_another_type_is_refused_or_read_as_transformers_reads_it(family: str) -> None:
    whole = json.loads(json.dumps(CONFIGS[family].to_dict(), default=str))
    assert of_plait(whole) is not None
    checked, wrong = 0, list[str]()
    for key in sorted({*whole, *ARITHMETIC} - IGNORED - {key for key in whole if key.startswith("summary_")}):
        for value in OTHERS:
            changed = {**whole, key: value}
            if (family, key, value) == ("deepseek_v3", "num_key_value_heads", ABSENT):
                continue  # transformers takes 128, and fails for another number of heads
            if value == ABSENT:
                del changed[key]
            ours = of_plait(json.loads(json.dumps(changed)))
            if ours is None:
                continue
            theirs = of_transformers(json.loads(json.dumps(changed)))
            if theirs is None:  # it refuses more: keys that have no effect, and integers for floats
                continue
            if of_plait(json.loads(json.dumps(theirs, default=str))) != ours:
                wrong.append(f"{key} = {value!r} is another model in transformers")
            checked += 1
    assert not wrong and checked > 40


@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", few_fast(["default", "linear", "llama3", "yarn"], "yarn"))
def test_positions_of_another_type_are_as_well(kind: str, table: str) -> None:
    whole = json.loads(json.dumps(CONFIGS["llama"].to_dict(), default=str)) | {"rope_parameters": None}
    full = {"rope_type": kind, "rope_theta": 700.0, "factor": 2.0, "original_max_position_embeddings": 16}
    full |= {"low_freq_factor": 1.0, "high_freq_factor": 2.0, "beta_fast": 4, "truncate": True, "mscale": 0.7}
    for key in (*full, "type", "attention_factor", "mscale_all_dim", "partial_rotary_factor"):
        for value in OTHERS:
            changed = {name: one for name, one in {**full, key: value}.items() if one != ABSENT}
            values = json.loads(json.dumps({**whole, table: changed}))
            ours = of_plait(json.loads(json.dumps(values)))
            theirs = None if ours is None else of_transformers(values)
            if theirs is not None:
                assert of_plait(json.loads(json.dumps(theirs, default=str))) == ours, f"{key} = {value!r}"


@pytest.mark.parametrize("family", few_fast(CONFIGS, *list(CONFIGS)[:9]))
def test_a_model_that_looks_both_ways_is_refused(family: str, tmp_path: Path) -> None:
    """transformers computes another model with this key: what is refused is not the same arithmetic."""
    random_model(CONFIGS[family]).save_pretrained(tmp_path)
    tokens_bt = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))
    values = json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        causal = AutoModelForCausalLM.from_pretrained(tmp_path, **EAGER)(tokens_bt).logits
        ours = load_model_from(read_base_model(tmp_path), SEQUENCE, torch.device("cpu"))
        scores = ours.logits(ours(tokens_bt)).view_as(causal)
        torch.testing.assert_close(scores, causal, rtol=0, atol=1e-4 * float(causal.abs().max()))
        (tmp_path / "config.json").write_text(json.dumps(values | {"is_causal": False}))
        other = AutoModelForCausalLM.from_pretrained(tmp_path, **EAGER)(tokens_bt).logits
    if family != "mistral" or values["sliding_window"] not in (1,):  # which sees itself alone, both ways
        assert (other - causal).abs().max() > 0.1 * causal.abs().max()
    with pytest.raises(PlaitError, match=r"is_causal in config.json is False, and plait computes True"):
        read_base_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"is_causal": True}))
    assert read_base_model(tmp_path).shape_for(SEQUENCE) == ours.shape


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rope_theta": 500.0},
            r"rope_theta in config.json is \d+ in its table .* and 500 outside it.*remove the wrong",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings in config.json is 'false'; it should be true or false"),
        ({"attention_bias": "no"}, "attention_bias in config.json is 'no'; it should be true or false"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config in config.json is"),
    ],
)
def test_what_contradicts_itself_is_named(changes: dict[str, Any], sentence: str) -> None:
    values = {**CONFIGS["llama"].to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    with pytest.raises(PlaitError, match=sentence):
        shape_of_config({**values, **changes})


def test_a_size_under_two_names_is_named() -> None:
    values = CONFIGS["gpt2"].to_dict()
    assert shape_of_config({**values, "hidden_size": values["n_embd"]}) == shape_of_config(values)
    other = {**values, "n_layer": 3, "num_hidden_layers": 2}
    assert CONFIG_MAPPING["gpt2"](**other).n_layer == 2  # transformers takes the alias
    with pytest.raises(PlaitError, match=r"n_layer and num_hidden_layers in config.json are two names of one number"):
        shape_of_config(other)


LLAMA_LIKE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"model_type": "llamoid", **LLAMA_LIKE}, "llama"),
        ({"model_type": "nemotron", **LLAMA_LIKE}, "llama"),
        ({"model_type": "ministral", **LLAMA_LIKE, "sliding_window": 4096}, "mistral"),
        ({"model_type": "qwen9_moe", **LLAMA_LIKE, "num_experts": 8, "moe_intermediate_size": 8}, "qwen3_moe"),
        ({"model_type": "qwen3_next", **LLAMA_LIKE, "num_experts": 8, "linear_num_value_heads": 8}, "qwen3_5_text"),
        ({"model_type": "phimoe", **LLAMA_LIKE, "num_local_experts": 16}, "mixtral"),
        ({"model_type": "kimi_k9", **LLAMA_LIKE, "kv_lora_rank": 16, "n_routed_experts": 8}, "deepseek_v3"),
        ({"model_type": "deepseek_vl", **LLAMA_LIKE, "kv_lora_rank": 16, "scoring_func": "softmax"}, "deepseek_v2"),
        ({"model_type": "gemma9_text", **LLAMA_LIKE, "final_logit_softcapping": 30.0}, "gemma3_text"),
        ({"model_type": "gemma3n_text", **LLAMA_LIKE, "num_kv_shared_layers": 10}, "gemma4_text"),
        ({"model_type": "gpt_oss2", **LLAMA_LIKE, "num_local_experts": 8, "swiglu_limit": 7.0}, "gpt_oss"),
        ({"model_type": "qwen9_text", **LLAMA_LIKE, "use_sliding_window": True}, "qwen3"),
        ({"model_type": "gpt_neox", "num_attention_heads": 4, "hidden_size": 32, "layer_norm_eps": 1e-5}, "gpt2"),
        ({"model_type": "mistral_bert", "num_attention_heads": 4, "architectures": ["BertForMaskedLM"]}, ""),
        ({"model_type": "t5", "num_heads": 8, "is_encoder_decoder": True, "architectures": ["T5ForCausalLM"]}, ""),
        ({"model_type": "mamba", "hidden_size": 32, "architectures": ["MambaForCausalLM"]}, ""),
    ],
)
def test_the_nearest_family_is_by_architecture(values: dict[str, Any], nearest: str) -> None:
    words = f"; the nearest in architecture is {nearest}$" if nearest else "; choose a model of one of these families$"
    with pytest.raises(PlaitError, match=words):
        family_of(values)
