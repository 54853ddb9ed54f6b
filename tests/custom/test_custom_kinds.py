"""Programs as people write them have plain torch's losses and final weights on any number of workers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import plait
from plait.errors import PlaitError
from plait.launch.values.job import Job
from tests.custom.kind import LAYOUTS, mlp, numbers, squared, trained_by_spread, trained_by_torch, whole_batches
from tests.custom.kinds import KINDS
from tests.matrix import few_fast
from tests.shared_ranks import RanksOf

TOLERANCE = 1e-12
WAYS = [
    (kind, layout, ranks)
    for kind in KINDS
    for layout in LAYOUTS
    for ranks in (2, 3)
    if layout not in KINDS[kind].refused
]
QUICK = [
    ("rest of a pass", "shard parameters", 3),
    ("channels last", "replicate", 2),
    ("weight with gaps", "replicate", 2),
    ("moving average", "shard optimizer", 2),
    ("layer left out", "shard optimizer", 2),
    ("layer left out, whole weights", "shard optimizer", 2),
    ("batches by length", "replicate", 2),
    ("flattened by size", "replicate", 3),
    ("routed experts", "shard parameters", 3),
    ("learned weights of tasks", "shard parameters", 2),
    ("PPO", "shard optimizer", 2),
    ("averaged weights", "shard optimizer", 2),
    ("compiled", "replicate", 2),
]


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.kinds_entries")


def told_by_all(server: RanksOf, entry: str, ranks: int, argument: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    job = Job(entry=entry, argument=argument, world_size=ranks, threads=1)
    server.run(job, on_message=lambda message: found.__setitem__(message.rank, dict(message.values)))
    return found


def told_by(server: RanksOf, entry: str, ranks: int, argument: str) -> dict[str, Any]:
    return told_by_all(server, entry, ranks, argument).get(0, {})


@cache
def expected(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """By plain torch, from the whole batches."""
    return trained_by_torch(KINDS[kind], whole_batches(KINDS[kind]))


@pytest.mark.parametrize(("kind", "layout", "ranks"), few_fast(WAYS, *QUICK))
def test_a_program_has_the_numbers_of_plain_torch(
    server: RanksOf, tmp_path: Path, kind: str, layout: str, ranks: int
) -> None:
    losses, weights = expected(kind)
    told = told_by(server, "train", ranks, json.dumps({"kind": kind, "layout": layout, "folder": str(tmp_path)}))
    assert told["losses"] == pytest.approx(losses, abs=TOLERANCE)
    found = load_file(tmp_path / "weights.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        real = torch.view_as_real(weight) if weight.is_complex() else weight
        assert float((found[name] - real).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_in_one_process_has_the_numbers_of_plain_torch(kind: str) -> None:
    losses, weights = expected(kind)
    found_losses, found = trained_by_spread(KINDS[kind], "replicate")
    assert found_losses == pytest.approx(losses, abs=TOLERANCE)
    assert all(float((found[name] - weight).abs().max()) < TOLERANCE for name, weight in weights.items())


@pytest.mark.parametrize("kind", ["channels last", "complex weight"])
def test_weights_that_are_not_contiguous_or_complex_are_saved(server: RanksOf, tmp_path: Path, kind: str) -> None:
    """And what the program keeps itself comes back with them, on every worker."""
    told = told_by_all(server, "save_and_resume", 2, f"{kind}:{tmp_path / 'kept'}")
    assert told[0] == told[1] == {"same": True, "kept": True, "best": [0.5, "step 3"]}


def test_a_pass_of_a_loader_has_its_rest_whatever_the_workers() -> None:
    """11 examples in batches of 5: three steps in each of two passes, the last of one example."""
    assert len(expected("rest of a pass")[0]) == 6


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("split", "worker 1 has a first example other than worker 0 has"),
        pytest.param("length", "worker 1 has a number of examples other than", marks=pytest.mark.slow),
        ("stream", "worker 1 has a first batch other than worker 0 has"),
    ],
)
def test_data_that_differ_by_worker_are_told(server: RanksOf, data: str, words: str) -> None:
    with pytest.raises(PlaitError, match=words):
        told_by(server, "unlike_data", 2, data)


@pytest.mark.parametrize("data", ["noise", "pairs"])
def test_what_cannot_be_compared_is_let_through(server: RanksOf, data: str) -> None:
    """Examples that are random beyond all seeds, and a collate that takes two at least."""
    told_by(server, "unlike_data", 2, data)


@pytest.mark.parametrize("when", few_fast(["before", "after"], "after"))
def test_a_hook_on_a_part_of_a_gradient_is_refused(server: RanksOf, when: str) -> None:
    with pytest.raises(PlaitError, match=r"0\.weight has a hook on its gradient .* before_update= of plait.spread"):
        told_by(server, "late_hook", 2, when)


def test_a_gradient_is_changed_by_the_optimizers_own_hook(server: RanksOf) -> None:
    assert told_by(server, "clip_by_value", 2, "")["error"] < TOLERANCE


def test_a_hook_in_one_process_sees_the_whole_gradient_of_the_mean() -> None:
    seen: list[Tensor] = []
    model: Any = mlp().double()
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_sum=squared)
    for batch in run.batches(numbers(5), batch=6):
        seen.clear()
        run.step(batch)
        assert torch.equal(seen[-1], run.gradients()["0.weight"])


def test_an_update_beside_the_run_is_refused_as_long_as_the_run_lives() -> None:
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = plait.spread(model, optimizer, loss_sum=squared)
    for batch in run.batches(numbers(5), batch=6):
        run.step(batch)
        with pytest.raises(PlaitError, match=r"run\.step, which has updated the weights already"):
            optimizer.step()
    again, batch = plait.spread(model, optimizer, loss_sum=squared), None
    for batch in again.batches(numbers(5), batch=6):
        again.step(batch)
    again.close()
    with pytest.raises(PlaitError, match="this run is closed"):
        again.step(batch)
    del run
    optimizer.step()


@pytest.mark.parametrize("layout", few_fast(["replicate", "shard optimizer"], "shard optimizer"))
def test_a_model_is_spread_a_second_time_with_other_weights_trained(server: RanksOf, layout: str) -> None:
    assert told_by(server, "spread_twice", 2, layout)["error"] < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("physics", r"differentiates twice \(create_graph=True\); take \"shard optimizer\""),
        ("complex weight", r"has torch.complex128 and torch.float64; take \"shard optimizer\""),
        ("channels last", "is not possible for this model"),
    ],
)
def test_what_sharded_parameters_cannot_carry_is_told(server: RanksOf, tmp_path: Path, kind: str, words: str) -> None:
    asked = {"kind": kind, "layout": "shard parameters", "folder": str(tmp_path)}
    with pytest.raises(PlaitError, match=words):
        told_by(server, "train", 2, json.dumps(asked))


def test_what_a_program_draws_between_steps_is_the_same_on_all_workers(server: RanksOf) -> None:
    alone = told_by(server, "draw_between", 1, "")["drawn"]
    both = told_by_all(server, "draw_between", 2, "")
    assert both[0]["drawn"] == both[1]["drawn"] == alone
    assert len(set(alone)) == len(alone)


def test_two_runs_over_one_model_are_told(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match=r"0\.weight is trained by two runs of plait\.spread at once"):
        told_by(server, "two_runs", 2, "")


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (lambda data: DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)), {}, "leave the DistributedSampler"),
        (lambda data: DataLoader(data, 4, sampler=iter(range(9))), {}, "has no length"),
        (lambda data: DataLoader(data, batch_sampler=[[0, 1], [2]]), {"batch": 2}, "leave batch out"),
        (lambda data: DataLoader(data, batch_sampler=[[0, 1], [2]]), {"order": "given"}, "leave order out"),
    ],
)
def test_samplers_that_share_out_themselves_get_one_sentence(loader: Any, options: Any, words: str) -> None:
    model = mlp().double()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    with pytest.raises(PlaitError, match=words):
        list(run.batches(loader(numbers(5)), **options))


def test_weights_of_16_bits_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp().bfloat16()
    plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=squared)
    assert "0.weight, 0.bias, 2.weight and 1 more: weights of 16 bits" in capsys.readouterr().out
