"""Sampling: the cache changes nothing, equal seeds give equal text, long text goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.errors import PlaitError
from plait.model.attention import Cache
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.trainer.generate import generate

ROPE = ModelShape(layers=3, width=32, heads=4, kv_heads=2, head_width=8, ffn=64, vocabulary=50, sequence=16)
LEARNED = replace(ROPE, positions="learned", kv_heads=4, qk_norm=True, tied=True)
SHAPES = pytest.mark.parametrize("shape", [ROPE, LEARNED], ids=["rope, grouped", "learned"])
PROMPT = [3, 1, 4, 1, 5]


def build(shape: ModelShape) -> GPT:
    """A model that is far from uniform, so that greedy choices are not ties."""
    model = GPT(shape).double()
    initialize(model, 6)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(12)
    return model


def greedy_without_cache(model: GPT, text: list[int], tokens: int) -> list[int]:
    for _ in range(tokens):
        with torch.no_grad():
            text = [*text, int(model.logits(model(torch.tensor([text])))[-1].argmax())]
    return text[-tokens:]


@SHAPES
def test_the_cache_gives_the_hidden_states_of_the_whole_forward(shape: ModelShape) -> None:
    model = build(shape)
    tokens_bt = torch.randint(0, shape.vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))
    cache = Cache(shape, rows=2, dtype=torch.float64, device=torch.device("cpu"))
    with torch.inference_mode():
        whole = model(tokens_bt).view(2, 16, -1)
        pieces = [model(tokens_bt[:, :7], cache=cache).view(2, 7, -1)]
        pieces += [model(tokens_bt[:, place : place + 1], cache=cache).unsqueeze(1) for place in range(7, 16)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-11)


@SHAPES
def test_greedy_text_is_that_of_the_forward_without_cache(shape: ModelShape) -> None:
    model = build(shape)
    expected = greedy_without_cache(model, PROMPT, 11)
    assert list(generate(model, PROMPT, tokens=11, temperature=0)) == expected
    assert len(set(expected)) > 3


@SHAPES
def test_text_longer_than_the_sequence_goes_on_from_its_last_half(shape: ModelShape) -> None:
    model = build(shape)
    text = list(generate(model, PROMPT, tokens=20, temperature=0))
    # 5 of the prompt and 11 new tokens fill the cache; the 12th is read off the full window, the 13th off the last 8.
    whole = PROMPT + text
    assert whole[16] == greedy_without_cache(model, whole[:16], 1)[0]
    assert whole[17:25] == greedy_without_cache(model, whole[9:17], 8)


def test_a_prompt_longer_than_the_sequence_is_read_from_its_end() -> None:
    model = build(ROPE)
    prompt = [token % 50 for token in range(7, 47)]
    assert list(generate(model, prompt, tokens=1, temperature=0)) == greedy_without_cache(model, prompt[-16:], 1)


def test_equal_seeds_give_equal_text_and_others_do_not() -> None:
    model = build(ROPE)
    first, again, other = (list(generate(model, PROMPT, tokens=30, temperature=2.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_small_top_p_is_greedy_and_a_large_one_follows_the_probabilities() -> None:
    model = build(ROPE)
    greedy = list(generate(model, PROMPT, tokens=5, temperature=0))
    assert list(generate(model, PROMPT, tokens=5, temperature=1.0, top_p=1e-9)) == greedy
    with torch.no_grad():
        likely = model.logits(model(torch.tensor([PROMPT])))[-1].softmax(-1)
    drawn = [next(generate(model, PROMPT, tokens=1, seed=seed)) for seed in range(400)]
    shares = torch.bincount(torch.tensor(drawn), minlength=50) / 400
    assert (shares - likely).abs().max() < 0.1


def test_a_stop_token_ends_the_text() -> None:
    model = build(ROPE)
    text = list(generate(model, PROMPT, tokens=11, temperature=0))
    stop = text[4]
    assert list(generate(model, PROMPT, tokens=11, temperature=0, stop=[stop])) == text[: text.index(stop) + 1]


def test_a_model_that_has_sampled_can_still_be_trained() -> None:
    model = build(ROPE)
    list(generate(model, PROMPT, tokens=3))
    model(torch.tensor([PROMPT])).sum().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if name != "head.weight")


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([50], {}, "token 50, the model knows 50"),
        (PROMPT, {"temperature": -1.0}, "temperature = -1.0"),
        (PROMPT, {"top_p": 0.0}, "top_p = 0.0"),
    ],
)
def test_wrong_settings_are_refused_before_the_first_token(prompt: list[int], settings: dict, words: str) -> None:
    with pytest.raises(PlaitError, match=words):
        generate(build(ROPE), prompt, tokens=3, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_without_finite_scores_says_so(temperature: float) -> None:
    model = build(ROPE)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(PlaitError, match="scores are not finite: its run diverged"):
        list(generate(model, PROMPT, tokens=3, temperature=temperature))
