"""What the ranks of the context strand's tests do: each compares its part with one process' whole, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.data.packing import restarting_positions, zigzag_columns
from plait.launch.values.job import RankContext
from plait.layout import Layout
from plait.model.attention import Documents, attend
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.parallel.context.attention import ContextAttend, context
from plait.parallel.mesh import make_mesh, open_store
from plait.parallel.sharded_model import unsharded
from plait.planner.plan_file import read_plan
from plait.report.memory import LiveTensorPeak
from plait.trainer.loss import sum_of_losses

SEQUENCE = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention: documents are the lengths of every row's, or of nothing."""

    rows: int
    documents: tuple[int, ...] | None
    heads: int = 4
    kv_heads: int = 2
    window: int = 0


RAGGED = (7, 20, 1, 1, 19)
CASES = {
    "no documents": Case(rows=1, documents=None),
    "no documents, three rows": Case(rows=3, documents=None),
    "every head its own keys": Case(rows=3, documents=None, kv_heads=4),
    "one key head": Case(rows=1, documents=RAGGED, kv_heads=1),
    "ragged": Case(rows=1, documents=RAGGED),
    "ragged and alike in three rows": Case(rows=3, documents=RAGGED * 3),
    "ragged, another in each row": Case(rows=3, documents=(*RAGGED, 48, 3, 45)),
    "ragged, every head its own keys": Case(rows=3, documents=(48, *RAGGED, 30, 18), kv_heads=4),
    "a document a row": Case(rows=3, documents=(48,) * 3),
    "a document a pair of tokens": Case(rows=3, documents=(2,) * 72),
    "a document a token": Case(rows=1, documents=(1,) * 48),
    "a document a chunk": Case(rows=1, documents=(6,) * 8),
    "equal documents across chunks": Case(rows=3, documents=(16,) * 9),
    "equal documents of no fitting length": Case(rows=1, documents=(8,) * 6),
    "only one rank's chunks are crossed": Case(rows=1, documents=(6,) * 6 + (12,)),
    "a window within a chunk": Case(rows=1, documents=None, window=3),
    "a window of two tokens": Case(rows=3, documents=RAGGED * 3, window=2),
    "a window over two chunks": Case(rows=3, documents=None, window=11, kv_heads=1),
    "a window as long as most documents": Case(rows=3, documents=(*RAGGED, 48, 3, 45), window=19),
    "a window beyond every row": Case(rows=1, documents=RAGGED, window=60),
}


def attend_cases(rank: RankContext, argument: str) -> None:
    """Tell, for every case, the largest differences of output, dq, dk and dv from the single process' core."""
    with joined(rank):
        assert dist.group.WORLD is not None
        core = ContextAttend(dist.group.WORLD)
        for name, case in CASES.items():
            rank.send("case", name=name, errors=_differences(core, case, rank))


