"""Samples that a model writes during training, on any layout.

Note [one token a pass]: a key/value cache exists only for a whole model in one process. Here every token is drawn after
a forward pass of the whole row through the layout, as held-out text is evaluated: pipeline stages, split sequences and
split matrices then need nothing of their own. For a short sample that is about the work of one step.

Note [no shared draws]: a token is the largest of scores / temperature plus Gumbel noise, which is a draw from the
softmax (Gumbel 1954). Each rank finds the largest among its own vocabulary entries and the ranks compare two numbers.
The noise comes from a generator of its own, so that training's random numbers stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from plait.data.conversations.chat_template import ChatTemplate, find_template
from plait.data.loader import Micro, make_micro
from plait.data.preparation.end_tokens import learnt_ends
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer
from plait.data.rows import IGNORED_TARGET
from plait.data.samples.opening import all_training_samples, heldout_samples
from plait.data.samples.sizes import Overlong
from plait.data.shards import Corpus
from plait.model.gpt import GPT
from plait.parallel.communicator import Communicator
from plait.parallel.exchange import first_ones
from plait.parallel.sharded_model import VocabularySplit
from plait.report.samples_file import SampleReport
from plait.trainer.assemble import Assembly, evaluate_with, make_autocast

SAMPLE_TOKENS = 64
SAMPLE_TEMPERATURE = 0.8
PROMPT_TOKENS = 16
"""Tokens of held-out text at the beginning of a sample."""


class TrainingSampler:
    """Writes a run's samples on one rank, always from the same prompt with the same random numbers."""

    def __init__(
        self, prompt_ids: list[int], ends: frozenset[int], prompt: str, seed: int, tokenizer: Tokenizer | None
    ) -> None:
        self.prompt_ids, self._ends, self._prompt, self._seed = prompt_ids, ends, prompt, seed
        self._tokenizer = tokenizer
        """Only on rank 0."""

    def sample(self, assembly: Assembly, step: int) -> SampleReport | None:
        """What the model writes now, on rank 0; None on the others. Every rank must call it."""
        new: list[int] = []
        noise = torch.Generator().manual_seed(self._seed)
        length = _row_length(assembly, len(self.prompt_ids) + SAMPLE_TOKENS)
        for _ in range(SAMPLE_TOKENS):
            token = _next_token(assembly, [*self.prompt_ids, *new][-length:], length, noise)
            if token is None or token in self._ends:
                break
            new.append(token)
        if self._tokenizer is None:
            return None
        # Decoded behind the prompt: some tokenizers drop the space that a text begins with, and a prompt may end within
        # a character.
        before = self.decode(self.prompt_ids).rstrip("\ufffd")
        text = self.decode([*self.prompt_ids, *new])[len(before) :]
        return SampleReport(step=step, prompt=self._prompt, text=text)

    def decode(self, ids: list[int]) -> str:
        """The text of these tokens, on rank 0."""
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids)


def load_sampler(
    assembly: Assembly, prompt: str | None, seed: int, overlong: Overlong, world: Communicator
) -> TrainingSampler:
    """Make the sampler of a run. Every rank must call it; rank 0 reads the text and the tokenizer. Raises PlaitError
    on all ranks if they cannot be read."""
    corpus, sequence = assembly.corpus, assembly.plan.job.sequence

    def beginning() -> Mapping[str, Any]:
        tokenizer = corpus_tokenizer(corpus)
        ids = sample_beginning(corpus, tokenizer, prompt, sequence, overlong)
        first = len(tokenizer.beginning) if ids[: len(tokenizer.beginning)] == [*tokenizer.beginning] else 0
        shown = tokenizer.decode(ids[first:]).rstrip("\ufffd")
        return {"ids": ids, "ends": learnt_ends(corpus, tokenizer), "prompt": shown}

    found = first_ones(beginning, world)
    tokenizer = corpus_tokenizer(corpus) if world.index == 0 else None
    return TrainingSampler(found["ids"], frozenset(found["ends"]), found["prompt"], seed, tokenizer)


def sample_beginning(
    corpus: Corpus, tokenizer: Tokenizer, prompt: str | None, sequence: int, overlong: Overlong
) -> list[int]:
    """The tokens that samples continue: the prompt's, or held-out text's if there is no prompt."""
    if prompt is None:
        ids = _text_beginning(corpus, sequence, overlong) or list(tokenizer.beginning)
        return ids if corpus.layout != "stream" else _whole_words(ids, tokenizer)
    if corpus.template:
        return _message_ids(corpus, tokenizer, prompt)
    return [*tokenizer.beginning, *tokenizer.encode(prompt)]


