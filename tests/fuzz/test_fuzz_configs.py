"""config.json of every family with keys that somebody edited: refused, or computed as transformers computes it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.read_weights import load_model_from
from tests.interop.random_models import (
    EAGER_NAMES,
    SEQUENCE,
    VOCABULARY,
    random_config,
    random_later_config,
    random_model,
)
from tests.matrix import CASES

CPU = torch.device("cpu")
TOKENS_BT = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))
EACH = 25
"""Edited configurations of one test: a model of transformers is made for each."""
SCALARS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False),
    "use_bidirectional_attention": (True, False, None),
    "sliding_window": (None, 1, 2, 7),
    "sliding_window_pattern": (1, 2, 3),
    "max_window_layers": (0, 1, 9),
    "no_rope_layer_interval": (1, 2, 3),
    "no_rope_layers": (None, [1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1], "1"),
    "layer_types": (
        None,
        ["full_attention"],
        ["sliding_attention"] * 3,
        ["full_attention", "chunked_attention"],
        ["linear_attention", "full_attention"],
    ),
    "head_dim": (None, 2, 6, 10),
    "num_key_value_heads": (None, 1, 2),
    "num_attention_heads": (1, 2, 4),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "hidden_activation": ("silu", "gelu_pytorch_tanh", "gelu", None),
    "query_pre_attn_scalar": (1, 9, 100),
    "attn_logit_softcapping": (None, 5.0),
    "final_logit_softcapping": (None, 5.0),
    "embedding_multiplier": (1.0, 3, 0.5, 12.0),
    "residual_multiplier": (1.0, 2.0, 0.1),
    "logits_scaling": (1.0, 2.0, 16),
    "attention_multiplier": (1.0, 0.1, 3.0),
    "partial_rotary_factor": (1.0, 0.5, 0.25, 0.3),
    "rope_theta": (1e4, 77.0, 500_000.0),
    "rope_local_base_freq": (1e4, 77.0),
    "original_max_position_embeddings": (None, 4, 9, 500),
    "max_position_embeddings": (SEQUENCE, 2 * SEQUENCE),
    "clip_qkv": (None, 0.5),
    "swiglu_limit": (7.0, 7, 1.0, None),
    "num_experts_per_tok": (1, 2, 3),
    "num_kv_shared_layers": (0, 1, 2, 3),
    "use_double_wide_mlp": (True, False),
    "attention_k_eq_v": (True, False),
    "hidden_size_per_layer_input": (0, 6, None),
    "vocab_size_per_layer_input": (VOCABULARY, 30),
    "global_head_dim": (None, 4, 8),
    "num_global_key_value_heads": (None, 1, 2),
    "per_layer_config": (None, {}, {"0": {"head_dim": 8}}, {"1": {"num_key_value_heads": 1}}, {"0": {"vocab_size": 9}}),
    "enable_moe_block": (True, False),
    "full_attention_interval": (1, 2, 3),
    "linear_num_key_heads": (1, 2, None),
    "linear_num_value_heads": (1, 2, 4),
    "linear_key_head_dim": (4, 6),
    "linear_value_head_dim": (4, 6),
    "linear_conv_kernel_dim": (1, 2, 3),
    "rms_norm_eps": (1e-5, 1e-2),
    "layer_norm_epsilon": (1e-5, 1e-2),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "scale_attn_weights": (True, False),
}
ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"),
    "rope_theta": (1e4, 77.0),
    "factor": (1.0, 2.0, 7.0),
    "attention_factor": (0.7, None),
    "original_max_position_embeddings": (4, 16, 100),
    "low_freq_factor": (0.5, 1.0),
    "high_freq_factor": (2.0, 6.0),
    "beta_fast": (4.0, 32.0),
    "beta_slow": (1.0, 2.0),
    "truncate": (True, False),
    "mscale": (0.5, 1.0),
    "mscale_all_dim": (0.5, 1.0),
    "partial_rotary_factor": (1.0, 0.5, 0.3),
    "llama_4_scaling_beta": (0.0, 0.1, 2.0),
    "short_factor": ([1.0, 2.0], [1.0] * 4),
    "long_factor": ([3.0, 2.0], [4.0] * 4),
}


def edited(seed: int) -> dict[str, Any]:
    """A family's config.json with one to three keys of any family changed, left out or put in."""
    draw = random.Random(77_000 + seed)
    config = (random_later_config if draw.random() < 0.75 else random_config)(seed)
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.3:
            tables = list(_rope_tables(values))
            table = draw.choice(tables) if tables else values.setdefault("rope_scaling", {})
            key = draw.choice([*ROPE])
            table[key] = draw.choice(ROPE[key])
        else:
            known = [key for key in SCALARS if key in values]
            key = draw.choice(known if known and draw.random() < 0.7 else [*SCALARS])
            values[key] = draw.choice(SCALARS[key])
            if draw.random() < 0.1:
                del values[key]
    return values


def _rope_tables(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    whole = values.get("rope_parameters")
    if isinstance(whole, dict):
        inner = [one for one in whole.values() if isinstance(one, dict)]
        yield from inner or [whole]


def outcome(values: dict[str, Any], folder: Path) -> str:
    """ "refused" or "right"; "skipped" where transformers makes no model of it, or one that looks both ways. Raises
    AssertionError for a model that is read and computes something else."""
    try:
        kernel = "eager" if values["model_type"] in EAGER_NAMES else "sdpa"
        theirs = random_model(AutoConfig.for_model(**json.loads(json.dumps(values)), attn_implementation=kernel))
        with torch.no_grad():
            wanted = theirs(TOKENS_BT).logits.flatten(0, 1)
        theirs.save_pretrained(folder)
    except Exception:  # of several kinds
        return "skipped"
    (folder / "config.json").write_text(json.dumps(values))
    try:
        base = read_base_model(folder)
        ours = load_model_from(base, SEQUENCE, CPU)
    except PlaitError as error:
        assert "\n" not in str(error)
        return "refused"
    if not torch.isfinite(wanted).all():
        return "skipped"
    with torch.no_grad():
        scores = ours.logits(ours(TOKENS_BT))
    torch.testing.assert_close(
        scores, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()), msg=lambda m: f"{values}\n{m}"
    )
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(max(1, CASES // EACH)))
def test_an_edited_config_is_refused_or_computed_as_it_says(part: int, tmp_path: Path) -> None:
    found: list[str] = []
    for seed in range(part * EACH, (part + 1) * EACH):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found.append(outcome(edited(seed), folder))
    assert found.count("right") >= 2  # the others are refused, or their results are not finite
