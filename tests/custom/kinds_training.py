"""Ways of training as people write them: schedules, averages, penalties, masks, teachers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.custom.kind import Kind, LossSum, in_order, mlp, numbers, squared

CUT = ("shard parameters",)


class Distilled(nn.Module):
    """A student beside its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp().requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def distilled(model: Any, batch: Any) -> tuple[Tensor, int]:
    with torch.no_grad():
        wanted = model.teacher(batch[0]).softmax(1)
    found = model(batch[0])
    return F.kl_div(found.log_softmax(1), wanted, reduction="sum") + squared(model, batch)[0], len(found)


class MeanTeacher(nn.Module):
    """A student that follows the average of its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def consistent(model: Any, batch: Any) -> tuple[Tensor, int]:
    with torch.no_grad():
        wanted = model.teacher(batch[0])
    return ((model(batch[0]) - wanted - 0.1 * batch[1]) ** 2).sum(), len(wanted)


def average(model: Any, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.1)


def of_student(model: Any) -> Any:
    return torch.optim.AdamW(model.student.parameters(), lr=0.05)


def mixed(examples: list[Any]) -> Any:
    """Mixup: each example with the one before it in the batch."""
    x, y = default_collate(examples)
    return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * y + 0.3 * y.roll(1, 0)


def penalized(model: Any, batch: Any) -> tuple[Tensor, int]:
    """L2 and L1 in the loss, times the count."""
    total, count = squared(model, batch)
    penalty = sum((p**2).sum() + 0.1 * p.abs().sum() for p in model.parameters())
    return total + 1e-2 * penalty * count, count


class Mixture(nn.Module):
    """Two experts, of which a router weighs each example's."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(5, 2), nn.ModuleList([mlp(), mlp()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(1)
        found = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights[..., None] * found).sum(1), weights


def balanced(run: Any) -> LossSum:
    """The balance of the whole batch: a product of means, in which each worker's part counts as its examples do."""

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, int]:
        found, weights = model(batch[0])
        everybody = run.gather(weights)
        chosen = F.one_hot(everybody.argmax(1), 2).double().mean(0)
        balance = 2 * (chosen * everybody.mean(0)).sum()
        return ((found - batch[1]) ** 2).sum() + 0.1 * balance * len(found), len(found)

    return loss_sum


def warm_then_cosine(optimizer: Any) -> Any:
    warm = LambdaLR(optimizer, lambda step: (step + 1) / 3)
    return {"schedulers": [SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, 3)], [2])]}


def by_groups(model: Any) -> Any:
    """Biases without decay and with another rate."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 0.01}], lr=0.05)


def masked(gradients: dict[str, Tensor]) -> None:
    """A mask and clipping by value, on whole gradients."""
    for name in gradients:
        gradients[name] = gradient = gradients[name].clamp(-0.02, 0.02)
        if name.endswith("0.weight"):
            gradient[:, ::2] = 0


class Counting(nn.Module):
    """A buffer that counts forward passes, and one that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.scale * self.inside(x)


def hooked() -> nn.Module:
    """A hook on activations, and one on their gradients."""
    model: Any = mlp()
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
    return model


def by_magnitude(model: Any, optimizer: Any, step: int) -> None:
    """Prunes small weights as it goes."""
    if step == 2:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_((p.abs() > 0.1).to(p.dtype))


class Augmented(Dataset[Any]):
    """Examples with noise of torch's own generator, from the `first` on that has some."""

    def __init__(self, first: int = 0) -> None:
        self.inside, self.first = numbers(5), first

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, position: int) -> Any:
        x, y = self.inside[position]
        return (x + 0.1 * torch.randn(5).double() if position >= self.first else x), y


def dicts() -> Any:
    """Batches that are dicts, as Hugging Face's are."""
    return [{"x": x, "y": y, "weight": y[0].abs()} for x, y in numbers(5)]


def weighted_by_example(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    each = ((model(batch["x"]) - batch["y"]) ** 2).sum(1)
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def focal(model: Any, batch: Any) -> tuple[Tensor, int]:
    logs = model(batch[0]).log_softmax(1).gather(1, batch[1].argmax(1, keepdim=True))
    return (-((1 - logs.exp()) ** 2) * logs).sum(), len(logs)


def quantiles(model: Any, batch: Any) -> tuple[Tensor, int]:
    wanted = batch[1].new_tensor([0.1, 0.5, 0.9])
    error = batch[1] - model(batch[0])
    return torch.maximum(wanted * error, (wanted - 1) * error).sum(), error.numel()


def tasks(model: Any, batch: Any) -> Any:
    """Three tasks, each with a denominator of its own."""
    found = model(batch[0])
    there = batch[1] > 0
    return tuple((((found - batch[1])[:, k] ** 2)[there[:, k]].sum(), there[:, k].sum()) for k in range(3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


def normed_weights() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


def nesterov(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)


def simple(**options: Any) -> Kind:
    return Kind(**{"model": mlp, "data": lambda: in_order(numbers(5)), **options})


TRAINING: dict[str, Kind] = {
    "distillation": simple(model=Distilled, loss_sum=distilled, optimizer=of_student, refused=CUT),
    "mean teacher": simple(model=MeanTeacher, loss_sum=consistent, optimizer=of_student, after=average, refused=CUT),
    "mixup": simple(data=lambda: in_order(numbers(5), collate_fn=mixed), batches={"collated_over": "batch"}),
    "penalties": simple(loss_sum=penalized, refused=CUT),
    "balanced experts": simple(model=Mixture, gathers=balanced),
    "warm-up and cosine": simple(options=warm_then_cosine),
    "groups of parameters": simple(optimizer=by_groups),
    "changed gradients": simple(options=lambda _: {"before_update": masked, "clip": 0.05}),
    "counting buffer": simple(model=Counting),
    "hooks on activations": simple(model=hooked),
    "pruned midway": simple(after=by_magnitude),
    "augmented data": simple(data=lambda: DataLoader(Augmented(), batch_size=5)),
    "augmented in part": simple(data=lambda: DataLoader(Augmented(first=4), batch_size=5)),
    "augmented by processes": simple(data=lambda: DataLoader(Augmented(), batch_size=5, num_workers=2)),
    "dicts with weights": simple(data=lambda: in_order(dicts()), loss_sum=weighted_by_example),
    "focal loss": simple(loss_sum=focal),
    "quantiles": simple(loss_sum=quantiles),
    "several tasks": simple(loss_sum=tasks),
    "spectral norm of old": simple(model=spectral),
    "weight norm": simple(model=normed_weights),
    "Nesterov": simple(optimizer=nesterov),
    "Adagrad": simple(optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1)),
}