def _text_beginning(corpus: Corpus, sequence: int, overlong: Overlong) -> list[int]:
    """The first held-out tokens; of an example, everything before its first learned token. Empty if no part of a
    stream of text is held out."""
    if corpus.heldout_tokens:
        reader = heldout_samples(corpus, sequence, overlong)
    elif corpus.layout == "stream":
        return []
    else:
        reader = all_training_samples(corpus, sequence, overlong)
    rows = reader.read(reader.places(np.arange(1)))
    learned = np.flatnonzero(rows.targets[0] != IGNORED_TARGET)
    count = PROMPT_TOKENS if corpus.layout == "stream" or not len(learned) else int(learned[0]) + 1
    return [int(token) for token in rows.inputs[0, :count]]


def _whole_words(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens without words cut at either end; unchanged if they contain an end of text, or fewer than two whole
    words."""
    words = re.search(r"\s(\S+\s.*\S)\s", tokenizer.decode(ids), re.DOTALL)
    return ids if words is None or tokenizer.eot in ids else tokenizer.encode(words[1])


def _message_ids(corpus: Corpus, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a user's message up to where the answer begins. Special tokens in the message are ordinary text;
    those of the template are tokens."""
    found = find_template([corpus.folder])
    assert found is not None
    template = ChatTemplate(found, "today")
    rendered = template.render([{"role": "user", "content": text}])
    template.close()
    backend: Any = tokenizers.Tokenizer.from_str(tokenizer.definition)
    backend.no_truncation()
    backend.no_padding()
    return list(backend.encode(rendered, add_special_tokens=False).ids)


def _row_length(assembly: Assembly, tokens: int) -> int:
    """The length of the computed row: the window, halved while the sample fits and the layout can still divide it."""
    layout, length = assembly.plan.placement.layout, assembly.plan.job.sequence
    divisor = 2 * layout.context * layout.tensor
    while length % 2 == 0 and length // 2 >= tokens and (length // 2) % divisor == 0:
        length //= 2
    return length


def _next_token(assembly: Assembly, tokens: list[int], length: int, noise: torch.Generator) -> int | None:
    """The next token; None if the model's scores are not finite. Every rank must call it."""
    autocast = make_autocast(assembly.plan.arithmetic.precision, assembly.device)
    drawn = _DrawnToken(assembly.model.vocabulary, assembly.corpus.vocabulary, noise, autocast)
    evaluate_with(assembly, [_row_micro(assembly, tokens, length)], drawn)
    replies = assembly.loader.selection.data_parallel_rank == 0  # the others draw the same token
    own = torch.tensor([drawn.score if replies else -inf, drawn.token], dtype=torch.float64)
    score, token = max(one.tolist() for one in assembly.sums.gather(own))
    return None if score == -inf else int(token)


def _row_micro(assembly: Assembly, tokens: list[int], length: int) -> Micro:
    """The tokens in a row of this length; the only target that is not ignored marks the last one."""
    samples = assembly.loader.selection
    inputs = np.full((1, length), assembly.corpus.eot, dtype=np.int64)
    targets = np.full((1, length), IGNORED_TARGET, dtype=np.int64)
    inputs[0, : len(tokens)] = tokens
    targets[0, len(tokens) - 1] = 0
    lengths = np.array([length]) if samples.documents == "mask" else None
    return make_micro(inputs, targets, lengths, replace(samples, sequence=length, predict_ahead=0))


class _DrawnToken:
    """Stands in for a loss: draws the token after the marked one, on the ranks that hold it."""

    def __init__(
        self,
        vocabulary: VocabularySplit,
        entries: int,
        noise: torch.Generator,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.score, self.token = -inf, -1
        self._vocabulary, self._entries, self._autocast = vocabulary, entries, autocast
        self._noise_v = -torch.empty(entries).exponential_(generator=noise).log()

    def __call__(self, hidden_nd: Tensor, chunk: GPT, micro: Micro) -> Tensor:
        with self._autocast():
            every_nd = self._vocabulary.enter(hidden_nd, micro.targets.numel())
            marked_n = micro.targets.flatten() != IGNORED_TARGET
            scores_nv = chunk.logits(every_nd[marked_n])  # of no row or one
        first = self._vocabulary.first
        known = max(0, min(self._entries - first, scores_nv.shape[1]))  # a table may have rows beyond the tokenizer's
        if len(scores_nv) and known:
            drawn_v = scores_nv[0, :known].float().cpu() / SAMPLE_TEMPERATURE + self._noise_v[first : first + known]
            if bool(torch.isfinite(drawn_v).all()):
                best = int(drawn_v.argmax())
                self.score, self.token = float(drawn_v[best]), first + best
        return hidden_nd.new_zeros(())
