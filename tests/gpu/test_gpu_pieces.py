"""What passes through a GPU in pieces: a checkpoint's bytes, the loss's logits, gradients in buckets of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.host_bytes import PIECE_BYTES, host_bytes
from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import read_tensor, whole_slice, write_rank
from plait.parallel.reduction import transfer_stream
from plait.trainer.loss import even_pieces, sum_of_losses
from plait.trainer.score_passes import FusedPasses, InPlacePasses
from tests.gpu.conftest import RunRanks
from tests.gpu.test_gpu_kernels import compiler_for, drawn, relative_error
from tests.trainer.tiny import make_tiny

BUCKET_MIB = (8, 25, 64)
LOGITS_AT_ONCE = 2**27


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 5])
def test_bytes_come_from_the_device_in_order(device: torch.device, size: int) -> None:
    """Through two pinned buffers on a GPU, of which one is filled while the other is read."""
    numbers = torch.arange(size, dtype=torch.int64).mul_(2654435761).to(torch.uint8)
    found = b"".join(bytes(piece) for piece in host_bytes(numbers.to(device)))
    assert found == numbers.numpy().tobytes()


def test_a_checkpoint_of_device_tensors_reads_back_to_the_bit(device: torch.device, tmp_path: Path) -> None:
    tensors = {
        "model/wide": drawn(device, 3 * PIECE_BYTES // 4 + 1),
        "model/turned": drawn(device, 64, 96).t(),
        "model/half": drawn(device, 1000).bfloat16(),
        "tokens": torch.tensor([7], device=device),
    }
    staging, final = staging_for(tmp_path, 1), checkpoint_for(tmp_path, 1)
    write_rank(staging, 0, {name: whole_slice(tensor) for name, tensor in tensors.items()})
    manifest = publish(staging, final, step=1, cursor=0, model={}, world_size=1)
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(final, manifest, name), tensor.cpu()), name


@pytest.mark.slow
def test_the_compiled_loss_is_the_loss_in_three_graphs_and_one_piece(device: torch.device) -> None:
    """Where two pieces are wanted, the memory of one is taken: on a GPU 2 bytes for a logit, and 2 for its gradient."""
    tokens, width, entries = (10_000, 64, 20_000) if device.type == "cuda" else (96, 64, 40_000)
    hidden = drawn(device, tokens, width).bfloat16().requires_grad_()
    head = drawn(device, entries, width, seed=6).requires_grad_()
    targets = torch.randint(0, entries, (tokens,), generator=torch.Generator().manual_seed(7)).to(device)
    targets[::5] = -100
    counter = compiler_for(device)
    fused = FusedPasses(lambda function: torch.compile(function, dynamic=False, fullgraph=True, backend=counter))
    plain, plain_grads, _ = loss_and_gradients(hidden, head, targets, InPlacePasses())
    loss_and_gradients(hidden, head, targets, fused)
    found, grads, peak = loss_and_gradients(hidden, head, targets, fused)
    assert counter.frame_count == 3
    assert relative_error(found, plain) < 1e-3
    for one, other in zip(grads, plain_grads, strict=True):
        assert relative_error(one, other) < 2e-2
    if device.type == "cuda":
        assert len(even_pieces(tokens, LOGITS_AT_ONCE // entries)) == 2
        others = 4 * head.nbytes + 3 * hidden.nbytes  # the head in bf16 and a product, its gradient, a cast of it
        assert peak < 1.1 * (4 * LOGITS_AT_ONCE + others)


def loss_and_gradients(
    hidden: Tensor, head: Tensor, targets: Tensor, passes: InPlacePasses | FusedPasses
) -> tuple[Tensor, tuple[Tensor, ...], int]:
    """The loss, the gradients of both, and the bytes that a GPU held at most beside what was there."""
    on_gpu = hidden.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    loss = sum_of_losses(hidden, head, targets, passes=passes)
    grads = torch.autograd.grad(loss, (hidden, head))
    return loss.detach(), grads, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def test_transfers_beside_the_arithmetic_see_its_results_and_are_seen(device: torch.device) -> None:
    """The stream for transfers comes after what was computed before it, and what is computed next comes after it."""
    side, numbers = transfer_stream(device), torch.zeros(1 << 22, device=device)
    for number in range(20):
        numbers += 1
        with side.after_compute():
            numbers *= 2
        side.join()
        numbers -= number
    wanted = 0
    for number in range(20):
        wanted = 2 * (wanted + 1) - number
    assert torch.equal(numbers, torch.full_like(numbers, float(wanted)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_a_bucket_s_size_changes_no_number(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device, layout: str
) -> None:
    """Two ranks; what each size costs, only two GPUs can tell: benchmarks/gpu_settings.py."""
    keys = ("layout.replicate=2",) if layout == "replicate" else ("layout.replicate=1", "layout.shard=2")
    make_tiny(tmp_path, *keys, device=device.type, precision="float32")
    told: list[dict[str, Any]] = []
    for mebibytes in (0, *BUCKET_MIB):
        asked = json.dumps({"folder": str(tmp_path), "steps": 3, "bucket_bytes": mebibytes << 20 or 3000})
        told.append(run_ranks("take_steps", asked, 2)[0])
    for one in told[1:]:
        assert one["losses"] == pytest.approx(told[0]["losses"], rel=1e-5)
        assert one["norms"] == pytest.approx(told[0]["norms"], rel=1e-4)


@pytest.mark.gpu
def test_a_transfer_waits_for_gradients_of_two_streams() -> None:
    """As FSDP2 adds those of split weights on a stream of its own, and autograd those of whole experts on the main
    one."""
    device = torch.device("cuda", torch.cuda.current_device())
    side, own = transfer_stream(device), torch.cuda.Stream(device)
    late, soon = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(own):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        late += 1
        side.arrived()
    soon += 1
    side.arrived()
    with side.after_compute():
        seen = torch.stack([late.min(), soon.min()])
    side.join()
    assert seen.tolist() == [1, 1]
