"""The reducer: sums and never means, in buckets that names and sizes alone decide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.parallel.reduce import Reducer
from tests.parallel.reduce_entries import SMALL_BUCKET_BYTES, Branches

SHAPE = ModelShape(layers=2, width=16, heads=2, kv_heads=2, head_width=8, ffn=32, vocabulary=50, sequence=8, tied=True)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gradients_are_sums_whatever_order_backward_takes_on_each_rank(reduce_on, tmp_path: Path, workers: int) -> None:
    reduce_on("reduce_branches", workers, str(tmp_path))
    weights = {name: p.detach() for name, p in Branches().named_parameters()}
    for step in (1, 2):
        factor = 2 * (1 + 10 * step)
        ranks = [load_file(tmp_path / f"step-{step}-rank-{rank}.safetensors") for rank in range(workers)]
        for name, weight in weights.items():
            times = 1 if name == "c" else workers  # only rank 0 ever reaches c; on the others it counts as zero
            for found in ranks:
                torch.testing.assert_close(found[name], factor * times * weight, rtol=1e-14, atol=0)


def test_a_rank_without_any_gradient_adds_zero(reduce_on) -> None:
    told = reduce_on("reduce_nothing", 2)
    wanted = [float(2 * p.detach().sum()) for p in Branches().parameters()]
    assert told[0]["sums"] == told[1]["sums"] == pytest.approx(wanted)


def test_group_sums(reduce_on) -> None:
    told = reduce_on("sum_and_gather", 3)
    for rank in range(3):
        assert told[rank] == {
            "total": [3.0, 3.0],
            "largest": [2.0, 1.0],
            "parts": [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]],
            "place": [rank, 3],
        }


def bucket_sizes(parameters: list[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> list[int]:
    return [bucket.numel() for bucket in Reducer(parameters, group, bucket_bytes).buckets]


def places(model: nn.Module) -> list[tuple[str, int]]:
    """Which flat tensor each gradient is a view of, and where in it."""
    found = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad._base is not None
        found.append((name, parameter.grad._base.numel(), parameter.grad.storage_offset()))
    return found


def test_buckets_follow_from_names_and_sizes_alone(group_of_one: dist.ProcessGroup) -> None:
    """Not from values, nor from the order in which gradients arrived in earlier steps."""
    seen = []
    for names in ("abcde", "edcba"):
        model = Branches()
        reducer = Reducer(model.parameters(), group_of_one, SMALL_BUCKET_BYTES)
        for order in (names, "cabed"):
            reducer.open()
            reducer.arm()
            model(3.0, order).backward()
            reducer.close()
            seen.append(places(model))
    assert all(each == seen[0] for each in seen)
    assert len({size for _, size, _ in seen[0]}) > 1


def test_a_bucket_ends_once_it_has_its_size_and_where_the_type_changes(group_of_one: dist.ProcessGroup) -> None:
    floats = [nn.Parameter(torch.zeros(10)) for _ in range(5)]
    assert bucket_sizes(floats, group_of_one, 80) == [20, 20, 10]
    assert bucket_sizes(floats, group_of_one, 1) == [10] * 5
    assert bucket_sizes(floats, group_of_one, 10**6) == [50]
    mixed = [*floats[:2], nn.Parameter(torch.zeros(7, dtype=torch.float64)), floats[2]]
    assert bucket_sizes(mixed, group_of_one, 10**6) == [10, 7, 20]


def test_earlier_micro_batches_only_add_up_and_the_sum_waits_for_the_last(group_of_one: dist.ProcessGroup) -> None:
    model = Branches()
    reducer = Reducer(model.parameters(), group_of_one, SMALL_BUCKET_BYTES)
    reducer.open()
    for _ in range(3):
        model(1.0, "abcde").backward()
    assert all(not bucket.any() for bucket in reducer.buckets)
    reducer.arm()
    model(1.0, "abcde").backward()
    reducer.close()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, 8 * parameter.detach(), rtol=1e-14, atol=0)


def test_a_tied_weight_counts_both_its_uses(group_of_one: dist.ProcessGroup) -> None:
    """An embedding that is also the head is reached twice by backward, and its hook must see the whole gradient."""
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))
    grads = []
    for reduced in (False, True):
        model = GPT(SHAPE).double()
        initialize(model, 1)
        reducer = Reducer(model.parameters(), group_of_one, 256) if reduced else None
        if reducer:
            reducer.open()
            reducer.arm()
        model.logits(model(tokens)).pow(2).sum().backward()
        if reducer:
            reducer.close()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, summed in zip(*grads, strict=True):
        torch.testing.assert_close(summed, plain, rtol=1e-13, atol=0)
