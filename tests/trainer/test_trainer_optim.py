"""Which weights decay, how the learning rate runs, and the norm over all gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.parallel.gradient_norm import clip_factor
from plait.parallel.sharded_model import plain_unit, unsharded
from plait.partition.boxes import whole_box
from plait.planner.plan import OptimizerPlan
from plait.trainer.optimizer.optim import learning_rate, make_optimizer, owned_squares, update

SHAPE = ModelShape(
    layers=2, width=16, heads=2, kv_heads=2, head_width=8, ffn=32, vocabulary=50, sequence=8,
    norm="layernorm", positions="learned", bias="all", qk_norm=True,
)  # fmt: skip
PLAN = OptimizerPlan(lr=0.01, warmup_steps=10, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, schedule="cosine")
SGD = replace(PLAN, kind="sgd", momentum=0.9)


def test_weight_decay_is_for_the_matrices_of_linear_layers_alone() -> None:
    model = GPT(SHAPE)
    initialize(model, 1)
    optimizer = make_optimizer(unsharded(model).units, PLAN)
    decay_of = {id(p): group.weight_decay for group in optimizer.groups for p in group.parameters}
    for name, parameter in model.named_parameters():
        matrix = name.endswith("weight") and parameter.ndim == 2 and not name.startswith("embed.")
        assert decay_of.pop(id(parameter)) == (0.1 if matrix else 0.0), name
    assert not decay_of


def test_decay_shrinks_and_the_others_stay_without_gradient() -> None:
    model = GPT(SHAPE)
    initialize(model, 1)
    optimizer = make_optimizer(unsharded(model).units, PLAN)
    optimizer.lr = 0.5
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrunk = name.endswith("weight") and parameter.ndim == 2 and not name.startswith("embed.")
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if shrunk else 1.0))


def test_an_update_is_adamw_s_by_hand() -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = make_optimizer(
        [plain_unit("head.weight", weight, whole_box(weight.shape), decays=True, owned=True)], PLAN
    )
    mean, square, value = torch.zeros(3, 4), torch.zeros(3, 4), weight.detach().clone()
    for step in range(1, 4):
        grad = torch.randn(3, 4)
        weight.grad = grad.clone()
        optimizer.lr = 0.01 * step
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * grad, 0.95 * square + 0.05 * grad**2
        value = value * (1 - 0.01 * step * 0.1)
        value -= 0.01 * step * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_an_update_is_sgd_s_by_hand_with_decay_after_clipping(dtype: torch.dtype, momentum: float) -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=dtype))
    units = [plain_unit("head.weight", weight, whole_box(weight.shape), decays=True, owned=True)]
    optimizer = make_optimizer(units, replace(SGD, momentum=momentum))
    buffer, value = torch.zeros(3, 4, dtype=dtype), weight.detach().clone()
    for step in range(1, 4):
        grad = torch.randn(3, 4, dtype=dtype)
        weight.grad = grad.clone()
        optimizer.lr = 0.01 * step
        factor = torch.tensor([0.25], dtype=torch.float64)
        update(optimizer, units, factor=factor[0], norm=torch.tensor(4.0))
        buffer = momentum * buffer + 0.25 * grad + 0.1 * value
        value = value - 0.01 * step * buffer
        tight = 1e-5 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(weight.detach(), value, rtol=tight, atol=tight)
    kept = [list(state) for state in optimizer.state.values()]
    assert kept == [["momentum_buffer"] if momentum else []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("plan", [PLAN, SGD, replace(SGD, momentum=0.0)], ids=["adamw", "sgd", "sgd without momentum"])
def test_five_updates_have_the_bits_of_torch_s_own_optimizer(plan: OptimizerPlan, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((3, 4), (70,), (5,))]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    optimizer = make_optimizer(
        [plain_unit("head.weight", one, whole_box(one.shape), decays=one.ndim > 1, owned=True) for one in ours], plan
    )
    decays = [{"params": theirs[:1], "weight_decay": plan.weight_decay}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = (
        torch.optim.AdamW(decays, lr=plan.lr, betas=plan.betas, fused=True)
        if plan.kind == "adamw"
        else torch.optim.SGD(decays, lr=plan.lr, momentum=plan.momentum, fused=True)
    )
    for step, skipped in enumerate([False, False, True, False, False]):
        optimizer.lr = 0.01 * (step + 1)
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):  # the last one never has a gradient
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for each in (optimizer, reference):
            each.found_inf = torch.tensor(float(skipped))  # pyright: ignore[reportAttributeAccessIssue]
            each.grad_scale = torch.tensor(0.5) if dtype == torch.float32 else None  # pyright: ignore[reportAttributeAccessIssue]
            each.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert optimizer.state[one].keys() == {
            name for name, value in reference.state[other].items() if value is not None
        }
        assert all(torch.equal(value, reference.state[other][name]) for name, value in optimizer.state[one].items())


def test_sgd_skips_a_step_whose_norm_is_not_finite() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    units = [plain_unit("head.weight", weight, whole_box(weight.shape), decays=True, owned=True)]
    optimizer = make_optimizer(units, SGD)
    taken: list[list[torch.Tensor]] = []
    for norm in (1.0, float("nan"), float("inf")):
        weight.grad = torch.full((3, 4), norm)
        update(optimizer, units, factor=torch.tensor(1.0), norm=torch.tensor(norm))
        taken.append([weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()])
    assert all(torch.equal(one, other) for later in taken[1:] for one, other in zip(taken[0], later, strict=True))
    assert float(taken[0][0][0, 0]) == pytest.approx(1 - 0.01 * 1.1)


def course(schedule: str, steps: int = 100, warmup: int = 10) -> list[float]:
    plan = replace(PLAN, schedule=schedule, warmup_steps=warmup)
    return [learning_rate(plan, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_climbs_evenly_to_the_peak_and_is_never_left_above_it(schedule: str) -> None:
    rates = course(schedule)
    assert rates[:10] == pytest.approx([0.001 * k for k in range(1, 11)])
    assert max(rates) == pytest.approx(0.01) and min(rates) > 0
    assert course(schedule) == rates
    without = course(schedule, warmup=0)
    assert without[0] == pytest.approx(0.01)


def test_cosine_ends_near_a_tenth_of_the_peak() -> None:
    rates = course("cosine")
    assert rates[10] == pytest.approx(0.01) and rates[55] == pytest.approx(0.0055, rel=0.01)
    assert rates[-1] == pytest.approx(0.001, rel=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_wsd_is_flat_and_then_falls_in_a_line_over_the_last_fifth() -> None:
    rates = course("wsd")
    assert rates[10:80] == pytest.approx([0.01] * 70)
    assert rates[80:] == pytest.approx([0.01 * left / 20 for left in range(20, 0, -1)])


def test_linear_falls_in_a_line_to_zero_behind_the_last_step() -> None:
    assert course("linear")[10:] == pytest.approx([0.01 * left / 90 for left in range(90, 0, -1)])


def test_constant_stays() -> None:
    assert course("constant")[10:] == pytest.approx([0.01] * 90)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 2), (3, 50), (5, 5)])
def test_short_runs_and_long_warm_ups_stay_in_bounds(schedule: str, steps: int, warmup: int) -> None:
    assert all(0 < rate <= 0.01 + 1e-12 for rate in course(schedule, steps, warmup))


def test_the_norm_is_that_of_all_owned_gradients_in_one_row() -> None:
    like, parts = torch.zeros(1, dtype=torch.float64), [torch.randn(3, 4), torch.randn(7), torch.randn(5)]
    units = []
    for owned, part in zip((True, False, True), parts, strict=True):
        units.append(
            plain_unit("head.weight", torch.nn.Parameter(part), whole_box(part.shape), decays=True, owned=owned)
        )
        units[-1].parameter.grad = part
    row = torch.cat([parts[0].reshape(-1), parts[2]])
    assert owned_squares(units, like=like).tolist() == pytest.approx([float(row.norm()) ** 2], rel=1e-6)
    assert owned_squares(units[1:2], like=like).tolist() == [0.0]


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (4.0, None, 1.0), (0.0, 1.0, 1.0)]
)
def test_clipping_only_ever_shrinks(norm: float, limit: float | None, factor: float) -> None:
    assert float(clip_factor(torch.tensor(norm), limit)) == pytest.approx(factor, rel=1e-5)
