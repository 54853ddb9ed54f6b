"""The reducer: sums and never means, in buckets that names and sizes alone decide, whole or split."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.names import decays
from plait.model.shape import ModelShape
from plait.parallel.gradient_buckets import LAST_BYTES, RankSet, SharedWeight, fill_buckets
from plait.parallel.gradient_reducer import GradientReducer, GradientRoom
from plait.partition.boxes import whole_box
from plait.planner.step_time import gradient_sync
from tests.matrix import few_fast
from tests.parallel.reduce_entries import NAMES, SMALL_BUCKET_BYTES, Branches, shared

SHAPE = ModelShape(layers=2, width=16, heads=2, kv_heads=2, head_width=8, ffn=32, vocabulary=50, sequence=8, tied=True)
TWO: RankSet = (0, 1)


@pytest.mark.parametrize("workers", few_fast([1, 2, 3], 3))
def test_gradients_are_sums_whatever_order_backward_takes_on_each_rank(reduce_on, tmp_path: Path, workers: int) -> None:
    reduce_on("reduce_branches", workers, json.dumps({"folder": str(tmp_path)}))
    weights = {name: p.detach() for name, p in Branches().named_parameters()}
    for step in (1, 2):
        ranks = [load_file(tmp_path / f"step-{step}-rank-{rank}.safetensors") for rank in range(workers)]
        for name, weight in weights.items():
            for found in ranks:
                wanted = gradient(name, weight, step, workers)
                torch.testing.assert_close(found.get(name, torch.zeros(())), wanted, rtol=1e-14, atol=0)


def gradient(name: str, weight: Tensor, step: int, workers: int) -> Tensor:
    """Only rank 0 ever reaches c; on the others it counts as zero."""
    return 2 * (1 + 10 * step) * (1 if name == "c" else workers) * weight


@pytest.mark.parametrize(
    ("workers", "split", "bucket_bytes"), [(2, 2, 64), (3, 3, 64), (4, 4, 1), (4, 2, 64), (4, 2, 10**6), (4, 4, 10**6)]
)
def test_split_buckets_update_every_weight_once(
    reduce_on, tmp_path: Path, workers: int, split: int, bucket_bytes: int
) -> None:
    """Also where a bucket has fewer numbers than there are ranks, and where other ranks keep the same part."""
    asked = {"folder": str(tmp_path), "split": split, "bucket_bytes": bucket_bytes}
    told = reduce_on("split_branches", workers, json.dumps(asked))
    found = [load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(workers)]
    owned: Counter[str] = Counter()
    for rank in range(workers):
        for name, numbers in told[rank]["parts"]:
            owned[name] += numbers
    for name, parameter in Branches().named_parameters():
        weight = parameter.detach()
        for step in (1, 2):
            weight = weight - 0.01 * gradient(name, weight, step, workers)
        for rank in range(workers):
            torch.testing.assert_close(found[rank][name], weight, rtol=1e-13, atol=0)
            assert torch.equal(found[rank][name], found[0][name]), "ranks must hold the same bits"
        assert owned[NAMES[name]] == weight.numel(), "each number has one owner"
    sizes = told[0]["buckets"]
    assert all(size % split == 0 for size in sizes) and sum(sizes) >= 94
    assert len(sizes) == {1: 5, 64: 4, 10**6: 2}[bucket_bytes]


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
        reducer = as_if_two(model, group_of_one)
        for order in (names, "cabed"):
            reducer.open()
            reducer.arm(0)
            model(3.0, order).backward()
            reducer.close()
            seen.append(places(model))
    assert all(each == seen[0] for each in seen)
    assert len({size for _, size, _ in seen[0]}) > 1


def as_if_two(
    model: nn.Module,
    group: dist.ProcessGroup,
    bucket_bytes: int = SMALL_BUCKET_BYTES,
    room: GradientRoom = "added",
) -> GradientReducer:
    """A reducer whose weights are shared by two, where a group of one stands for them."""
    return GradientReducer(shared(model, TWO), {TWO: group}, bucket_bytes=bucket_bytes, room=room)


class WrittenNumbers(TorchDispatchMode):
    """Counts the numbers that are set to zero, added to or copied in place, as passes over buckets are."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.zero_, torch.ops.aten.add_, torch.ops.aten.copy_):
            self.counts[func.overloadpacket.__name__] += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_gradient_that_is_moved_passes_memory_once_and_one_that_nobody_reached_is_zero(
    group_of_one: dist.ProcessGroup,
) -> None:
    model = Branches()
    reducer, numbers = as_if_two(model, group_of_one, room="moved"), sum(p.numel() for p in model.parameters())
    for names in ("abcde", "ca"):
        reducer.open()
        reducer.arm(0)
        with WrittenNumbers() as written:
            model(3.0, names).backward()
            reducer.close()
        reached = sum(model.get_parameter(name).numel() for name in names)
        assert dict(written.counts) == {"copy_": reached} | ({"zero_": numbers - reached} if reached < numbers else {})
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad._base is not None
            assert torch.equal(parameter.grad, 6 * parameter.detach() * (name in names))
    reducer.open()
    for last in (False, True):
        if last:
            reducer.arm(0)
        model(1.0, "abcde").backward()
    reducer.close()
    assert all(p.grad is not None and torch.equal(p.grad, 4 * p.detach()) for p in model.parameters())


