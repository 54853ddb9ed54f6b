"""The losses of pairs: values, margins and gradients are those of the papers, as TRL writes them, whatever a rank holds
of a pair."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.data.samples.micro import Micro, MicroPairs
from plait.parallel.sharded_model import LocalGradients, ShardedModel, WholeVocabulary
from plait.trainer.loss import sum_of_losses
from plait.trainer.preference.formulas import PreferenceLoss
from plait.trainer.preference.pair_losses import PairLosses
from plait.trainer.preference.token_losses import token_losses
from plait.trainer.score_passes import IGNORED, FusedPasses, InPlacePasses, ScorePasses

TOKENS, WIDTH, VOCABULARY = 700, 8, 8192
"""More scores than are held at a time, in pieces that do not come out even."""
PASSES: dict[str, ScorePasses] = {"in place": InPlacePasses(), "fused": FusedPasses(lambda function: function)}
BETA, GAMMA, SMOOTHING = 0.3, 0.2, 0.1
DPO = PreferenceLoss(kind="dpo", beta=BETA, compared_with="base")
LOSSES = {
    "DPO": DPO,
    "conservative DPO": replace(DPO, label_smoothing=SMOOTHING),
    "DPO without a reference": replace(DPO, compared_with="none"),
    "SimPO": PreferenceLoss(kind="simpo", beta=BETA, margin=GAMMA, compared_with="none"),
    "SimPO, smoothed": PreferenceLoss(
        kind="simpo", beta=BETA, margin=GAMMA, label_smoothing=SMOOTHING, compared_with="none"
    ),
    "ORPO": PreferenceLoss(kind="orpo", beta=BETA, compared_with="none"),
}


def made(dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(vocabulary, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) < 0.2] = IGNORED
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), targets


def weights() -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("head_learns", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
def test_each_tokens_loss_and_its_weighed_gradients_are_torchs(
    dtype: torch.dtype, rtol: float, head_learns: bool, passes: str
) -> None:
    hidden, head, targets = made(dtype)
    head = head if head_learns else head.detach()
    exact = F.cross_entropy(hidden @ head.T, targets, ignore_index=IGNORED, reduction="none")
    learning = (hidden, head) if head_learns else (hidden,)
    wanted = torch.autograd.grad((exact * weights().to(dtype)).sum(), learning)
    losses = token_losses(hidden, head, targets, passes=PASSES[passes])
    found = torch.autograd.grad((losses * weights().to(dtype)).sum(), learning)
    torch.testing.assert_close(losses, exact, rtol=rtol, atol=rtol * float(exact.detach().max()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=rtol * float(other.abs().max()) * 10)


def test_losses_of_tokens_add_up_to_the_sum_bit_for_bit_in_each_piece() -> None:
    hidden, head, targets = (values[:200] for values in made(torch.float32))
    with torch.no_grad():
        assert float(token_losses(hidden, head, targets).sum()) == float(sum_of_losses(hidden, head, targets))


def test_without_gradients_nothing_is_kept() -> None:
    hidden, head, targets = made()
    with torch.no_grad():
        assert not token_losses(hidden, head, targets).requires_grad


def micro_of(targets_n: Tensor, sequence_n: Tensor, numbers: list[int], reported: int) -> Micro:
    shape = (1, len(targets_n))
    pairs = MicroPairs(
        numbers=torch.tensor(numbers, dtype=torch.int64), sequence=sequence_n.view(shape), reported=reported
    )
    targets = targets_n.view(shape)
    return Micro(inputs=torch.zeros_like(targets), targets=targets, positions=None, lengths=None, pairs=pairs)


def losses_of(pairs: int, head: Tensor, loss: PreferenceLoss = DPO, **changes: Any) -> tuple[PairLosses, Any]:
    """The loss of a model that is nothing but a head."""
    chunk = SimpleNamespace(head_weight=lambda: head, parameters=lambda: iter([head]))
    sharded = ShardedModel(chunks=cast(Any, (chunk,)), gradients=LocalGradients([]))
    return PairLosses(replace(sharded, **changes), pairs, loss, nullcontext), chunk


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets, the sequence of each token and a reference for three pairs."""
    hidden, head, targets = made(vocabulary=50)
    generator = torch.Generator().manual_seed(5)
    sequence = torch.randint(-1, 6, (TOKENS,), generator=generator)
    targets[sequence < 0] = IGNORED
    reference = torch.randn(7, 2, generator=generator, dtype=torch.float64) * 20 - 300
    return hidden, head, targets, sequence, reference


NUMBERS = [4, 0, 6]


def by_trl(
    name: str, hidden: Tensor, head: Tensor, targets: Tensor, sequence: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor]:
    """The losses and margins of rewards of TRL's trainers (DPOTrainer, CPOTrainer with loss_type "simpo", ORPOTrainer),
    from summed log-probabilities of completions, or means where those are averaged. ORPO's likelihood is the paper's:
    the mean of each preferred answer, where TRL's is the mean over a whole batch and the prompts."""
    logps = -F.cross_entropy(hidden @ head.T, targets, ignore_index=IGNORED, reduction="none")
    answers = [logps[(sequence == s) & (targets != IGNORED)] for s in range(6)]
    if "DPO" in name:
        sums = torch.stack([one.sum() for one in answers])
        chosen, rejected = sums[0::2], sums[1::2]
        ref_chosen, ref_rejected = reference[NUMBERS].unbind(dim=1)
        ref_logratios = torch.zeros(3) if "without" in name else ref_chosen - ref_rejected
        logits = (chosen - rejected) - ref_logratios
        smoothing = SMOOTHING if "conservative" in name else 0.0
        losses = -F.logsigmoid(BETA * logits) * (1 - smoothing) - F.logsigmoid(-BETA * logits) * smoothing
        return losses, BETA * logits
    means = torch.stack([one.mean() for one in answers])
    chosen, rejected = means[0::2], means[1::2]
    margins = BETA * chosen - BETA * rejected
    if "SimPO" in name:
        logits = chosen - rejected - GAMMA / BETA
        smoothing = SMOOTHING if "smoothed" in name else 0.0
        return -F.logsigmoid(BETA * logits) * (1 - smoothing) - F.logsigmoid(-BETA * logits) * smoothing, margins
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -chosen - BETA * F.logsigmoid(odds), margins


