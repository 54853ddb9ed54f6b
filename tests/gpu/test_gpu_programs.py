"""People's own programs on one GPU: plain torch's numbers there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from tests.custom.kind import mlp, numbers, squared, trained_by_spread, trained_by_torch, whole_batches
from tests.custom.kinds import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_has_the_numbers_of_plain_torch(kind: str) -> None:
    losses, weights = trained_by_torch(KINDS[kind], whole_batches(KINDS[kind]))
    found, ours = trained_by_spread(KINDS[kind], "replicate")
    assert found == pytest.approx(losses, abs=1e-9)
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        assert ours[name].is_cuda
        assert float((ours[name] - weight).abs().max()) < 1e-9, name


def test_float16_scales_as_grad_scaler_does() -> None:
    """With steps that are skipped: the first scale is too large for this loss."""
    torch.manual_seed(3)
    model, plain = mlp().cuda(), mlp().cuda()
    plain.load_state_dict(model.state_dict())
    data = [(20 * x.float(), 20 * y.float()) for x, y in numbers(5, examples=48)]
    optimizer, usual = (torch.optim.SGD(one.parameters(), lr=1e-4) for one in (model, plain))
    run = plait.spread(model, optimizer, loss_sum=squared, precision="fp16", clip=1.0)
    scaler = torch.amp.GradScaler("cuda")
    for batch in run.batches(data, batch=6, order="given", epochs=4):
        loss = run.step(batch)
        usual.zero_grad()
        with torch.autocast("cuda", torch.float16):
            total, count = squared(plain, batch)
        scaler.scale(total / count).backward()
        scaler.unscale_(usual)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(usual)
        scaler.update()
        assert float(loss) == pytest.approx(float(total / count), rel=2e-2)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-4)