def weights(
    *sizes: int, ranks: RankSet = TWO, dtype: torch.dtype = torch.float32, name: str = "head.weight"
) -> list[SharedWeight]:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    return [
        SharedWeight(name=name, parameter=p, box=whole_box(p.shape), chunk=0, ranks=ranks, decays=decays(name))
        for p in parameters
    ]


def test_a_bucket_ends_once_it_has_its_size() -> None:
    floats = weights(10, 10, 10, 10, 10)
    assert fill_buckets(floats, 1, 80) == [[0, 1], [2, 3], [4]]
    assert fill_buckets(floats, 1, 1) == [[0], [1], [2], [3], [4]]
    assert fill_buckets(floats, 1, 10**6) == [[0, 1, 2, 3, 4]]


def test_buckets_shrink_towards_the_end_of_the_backward_pass() -> None:
    quarter = LAST_BYTES // 16  # numbers of a weight that is a quarter as large
    sizes = [len(bucket) for bucket in fill_buckets(weights(*[quarter] * 64), 1)]
    assert sizes == [32, 16, 8, 4, 4], "8 MiB, then half of what is left, and never less than 1 MiB but for the rest"
    assert [len(bucket) for bucket in fill_buckets(weights(*[quarter] * 3), 1)] == [3]
    assert gradient_sync.LAST_BUCKET_BYTES == LAST_BYTES, "what the planner counts with"


def test_a_bucket_holds_one_type_one_group_and_where_it_is_split_one_decay() -> None:
    floats = weights(10, 10)
    doubles, others = weights(7, dtype=torch.float64), weights(5, ranks=(0, 2))
    bias = weights(10, name="layers.0.attention.q.bias")
    assert fill_buckets([*floats[:1], *doubles, *floats[1:]], 1, 10**6) == [[1], [0, 2]]
    assert fill_buckets([*floats[:1], *others, *floats[1:]], 1, 10**6) == [[1], [0, 2]]
    assert fill_buckets([*floats[:1], *bias, *floats[1:]], 1, 10**6) == [[0, 1, 2]]
    assert fill_buckets([*floats[:1], *bias, *floats[1:]], 2, 10**6) == [[1], [0, 2]]


def test_what_nobody_shares_has_no_bucket_unless_it_is_split() -> None:
    mine = weights(10, 10, ranks=(3,))
    assert fill_buckets(mine, 1, 10**6) == []
    assert fill_buckets(mine, 2, 10**6) == [[0, 1]]
    whole = [replace(one, split=(3,)) for one in mine]  # an expert's, where `shard` splits all else
    assert fill_buckets(whole, 2, 10**6) == []
    apart = [replace(one, split=(3, 5)) for one in mine]
    assert fill_buckets([mine[0], apart[1]], 2, 10**6) == [[0], [1]]


def test_earlier_micro_batches_only_add_up_and_the_sum_waits_for_the_last(group_of_one: dist.ProcessGroup) -> None:
    model = Branches()
    reducer, sums = as_if_two(model, group_of_one), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda *tensors, begin=dist.all_reduce, **how: sums.append(1) or begin(*tensors, **how)
        )
        reducer.open()
        for _ in range(3):
            model(1.0, "abcde").backward()
        assert not sums
        reducer.arm(0)
        model(1.0, "abcde").backward()
        assert sums
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
        reducer = as_if_two(model, group_of_one, 256) if reduced else None
        if reducer:
            reducer.open()
            reducer.arm(0)
        model.logits(model(tokens)).pow(2).sum().backward()
        if reducer:
            reducer.close()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, summed in zip(*grads, strict=True):
        torch.testing.assert_close(summed, plain, rtol=1e-13, atol=0)
