"""Text from a model, token by token, with a key/value cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from plait.errors import PlaitError
from plait.model.attention import Cache
from plait.model.gpt import GPT


def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Yield up to `tokens` new token ids, ending early after an id in `stop`, which is yielded too.

    Temperature 0 takes the likeliest token each time; `top_p` keeps the likeliest tokens that together reach that
    probability (Holtzman et al. 2020). When the text outgrows the model's sequence length, its last half is read again
    as a new beginning, so the text may be of any length. Equal seeds give equal text on one machine. Raises PlaitError
    for an empty prompt, a token outside the vocabulary, settings out of range, and scores that are not finite.
    """
    _check(model, prompt_ids, temperature, top_p, seed)
    return _generate(model, list(prompt_ids), tokens, _Chooser(temperature, top_p, seed), frozenset(stop))


def _generate(model: GPT, text: list[int], tokens: int, choose: _Chooser, stop: frozenset[int]) -> Iterator[int]:
    window = model.shape.sequence
    cache, unread = _empty_cache(model), text[-window:]
    for _ in range(tokens):
        if cache.length + len(unread) > window:
            cache, unread = _empty_cache(model), text[-max(1, window // 2) :]
        token = choose(_read(model, unread, cache))
        text.append(token)
        unread = [token]
        yield token
        if token in stop:
            return


@torch.inference_mode()
def _read(model: GPT, ids: list[int], cache: Cache) -> Tensor:
    """Logits of the next token, shape [vocabulary]: float32 on the CPU, so that the random draws are the same for
    every device."""
    tokens_bt = torch.tensor([ids], device=model.head_weight().device)
    hidden_nd = model(tokens_bt, cache=cache)
    logits_v = model.logits(hidden_nd[-1]).float().cpu()
    if not bool(torch.isfinite(logits_v).all()):
        raise PlaitError("the model's scores are not finite: its run diverged; train one with a lower optimizer.lr")
    return logits_v


def _empty_cache(model: GPT) -> Cache:
    weight = model.head_weight()
    return Cache(model.shape, rows=1, dtype=weight.dtype, device=weight.device)


class _Chooser:
    """Samples one token id from logits."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, scores_v: Tensor) -> int:
        if self._temperature == 0:
            return int(scores_v.argmax())
        likeliest, order = (scores_v / self._temperature).softmax(-1).sort(descending=True, stable=True)
        reached_before = likeliest.cumsum(-1) - likeliest
        likeliest[reached_before >= self._top_p] = 0
        return int(order[torch.multinomial(likeliest, 1, generator=self._generator)])


def _check(model: GPT, prompt_ids: Sequence[int], temperature: float, top_p: float, seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise PlaitError(f"seed = {seed}; choose a whole number from 0 to {2**63 - 1}")
    if not prompt_ids:
        raise PlaitError("the prompt is empty; give at least one token to go on from")
    vocabulary = model.shape.vocabulary
    outside = [token for token in prompt_ids if not 0 <= token < vocabulary]
    if outside:
        raise PlaitError(
            f"the prompt has token {outside[0]}, the model knows {vocabulary}; use the run's own tokenizer"
        )
    if not temperature >= 0:
        raise PlaitError(f"temperature = {temperature}; choose 0 for the likeliest token, or more")
    if not 0 < top_p <= 1:
        raise PlaitError(f"top_p = {top_p}; choose a number above 0 and at most 1")
