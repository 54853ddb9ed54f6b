"""Random models that transformers made compute the same here: read from their folders, in float64 and in float32.

In float64 transformers' islands of float32, its norms and rotary tables, are replaced by their definitions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from plait.interop.base_model import read_base_model
from plait.interop.config_in import shape_of_config
from plait.interop.config_out import config_of_shape
from plait.interop.read_weights import file_tensors, load_model_from, read_boxes
from plait.model.gpt import GPT
from plait.partition.boxes import whole_box
from tests.interop.random_models import (
    EAGER_NAMES,
    LATER_NAMES,
    SEQUENCE,
    VOCABULARY,
    random_config,
    random_later_config,
    random_model,
)
from tests.matrix import CASES, few_fast

EVERY_DAY, ALL = range(10), range(10, 10 + CASES // 2)
CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "initializer_range": 0.5,
}


class Float64Norm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (self.offset + self.weight)


class Float64Rotary(nn.Module):
    """Transformers' own formulas in float64; the module's frequencies are what its float32 gives, to compare with."""

    def __init__(self, config: Any, theirs: Any) -> None:
        super().__init__()
        tables = config.rope_parameters
        nested = "rope_type" not in tables
        self.repeats = 1 if config.model_type == "gpt_oss" else 2
        unlike = config.model_type == "gemma4_text"
        dim = 0 if unlike else getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.tables: dict[str | None, tuple[Tensor, float]] = {}
        for kind in theirs.layer_types if nested else [None]:
            rope = tables[kind] if nested else tables
            share = rope.get("partial_rotary_factor", 1.0)
            turned = config.per_layer_config[kind].head_dim if unlike else int(dim * share)
            plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, turned, 2, dtype=torch.float64) / turned))
            long = {"longest": config.max_position_embeddings, "tokens": SEQUENCE}
            self.tables[kind] = FORMULAS[rope["rope_type"]](plain, {**rope, **long})
            found = getattr(theirs, f"{kind}_inv_freq" if nested else "inv_freq")
            torch.testing.assert_close(self.tables[kind][0], found.double(), rtol=1e-5, atol=0)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        frequencies, scale = self.tables[layer_type]
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids  # one for each of three grids
        angles = position_ids[..., None].double() * frequencies.repeat(self.repeats)
        return angles.cos() * scale, angles.sin() * scale


class Float64DeltaNet(nn.Module):
    """Qwen 3.5's linear attention by its definition, token by token."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        one, (rows, tokens, _width) = self.theirs, hidden_states.shape
        mixed = one.in_proj_qkv(hidden_states).transpose(1, 2)
        padded = torch.nn.functional.pad(mixed, (one.conv_kernel_size - 1, 0))
        mixed = torch.nn.functional.conv1d(padded, one.conv1d.weight, groups=one.conv_dim)
        mixed = torch.nn.functional.silu(mixed).transpose(1, 2)
        q, k, v = mixed.split([one.key_dim, one.key_dim, one.value_dim], dim=-1)
        q, k = (x.reshape(rows, tokens, one.num_k_heads, one.head_k_dim) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(one.num_v_heads // one.num_k_heads, dim=2) for x in (q, k))
        v = v.reshape(rows, tokens, one.num_v_heads, one.head_v_dim)
        write = one.in_proj_b(hidden_states).sigmoid()
        decay = (-one.A_log.exp() * torch.nn.functional.softplus(one.in_proj_a(hidden_states) + one.dt_bias)).exp()
        state = hidden_states.new_zeros(rows, one.num_v_heads, one.head_k_dim, one.head_v_dim)
        read = []
        for t in range(tokens):
            state = state * decay[:, t, :, None, None]
            known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - known) * write[:, t, :, None])
            read.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * one.head_k_dim**-0.5)
        found = torch.stack(read, dim=1)
        found = found / (found.square().mean(-1, keepdim=True) + one.layer_norm_epsilon).sqrt() * one.norm.weight
        gate = one.in_proj_z(hidden_states).view(found.shape)
        return one.out_proj((found * torch.nn.functional.silu(gate)).flatten(2))


