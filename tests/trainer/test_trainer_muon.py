"""Muon's updates: by hand, beside torch's own, and beside AdamW for what is no hidden matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.names import is_hidden_matrix
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape, weight_sizes
from plait.parallel.orthogonalize import COEFFICIENTS, orthogonalize
from plait.parallel.sharded_model import OptimizerUnit, plain_unit, unsharded
from plait.partition.boxes import whole_box
from plait.planner.plan import OptimizerPlan
from plait.trainer.optimizer.moments import moment_names
from plait.trainer.optimizer.optim import make_optimizer, update, updates_counted

SHAPE = ModelShape(
    layers=2, width=16, heads=2, kv_heads=1, head_width=8, ffn=32, vocabulary=50, sequence=8,
    norm="layernorm", positions="learned", bias="all", qk_norm=True,
)  # fmt: skip
PLAN = OptimizerPlan(
    lr=0.01, warmup_steps=10, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, schedule="cosine", kind="muon",
    momentum=0.95, adamw_lr=0.004,
)  # fmt: skip
NAMES = ("attention.q", "attention.k", "feedforward.up", "feedforward.down")


def matrices(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Square, wide and tall ones, two of one shape and one of it turned."""
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((12, 12), (5, 12), (12, 5), (5, 12))]


def units_of(parameters: list[torch.nn.Parameter]) -> list[OptimizerUnit]:
    named = zip(NAMES, parameters, strict=True)
    return [
        plain_unit(f"layers.0.{name}.weight", one, whole_box(one.shape), decays=True, owned=True) for name, one in named
    ]


