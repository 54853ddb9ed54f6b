"""A mixture of experts against its definition: what it computes, counts, weighs, and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import PlaitError
from plait.model.attention import Cache, Rows
from plait.model.gpt import GPT, mixtures_of
from plait.model.init import initialize
from plait.model.mixture import Mixture, RowSpans, grouped_product, kept_choices
from plait.model.parts.mixture import MixtureShape, mixture_of_keys
from plait.model.shape import ModelShape, parameter_count, weight_sizes
from plait.model.sizes import explicit_shape
from plait.model.weights import active_parameter_count, kept_values, training_flops_per_token

EXPERTS = MixtureShape(experts=6, experts_per_token=2, expert_ffn=10, shared_experts=1, router="sigmoid", scale=1.5)
SHAPE = ModelShape(
    layers=3, width=16, heads=2, kv_heads=2, head_width=8, ffn=24, vocabulary=31, sequence=8, mixture=EXPERTS
)
ROWS = Rows(rows=3, tokens=8, rotation=None, documents=None, cache=None)


def mixture(changes: dict[str, Any] | None = None) -> Mixture:
    """One with weights large enough that every part of it matters."""
    shape = replace(EXPERTS, **(changes or {}))
    module = Mixture(replace(SHAPE, mixture=shape), shape).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    module.router.balance.normal_(std=0.3, generator=generator)
    return module


def tokens() -> Tensor:
    return torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()


def by_definition(module: Mixture, x_nd: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for x in x_nd:
        scores = (module.router.weight @ x).sigmoid()
        chosen = (scores + module.router.balance).topk(2).indices.tolist()
        whole = sum(scores[expert] for expert in chosen)
        total = one_expert(module.shared, x)
        for expert in chosen:
            total = total + 1.5 * scores[expert] / whole * one_expert(module.experts[str(expert)], x)
        rows.append(total)
    return torch.stack(rows)


def one_expert(expert: Any, x: Tensor) -> Tensor:
    return expert.down.weight @ (F.silu(expert.gate.weight @ x) * (expert.up.weight @ x))


def test_a_mixture_is_what_its_definition_says() -> None:
    module, x_nd = mixture(), tokens()
    result, wanted = module(x_nd, ROWS), by_definition(module, x_nd)
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
    weights = [x_nd, *module.parameters()]
    ours = torch.autograd.grad(result.square().sum(), weights)
    theirs = torch.autograd.grad(wanted.square().sum(), weights, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_all_tokens_may_go_to_the_same_experts_and_none_is_dropped() -> None:
    module, x_nd = mixture(), tokens()
    module.router.balance.copy_(torch.tensor([100.0, 100, 0, 0, 0, 0]))
    result = module(x_nd, ROWS)
    torch.testing.assert_close(result, by_definition(module, x_nd), rtol=0, atol=1e-12)
    result.sum().backward()
    assert module.meter.take().tolist() == [24, 24, 0, 0, 0, 0]  # type: ignore[union-attr]
    unused = module.experts["5"].up.weight.grad  # type: ignore[union-attr]
    assert isinstance(unused, Tensor) and not unused.any()


def test_counts_are_of_tokens_that_enter_the_loss_and_of_backward_passes_alone() -> None:
    module, x_nd = mixture(), tokens()
    with torch.no_grad():
        module(x_nd, ROWS)
    assert module.meter.take() is None
    counted_n = torch.arange(24) % 3 > 0
    module(x_nd, replace(ROWS, counted_n=counted_n)).sum().backward()
    counts = module.meter.take()
    chosen = module.router(x_nd).chosen_nk[counted_n]
    assert counts is not None and torch.equal(counts, torch.bincount(chosen.flatten(), minlength=6).double())
    assert module.meter.take() is None


def shares_and_choices(module: Mixture, x_nd: Tensor) -> tuple[Tensor, Tensor]:
    routing = module.router(x_nd)
    shares = routing.scores_ne / routing.scores_ne.sum(1, keepdim=True)
    return shares, F.one_hot(routing.chosen_nk, 6).sum(1).double()


def added_gradient(module: Mixture, x_nd: Tensor, counted_n: Tensor | None = None) -> Tensor:
    """What the losses add to the router's gradient."""
    grads = []
    for losses in (
        module.shape_of_mixture,
        replace(module.shape_of_mixture, balance=(), balance_weights=(), z_weight=0),
    ):
        module.shape_of_mixture, kept = losses, module.shape_of_mixture
        result = module(x_nd, replace(ROWS, counted_n=counted_n))
        grads.append(torch.autograd.grad(result.sum(), module.router.weight)[0])
        module.shape_of_mixture = kept
    return grads[0] - grads[1]


