"""What is seen of a model's forward pass: dropout becomes the identity, and what draws numbers is named."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.custom.program import Program
from plait.custom.verifying.observed import WithoutDropout, observe


class Everywhere(nn.Module):
    """Dropout as a layer, as a function, inside of an LSTM and inside of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.3)
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.rnn(F.dropout(self.layer(inputs), 0.3, self.training))[0]
        return self.attention(x, x, x)[0]


def test_dropout_of_every_kind_is_the_identity_in_forward_and_backward() -> None:
    torch.manual_seed(0)
    model, inputs = Everywhere().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    wanted = gradients(model.eval(), inputs)
    with WithoutDropout() as mode:
        found = gradients(model.train(), inputs)
    assert mode.drops >= 4
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
    assert not torch.equal(gradients(model, inputs)[0], wanted[0])


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(inputs).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_the_innermost_layer_that_draws_is_named_and_calls_are_in_order() -> None:
    class Drawing(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + torch.rand_like(inputs)

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), Drawing()), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = Program(models=(model,), optimizers=(optimizer,), losses=(lambda model, batch: (model(batch).sum(), 1),))
    with observe(program) as seen:
        program.loss_sum(0, torch.ones(3, 2))
    assert seen.random_layers == ["1.1"] and seen.drops == 1
    assert [call.layer for call in seen.calls] == ["0", "1.0", "1.1", "1", "2", ""]
    assert {call.numbers for call in seen.calls} == {6}
    model(torch.ones(3, 2))
    assert len(seen.calls) == 6, "the hooks are gone"