def llama3_formula(plain: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    old, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    wavelength = 2 * math.pi / plain
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope["factor"] + smooth * plain
    slow = torch.where(wavelength > old / low, plain / rope["factor"], between)
    return torch.where(wavelength < old / high, plain, slow), 1.0


def yarn_formula(plain: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    factor, dim = rope["factor"], 2 * len(plain)

    def place(rotations: float) -> float:
        length = rope["original_max_position_embeddings"]
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(len(plain), dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale"):
        scale = (0.1 * rope["mscale"] * math.log(factor) + 1) / (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1)
    return plain / factor * ramp + plain * (1 - ramp), scale or 0.1 * math.log(factor) + 1


def longrope_formula(plain: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    original = rope["original_max_position_embeddings"]
    factors = rope["long_factor" if rope["tokens"] > original else "short_factor"]
    factor = rope.get("factor") or rope["longest"] / original
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64), rope.get("attention_factor") or scale


def proportional_formula(plain: Tensor, rope: dict[str, Any]) -> tuple[Tensor, float]:
    turned = int(rope.get("partial_rotary_factor", 1.0) * 2 * len(plain) // 2)
    moves = torch.arange(len(plain)) < turned
    return torch.where(moves, plain / rope.get("factor", 1.0), torch.zeros_like(plain)), 1.0


FORMULAS: dict[str, Any] = {
    "dynamic": lambda plain, rope: (plain, 1.0),
    "longrope": longrope_formula,
    "default": lambda plain, rope: (plain, 1.0),
    "linear": lambda plain, rope: (plain / rope["factor"], 1.0),
    "llama3": llama3_formula,
    "yarn": yarn_formula,
    "proportional": proportional_formula,
}


def in_float64(theirs: PreTrainedModel) -> None:
    theirs.double()
    theirs.config._experts_implementation = "eager"  # torch's grouped product refuses float64
    if theirs.config.model_type in EAGER_NAMES:
        theirs.set_attn_implementation("exact")
    for module in list(theirs.modules()):
        for name, child in list(module.named_children()):
            kind: Any = child
            if type(child).__name__ == "Gemma4RMSNorm":
                weight = kind.weight if kind.with_scale else nn.Parameter(torch.ones((), dtype=torch.float64))
                setattr(module, name, Float64Norm(weight, kind.eps, 0.0))
            elif type(child).__name__.endswith("RMSNorm"):
                eps = getattr(kind, "eps", None) or kind.variance_epsilon
                offset = float(type(child).__name__.startswith(("Gemma", "Qwen3_5")))
                setattr(module, name, Float64Norm(kind.weight, eps, offset))
            elif type(child).__name__ == "Qwen3_5GatedDeltaNet":
                setattr(module, name, Float64DeltaNet(child))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(module, name, Float64Rotary(theirs.config, child))
            elif type(child).__name__ == "Ministral3Attention":  # by which its queries grow
                child.register_forward_pre_hook(with_exact_positions, with_kwargs=True)
            elif type(child).__name__.endswith("ScaledWordEmbedding"):
                kind.embed_scale.fill_(kind.scalar_embed_scale)


def exact_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Any]:
    """The eager attention of Gemma 2 and gpt-oss without islands of float32."""
    key, value = (one.repeat_interleave(module.num_key_value_groups, dim=1) for one in (key, value))
    scores = query @ key.mT * settings["scaling"]
    if (cap := settings.get("softcap")) is not None:
        scores = (scores / cap).tanh() * cap
    scores = scores if attention_mask is None else scores + attention_mask
    if (sinks := settings.get("s_aux")) is not None:
        sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ value).transpose(1, 2).contiguous(), None
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", eager_mask)


def with_exact_positions(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return inputs, {**named, "position_ids": named["position_ids"].double()}


def in_float64_here(folder: Path, sequence: int = SEQUENCE) -> GPT:
    base = read_base_model(folder)
    ours = GPT(base.shape_for(sequence)).double()
    read_boxes(base, ((name, whole_box(one.shape), one) for name, one in file_tensors(ours)))
    return ours


def check(config: Any, seed: int, folder: Path) -> None:
    theirs = random_model(config)
    theirs.save_pretrained(folder)
    tokens_bt = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ours = load_model_from(read_base_model(folder), SEQUENCE, CPU)
        rounded, theirs_rounded = ours.logits(ours(tokens_bt)), theirs(tokens_bt).logits.flatten(0, 1)
        assert theirs_rounded.std() > 0.01
        in_float64(theirs)
        ours = in_float64_here(folder)
        scores, wanted = ours.logits(ours(tokens_bt)), theirs(tokens_bt).logits.flatten(0, 1)
        torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-10)
        # Some random models magnify float32's rounding, theirs as ours.
        largest, theirs_error = float(wanted.abs().max()), float((theirs_rounded - wanted).abs().max())
        allowed = min(max(1e-5 * largest, 10 * theirs_error), 1e-3 * largest)
        torch.testing.assert_close(rounded.double(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("seed", EVERY_DAY)
def test_scores_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    check(random_config(seed), seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_scores_of_many_more_are(seed: int, tmp_path: Path) -> None:
    check(random_config(seed), seed, tmp_path)


@pytest.mark.parametrize("seed", range(len(LATER_NAMES)))
def test_scores_of_later_families_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    check(random_later_config(seed), seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(LATER_NAMES), len(LATER_NAMES) * (1 + CASES // 4)))
def test_scores_of_many_more_of_later_families_are(seed: int, tmp_path: Path) -> None:
    check(random_later_config(seed), seed, tmp_path)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_mistral_with_kinds_of_layers_is_what_transformers_calls_a_ministral(mixed: bool, tmp_path: Path) -> None:
    """Its window is on the layers that layer_types names alone, here and in what plait writes."""
    config = CONFIG_MAPPING["mistral"](**SMALL, sliding_window=5)
    random_model(config).save_pretrained(tmp_path)
    kinds = ["full_attention", "sliding_attention" if mixed else "full_attention", "full_attention"]
    values = json.loads((tmp_path / "config.json").read_text()) | {"layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tokens_bt = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = load_model_from(read_base_model(tmp_path), SEQUENCE, CPU)
        scores, shape = ours.logits(ours(tokens_bt)), ours.shape
        for _ in ("as it lay there", "as plait writes it"):
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
            torch.testing.assert_close(scores, theirs(tokens_bt).logits.flatten(0, 1), rtol=0, atol=1e-4)
            (tmp_path / "config.json").write_text(json.dumps(config_of_shape(shape, "float32", "mistral")))
    assert shape.windows == ((0, 5, 0) if mixed else ())
    assert read_base_model(tmp_path).shape == shape


@pytest.mark.parametrize("seed", few_fast([*EVERY_DAY, *ALL], *EVERY_DAY))
def test_a_config_that_is_written_means_the_same_to_both(seed: int, tmp_path: Path) -> None:
    """Read by transformers again, and by plait from each version's keys alone."""
    check_written(random_config(seed), tmp_path)


@pytest.mark.parametrize("seed", few_fast(range(5 * len(LATER_NAMES)), *range(len(LATER_NAMES))))
def test_a_config_of_a_later_family_does_as_well(seed: int, tmp_path: Path) -> None:
    check_written(random_later_config(seed), tmp_path)


def check_written(config: Any, tmp_path: Path) -> None:
    shape = shape_of_config(config.to_dict())
    written = config_of_shape(shape, "float32", config.model_type)
    assert written["model_type"] == config.model_type
    newer_only = config.model_type in ("olmo3", "ministral3", "gpt_oss", "gemma4_text")
    older = ("dtype",) if newer_only else ("rope_parameters", "dtype")
    for dropped in ((), older, ("rope_theta", "rope_scaling", "torch_dtype")):
        assert shape_of_config({key: value for key, value in written.items() if key not in dropped}) == shape
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert shape_of_config(AutoConfig.from_pretrained(tmp_path).to_dict()) == shape