def test_the_loss_of_a_row_is_deepseeks() -> None:
    module, x_nd = mixture({"balance": ("sequence",), "balance_weights": (0.3,)}), tokens()
    counted_n = torch.arange(24) % 5 > 0
    shares, choices = shares_and_choices(module, x_nd)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        places = [n for n in range(8 * row, 8 * row + 8) if counted_n[n]]
        f = 6 / (2 * len(places)) * choices[places].sum(0)
        total = total + len(places) * 0.3 * (f * shares[places].mean(0)).sum()
    wanted = torch.autograd.grad(total, module.router.weight)[0]
    torch.testing.assert_close(added_gradient(module, x_nd, counted_n), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rule", "factor"), [("global", 6 / 2), ("switch", 6)])
def test_the_losses_of_a_step_are_over_all_its_tokens(rule: str, factor: float) -> None:
    module, x_nd = mixture({"balance": (rule,), "balance_weights": (0.3,)}), tokens()
    shares, choices = shares_and_choices(module, x_nd)
    other = torch.tensor([5.0, 0, 3, 3, 1, 4], dtype=torch.float64)  # of other micro-batches, 8 tokens
    module.step_counts_e = choices.sum(0) + other
    f = factor * module.step_counts_e / 32
    wanted = torch.autograd.grad(0.3 * (f * shares.sum(0)).sum(), module.router.weight)[0]
    torch.testing.assert_close(added_gradient(module, x_nd), wanted, rtol=0, atol=1e-12)


def test_the_z_loss_is_the_square_of_the_scores_size() -> None:
    module, x_nd = mixture({"z_weight": 0.2}), tokens()
    z = 0.2 * (x_nd @ module.router.weight.T).logsumexp(1).square().sum()
    wanted = torch.autograd.grad(z, module.router.weight)[0]
    torch.testing.assert_close(added_gradient(module, x_nd), wanted, rtol=0, atol=1e-12)


def test_with_a_capacity_the_later_tokens_of_a_row_are_dropped_and_counted() -> None:
    module, x_nd = mixture({"capacity": 0.75}), tokens()
    limit = 2  # of 8 tokens' 16 choices of 6 experts: 0.75 × 16 / 6
    chosen = module.router(x_nd).chosen_nk.tolist()
    wanted, dropped = [], 0
    for row in range(3):
        room = [limit] * 6
        for n in range(8 * row, 8 * row + 8):
            total = one_expert(module.shared, x_nd[n])
            gates = module.router(x_nd[n : n + 1]).gates_nk[0]
            for place, expert in enumerate(chosen[n]):
                if room[expert]:
                    room[expert] -= 1
                    total = total + gates[place] * one_expert(module.experts[str(expert)], x_nd[n])
                else:
                    dropped += 1
            wanted.append(total)
    result = module(x_nd, ROWS)
    assert dropped > 5
    torch.testing.assert_close(result, torch.stack(wanted), rtol=0, atol=1e-12)
    weights = [x_nd, *module.parameters()]
    ours = torch.autograd.grad(result.square().sum(), weights)
    theirs = torch.autograd.grad(torch.stack(wanted).square().sum(), weights, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    counts = module.meter.take()
    assert counts is not None and counts[-1] == dropped and counts[:-1].sum() == 48, "loads are of what was chosen"


def test_a_large_capacity_drops_nothing_and_nor_does_a_text_that_is_written_on() -> None:
    module, x_nd = mixture({"capacity": 6 / 2}), tokens()
    everything = mixture()
    torch.testing.assert_close(module(x_nd, ROWS), everything(x_nd, ROWS), rtol=0, atol=1e-12)
    tight = mixture({"capacity": 0.1})
    cache = Cache(SHAPE, rows=3, dtype=torch.float64, device=torch.device("cpu"))
    with torch.no_grad():
        written_on = tight(x_nd, replace(ROWS, cache=cache))
    torch.testing.assert_close(written_on, everything(x_nd, ROWS).detach(), rtol=0, atol=1e-12)


def test_parts_of_rows_find_the_room_that_whole_rows_leave() -> None:
    shape = replace(EXPERTS, capacity=0.6)
    chosen_nk = torch.rand(24, 6, generator=torch.Generator().manual_seed(4)).topk(2).indices
    whole = kept_choices(chosen_nk, shape, 3, RowSpans(), lambda counts: counts)
    assert whole is not None and not whole.all()
    spans = [RowSpans(of=4, own=(0, 3)), RowSpans(of=4, own=(1, 2))]
    places = [[8 * row + 2 * span + n for row in range(3) for span in one.own for n in (0, 1)] for one in spans]
    said: list[Tensor] = []
    for one, mine in zip(spans, places, strict=True):
        kept_choices(chosen_nk[mine], shape, 3, one, lambda counts: said.append(counts) or counts)
    for one, mine in zip(spans, places, strict=True):
        kept = kept_choices(chosen_nk[mine], shape, 3, one, lambda _: said[0] + said[1])
        assert kept is not None and torch.equal(kept, whole[mine])


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (8, 0, 0)], ids=str)
def test_a_product_of_all_experts_is_that_of_each(counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), 4, dtype=torch.float64, generator=generator).requires_grad_()
    weights = [torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in counts]
    joined = torch.cat([F.linear(part, one) for part, one in zip(rows.split(counts), weights, strict=True)])
    product = grouped_product(rows, weights, counts)
    torch.testing.assert_close(product, joined, rtol=0, atol=1e-14)
    ours = torch.autograd.grad(product.square().sum(), [rows, *weights])
    theirs = torch.autograd.grad(joined.square().sum(), [rows, *weights])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def by_itself(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "gelu"])
