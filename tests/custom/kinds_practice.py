"""Programs as they stand in papers' and examples' repositories: agents, averages of weights, adapters, mixtures, routed
layers. What they draw follows from examples, so that it is the same whoever draws it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, Dataset

from tests.custom.kind import EXAMPLES, Kind, in_order, mlp, numbers
from tests.custom.kinds_models import noise, plain_steps, words
from tests.custom.kinds_training import CUT, simple


class Kept(Dataset[Any]):
    """Examples, and which of two residual branches each keeps: stochastic depth, drawn with the data."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, position: int) -> Any:
        x, y = numbers(5)[position]
        return x, y, (torch.rand(2) < 0.7).double()


class StochasticDepth(nn.Module):
    """DropPath: a branch that an example does not keep adds nothing, and counts more where it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.leave = nn.Linear(5, 3)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        for number, branch in enumerate(self.branches):
            x = x + branch(x) * kept[:, number : number + 1] / 0.7
        return self.leave(x)


def of_kept(model: Any, batch: Any) -> tuple[Tensor, int]:
    return ((model(batch[0], batch[2]) - batch[1]) ** 2).sum(), batch[1].numel()


class Agent(nn.Module):
    """A policy over three actions, its value, and what it remembers between steps: no parameter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)
        self.register_buffer("remembered", torch.zeros(EXAMPLES))
        self.baseline = 0.0

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.tanh(self.body(states))
        return self.policy(found).log_softmax(1), self.value(found)[:, 0]


def played() -> Any:
    """States with what was done in them, what came of it, and their number."""
    return [(x, y.argmax(), y.sum(), position) for position, (x, y) in enumerate(numbers(5))]


def remember(model: Any, optimizer: Any, step: int) -> None:
    """A new rollout every third step: the old policy's log-probabilities of all that was done."""
    if step % 3 == 0:
        device = next(model.parameters()).device
        states = torch.stack([one[0] for one in played()]).to(device)
        done = torch.stack([one[1] for one in played()]).to(device)
        with torch.no_grad():
            model.remembered.copy_(model(states)[0].gather(1, done[:, None])[:, 0])


def clipped_surrogate(model: Any, batch: Any) -> tuple[Tensor, int]:
    """PPO's: several steps over one rollout."""
    states, done, returns, position = batch
    logs, values = model(states)
    ratio = (logs.gather(1, done[:, None])[:, 0] - model.remembered[position]).exp()
    gain = returns - values.detach()
    policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    entropy = -(logs.exp() * logs).sum(1)
    return (policy + 0.5 * (values - returns) ** 2 - 0.01 * entropy).sum(), len(done)


def play(model: Any, optimizer: Any, step: int) -> None:
    """The environment's turn between two steps: the present policy plays all states, whose mean reward is the
    baseline."""
    states = torch.stack([x for x, _ in numbers(5)]).to(next(model.parameters()).device)
    with torch.no_grad():
        chosen = (model(states)[0] + noise(states[:, :3])).argmax(1)
    model.baseline = 0.9 * model.baseline + 0.1 * float(chosen.double().mean())


