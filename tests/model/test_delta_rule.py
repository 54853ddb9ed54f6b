"""Linear attention by chunks is what it is token by token, and documents never see each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.model.attention import Documents
from plait.model.delta_rule import convolve, delta_rule, delta_step
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.shape import ModelShape

SHAPE = ModelShape(
    layers=3, width=24, heads=3, kv_heads=1, head_width=8, ffn=40, vocabulary=31, sequence=40, qk_norm=True,
    attention_gate=True, norm_weight="one plus",
    delta=DeltaAttentionShape(layers=(0, 2), key_heads=2, value_heads=4, key_width=6, value_width=5, taps=4),
)  # fmt: skip


def drawn(tokens: int) -> list[Tensor]:
    """Queries, keys, values, decays and writes of two rows and three heads."""
    numbers = torch.Generator().manual_seed(2)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(2, tokens, 3, *sizes, generator=numbers, dtype=torch.float64)

    q, k, v, decay, write = draw(6), draw(6), draw(5), draw(), draw()
    made = [torch.nn.functional.normalize(one, dim=-1) for one in (q, k)]
    return [one.requires_grad_() for one in (*made, v, -decay.exp(), write.sigmoid())]


def one_by_one(inputs: list[Tensor], document_bt: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.zeros(2, 3, 6, 5, dtype=torch.float64)
    found = []
    for t in range(inputs[0].shape[1]):
        goes_on = document_bt[:, t] == document_bt[:, max(t - 1, 0)]
        one = [x[:, t] for x in inputs]
        read, state = delta_step(one[0], one[1], one[2], one[3], one[4], state * goes_on[:, None, None, None])
        found.append(read)
    return torch.stack(found, dim=1), state


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 4), (7, 4), (8, 4), (13, 64), (30, 4)])
def test_chunks_are_what_single_tokens_are_with_their_gradients(tokens: int, chunk: int) -> None:
    inputs = drawn(tokens)
    starts = torch.rand(2, tokens, generator=torch.Generator().manual_seed(tokens)) < 0.2
    for document_bt in (torch.zeros(1, tokens, dtype=torch.long), starts.cumsum(1)):
        whole = document_bt.expand(2, -1)
        wanted, found = one_by_one(inputs, whole), delta_rule(*inputs, document_bt, chunk)  # pyright: ignore
        weight = torch.randn(wanted[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        grads = [torch.autograd.grad((one[0] * weight).sum() + one[1].sum(), inputs) for one in (found, wanted)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_convolution_reads_its_document_alone() -> None:
    x = torch.randn(1, 6, 2, dtype=torch.float64)
    taps = torch.randn(2, 3, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    both = convolve(x, taps, positions)
    for part in (slice(0, 3), slice(3, 6)):
        alone = convolve(x[:, part], taps, torch.tensor([[0, 1, 2]]))
        torch.testing.assert_close(both[:, part], alone, rtol=0, atol=1e-14)
    torch.testing.assert_close(both[0, 2], x[0, 0] * taps[:, 0] + x[0, 1] * taps[:, 1] + x[0, 2] * taps[:, 2])


def test_documents_never_see_each_other() -> None:
    model = GPT(SHAPE).double()
    initialize(model, 3)
    for name, taps in model.named_parameters():
        if name.endswith("_taps"):
            torch.nn.init.normal_(taps, generator=torch.Generator().manual_seed(4))
    tokens_bt = torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(1))
    lengths = (7, 13, 20)
    positions_bt = torch.stack([torch.tensor([*range(7), *range(13)]), torch.arange(20)])
    with torch.no_grad():
        together = model(tokens_bt, positions_bt, Documents(lengths))
        parts = [tokens_bt[:1, :7], tokens_bt[:1, 7:], tokens_bt[1:]]
        apart = torch.cat([model(part) for part in parts])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
