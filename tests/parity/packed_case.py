"""One set of examples computed in four ways: packed, padded in one micro-batch, one at a time, and by plain torch.

As a program it prints the largest relative error between them, so that a mutated copy of plait can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plait.data.loader import IGNORED_TARGET, Micro, SampleSelection, make_micro
from plait.data.preparation.synthetic import write_synthetic
from plait.data.samples.packed import PackedExamples, PackedReader, pack_examples
from plait.data.shards import Corpus, Shard, open_corpus
from plait.model.gpt import GPT
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import unsharded
from plait.trainer.step import make_forward, make_loss

SEQUENCE, VOCABULARY = 24, 61
SHAPE = ModelShape(
    layers=2,
    width=16,
    heads=2,
    kv_heads=2,
    head_width=8,
    ffn=32,
    vocabulary=VOCABULARY,
    sequence=SEQUENCE,
    positions="learned",
)
"""With learned positions: those of a rotation only matter within an example, so wrong ones would not show."""
WAYS = ("packed", "padded", "one at a time", "by hand")


def sample_selection(micro_sequences: int) -> SampleSelection:
    """All samples, for one process."""
    return SampleSelection(
        sequence=SEQUENCE,
        sequences_per_replica=(micro_sequences,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=micro_sequences,
        documents="mask",
        device=torch.device("cpu"),
    )


def losses_and_gradients(folder: Path) -> dict[str, list[Tensor]]:
    """Of each way: the summed loss, the counted tokens and the gradient of every weight, in float64."""
    corpus = open_corpus(write_synthetic(folder, vocabulary=VOCABULARY, sequence=SEQUENCE, seed=5, layout="whole"))
    windows = pack_examples(corpus.train, SEQUENCE, "refuse")
    reader = PackedReader(corpus.train, windows, None, sequence=SEQUENCE, eot=0, vocabulary=VOCABULARY)
    places = reader.places(np.linspace(5, reader.samples - 1, 9).astype(np.int64))  # the first ones hold one each
    rows = reader.read(places)
    packed = make_micro(rows.inputs, rows.targets, rows.lengths, sample_selection(len(places)))
    examples = [one for window in places[:, 0].tolist() for one in _examples(corpus, windows, window)]
    assert len(examples) > 2 * len(places)
    inputs, targets, lengths = zip(*(_padded(*example) for example in examples), strict=True)
    padded = make_micro(np.stack(inputs), np.stack(targets), np.concatenate(lengths), sample_selection(len(examples)))
    alone = [
        make_micro(one[None], wanted[None], length, sample_selection(1))
        for one, wanted, length in zip(inputs, targets, lengths, strict=True)
    ]
    return {
        "packed": _through_plait([packed]),
        "padded": _through_plait([padded]),
        "one at a time": _through_plait(alone),
        "by hand": _by_hand(examples),
    }


def _examples(corpus: Corpus, windows: PackedExamples, window: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and marks of each example that a window holds, read from the files alone."""
    for number in range(windows.first[window], windows.first[window + 1]):
        shard = corpus.train[windows.shard[number]]
        first = int(windows.start[number])
        last = first + int(windows.length[number]) + 1
        yield np.array(shard.tokens[first:last]).astype(np.int64), np.array(_marks(shard)[first:last])


def _marks(shard: Shard) -> np.ndarray:
    assert shard.mask is not None
    return shard.mask


def _padded(ids: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs = np.zeros(SEQUENCE, dtype=np.int64)
    targets = np.full(SEQUENCE, IGNORED_TARGET, dtype=np.int64)
    inputs[: len(ids) - 1] = ids[:-1]
    targets[: len(ids) - 1] = np.where(marks[1:], IGNORED_TARGET, ids[1:])
    free = SEQUENCE - (len(ids) - 1)
    return inputs, targets, np.array([len(ids) - 1, free] if free else [len(ids) - 1])


def _model() -> GPT:
    torch.manual_seed(1)
    model = GPT(SHAPE).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def _through_plait(micros: Sequence[Micro]) -> list[Tensor]:
    sharded = unsharded(model := _model())
    forward, loss_of = make_forward(nullcontext), make_loss(nullcontext, sharded.vocabulary)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for micro in micros:
        loss = loss_of(forward(model, micro, None), model, micro)
        loss.backward()
        total, count = total + loss.detach(), count + int((micro.targets != IGNORED_TARGET).sum())
    return [total, torch.tensor(float(count)).double(), *(_gradient(weight) / count for weight in model.parameters())]


def _by_hand(examples: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Tensor]:
    """Each example alone, without padding, with the loss of plain torch at the unmarked targets."""
    model, total, count = _model(), torch.zeros((), dtype=torch.float64), 0
    for ids, marks in examples:
        tokens = torch.from_numpy(ids)
        hidden = model(tokens[None, :-1], torch.arange(len(ids) - 1)[None], None)
        kept = torch.from_numpy(marks[1:] == 0)
        scores = (hidden.reshape(-1, SHAPE.width) @ model.head_weight().T)[kept]
        loss = torch.nn.functional.cross_entropy(scores, tokens[1:][kept], reduction="sum")
        loss.backward()
        total, count = total + loss.detach(), count + int(kept.sum())
    return [total, torch.tensor(float(count)).double(), *(_gradient(weight) / count for weight in model.parameters())]


def _gradient(weight: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def largest_error(found: dict[str, list[Tensor]]) -> float:
    """The largest difference between a way and the one by hand, relative to the tensor's largest value."""
    expected = found["by hand"]
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
        for way in WAYS
        for one, other in zip(found[way], expected, strict=True)
    )
