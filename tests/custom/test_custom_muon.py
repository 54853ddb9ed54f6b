"""`plait.Muon`: torch's interface, plait's own numbers, and whole matrices in every layout of plait.spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import PlaitError
from plait.parallel.orthogonalize import orthogonalize
from plait.parallel.sharded_model import plain_unit
from plait.partition.boxes import whole_box
from plait.planner.plan import OptimizerPlan
from plait.trainer.optimizer.optim import make_optimizer
from tests.custom.test_custom_ranks import LAYOUTS, check_equal, told_by, trained
from tests.matrix import few_fast
from tests.shared_ranks import RanksOf

SIZES = ((12, 12), (5, 12), (12, 5), (5, 12))
WHOLE = ["plait.Muon", "torch.optim.Muon", "Adafactor"]
CUT = [(whole, layout) for whole in WHOLE for layout in LAYOUTS]
QUICK = [("plait.Muon", "shard optimizer"), ("plait.Muon", "shard parameters")]


def matrices(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(size, dtype=dtype)) for size in SIZES]


def with_gradients(step: int, *several: list[nn.Parameter]) -> None:
    torch.manual_seed(10 + step)
    for some in zip(*several, strict=True):
        gradient = torch.randn_like(some[0])
        for one in some:
            one.grad = gradient.clone()


def test_updates_are_those_of_recipes() -> None:
    own, recipes = matrices(), matrices()
    plan = OptimizerPlan(
        lr=0.01, warmup_steps=0, weight_decay=0.1, betas=(0.9, 0.95), clip=None, schedule="constant", kind="muon",
        momentum=0.95,
    )  # fmt: skip
    names = [f"layers.{number}.attention.q.weight" for number in range(4)]
    units = [
        plain_unit(name, one, whole_box(one.shape), decays=True, owned=True)
        for name, one in zip(names, recipes, strict=True)
    ]
    muon, other = plait.Muon(own, lr=0.01), make_optimizer(units, plan, "float64")
    for step in range(3):
        with_gradients(step, own, recipes)
        muon.step()
        other.step()
    for one, same in zip(own, recipes, strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(muon.state[one]["momentum_buffer"], other.state[same]["momentum_buffer"])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_updates_are_those_of_torch_in_bf16_but_for_the_order_of_sums() -> None:
    own, theirs = matrices(torch.float32), matrices(torch.float32)
    muon = plait.Muon(own, lr=0.01, orthogonalized_in="bf16")
    reference = torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        with_gradients(step, own, theirs)
        before = [one.detach().clone() for one in own]
        muon.step()
        reference.step()
        for one, other, old in zip(own, theirs, before, strict=True):
            assert (one - other).norm() < 0.02 * (other - old).norm()
            one.detach().copy_(other.detach())


def test_a_convolution_is_a_matrix_with_a_row_for_each_filter() -> None:
    filters = nn.Parameter(torch.randn(4, 3, 2, 2, dtype=torch.float64))
    filters.grad = torch.randn_like(filters)
    before, flat = filters.detach().clone(), filters.grad.flatten(1)
    plait.Muon([filters], lr=0.01, weight_decay=0, momentum=0).step()
    wanted = orthogonalize(flat.clone()[None])[0].view_as(filters) * 0.01 * 0.2 * 12**0.5
    torch.testing.assert_close(before - filters.detach(), wanted, rtol=1e-10, atol=1e-12)


def test_a_weight_without_a_gradient_stays_and_a_closure_is_called() -> None:
    one, other = matrices()[:2]
    one.grad = torch.ones_like(one)
    before: Tensor = other.detach().clone()
    assert plait.Muon([one, other]).step(lambda: 3.0) == 3.0
    assert torch.equal(before, other)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"params": [nn.Parameter(torch.zeros(3))]}, r"given a weight of shape \(3,\) and torch.float32; give norms"),
        ({"lr": -1.0}, "lr = -1.0; give a number of 0 or more"),
        ({"momentum": 1.0}, "momentum = 1.0; give a number of 0 or more, momentum below 1"),
        ({"orthogonalized_in": "fp8"}, 'orthogonalized_in = "fp8" is unknown; choose "auto"'),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        plait.Muon(**{"params": matrices(), **options})


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.run_entries")


def test_matrices_that_torch_shards_are_orthogonalized_whole() -> None:
    """FSDP2, whose rows and momenta stay where they are."""
    told = told_by(RanksOf("tests.custom.muon_entries"), "updates_of_shards", 2)
    assert len(told) == 2 and max(error for one in told for error in one["errors"]) < 1e-12, told


def skip_what_torch_lacks(whole: str) -> None:
    if whole == "torch.optim.Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")


@pytest.mark.parametrize(("whole", "layout"), few_fast(CUT, *QUICK))
def test_training_has_the_numbers_of_one_process(server: RanksOf, tmp_path: Path, whole: str, layout: str) -> None:
    skip_what_torch_lacks(whole)
    alone = trained(server, tmp_path, 1, whole=whole, layout="replicate")
    check_equal(trained(server, tmp_path, 2, whole=whole, layout=layout, shares=[1, 2], accumulate=2), alone)


@pytest.mark.parametrize(("whole", "layout"), few_fast(CUT, *QUICK[:1]))
def test_a_run_resumes_to_the_bit_and_in_another_layout(
    server: RanksOf, tmp_path: Path, whole: str, layout: str
) -> None:
    skip_what_torch_lacks(whole)
    asked, saved = {"whole": whole, "layout": layout}, str(tmp_path / "saved")
    all_steps = trained(server, tmp_path, 2, **asked)
    trained(server, tmp_path, 2, **asked, stop=4, save=saved)
    rest = trained(server, tmp_path, 2, **asked, resume=saved)
    assert rest[0] == all_steps[0][4:]
    assert all(torch.equal(weight, all_steps[1][name]) for name, weight in rest[1].items())
    other = LAYOUTS[(LAYOUTS.index(layout) + 1) % 3]
    check_equal(trained(server, tmp_path, 3, whole=whole, layout=other, resume=saved), all_steps, last=len(rest[0]))


@pytest.mark.parametrize(("whole", "layout"), few_fast(CUT, QUICK[1]))
def test_verify_proves_it(server: RanksOf, whole: str, layout: str) -> None:
    skip_what_torch_lacks(whole)
    assert told_by(server, "verify_whole", 2, whole=whole, layout=layout) == [{"ok": True, "failed": []}] * 2


@pytest.mark.parametrize("layout", few_fast(LAYOUTS[1:], "shard optimizer"))
def test_verify_finds_matrices_that_are_orthogonalized_by_part(server: RanksOf, layout: str) -> None:
    assert (
        told_by(server, "verify_whole", 2, whole="by part", layout=layout) == [{"ok": False, "failed": ["update"]}] * 2
    )
