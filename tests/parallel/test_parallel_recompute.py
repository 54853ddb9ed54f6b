"""Computing again changes no bit of loss and gradients, and keeps less: tensors counted, not hoped for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plait.layout import Layout, Recompute
from plait.model.attention import Documents
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.parallel.recompute import layer_runner
from plait.planner.plan import Plan
from plait.report.memory import LiveTensorPeak
from tests.trainer.tiny import make_tiny

SHAPE = ModelShape(
    layers=8, width=64, heads=4, kv_heads=2, head_width=16, ffn=176, vocabulary=50, sequence=64, qk_norm=True
)
TOKENS = torch.randint(0, 50, (8, 64), generator=torch.Generator().manual_seed(1))
LENGTHS = (64, 40, 24, 64, 10, 54, 64, 64, 64, 64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many threads for small tensors only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_tiny(tmp_path_factory.mktemp("recompute"))[1]


def model_with(plan: Plan, what: Recompute, context: int = 1) -> GPT:
    model = GPT(SHAPE).double()
    initialize(model, 1)
    if what != "none":
        run = layer_runner(
            replace(plan, placement=replace(plan.placement, layout=Layout(recompute=what, context=context))).execution
        )
        for layer in model.layers.values():
            layer.run = run
    return model


def loss_of(model: GPT, documents: Documents | None = None) -> Tensor:
    positions = None if documents is None else torch.cat([torch.arange(n) for n in documents.lengths]).view(8, 64)
    return model.logits(model(TOKENS, positions, documents)).logsumexp(1).sum()


@pytest.mark.parametrize("documents", [None, Documents(LENGTHS)], ids=["rows", "documents"])
@pytest.mark.parametrize(("what", "context"), [("full", 1), ("selective", 1), ("selective", 2)])
def test_no_bit_changes(plan: Plan, what: Recompute, context: int, documents: Documents | None) -> None:
    plain, again = model_with(plan, "none"), model_with(plan, what, context)
    assert list(dict(plain.named_parameters())) == list(dict(again.named_parameters()))
    losses = [loss_of(model, documents) for model in (plain, again)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for wanted, found in zip(plain.parameters(), again.parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None
        assert torch.equal(wanted.grad, found.grad)


def test_less_is_kept(plan: Plan) -> None:
    """Beside weights and gradients; 8 layers, of which one at a time is here in full while it is computed again."""
    kept = {what: kept_bytes(plan, what) for what in ("none", "selective", "full")}
    assert kept["selective"] < 0.75 * kept["none"]
    assert kept["full"] < 0.35 * kept["none"]


def kept_bytes(plan: Plan, what: Recompute) -> int:
    model = model_with(plan, what)
    loss_of(model).backward()
    roots = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with LiveTensorPeak(torch.device("cpu"), roots) as peak:
        loss_of(model).backward()
    return peak.bytes - sum(root.numel() * root.element_size() for root in roots)