def attend_low_precision(rank: RankContext, argument: str) -> None:
    """bfloat16, and float32 under bfloat16 autocast, against float64."""
    case = CASES["ragged, another in each row"]
    with joined(rank):
        assert dist.group.WORLD is not None
        core = ContextAttend(dist.group.WORLD)
        rank.send("case", name="bfloat16", errors=_differences(core, case, rank, torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            rank.send("case", name="autocast", errors=_differences(core, case, rank, torch.float32))


def gradients_of_model(rank: RankContext, argument: str) -> None:
    """Tell the largest differences of whole models' scores and summed gradients; the argument: plan.json."""
    plan = read_plan(Path(argument))
    columns = torch.from_numpy(zigzag_columns(SEQUENCE, rank.world_size, rank.rank))
    tokens = torch.randint(0, 50, (3, SEQUENCE), generator=torch.Generator().manual_seed(3))
    lengths = (*RAGGED, 48, 5, 43)
    positions = torch.from_numpy(restarting_positions(np.array(lengths))).view(3, SEQUENCE)
    with joined(rank):
        mesh = make_mesh(Layout(context=rank.world_size), "cpu")
        for name, shape in MODELS.items():
            whole, part = _model(shape), _model(shape)
            assert context(unsharded(part), mesh, plan).chunks == (part,)
            wanted = _scores_after_backward(whole, tokens, positions, lengths, slice(None))
            found = _scores_after_backward(part, tokens, positions, lengths, columns)
            errors = [_error(found, wanted[:, columns])]
            largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
            for mine, theirs in zip(part.parameters(), whole.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                dist.all_reduce(mine.grad)
                # The true gradient of a key's bias is zero: nothing but rounding to compare.
                errors.append(_error(mine.grad, theirs.grad, at_least=1e-3 * largest))
            rank.send("case", name=name, errors=errors)


def leave_one_rank_alone(rank: RankContext, argument: str) -> None:
    """An axis of size 1 keeps the attention that the model came with."""
    with joined(rank):
        model = _model(next(iter(MODELS.values())))
        before = [layer.attention.attend for layer in model.layers.values()]
        context(unsharded(model), make_mesh(Layout(), "cpu"), read_plan(Path(argument)))
        same = [layer.attention.attend for layer in model.layers.values()] == before
        rank.send("case", name="alone", same=same)


def largest_tensor(rank: RankContext, argument: str) -> None:
    """Tell the numbers of the largest tensor that attention makes, forward and backward, for two lengths of rows."""
    with joined(rank):
        assert dist.group.WORLD is not None
        core = ContextAttend(dist.group.WORLD)
        for sequence in (512, 1024):
            own = [x.chunk(rank.world_size, 1)[0] for x in _tensors(Case(rows=1, documents=None), sequence)]
            q, k, v = (x.clone().requires_grad_() for x in own[:3])
            with _Largest() as watch:
                core(q, k, v, None).sum().backward()
            rank.send("case", name=str(sequence), largest=watch.numbers)


def peak_of_step(rank: RankContext, argument: str) -> None:
    """Tell each rank's and one process' peak tensor bytes of a forward and backward; the argument: its tokens."""
    sequence = int(argument)
    columns = torch.from_numpy(zigzag_columns(sequence, rank.world_size, rank.rank))
    shape = ModelShape(
        layers=2, width=128, heads=8, kv_heads=2, head_width=16, ffn=352, vocabulary=256, sequence=sequence
    )
    row = torch.randint(0, 256, (1, sequence + 1), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(sequence).unsqueeze(0)
    with joined(rank):
        assert dist.group.WORLD is not None
        core = ContextAttend(dist.group.WORLD)
        for name, attention, some in (("part", core, columns), ("whole", attend, slice(None))):
            model = GPT(shape)
            initialize(model, 1)
            for layer in model.layers.values():
                layer.attention.attend = attention
            if name == "part" or rank.rank == 0:
                inputs, targets, places = row[:, :-1][:, some], row[:, 1:][:, some], positions[:, some]
                with LiveTensorPeak(torch.device("cpu"), model.parameters()) as peak:
                    sum_of_losses(model(inputs, places), model.head_weight(), targets.flatten()).backward()
                rank.send("case", name=name, bytes=peak.bytes)


MODELS = {
    "rotary": ModelShape(
        layers=2, width=32, heads=4, kv_heads=2, head_width=8, ffn=48, vocabulary=50, sequence=SEQUENCE, qk_norm=True
    ),
    "learned": ModelShape(
        layers=2, width=32, heads=4, kv_heads=4, head_width=8, ffn=48, vocabulary=50, sequence=SEQUENCE,
        positions="learned", norm="layernorm", bias="all", activation="gelu",
    ),
}  # fmt: skip


@contextmanager
def joined(rank: RankContext) -> Iterator[None]:
    """The process group of all ranks, for as long as the block lasts."""
    store = open_store(rank.rendezvous, rank.rank, rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    yield
    dist.destroy_process_group()


class _Largest(TorchDispatchMode):
    """Sees every tensor that is made, also in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def _differences(
    core: ContextAttend, case: Case, rank: RankContext, dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    columns = torch.from_numpy(zigzag_columns(SEQUENCE, rank.world_size, rank.rank))
    documents = None if case.documents is None else Documents(case.documents)
    *inputs, weight = _tensors(case, SEQUENCE)
    whole = [x.requires_grad_() for x in inputs]
    part = [x.detach()[:, columns].to(dtype).requires_grad_() for x in inputs]
    with torch.autocast("cpu", enabled=False):
        wanted = attend(whole[0], whole[1], whole[2], documents, case.window)
        wanted_grads = torch.autograd.grad(wanted, whole, weight)
    found = core(part[0], part[1], part[2], documents, case.window)
    found_grads = torch.autograd.grad(found, part, weight[:, columns].to(found.dtype))
    pairs = zip((found, *found_grads), (wanted, *wanted_grads), strict=True)
    # Numbers are about 1; the gradient of a query with a single key is zero, to rounding or altogether.
    errors = [_error(x, y[:, columns], at_least=1e-3) for x, y in pairs]
    return dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))


def _tensors(case: Case, sequence: int) -> list[Tensor]:
    """q, k, v and the output's gradient for whole rows, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [torch.randn(case.rows, sequence, h, 8, generator=generator, dtype=torch.float64) for h in heads]


def _scores_after_backward(
    model: GPT, tokens: Tensor, positions: Tensor, lengths: tuple[int, ...], columns: Tensor | slice
) -> Tensor:
    weight = torch.randn(*tokens.shape, model.shape.vocabulary, generator=torch.Generator().manual_seed(4)).double()
    hidden = model(tokens[:, columns], positions[:, columns], Documents(lengths))
    scores = model.logits(hidden).view_as(weight[:, columns])
    (scores * weight[:, columns]).sum().backward()
    return scores.detach()


def _model(shape: ModelShape) -> GPT:
    """With weights larger than first ones, so that attention is far from even."""
    model = GPT(shape).double()
    initialize(model, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(30 if name.endswith(("o.weight", "down.weight")) else 2)
    return model


def _error(found: Tensor, wanted: Tensor, at_least: float = 0.0) -> float:
    """The largest difference, over the largest number that should be there."""
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), at_least)