def test_experts_multiplied_as_one_are_experts_one_by_one(activation: str) -> None:
    shape = replace(SHAPE, activation=activation)
    module = Mixture(shape, EXPERTS).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    at_once = module(tokens(), ROWS)
    for expert in module.experts.values():
        expert.up.product = by_itself  # type: ignore[union-attr]
    torch.testing.assert_close(at_once, module(tokens(), ROWS), rtol=0, atol=1e-12)


def test_the_router_rounds_nothing_where_products_are_rounded() -> None:
    module, x_nd = mixture().float(), tokens().float()
    exact = module.router(x_nd)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, result = module.router(x_nd), module(x_nd, ROWS)
    assert torch.equal(exact.logits_ne, rounded.logits_ne) and rounded.gates_nk.dtype == torch.float32
    torch.testing.assert_close(result.float(), module(x_nd, ROWS), rtol=0.1, atol=0.3)


def test_parameters_and_work_count_what_a_token_meets() -> None:
    dense = replace(SHAPE, mixture=None, ffn=30)  # as wide as two experts and the shared one
    routers = 3 * 6 * 16
    assert active_parameter_count(SHAPE) == parameter_count(dense) + routers
    assert parameter_count(SHAPE) == active_parameter_count(SHAPE) + 3 * 4 * 3 * 16 * 10
    assert training_flops_per_token(SHAPE, 8, "full") == training_flops_per_token(dense, 8, "full") + 6 * routers


def test_layers_without_experts_have_a_plain_part() -> None:
    shape = replace(SHAPE, layers=5, mixture=replace(EXPERTS, dense_layers=1, every=2))
    model = GPT(shape)
    initialize(model, 1)
    assert sorted(mixtures_of(model)) == [2, 4]
    assert {name for name, _ in model.named_parameters()} == set(weight_sizes(shape))
    assert kept_values(shape) == ()
    kept = kept_values(replace(shape, mixture=replace(EXPERTS, balance=("bias",), dense_layers=4)))
    assert kept == ("layers.4.feedforward.router.balance",)


def test_a_shape_with_experts_survives_json() -> None:
    shape = replace(SHAPE, mixture=replace(EXPERTS, balance=("bias", "sequence"), balance_weights=(0.1,)))
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert "mixture" not in replace(shape, mixture=None).to_dict()


def test_open_keys_make_a_token_meet_as_much_as_in_the_dense_model() -> None:
    found = mixture_of_keys({"experts": 16, "experts_per_token": 3, "shared_experts": 1}, ffn=512)
    assert found is not None and found.expert_ffn == 128
    assert (found.router, found.balance, found.normalize) == ("sigmoid", ("bias",), True)
    assert mixture_of_keys({"layers": 3}, ffn=512) is None


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"experts_per_token": 2}, "name model.experts, too"),
        ({"experts": 1}, "model.experts is 1"),
        ({"experts": 8, "experts_per_token": 9}, "experts_per_token = 9 is more than the 8 experts; choose at most 8"),
        ({"experts": 8, "expert_groups": 3}, "expert_groups = 3 does not divide 8 experts; choose one of 1, 2, 4"),
        ({"experts": 8, "expert_groups": 8}, "leaves one expert to a group"),
        ({"experts": 8, "expert_groups": 2, "expert_groups_chosen": 3}, "more than the 2 groups"),
        ({"experts": 8, "expert_groups": 4, "expert_groups_chosen": 1, "experts_per_token": 3}, "fewer than"),
        ({"experts": 8, "expert_balance": ["bias", "none"]}, '"none" beside others'),
        ({"experts": 8, "expert_balance": ["bias", "bias"]}, "twice"),
        ({"experts": 8, "expert_balance_weight": 0.1}, "names none"),
        ({"experts": 8, "expert_balance": ["global", "sequence"], "expert_balance_weight": [0.1]}, "2 losses"),
        ({"experts": 8, "dense_layers": 4}, "none of 4 layers with experts"),
        ({"experts": 8, "bias": "all"}, "experts have no biases"),
        ({"experts": 8, "router_scale": -1.0}, "router_scale is -1.0"),
        ({"experts": 8, "expert_capacity": 0.0}, "expert_capacity is 0.0; choose a number above 0, such as 1.25"),
    ],
)
def test_what_cannot_be_is_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence.replace("?", ".")):
        explicit_shape(layers=4, width=64, vocabulary=64, sequence=16, **keys)
