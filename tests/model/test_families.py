"""GPT-2, Llama, Mistral, Qwen 2 and Qwen 3 are points in the model's shape: same scores and gradients in float64.

The other implementation computes norms and rotary tables in float32 whatever the model's dtype; here these two are
replaced by their definitions in float64, as nothing else would allow a limit of 1e-10. Unchanged it agrees in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from plait.model.gpt import GPT
from plait.model.shape import ModelShape

SEQUENCE, VOCABULARY = 24, 61
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "initializer_range": 0.15,
    "attn_implementation": "sdpa",
}
LLAMA_SHAPE = ModelShape(
    layers=3, width=48, heads=6, kv_heads=2, head_width=8, ffn=80, vocabulary=VOCABULARY, sequence=SEQUENCE
)

LLAMA_NAMES = {
    "model.embed_tokens.weight": "embed.tokens.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feedforward_norm",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "mlp.gate_proj": "feedforward.gate",
    "mlp.up_proj": "feedforward.up",
    "mlp.down_proj": "feedforward.down",
}
GPT2_NAMES = {
    "transformer.wte.weight": "embed.tokens.weight",
    "transformer.wpe.weight": "embed.positions.weight",
    "transformer.ln_f": "norm",
    "ln_1": "attention_norm",
    "ln_2": "feedforward_norm",
    "attn.c_proj": "attention.o",
    "mlp.c_fc": "feedforward.up",
    "mlp.c_proj": "feedforward.down",
}


def renamed(name: str, table: dict[str, str]) -> str:
    inner = re.sub(r"^(model\.layers|transformer\.h)\.(\d+)\.", r"layers.\2.", name)
    for theirs, ours in table.items():
        inner = re.sub(rf"(?:(?<=\.)|^){re.escape(theirs)}(?=\.|$)", ours, inner)
    return inner


def from_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {renamed(name, LLAMA_NAMES): weight for name, weight in weights.items()}


def from_gpt2(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2 stores its matrices as input × output, and q, k and v side by side."""
    ours: dict[str, Tensor] = {}
    for name, weight in weights.items():
        weight = weight.T if re.search(r"c_(attn|proj|fc)\.weight$", name) else weight
        if ".attn.c_attn." in name:
            stem, kind = renamed(name, GPT2_NAMES).split("attn.c_attn.")
            ours |= {f"{stem}attention.{part}.{kind}": cut for part, cut in zip("qkv", weight.chunk(3), strict=True)}
        else:
            ours[renamed(name, GPT2_NAMES)] = weight
    return ours


def gpt2() -> tuple[PreTrainedModel, ModelShape]:
    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_embd=48,
            n_layer=3,
            n_head=6,
            vocab_size=VOCABULARY,
            n_positions=SEQUENCE,
            activation_function="gelu_pytorch_tanh",
            initializer_range=0.15,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation="sdpa",
        )
    )
    shape = LLAMA_SHAPE.to_dict() | {
        "kv_heads": 6,
        "ffn": 192,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": "all",
        "tied": True,
    }
    return theirs, ModelShape.from_dict(shape)


def llama() -> tuple[PreTrainedModel, ModelShape]:
    theirs = LlamaForCausalLM(LlamaConfig(**SMALL, rms_norm_eps=1e-5, rope_parameters=rope(10_000.0)))
    return theirs, LLAMA_SHAPE


def mistral() -> tuple[PreTrainedModel, ModelShape]:
    config = MistralConfig(**SMALL, head_dim=16, sliding_window=None, rms_norm_eps=1e-6, rope_parameters=rope(1e6))
    changes = {"head_width": 16, "norm_eps": 1e-6, "rope_theta": 1e6}
    return MistralForCausalLM(config), ModelShape.from_dict(LLAMA_SHAPE.to_dict() | changes)


def qwen2() -> tuple[PreTrainedModel, ModelShape]:
    config = Qwen2Config(**SMALL, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=rope(1e6))
    changes = {"bias": "qkv", "tied": True, "norm_eps": 1e-6, "rope_theta": 1e6}
    return Qwen2ForCausalLM(config), ModelShape.from_dict(LLAMA_SHAPE.to_dict() | changes)


def qwen3() -> tuple[PreTrainedModel, ModelShape]:
    config = Qwen3Config(**SMALL, head_dim=16, rms_norm_eps=1e-6, rope_parameters=rope(1e6))
    changes = {"qk_norm": True, "head_width": 16, "norm_eps": 1e-6, "rope_theta": 1e6}
    return Qwen3ForCausalLM(config), ModelShape.from_dict(LLAMA_SHAPE.to_dict() | changes)


def rope(theta: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta}


class Float64Norm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Float64Rotary(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        width = self.shape.head_width
        frequencies = [self.shape.rope_theta ** (-2 * pair / width) for pair in range(width // 2)]
        angles = position_ids[..., None].double() * torch.tensor(frequencies * 2, dtype=torch.float64)
        return angles.cos(), angles.sin()


def put_into_float64(theirs: PreTrainedModel, shape: ModelShape) -> None:
    theirs.double()
    for module in list(theirs.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, Float64Norm(child.weight, shape.norm_eps))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(module, name, Float64Rotary(shape))


Family = Callable[[], tuple[PreTrainedModel, ModelShape]]
FAMILIES = pytest.mark.parametrize("family", [gpt2, llama, mistral, qwen2, qwen3], ids=lambda family: family.__name__)


def both(
    family: Family, dtype: torch.dtype
) -> tuple[PreTrainedModel, GPT, Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    torch.manual_seed(5)
    theirs, shape = family()
    for name, weight in theirs.named_parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
    if dtype == torch.float64:
        put_into_float64(theirs, shape)
    ours = GPT(shape).to(dtype)
    convert = from_gpt2 if family is gpt2 else from_llama
    ours.load_state_dict(convert({name: weight.detach() for name, weight in theirs.named_parameters()}))
    return theirs, ours, convert


def scores_and_gradients(scores: Tensor, model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(scores.shape, generator=generator, dtype=torch.float64).to(scores.dtype)
    (scores.log_softmax(-1) * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


@FAMILIES
def test_scores_and_gradients_are_the_same(family: Family) -> None:
    theirs, ours, convert = both(family, torch.float64)
    tokens_bt = torch.randint(0, VOCABULARY, (3, SEQUENCE))
    their_scores, our_scores = theirs(tokens_bt).logits.flatten(0, 1), ours.logits(ours(tokens_bt))
    assert our_scores.std() > 0.5
    torch.testing.assert_close(our_scores, their_scores, rtol=0, atol=1e-10)
    their_gradients = convert(scores_and_gradients(their_scores, theirs))
    our_gradients = scores_and_gradients(our_scores, ours)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(
            gradient, their_gradients[name], rtol=0, atol=1e-10 * float(gradient.abs().max() + 1), msg=name
        )


@FAMILIES
def test_the_unchanged_other_implementation_agrees_in_float32(family: Family) -> None:
    theirs, ours, _ = both(family, torch.float32)
    tokens_bt = torch.randint(0, VOCABULARY, (3, SEQUENCE))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.logits(ours(tokens_bt)), theirs(tokens_bt).logits.flatten(0, 1), rtol=1e-4, atol=1e-4
        )