@pytest.mark.parametrize("name", LOSSES)
def test_value_gradients_margins_and_accuracy_are_trls(name: str) -> None:
    hidden, head, targets, sequence, reference = case()
    exact, margins = by_trl(name, hidden, head, targets, sequence, reference)
    wanted = torch.autograd.grad(exact.sum(), (hidden, head))
    objective, chunk = losses_of(7, head, LOSSES[name])
    if LOSSES[name].compared_with == "base":
        objective.set_reference(reference)
    objective.begin()
    loss = objective.loss_of(hidden, chunk, micro_of(targets, sequence, NUMBERS, 3))
    found = torch.autograd.grad(loss, (hidden, head))
    torch.testing.assert_close(loss, exact.sum(), rtol=1e-12, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))
    margin, right, tokens = objective.take(like=loss).tolist()
    assert margin == pytest.approx(float(margins.detach().sum()), rel=1e-12)
    assert right == int((margins > 0).sum()) > 0 and tokens == int((targets != IGNORED).sum())
    objective.begin()
    assert objective.take(like=loss).tolist() == [0.0, 0.0, 0.0]


def test_an_answer_that_is_sure_has_finite_odds() -> None:
    """In float32 a mean log-probability is 0 where the model is sure."""
    sums = torch.tensor([[0.0, -3.0], [-3.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    losses, _ = LOSSES["ORPO"].of(sums, torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0]]).double())
    losses.sum().backward()
    assert torch.isfinite(losses).all() and sums.grad is not None and torch.isfinite(sums.grad).all()


@pytest.mark.parametrize("name", ["DPO", "SimPO", "ORPO"])
def test_parts_of_a_sequence_are_added_up_before_the_sigmoid(name: str) -> None:
    """Two ranks of a context, each with a part of every answer: one reports, and their gradients are the whole's."""
    hidden, head, targets, sequence, reference = case()
    exact, margins = by_trl(name, hidden, head, targets, sequence, reference)
    wanted = torch.autograd.grad(exact.sum(), (hidden, head))
    parts = [torch.arange(TOKENS) % 3 == 0, torch.arange(TOKENS) % 3 != 0]
    sums = []
    for part in parts:
        alone, chunk = losses_of(7, head, over_sequence=lambda own: sums.append(own) or own)
        alone.set_reference(reference)
        alone.loss_of(hidden[part], chunk, micro_of(targets[part], sequence[part], NUMBERS, 3))
    total, found, taken = 0.0, [torch.zeros_like(one) for one in wanted], torch.zeros(3, dtype=torch.float64)
    for rank, part in enumerate(parts):
        objective, chunk = losses_of(7, head, LOSSES[name], over_sequence=lambda own, rank=rank: own + sums[1 - rank])
        objective.set_reference(reference)
        micro = micro_of(targets[part], sequence[part], NUMBERS, 3 if rank == 0 else 0)
        loss = objective.loss_of(hidden[part], chunk, micro)
        total += float(loss.detach())
        taken += objective.take(like=taken)
        grads = torch.autograd.grad(loss, (hidden, head))
        found = [one + other for one, other in zip(found, grads, strict=True)]
    assert total == pytest.approx(float(exact.detach().sum()), rel=1e-12)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))
    assert taken.tolist() == pytest.approx(
        [float(margins.detach().sum()), int((margins > 0).sum()), int((targets >= 0).sum())]
    )


def test_a_micro_batch_without_pairs_has_no_loss_and_a_gradient_of_zeros() -> None:
    hidden, head, targets, _, reference = case()
    objective, chunk = losses_of(7, head)
    objective.set_reference(reference)
    none = torch.full((TOKENS,), -1)
    loss = objective.loss_of(hidden, chunk, micro_of(torch.full_like(targets, IGNORED), none, [], 0))
    assert float(loss) == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, (hidden, head)))


class HalfVocabulary(WholeVocabulary):
    """One of two ranks with half of the entries, asked in turn with what the other answered."""

    def __init__(self, first: int, answers: list[Tensor]) -> None:
        self.first, self.own, self._answers = first, list[Tensor](), answers

    def largest(self, values: Tensor) -> Tensor:
        self.own.append(values.clone())
        return torch.maximum(values, self._answers[len(self.own) - 1]) if self._answers else values

    def sum(self, values: Tensor) -> Tensor:
        self.own.append(values.clone())
        return values + self._answers[len(self.own) - 1] if self._answers else values


def test_a_split_vocabulary_asks_its_ranks_alike_forward_and_backward() -> None:
    hidden, head, targets = made(vocabulary=50)
    calls = []
    for _ in range(2):
        vocabulary = HalfVocabulary(0, [])
        losses = token_losses(hidden, head, targets, vocabulary)
        losses.sum().backward()
        calls.append([tuple(one.shape) for one in vocabulary.own])
    assert calls[0] == calls[1] and len(calls[0]) % 4 == 0, "the logits are computed twice where the head learns"
    frozen = HalfVocabulary(0, [])
    token_losses(hidden, head.detach(), targets, frozen).sum().backward()
    assert len(frozen.own) == len(calls[0]) // 2
