"""The programs of the benchmark of `plait.spread`: three kinds of model, the same for plait and its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """ResNet-18's block: two 3 × 3 convolutions and a shortcut."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)])
        cut = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))
        self.shortcut = nn.Identity() if stride == 1 and channels == wider else cut

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, wider, h / stride, w / stride]."""
        return F.relu(self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))) + self.shortcut(x))


def resnet18() -> nn.Module:
    """For images of 32 × 32; 11.2 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for wider, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(width, wider, stride), Residual(wider, wider, 1)]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class WordModel(nn.Module):
    """PyTorch's word language model: an LSTM with tied weights; 6.0 M parameters."""

    def __init__(self, words: int = 10_000, width: int = 400) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor) -> Tensor:
        """Scores [n, words, sequence] of the word after each."""
        return self.decoder(self.rnn(self.encoder(words))[0]).transpose(1, 2)


class Encoder(nn.Module):
    """A BERT-like encoder that scores each position; 9.7 M parameters."""

    def __init__(self, words: int = 8000, width: int = 320, layers: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 5, 4 * width, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.span = nn.Linear(width, 1)

    def forward(self, words: Tensor) -> Tensor:
        """Scores [n, sequence] of each position as the first of the answer."""
        return self.span(self.encoder(self.words(words))).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchProgram:
    """A model, a batch of so many examples, and how many losses a batch of that size has."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    examples: int
    """Of a step, over all ranks."""
    losses_of_example: int
    units: tuple[type[nn.Module], ...]
    """What FSDP2 gathers as one."""


def _images(count: int) -> Batch:
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def _words(count: int) -> Batch:
    words = torch.randint(10_000, (count, 36))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _spans(count: int) -> Batch:
    return torch.randint(8000, (count, 128)), torch.randint(128, (count,))


PROGRAMS = {
    "resnet": BenchProgram(
        make_model=resnet18, make_batch=_images, examples=32, losses_of_example=1, units=(Residual,)
    ),
    "lstm": BenchProgram(make_model=WordModel, make_batch=_words, examples=40, losses_of_example=35, units=(nn.LSTM,)),
    "encoder": BenchProgram(
        make_model=Encoder, make_batch=_spans, examples=16, losses_of_example=1, units=(nn.TransformerEncoderLayer,)
    ),
}


def loss_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The sum of cross entropies, and their count."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()