def reinforce(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Actions drawn by the policy (by noise of the state's own), and their rewards beside the baseline."""
    logs, _ = model(batch[0])
    chosen = (logs.detach() + noise(batch[0][:, :3])).argmax(1)
    reward = batch[1].gather(1, chosen[:, None])[:, 0] - model.baseline
    return -(logs.gather(1, chosen[:, None])[:, 0] * reward).sum(), len(chosen)


def average_late(model: Any, optimizer: Any, step: int) -> None:
    """torch's stochastic weight averaging from the second step on, whose average is taken in the last one."""
    if step == 1:
        object.__setattr__(model, "averaged", AveragedModel(model))  # no part of the model
    if step >= 1:
        model.averaged.update_parameters(model)
    if step == 4:
        with torch.no_grad():
            for own, average in zip(model.parameters(), model.averaged.module.parameters(), strict=True):
                own.copy_(average)


class Byol(nn.Module):
    """Bootstrap your own latent: a predictor of what a slow copy makes of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predicts = mlp(), nn.Linear(3, 3)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x + 0.1 * noise(x), x - 0.1 * noise(x)
        found = F.normalize(self.predicts(self.online(one)), dim=1)
        with torch.no_grad():
            wanted = F.normalize(self.slow(other), dim=1)
        return (2 - 2 * (found * wanted).sum(1)).sum()


def follow_slowly(model: Any, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        for slow, fast in zip(model.slow.parameters(), model.online.parameters(), strict=True):
            slow.lerp_(fast, 0.05)


def as_it_is(model: Any, batch: Any) -> tuple[Tensor, int]:
    return model(batch[0]), len(batch[0])


class Temperature(nn.Module):
    """Classes at a temperature that is learned, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.temperature = mlp(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) / F.softplus(self.temperature)


def classes(model: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1].argmax(1), reduction="sum"), len(batch[0])


class Tasks(nn.Module):
    """Two tasks whose weights are learned (Kendall, Gal and Cipolla): a single number each."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.first, self.second = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(-0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inside(x), self.first, self.second


def by_uncertainty(model: Any, batch: Any) -> Any:
    found, first, second = model(batch[0])
    there = batch[1][:, 2] > 0
    regression = ((found[:, :2] - batch[1][:, :2]) ** 2).sum()
    classified = F.binary_cross_entropy_with_logits(found[there, 2], batch[1][there, 0].sigmoid(), reduction="sum")
    pairs = ((regression, first, 2 * len(found)), (classified, second, int(there.sum())))
    return tuple(((-weight).exp() * total + weight * count, count) for total, weight, count in pairs)


class Adapter(nn.Module):
    """LoRA by hand: a frozen layer and two small factors beside it."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.inside = inside.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, inside.in_features))
        self.up = nn.Parameter(torch.zeros(inside.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + 2.0 * (x @ self.down.T @ self.up.T)


def adapted() -> nn.Module:
    return nn.Sequential(Adapter(nn.Linear(5, 8)), nn.Tanh(), Adapter(nn.Linear(8, 3)))


def of_trained(model: Any) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


class FrozenNorm(nn.Module):
    """A backbone whose BatchNorm stays in evaluation mode while it is fine-tuned, as detectors have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.body[1].running_mean += 0.3  # type: ignore[operator]
        self.train()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Masked(nn.Module):
    """torch's own attention with padding that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, padding_idx=0)
        self.attention, self.leave = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 11)

    def forward(self, texts: Tensor) -> Tensor:
        x = self.table(texts)
        found, _ = self.attention(x, x, x, key_padding_mask=texts == 0, need_weights=False)
        return self.leave(x + found)


def next_of(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    texts, following = batch
    texts = texts * (texts != 7)  # some places are padding
    texts[:, 0] = 1
    total = F.cross_entropy(model(texts).transpose(1, 2), following, reduction="sum", ignore_index=3)
    return total, (following != 3).sum()


class Packed(nn.Module):
    """A bidirectional LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(11, 4), nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.leave = nn.Linear(6, 11)

    def forward(self, texts: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(texts), lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=texts.shape[1])
        return self.leave(found)


def with_lengths() -> Any:
    return [(x, y, 2 + position % 5) for position, (x, y) in enumerate(words())]


def of_lengths(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    texts, following, lengths = batch
    there = torch.arange(texts.shape[1], device=texts.device) < lengths[:, None]
    each = F.cross_entropy(model(texts, lengths).transpose(1, 2), following, reduction="none")
    return (each * there).sum(), there.sum()


class MixtureDensity(nn.Module):
    """Three Gaussians for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shares, means, widths = self.inside(x).split(3, 1)
        logs = torch.distributions.Normal(means, F.softplus(widths) + 0.1).log_prob(y)
        return -(shares.log_softmax(1) + logs).logsumexp(1)


def unlikelihood(model: Any, batch: Any) -> tuple[Tensor, int]:
    return model(batch[0], batch[1][:, :1]).sum(), len(batch[0])


class Routed(nn.Module):
    """Each example goes through the one expert that its router likes most: some experts see nothing of a share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(1).max(1)
        found = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                found = found.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return found


class RoutedBlocks(nn.Module):
    """The same as a row of blocks, each of which is gathered as one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.between = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return second(torch.tanh(self.between(first(x))))


class Adaptive(nn.Module):
    """torch's adaptive softmax, whose rare words have weights of their own that few examples reach."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(6, 11, [3, 7], div_value=2.0)

    def forward(self, texts: Tensor, following: Tensor) -> Tensor:
        found, _ = self.head(self.table(texts).flatten(0, 1), following.flatten())
        return -found.sum()


def adaptive(model: Any, batch: Any) -> tuple[Tensor, int]:
    return model(*batch), batch[1].numel()


class Reverse(torch.autograd.Function):
    """Lets values through and turns gradients round: domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -0.5 * gradients[0]


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.tanh(self.body(x))
        return self.label(found), self.domain(Reverse.apply(found))[:, 0]  # type: ignore[arg-type]


def of_domains(model: Any, batch: Any) -> tuple[Tensor, int]:
    labels, domain = model(batch[0])
    side = (batch[0][:, 0] > 0).double()
    adversary = F.binary_cross_entropy_with_logits(domain, side, reduction="sum")
    return F.cross_entropy(labels, batch[1].argmax(1), reduction="sum") + adversary, len(side)


class Codebook(nn.Module):
    """A vector-quantized autoencoder with gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.codes = nn.Linear(5, 4), nn.Linear(4, 3), nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.enter(x)
        nearest = self.codes(torch.cdist(found.detach(), self.codes.weight.detach()).argmin(1))
        apart = ((nearest - found.detach()) ** 2).sum() + 0.25 * ((found - nearest.detach()) ** 2).sum()
        return self.leave(found + (nearest - found).detach()), apart


def quantized(model: Any, batch: Any) -> tuple[Tensor, int]:
    found, apart = model(batch[0])
    return ((found - batch[1]) ** 2).sum() + apart, len(found)


class OverAndOver(nn.Module):
    """One layer that runs four times: a universal transformer, or an equilibrium that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(4):
            x = x + self.layers[0](x)
        return self.leave(x)


class Hyper(nn.Module):
    """A net that makes the weights of another one for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 18))

    def forward(self, x: Tensor) -> Tensor:
        weights, shift = self.makes(x).split((15, 3), 1)
        return torch.einsum("noi,ni->no", weights.view(-1, 3, 5), x) + shift


def learned_to_learn(model: Any, batch: Any) -> tuple[Tensor, int]:
    """MAML: the loss of each example after a step on its own first half, differentiated through that step."""
    total = batch[0].new_zeros(())
    names, weights = zip(*model.named_parameters(), strict=True)
    for x, y in zip(*batch, strict=True):
        before = ((model(x[None]) - y[None]) ** 2)[:, :2].sum()
        slopes = torch.autograd.grad(before, weights, create_graph=True)
        moved = {name: one - 0.05 * slope for name, one, slope in zip(names, weights, slopes, strict=True)}
        total = total + ((functional_call(model, moved, (x[None],)) - y[None]) ** 2).sum()
    return total, len(batch[0])


def clipped_by_example(model: Any, batch: Any) -> tuple[Tensor, int]:
    """DP-SGD: no example's gradient is longer than 0.5."""
    weights, total = list(model.parameters()), batch[0].new_zeros(())
    for x, y in zip(*batch, strict=True):
        own = ((model(x[None]) - y[None]) ** 2).sum()
        slopes = torch.autograd.grad(own, weights, retain_graph=True)
        length = torch.stack([slope.norm() for slope in slopes]).norm()
        total = total + own * (0.5 / length).clamp(max=1.0)
    return total, len(batch[0])


def pruned() -> nn.Module:
    """torch's own pruning: a mask, and the weight made of it before each call."""
    model = mlp()
    prune.random_unstructured(model[0], "weight", amount=0.4)  # type: ignore[index, arg-type]
    return model


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


def compiled() -> Any:
    return torch.compile(mlp(), backend="aot_eager")


class Annealed(nn.Module):
    """A weight of a term that grows with the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.share = mlp(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def anneal(model: Any, optimizer: Any, step: int) -> None:
    model.share = min(1.0, step / 3)


def annealed(model: Any, batch: Any) -> tuple[Tensor, int]:
    found = model(batch[0])
    return ((found - batch[1]) ** 2).sum() + model.share * found.abs().sum(), found.numel()


def dice(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Overlap of each image's own mask: a ratio of sums within an example."""
    found, wanted = model(batch[0]).sigmoid().flatten(1), (batch[0][:, :1] > 0).double().flatten(1)
    overlap = (2 * (found * wanted).sum(1) + 1) / (found.sum(1) + wanted.sum(1) + 1)
    return (1 - overlap).sum(), len(found)


def one_cycle(optimizer: Any) -> Any:
    """Moves the rate and Adam's first beta."""
    return {"schedulers": [OneCycleLR(optimizer, max_lr=0.1, total_steps=8)]}


def cyclic(optimizer: Any) -> Any:
    """Moves the rate and the momentum."""
    return {"schedulers": [CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2)]}


def chained(optimizer: Any) -> Any:
    return {"schedulers": [ChainedScheduler([LinearLR(optimizer, 0.3, total_iters=3), ExponentialLR(optimizer, 0.9)])]}


def restarts(optimizer: Any) -> Any:
    return {"schedulers": [CosineAnnealingWarmRestarts(optimizer, T_0=2)]}


def two_rates(optimizer: Any) -> Any:
    """torch's rule for averaged weights: to one rate."""
    return {"schedulers": [SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)]}


def with_momentum(model: Any) -> Any:
    groups = [{"params": [p], "lr": 0.05 / (1 + number)} for number, p in enumerate(model.parameters())]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loaded(data: Any) -> Any:
    return lambda: DataLoader(data(), batch_size=5)


IMAGES = numbers(3, 6, 6)
PRACTICE: dict[str, Kind] = {
    "stochastic depth": simple(model=StochasticDepth, data=loaded(Kept), loss_sum=of_kept),
    "PPO": simple(model=Agent, data=loaded(played), loss_sum=clipped_surrogate, before=remember),
    "REINFORCE": simple(model=Agent, loss_sum=reinforce, before=play),
    "compiled": simple(model=compiled),
    "averaged weights": simple(after=average_late, options=two_rates, refused=CUT),
    "BYOL": simple(model=Byol, loss_sum=as_it_is, after=follow_slowly, optimizer=of_trained),
    "learned temperature": simple(model=Temperature, loss_sum=classes),
    "learned weights of tasks": simple(model=Tasks, loss_sum=by_uncertainty),
    "adapters": simple(model=adapted, optimizer=of_trained),
    "frozen norm": Kind(model=FrozenNorm, data=lambda: in_order(IMAGES), loss_sum=classes, optimizer=plain_steps),
    "attention with padding": Kind(
        model=Masked, data=lambda: in_order(words()), loss_sum=next_of, optimizer=plain_steps
    ),
    "packed sequences": Kind(model=Packed, data=lambda: in_order(with_lengths()), loss_sum=of_lengths),
    "mixture density": simple(model=MixtureDensity, loss_sum=unlikelihood),
    "routed experts": simple(model=RoutedBlocks),
    "adaptive softmax": Kind(
        model=Adaptive, data=lambda: in_order(words()), loss_sum=adaptive, options=lambda _: {"units": ["head"]}
    ),
    "reversed gradients": simple(model=Domains, loss_sum=of_domains),
    "codebook": simple(model=Codebook, loss_sum=quantized, refused=CUT),
    "one layer over and over": simple(model=OverAndOver),
    "weights made by a net": simple(model=Hyper),
    "learning to learn": simple(loss_sum=learned_to_learn, refused=CUT),
    "clipped by example": simple(loss_sum=clipped_by_example, refused=CUT),
    "pruned by torch": simple(model=pruned),
    "spectral norm": simple(model=spectral),
    "annealed term": simple(model=Annealed, loss_sum=annealed, before=anneal),
    "overlap of masks": Kind(model=lambda: nn.Conv2d(3, 1, 3, padding=1), data=lambda: in_order(IMAGES), loss_sum=dice),
    "parts and unequal rests": simple(
        data=lambda: in_order(numbers(5, examples=11)), options=lambda _: {"accumulate": 3}
    ),
    "one cycle": simple(options=one_cycle),
    "cyclic rate": simple(optimizer=with_momentum, options=cyclic),
    "chained rates": simple(options=chained),
    "warm restarts": simple(options=restarts),
}
