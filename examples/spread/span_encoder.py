"""A BERT-like encoder with a span head, as for SQuAD: where in a passage do the words stand that the question leaves
out? Some questions have no answer: python span_encoder.py [--steps 40]."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

TEXT = Path(__file__).parents[2] / "recipes" / "shakespeare.txt"
VOCABULARY, PASSAGE, NO_ANSWER = 2000, 48, -100
GAP, SEPARATOR = VOCABULARY, VOCABULARY + 1


class SpanEncoder(nn.Module):
    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY + 2, width)
        self.positions = nn.Parameter(torch.randn(PASSAGE + 6, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.span = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of each position as the first and as the last word of the answer, [n, positions] each."""
        first, last = self.span(self.encoder(self.words(words) + self.positions)).unbind(-1)
        return first, last


def questions(count: int = 2000) -> tuple[Tensor, Tensor, Tensor]:
    """Question and passage as words [n, 6 + PASSAGE], and where the answer begins and ends [n]."""
    words = TEXT.read_text(encoding="ascii")[:600_000].lower().split()
    number = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    tokens, dice, rows = [number.get(word, 0) for word in words], random.Random(0), []
    for _ in range(count):
        start = dice.randrange(len(tokens) - PASSAGE)
        passage = tokens[start : start + PASSAGE]
        length, first = dice.randint(1, 4), dice.randrange(2, PASSAGE - 6)
        last = first + length - 1
        question = [*passage[first - 2 : first], GAP, *passage[last + 1 : last + 3], SEPARATOR]
        if dice.random() < 0.3:
            rows.append((question + dice.sample(tokens, PASSAGE), NO_ANSWER, NO_ANSWER))
        else:
            rows.append((question + passage, 6 + first, 6 + last))
    inputs, firsts, lasts = zip(*rows, strict=True)
    return torch.tensor(inputs), torch.tensor(firsts), torch.tensor(lasts)


def loss_of(model: nn.Module, batch: list[Tensor]):
    words, firsts, lasts = batch
    scores = torch.cat(model(words))
    return F.cross_entropy(scores, torch.cat([firsts, lasts]), reduction="sum"), 2 * (firsts >= 0).sum()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
steps = parser.parse_args().steps

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(*questions())
model = SpanEncoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = plait.spread(model, optimizer, loss_sum=loss_of)

for step, batch in enumerate(run.batches(data, batch=48)):
    if step == steps:
        break
    loss = run.step(batch)
    print(f"step {step + 1}  loss {loss:.5f}")
