"""Corners of families and of PEFT's adapters that transformers and PEFT compute, in float64."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plait.errors import PlaitError
from plait.interop.adapter_in import read_adapter, with_adapter
from plait.interop.base_model import read_base_model
from plait.interop.config_in import shape_of_config
from plait.interop.config_out import config_of_shape
from plait.interop.read_weights import load_model_from
from plait.model.shape import ModelShape
from tests.interop.random_models import SEQUENCE, VOCABULARY, random_config, random_model
from tests.interop.test_interop_families import SMALL, in_float64
from tests.interop.test_interop_latent import deepseek_model, in_float64_here, lifted, random_deepseek
from tests.interop.test_interop_mixtures import routers_in_float64
from tests.interop.test_interop_peft import config, random_adapter, saved_base, written
from tests.matrix import few_fast

TOKENS_BT = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))


def assert_same(ours: Any, theirs: Any) -> None:
    with torch.no_grad():
        scores, wanted = ours.logits(ours(TOKENS_BT)), theirs(TOKENS_BT).logits.flatten(0, 1)
    assert wanted.std() > 0.05
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-10)


def assert_written_back(shape: ModelShape, family: str) -> None:
    written = json.loads(json.dumps(config_of_shape(shape, "float32", family)))
    assert written["model_type"] == family and shape_of_config(written) == shape
    again = CONFIG_MAPPING[family](**{key: one for key, one in written.items() if key != "model_type"}).to_dict()
    assert shape_of_config(json.loads(json.dumps(again, default=str))) == shape
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_nope_head_dim": 3},
        {"qk_nope_head_dim": 7, "v_head_dim": 7},
        {"qk_nope_head_dim": 1, "v_head_dim": 3},
        {"n_shared_experts": 0},
        {"n_shared_experts": 0, "qk_nope_head_dim": 5},
    ],
    ids=str,
)
def test_a_deepseek_of_odd_heads_or_without_shared_experts(changes: dict[str, int], tmp_path: Path) -> None:
    values = random_deepseek(1).to_dict() | {"attn_implementation": "sdpa"} | changes
    values.pop("qk_head_dim")
    theirs = deepseek_model(CONFIG_MAPPING["deepseek_v3"](**values))
    theirs.save_pretrained(tmp_path)
    ours = in_float64_here(tmp_path)
    assert_same(ours, lifted(theirs))
    assert_written_back(read_base_model(tmp_path).shape, "deepseek_v3")


@pytest.mark.parametrize(
    ("step", "dense", "experts_in"),
    [(1, [1], [0, 2, 3, 4]), (1, [3, 1, 77], [0, 2, 4]), (2, [3], [1]), (2, [1], [3]), (1, [0, 2], [1, 3, 4])],
)
def test_dense_layers_of_a_qwen3_moe_lie_anywhere(
    step: int, dense: list[int], experts_in: list[int], tmp_path: Path
) -> None:
    values = {**SMALL, "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
    values |= {"decoder_sparse_step": step, "mlp_only_layers": dense, "head_dim": 8, "attn_implementation": "sdpa"}
    theirs = random_model(CONFIG_MAPPING["qwen3_moe"](**values | {"initializer_range": 0.2}))
    theirs.save_pretrained(tmp_path)
    shape = read_base_model(tmp_path).shape
    assert [layer for layer in range(5) if shape.mixture_of(layer)] == experts_in
    in_float64(theirs)
    routers_in_float64(theirs)
    assert_same(in_float64_here(tmp_path), theirs)
    assert_written_back(shape, "qwen3_moe")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("stored", ["head", "embedding", "both"])
def test_a_tied_table_is_stored_under_either_name(family: str, stored: str, tmp_path: Path) -> None:
    seed = {"gpt2": 0, "llama": 1}[family]
    values = random_config(seed).to_dict() | {"tie_word_embeddings": True, "attn_implementation": "sdpa"}
    random_model(CONFIG_MAPPING[family](**values)).save_pretrained(tmp_path)
    name = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop(name)
    names = {"head": ["lm_head.weight"], "embedding": [name], "both": [name, "lm_head.weight"]}[stored]
    save_file(
        tensors | {one: table.clone() for one in names}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    in_float64(theirs)
    assert_same(in_float64_here(tmp_path), theirs)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("patterns", "rank", "alpha"),
    [
        ({"rank_pattern": {".*": 4}}, 4, 6.0),
        ({"rank_pattern": {"(q|v|c_attn|c_proj|c_fc|k|o|gate|up|down)_?(proj)?": 4}}, 4, 6.0),
        ({"rank_pattern": {".*": 4}, "alpha_pattern": {".*(attn|mlp).*": 3}}, 4, 3.0),
        ({"rank_pattern": {".*": 4}, "use_rslora": True}, 4, 6.0),
    ],
    ids=str,
)
def test_one_rank_for_all_modules_by_rank_pattern(
    family: str, patterns: dict[str, Any], rank: int, alpha: float, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    seed = {"gpt2": 0, "llama": 1}[family]
    base = saved_base(tmp_path / "base", seed)
    settings = peft.LoraConfig(r=8, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, **patterns)
    plain = random_model(random_config(seed))
    in_float64(plain)
    theirs = peft.get_peft_model(plain, settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    found = read_adapter(tmp_path / "adapter", base.family, base.shape)
    assert (found.shape.rank, found.shape.alpha) == (rank, pytest.approx(alpha))
    ours = with_adapter(in_float64_here(tmp_path / "base"), found)
    with torch.no_grad():
        scores, wanted = ours.logits(ours(TOKENS_BT)), theirs.double()(TOKENS_BT).logits.flatten(0, 1)
        before = in_float64_here(tmp_path / "base")
        assert not torch.allclose(before.logits(before(TOKENS_BT)), wanted, atol=1e-2)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "c_proj"]])
def test_a_dense_adapter_of_a_fused_module_has_the_rank_of_its_pattern(targets: list[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = saved_base(tmp_path / "base", 0)
    settings = peft.LoraConfig(
        r=2, lora_alpha=6, rank_pattern={".*": 6}, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True
    )
    theirs = peft.get_peft_model(random_model(random_config(0)), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    found = read_adapter(tmp_path / "adapter", base.family, base.shape)
    assert found.shape.rank == 6
    ours = with_adapter(load_model_from(base, SEQUENCE, torch.device("cpu")), found)
    with torch.no_grad():
        wanted = theirs(TOKENS_BT).logits.flatten(0, 1)
        torch.testing.assert_close(ours.logits(ours(TOKENS_BT)), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "key",
    few_fast(
        ["([a-z_.0-9]+)+!", "(a|a)*(a|a)*(.*)*!", "((((.*)*)*)*)*x!", "(.*.){25}!", "(x+x+)+y|(.|.)*!"],
        "([a-z_.0-9]+)+!",
    ),
)
def test_an_expression_of_nested_quantifiers_ends(key: str, tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", 1)
    folder = written(tmp_path / "adapter", base, random_adapter(base))
    config(alpha_pattern={key: 9})(folder)
    began = time.process_time()
    with pytest.raises(PlaitError, match=r"alpha_pattern in .* has a key that takes more than 2 s.*write module names"):
        read_adapter(folder, base.family, base.shape)
    assert time.process_time() - began < 2  # of this process, which only waits


@pytest.mark.parametrize("key", ["(" * 5000 + ")" * 5000, "(?P<a", "a{99999999999999}"])
def test_an_expression_too_large_to_compile_is_one_sentence(key: str, tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", 1)
    folder = written(tmp_path / "adapter", base, random_adapter(base))
    config(alpha_pattern={key: 9})(folder)
    with pytest.raises(PlaitError, match=r"alpha_pattern in .* has a key that") as refused:
        read_adapter(folder, base.family, base.shape)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_alphas_are_those_of_peft_for_many_kinds_of_keys(tmp_path: Path) -> None:
    """Names, ends of names, expressions, and keys that match nothing, against PEFT's own get_pattern_key."""
    from peft.utils.other import get_pattern_key

    from plait.interop.configs.adapter_values import alphas_of

    modules = [
        f"model.layers.{n}.{part}" for n in (0, 1, 11) for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    keys = [
        "q_proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "layers.1.mlp.up_proj", "_proj", "proj",
        ".*_proj", r"model\.layers\.[01]\..*", "layers.1.*", "^model.layers.0.mlp.up_proj", "(q|up)_proj", "1", "",
        "mlp.(up|down)_proj", r".*\.1\..*", "down_proj$", "[0-9]+.mlp.up_proj", "MODEL.*", "(?i:MLP).up_proj",
    ]  # fmt: skip
    for first in keys:
        for second in keys:
            pattern = {first: 2, second: 3}
            wanted = [pattern.get(get_pattern_key(pattern.keys(), module), 5) for module in modules]
            values = {"alpha_pattern": pattern, "lora_alpha": 5}
            if first < second or len(first) > 12:
                assert alphas_of(Path("x"), values, modules) == wanted, (first, second)