def orthogonalized_by_hand(matrix: Tensor) -> Tensor:
    """The iteration as Jordan et al. write it, without turning tall matrices."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def test_singular_values_come_close_to_one_and_directions_stay() -> None:
    torch.manual_seed(2)
    some = torch.randn(3, 20, 33, dtype=torch.float64)
    found = orthogonalize(some.clone())
    for matrix, result in zip(some, found, strict=True):
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.6 and values.max() < 1.3
        wanted_left, _, wanted_right = torch.linalg.svd(matrix, full_matrices=False)
        aligned = wanted_left.T @ result @ wanted_right.T
        torch.testing.assert_close(aligned, torch.diag(aligned.diagonal()), rtol=0, atol=1e-12)
    assert not orthogonalize(torch.zeros(1, 3, 4)).any()


def test_updates_are_muon_s_by_hand() -> None:
    weights = matrices(torch.float64)
    units = units_of(weights)
    optimizer = make_optimizer(units, PLAN, "float64")
    averages, values = [torch.zeros_like(one) for one in weights], [one.detach().clone() for one in weights]
    for step in range(1, 4):
        gradients = [torch.randn_like(one) for one in weights]
        for one, gradient in zip(weights, gradients, strict=True):
            one.grad = gradient.clone()
        lr = 0.01 * step
        optimizer.set_lr(lr)
        update(optimizer, units, factor=torch.tensor(0.25, dtype=torch.float64), norm=torch.tensor(4.0))
        for at, gradient in enumerate(gradients):
            averages[at] = 0.95 * averages[at] + 0.05 * 0.25 * gradient
            nesterov = 0.95 * averages[at] + 0.05 * 0.25 * gradient
            size = 0.2 * max(gradient.shape) ** 0.5
            values[at] = values[at] * (1 - lr * 0.1) - lr * size * orthogonalized_by_hand(nesterov)
            torch.testing.assert_close(weights[at].detach(), values[at], rtol=1e-11, atol=1e-11)
    assert [list(optimizer.state[one]) for one in weights] == [["momentum_buffer"]] * 4


def test_updates_are_those_of_torch_s_muon_but_for_the_order_of_sums() -> None:
    ours, theirs = matrices(torch.float32), matrices(torch.float32)
    units = units_of(ours)
    optimizer = make_optimizer(units, PLAN, "bf16")
    reference = torch.optim.Muon(
        theirs, lr=PLAN.lr, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        before = [one.detach().clone() for one in ours]
        optimizer.step()
        reference.step()
        for one, other, old in zip(ours, theirs, before, strict=True):
            moved = (other.detach() - old).norm()
            assert (one.detach() - other.detach()).norm() < 0.02 * moved  # bfloat16 has 8 bits
            torch.testing.assert_close(
                optimizer.state[one]["momentum_buffer"], reference.state[other]["momentum_buffer"], rtol=0, atol=0
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_whose_norm_is_not_finite_is_skipped_bit_for_bit(dtype: torch.dtype) -> None:
    weights = matrices(dtype)
    units = units_of(weights)
    optimizer = make_optimizer(units, PLAN, "float64" if dtype == torch.float64 else "float32")
    taken: list[list[Tensor]] = []
    for norm in (1.0, float("nan"), float("inf")):
        for one in weights:
            one.grad = torch.full_like(one, norm)
        update(optimizer, units, factor=torch.tensor(1.0, dtype=dtype), norm=torch.tensor(norm))
        taken.append(
            [one.detach().clone() for one in weights]
            + [optimizer.state[one]["momentum_buffer"].clone() for one in weights]
        )
    assert all(torch.equal(one, other) for later in taken[1:] for one, other in zip(taken[0], later, strict=True))
    assert all(bool(one.any()) for one in taken[0])


def test_a_matrix_without_a_gradient_counts_as_one_of_zeros() -> None:
    weights, others = matrices(torch.float64), matrices(torch.float64)
    for some in (weights, others):
        units = units_of(some)
        optimizer = make_optimizer(units, PLAN, "float64")
        for one in some:
            one.grad = torch.full_like(one, 0.5)
        optimizer.step()
        some[0].grad = None if some is weights else torch.zeros_like(some[0])
        optimizer.step()
    assert torch.equal(weights[0], others[0])


def test_all_but_hidden_matrices_are_updated_by_adamw_at_its_own_rate() -> None:
    both: list[GPT] = []
    for plan in (PLAN, replace(PLAN, kind="adamw", lr=0.004, adamw_lr=None)):
        model = GPT(SHAPE)
        initialize(model, 1)
        optimizer = make_optimizer(unsharded(model).units, plan)
        torch.manual_seed(3)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.set_lr(plan.lr / 2)
            optimizer.step()
        both.append(model)
        counted = updates_counted(optimizer)
        assert counted is not None and int(counted) == 2
    same = {
        name for (name, one), other in zip(both[0].named_parameters(), both[1].parameters(), strict=True)
        if torch.equal(one, other)
    }  # fmt: skip
    assert same == {name for name in weight_sizes(SHAPE) if not is_hidden_matrix(name)}


def test_hidden_matrices_are_those_of_layers_and_experts_without_router_and_adapters() -> None:
    mixture = MixtureShape(experts=4, experts_per_token=2, expert_ffn=16, shared_experts=1)
    shape = replace(SHAPE, bias="none", positions="rope", qk_norm=False, norm="rmsnorm", mixture=mixture)
    hidden = {name.split(".", 2)[2] for name in weight_sizes(shape) if is_hidden_matrix(name)}
    wanted = {f"attention.{one}.weight" for one in "qkvo"}
    wanted |= {
        f"feedforward.{part}.{one}.weight"
        for part in ("shared", *(f"experts.{number}" for number in range(4)))
        for one in ("gate", "up", "down")
    }
    assert hidden == wanted
    assert not is_hidden_matrix("layers.0.attention.q.lora_a") and is_hidden_matrix("ahead.1.projection.weight")
    assert set(moment_names(PLAN, "layers.0.attention.q.weight")) == {"muon_momentum"}
    assert set(moment_names(PLAN, "head.weight")) == {"adam_m", "adam_v"}
