"""Mixtures of experts that transformers made compute the same here, and go back to it; both ways of holding experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.config_in import shape_of_config
from plait.interop.config_out import config_of_shape
from plait.model.parts.mixture import MixtureShape
from plait.model.router import route
from tests.interop.random_models import SEQUENCE, VOCABULARY, random_mixture_config, random_model
from tests.interop.test_interop_families import in_float64, in_float64_here
from tests.matrix import CASES

EVERY_DAY, ALL = range(3), range(3, 3 + CASES)


class Float64Router(nn.Module):
    """A family's router without its islands of float32."""

    def __init__(self, theirs: Any, *, normalize: bool) -> None:
        super().__init__()
        self.weight, self.top_k, self.normalize = theirs.weight, theirs.top_k, normalize

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
        gates, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, gates / gates.sum(-1, keepdim=True) if self.normalize else gates, chosen


def routers_in_float64(theirs: PreTrainedModel) -> None:
    theirs.config._experts_implementation = "eager"  # torch's grouped product refuses float64
    for module in list(theirs.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("TopKRouter"):
                kind = type(child).__name__
                setattr(
                    module,
                    name,
                    Float64Router(child, normalize=kind.startswith("Mixtral") or bool(child.norm_topk_prob)),
                )


def check(seed: int, folder: Path) -> PreTrainedModel:
    theirs = random_model(random_mixture_config(seed))
    theirs.save_pretrained(folder)
    in_float64(theirs)
    routers_in_float64(theirs)
    compare(theirs, folder, seed)
    return theirs


def compare(theirs: PreTrainedModel, folder: Path, seed: int) -> None:
    tokens_bt = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ours = in_float64_here(folder)
        scores, wanted = ours.logits(ours(tokens_bt)), theirs(tokens_bt).logits.flatten(0, 1)
    assert wanted.std() > 0.05
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", EVERY_DAY)
def test_a_mixture_computes_what_transformers_computes(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_sixty_more_mixtures_do(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1))])
def test_files_with_all_experts_in_one_tensor_are_the_same_model(seed: int, tmp_path: Path) -> None:
    theirs = random_model(random_mixture_config(seed))
    theirs.save_pretrained(tmp_path)
    fused = {name: weight.detach().contiguous() for name, weight in theirs.named_parameters()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    one_by_one = in_float64_here(tmp_path).state_dict()
    if "lm_head.weight" in fused and theirs.config.tie_word_embeddings:
        del fused["lm_head.weight"]
    save_file(fused, tmp_path / "model.safetensors")
    for name, weight in in_float64_here(tmp_path).state_dict().items():
        assert torch.equal(weight, one_by_one[name]), name


@pytest.mark.parametrize("seed", range(9))
def test_a_config_of_a_mixture_is_written_as_it_is_read(seed: int) -> None:
    config = random_mixture_config(seed)
    shape = shape_of_config(config.to_dict())
    written = config_of_shape(shape, "float32", preferred=config.model_type)
    assert written["model_type"] == config.model_type
    assert shape_of_config(json.loads(json.dumps(written))) == shape


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_weights_go_back_to_files_that_transformers_reads(seed: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from plait.interop.families import MODEL_FAMILIES
    from plait.interop.write_weights import write_weights, written_tensors

    config = random_mixture_config(seed)
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path / "theirs")
    base = read_base_model(tmp_path / "theirs")
    ours = dict(in_float64_here(tmp_path / "theirs").named_parameters())

    def read(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        part = ours[name].detach()
        for dim, (first, length) in enumerate(zip(offset, extent, strict=True)):
            part = part.narrow(dim, first, length)
        return part

    written = tmp_path / "ours"
    written.mkdir()
    values = config_of_shape(base.shape, "float32", preferred=base.family)
    (written / "config.json").write_text(json.dumps(values))
    write_weights(written, written_tensors(base.shape, MODEL_FAMILIES[base.family]), "F32", read)
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    assert (
        load_file(written / "model.safetensors").keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_experts_that_no_family_has_are_named() -> None:
    shape = shape_of_config(random_mixture_config(0).to_dict())
    assert shape.mixture is not None
    other = replace(shape, mixture=replace(shape.mixture, router="sigmoid", balance=("bias",)))
    with pytest.raises(PlaitError, match="router sigmoid, balance bias"):
        config_of_shape(other, "float32")


@pytest.mark.parametrize("seed", range(66))
def test_routing_is_that_of_deepseek(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *choices: choices[int(torch.randint(len(choices), (1,), generator=generator))]  # noqa: E731
    groups, each = draw(1, 2, 4), draw(2, 3, 8)
    chosen = draw(*range(1, groups + 1))
    mixture = MixtureShape(
        experts=groups * each,
        experts_per_token=draw(*range(1, chosen * each + 1)),
        expert_ffn=8,
        groups=groups,
        groups_chosen=chosen,
        router="sigmoid",
        scale=draw(1.0, 2.5),
        normalize=draw(True, False),
    )
    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=mixture.experts, num_experts_per_tok=mixture.experts_per_token, n_group=groups,
        topk_group=chosen, routed_scaling_factor=mixture.scale, norm_topk_prob=mixture.normalize,
    )  # fmt: skip
    theirs = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        theirs.weight.normal_(generator=generator)
        theirs.e_score_correction_bias.normal_(std=0.3, generator=generator)
        x_nd = torch.randn(50, 16, generator=generator)
        logits, gates, experts = theirs(x_nd)
        ours = route(logits, theirs.e_score_correction_bias, mixture)
        exact = route(logits.double(), theirs.e_score_correction_bias.double(), mixture)
    place, own = experts.argsort(1), ours.chosen_nk.argsort(1)
    assert torch.equal(experts.gather(1, place), ours.chosen_nk.gather(1, own))
    torch.testing.assert_close(ours.gates_nk.gather(1, own), gates.gather(1, place), rtol=1e-6, atol=0)
    assert torch.equal(exact.chosen_nk.sort(1).values, experts.sort(1).values)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv in config.json is 8.0, and plait computes no model with it$"),
        ({"num_experts_per_tok": 99}, "experts_per_token = 99 is more than"),
        ({"num_experts": 0}, "whole number above 0"),
    ],
)
def test_what_is_not_computed_is_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        shape_of_config({**random_mixture_config(1).to_dict(), **changes})
