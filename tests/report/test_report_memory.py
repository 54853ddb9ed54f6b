"""The peak of live tensors against cases whose peak is known by arithmetic."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.report.memory import LiveTensorPeak

CPU = torch.device("cpu")
N = 1000
FLOAT = 4


def test_nothing_is_nothing_and_roots_count_from_the_start():
    with LiveTensorPeak(CPU) as peak:
        pass
    assert peak.bytes == 0
    one, other = torch.zeros(N), torch.zeros(2 * N)
    with LiveTensorPeak(CPU, [one, other, other[5:]]) as peak:
        pass
    assert peak.bytes == 3 * N * FLOAT


def test_views_are_free_and_copies_are_not():
    base = torch.zeros(N, 4)
    with LiveTensorPeak(CPU, [base]) as peak:
        base.t()[1:].view(3, N).add_(1)
    assert peak.bytes == 4 * N * FLOAT
    with LiveTensorPeak(CPU, [base]) as peak:
        base.t().contiguous()
    assert peak.bytes == 8 * N * FLOAT


def test_what_is_freed_makes_room_again():
    with LiveTensorPeak(CPU) as peak:
        for _ in range(10):
            torch.zeros(N)
    assert peak.bytes <= 2 * N * FLOAT
    with LiveTensorPeak(CPU) as peak:
        kept = [torch.zeros(N) for _ in range(10)]
    assert peak.bytes == len(kept) * N * FLOAT


def test_a_chain_of_operations_holds_two_at_a_time():
    start = torch.zeros(N)
    with LiveTensorPeak(CPU, [start]) as peak, torch.no_grad():
        value = start
        for _ in range(5):
            value = value + 1
    # The start, and while one sum is made from the one before it, both of them.
    assert peak.bytes == 3 * N * FLOAT


def test_backward_counts_saved_activations_and_gradients():
    leaf = torch.zeros(N, requires_grad=True)
    with LiveTensorPeak(CPU, [leaf]) as peak:
        leaf.exp().sum().backward()
    # At the multiplication of backward: the leaf, exp's saved result, and the gradient; beside them the loss and the
    # one that backward starts from, which sum's backward only expands.
    assert peak.bytes == 3 * N * FLOAT + 2 * FLOAT
    assert leaf.grad is not None


def test_a_linear_layer_by_hand():
    batch, width = 64, 256
    layer, x = nn.Linear(width, width, bias=False), torch.randn(batch, width)
    weight, rows = width * width * FLOAT, batch * width * FLOAT
    with LiveTensorPeak(CPU, [*layer.parameters(), x]) as peak:
        layer(x).sum().backward()
    # In backward: weight, input and the weight's new gradient; the output died with `sum`, which saves no values.
    assert peak.bytes == 2 * weight + rows + 2 * FLOAT


def test_optimizer_state_is_seen_when_it_is_made():
    weight = nn.Parameter(torch.zeros(N))
    optimizer = torch.optim.AdamW([weight], fused=True)
    with LiveTensorPeak(CPU, [weight]) as peak:
        F.mse_loss(weight, torch.ones(N)).backward()
        optimizer.step()
    # At least weight, gradient and two moments stand together at the end.
    assert peak.bytes >= 4 * N * FLOAT
    assert peak.bytes <= 6 * N * FLOAT


def test_a_storage_that_grows_in_place_is_counted_anew():
    value = torch.zeros(N)
    with LiveTensorPeak(CPU, [value]) as peak:
        value.resize_(3 * N)
    assert peak.bytes == 3 * N * FLOAT


def test_tensors_of_another_device_are_not_counted():
    with LiveTensorPeak(CPU) as peak:
        torch.zeros(N, device="meta") + 1
    assert peak.bytes == 0


def test_watching_changes_no_result():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    model(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with LiveTensorPeak(CPU, model.parameters()):
        model(x).sum().backward()
    watched = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, plain, watched))


def test_an_exception_inside_comes_out_and_the_peak_is_kept():
    peak = LiveTensorPeak(CPU)
    with pytest.raises(KeyError), peak:
        torch.zeros(N)
        raise KeyError
    assert peak.bytes == N * FLOAT
    torch.zeros(2 * N)
    assert peak.bytes == N * FLOAT


def test_resident_memory_grows_with_what_is_touched():
    """In a process of its own: this one may have touched gigabytes before."""
    script = """
import torch
from plait.report.memory import peak_rss_bytes
before = peak_rss_bytes()
assert before > 50e6
torch.ones(2 * before // 4)
assert peak_rss_bytes() >= 2 * before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_allocator_is_asked():
    device = torch.device("cuda", 0)
    kept = torch.zeros(2**20, device=device)
    with LiveTensorPeak(device) as peak:
        torch.zeros(2**21, device=device)
    assert peak.bytes >= 3 * 2**20 * FLOAT
    assert peak.bytes <= torch.cuda.memory_allocated(device) + 2**21 * FLOAT + kept.nbytes
