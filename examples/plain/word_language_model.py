"""A language model of words: an LSTM with tied weights on Shakespeare, of the shape of PyTorch's own example:
python word_language_model.py [--steps 40]."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = Path(__file__).parents[2] / "recipes" / "shakespeare.txt"
SEQUENCE, VOCABULARY = 35, 2000


class RNNModel(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(words))[0])


def sequences() -> Tensor:
    """The numbers of the words, int64 [n, SEQUENCE + 1]; 0 stands for all rare words."""
    words = TEXT.read_text(encoding="ascii")[:600_000].lower().split()
    number = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    found = torch.tensor([number.get(word, 0) for word in words])
    return found[: len(found) // (SEQUENCE + 1) * (SEQUENCE + 1)].view(-1, SEQUENCE + 1)


def loss_of(model: nn.Module, batch: list[Tensor]):
    scores = model(batch[0][:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch[0][:, 1:].flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
steps = parser.parse_args().steps

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(sequences())
model = RNNModel()
optimizer = torch.optim.SGD(model.parameters(), lr=10.0)

for step, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)):
    if step == steps:
        break
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"step {step + 1}  loss {loss:.5f}")
