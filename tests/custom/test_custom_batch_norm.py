"""BatchNorm over all workers computes what PyTorch's computes over the whole batch, whatever the shares."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from plait.custom.exact_norm.batch_norm import GlobalBatchNorm, convert_batch_norm
from plait.launch.values.job import Job
from tests.custom.norm_entries import samples, small_net, tensors_after_two_steps
from tests.shared_ranks import RanksOf

NormalizeOn = Callable[[str, str, int], None]


@pytest.fixture(scope="module")
def norm_ranks() -> NormalizeOn:
    """Run an entry of norm_entries with an argument on so many ranks."""
    server = RanksOf("tests.custom.norm_entries")

    def run(entry: str, argument: str, world_size: int) -> None:
        job = Job(entry=entry, argument=argument, world_size=world_size, threads=1)
        server.run(job, on_message=lambda message: None).require_finished()

    return run


@pytest.mark.parametrize("shares", [(5, 2), (3, 1, 8)])
def test_unequal_shares_give_the_gradients_and_statistics_of_one_process(
    norm_ranks: NormalizeOn, tmp_path: Path, shares: tuple[int, ...]
) -> None:
    found = ranks_of(norm_ranks, tmp_path, shares, converted=True)
    wanted = tensors_after_two_steps(small_net(), *samples(sum(shares)))
    for name, value in wanted.items():
        kind = name.split("/")[0]
        if kind == "weight":
            assert_near(sum(rank[name] for rank in found), value)
        elif kind == "input":
            assert_near(torch.cat([rank[name] for rank in found]), value)
        else:
            assert all(torch.equal(rank[name], found[0][name]) for rank in found)
            assert_near(found[0][name], value)


def test_layers_over_local_batches_differ(norm_ranks: NormalizeOn, tmp_path: Path) -> None:
    """The test above can fail: PyTorch's own layer on each rank's share is far off."""
    found = ranks_of(norm_ranks, tmp_path, (5, 2), converted=False)
    wanted = tensors_after_two_steps(small_net(), *samples(7))
    error = (torch.cat([rank["input"] for rank in found]) - wanted["input"]).abs().max() / wanted["input"].abs().max()
    assert error > 0.01


def ranks_of(
    norm_ranks: NormalizeOn, folder: Path, shares: tuple[int, ...], *, converted: bool
) -> list[dict[str, Tensor]]:
    asked = {"folder": str(folder), "shares": shares, "converted": converted}
    norm_ranks("normalize_shares", json.dumps(asked), len(shares))
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(len(shares))]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    scale = max(float(wanted.double().abs().max()), 1e-6)
    assert float((found.double() - wanted.double()).abs().max()) <= 1e-10 * scale


def test_one_process_computes_to_the_bit_what_it_did() -> None:
    net = small_net()
    converted = convert_batch_norm(copy.deepcopy(net))
    for inputs, wanted in [samples(6)]:
        before, after = tensors_after_two_steps(net, inputs, wanted), tensors_after_two_steps(converted, inputs, wanted)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(net.eval()(samples(6)[0]), converted.eval()(samples(6)[0]))


def test_a_converted_model_keeps_its_weights_its_names_and_a_layer_that_stands_twice() -> None:
    layer = nn.BatchNorm1d(3)
    net = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Linear(3, 3)), "own": Doubled(3)})
    before = dict(net.named_parameters())
    names = set(net.state_dict())
    convert_batch_norm(net)
    assert {name: id(value) for name, value in net.named_parameters()} == {n: id(v) for n, v in before.items()}
    assert set(net.state_dict()) == names
    first, second = net["a"], net["b"]
    assert isinstance(first, GlobalBatchNorm) and isinstance(second, nn.Sequential) and second[0] is first
    assert type(net["own"]) is Doubled
    assert isinstance(convert_batch_norm(nn.BatchNorm2d(2)), GlobalBatchNorm)


class Doubled(nn.BatchNorm1d):
    """A layer of somebody's own, which computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)
