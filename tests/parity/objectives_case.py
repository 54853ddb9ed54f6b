"""Auxiliary objectives by plait, from packed rows, and by hand: each document alone, as the papers write them down.

As a program it prints the largest relative error between both, so that a mutated copy of plait can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.data.loader import IGNORED_TARGET, Micro, SampleSelection, make_micro
from plait.model.attention import Rows
from plait.model.gpt import GPT, row_positions
from plait.model.parts.objectives import ObjectivesShape
from plait.model.prediction_heads import AheadInput, AuxiliaryHead
from plait.model.shape import ModelShape
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.sharded_model import unsharded
from plait.trainer.auxiliary.losses import AuxiliaryLosses
from plait.trainer.step import make_forward, make_loss

SEQUENCE = 24
OBJECTIVES = ObjectivesShape(heads=(1, 2), head_weights=(0.5, 0.25), ahead=2, ahead_weight=0.7)
SHAPE = ModelShape(
    layers=3, width=16, heads=4, kv_heads=2, head_width=4, ffn=32, vocabulary=61, sequence=SEQUENCE,
    objectives=OBJECTIVES,
)  # fmt: skip
SHAPES = (SHAPE, replace(SHAPE, tied=True, norm="layernorm", bias="all", activation="gelu"))
ROWS: tuple[tuple[int, ...], ...] = ((9, 15), (24,), (1, 2, 3, 18), (7, 7, 7, 3))
"""Lengths of the documents in each row: some too short to predict anything ahead."""

Document = tuple[Tensor, Tensor]
"""Its tokens, one more than inputs, and which of them are learned."""


def documents() -> list[list[Document]]:
    """Of each row its documents; about a fourth of the tokens is not learned."""
    drawn = torch.Generator().manual_seed(3)
    return [
        [
            (
                torch.randint(SHAPE.vocabulary, (length + 1,), generator=drawn),
                torch.rand(length + 1, generator=drawn) > 0.25,
            )
            for length in row
        ]
        for row in ROWS
    ]


def model_of(shape: ModelShape) -> GPT:
    """A model with weights that hide nothing."""
    torch.manual_seed(1)
    model = GPT(shape).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def by_plait(shape: ModelShape, micro_sequences: int) -> dict[str, Tensor]:
    """Gradients of the objective by name, and the sums of all losses with their tokens."""
    micros = packed(micro_sequences)
    sharded = unsharded(model := model_of(shape))
    auxiliary = AuxiliaryLosses(sharded, shape, nullcontext)
    forward, loss_of = make_forward(nullcontext, auxiliary), make_loss(nullcontext, sharded.vocabulary)
    auxiliary.begin(micros, ONE_PROCESS)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for micro in micros:
        loss = loss_of(forward(model, micro, None), model, micro)
        loss.backward()
        total, count = total + loss.detach(), count + int((micro.targets != IGNORED_TARGET).sum())
    main = torch.tensor([total, float(count)], dtype=torch.float64)
    found = {"losses": torch.cat([main[None], auxiliary.table(auxiliary.take(like=main))])}
    return found | {name: weight.grad / count for name, weight in model.named_parameters() if weight.grad is not None}


def packed(micro_sequences: int) -> list[Micro]:
    """The rows as micro-batches, of one row or several."""
    inputs = [torch.cat([ids[:-1] for ids, _ in row]).numpy() for row in documents()]
    targets = [
        torch.cat([torch.where(kept, ids, IGNORED_TARGET)[1:] for ids, kept in row]).numpy() for row in documents()
    ]
    selection = SampleSelection(
        sequence=SEQUENCE, sequences_per_replica=(len(ROWS),), data_parallel_rank=0, lockstep_replicas=range(1),
        micro_sequences=micro_sequences, documents="mask", device=torch.device("cpu"),
        predict_ahead=OBJECTIVES.ahead,
    )  # fmt: skip
    return [
        make_micro(
            np.stack(inputs[first : first + micro_sequences]),
            np.stack(targets[first : first + micro_sequences]),
            np.array([length for row in ROWS[first : first + micro_sequences] for length in row]),
            selection,
        )
        for first in range(0, len(ROWS), micro_sequences)
    ]


def by_hand(shape: ModelShape) -> dict[str, Tensor]:
    """The same by plain torch: sequences get shorter with each depth (DeepSeek-V3, equations 21 to 25)."""
    model = model_of(shape)
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(5)], [0] * 5
    for row in documents():
        for ids, learned in row:
            for place, (loss, count) in enumerate(_losses_of(model, ids, learned)):
                sums[place], counts[place] = sums[place] + loss, counts[place] + count
    weights = (1.0, *OBJECTIVES.head_weights, *[OBJECTIVES.ahead_weight / OBJECTIVES.ahead] * OBJECTIVES.ahead)
    means = [loss / count for loss, count in zip(sums, counts, strict=True)]
    torch.stack([weight * mean for weight, mean in zip(weights, means, strict=True)]).sum().backward()
    table = torch.stack(
        [torch.stack([loss.detach(), torch.tensor(float(n))]) for loss, n in zip(sums, counts, strict=True)]
    )
    return {"losses": table} | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _losses_of(model: GPT, ids: Tensor, learned: Tensor) -> list[tuple[Tensor, int]]:
    """(sum, tokens) of the main loss, of each head and of each depth, for one document."""
    assert model.embed is not None and model.norm is not None
    embedded = model.embed.tokens.weight[ids]
    stream, found = embedded[:-1], list[tuple[Tensor, int]]()
    for layer in range(SHAPE.layers):
        stream = _through_layer(model, layer, stream)
        if layer + 1 in OBJECTIVES.heads:
            head = model.auxiliary[str(layer + 1)]
            assert isinstance(head, AuxiliaryHead)
            found.append(_cross_entropy(model, head.norm, stream, ids[1:], learned[1:]))
    found.insert(0, _cross_entropy(model, model.norm, stream, ids[1:], learned[1:]))
    for depth in range(1, OBJECTIVES.ahead + 1):
        own, left = model.ahead[str(depth)], len(ids) - 1 - depth
        assert isinstance(own, AheadInput)
        if left < 1:
            found.append((torch.zeros((), dtype=torch.float64), 0))
            continue
        halves = own.hidden_norm(stream[:left]), own.embedding_norm(embedded[depth : depth + left])
        stream = _through_layer(model, SHAPE.layers + depth - 1, torch.cat(halves, dim=1) @ own.projection.weight.T)
        found.append(_cross_entropy(model, own.norm, stream, ids[depth + 1 :], learned[depth + 1 :]))
    return found


def _through_layer(model: GPT, layer: int, stream: Tensor) -> Tensor:
    tokens = len(stream)
    rotation = None if model.rotary is None else model.rotary(row_positions(torch.zeros(1, tokens)), stream.dtype)
    rows = Rows(rows=1, tokens=tokens, rotation=rotation, documents=None, cache=None)
    result = model.layers[str(layer)](stream, rows)
    assert isinstance(result, Tensor)
    return result


def _cross_entropy(model: GPT, norm: nn.Module, stream: Tensor, wanted: Tensor, learned: Tensor) -> tuple[Tensor, int]:
    scores = (norm(stream) @ model.head_weight().T)[learned]
    return F.cross_entropy(scores, wanted[learned], reduction="sum"), int(learned.sum())


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, relative to the tensor's largest value; infinite where tensors are missing."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-30)) for n in wanted)


def all_errors(shapes: Sequence[ModelShape] = SHAPES) -> list[float]:
    """Of each shape and of several sizes of micro-batches."""
    return [largest_error(by_plait(shape, size), by_hand(shape)) for shape in shapes for size in (1, 3, 4)]
