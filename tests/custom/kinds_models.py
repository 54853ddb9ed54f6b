"""Models as people write them: vision, language, and those that generate. Noise follows from an example's own numbers,
so that it is the same whoever draws it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import plait
from tests.custom.kind import EXAMPLES, Kind, LossSum, in_order, mlp, numbers


def noise(x: Tensor) -> Tensor:
    """Numbers between -1 and 1 that look random, and are a function of x alone."""
    return torch.sin(1e3 * x.detach())


def words(length: int = 6, vocabulary: int = 11, examples: int = EXAMPLES) -> Any:
    """Texts of small numbers, each with the same one moved by a place."""
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(1, vocabulary, (examples, length + 1), generator=generator)
    return [(text[:-1], text[1:]) for text in texts]


def unlike_lengths() -> DataLoader[Any]:
    """Pairs of texts of unlike lengths, padded by the batch."""
    generator = torch.Generator().manual_seed(6)
    data = [
        (
            torch.randint(1, 9, (2 + k % 4,), generator=generator),
            torch.randint(1, 9, (3 + k % 3,), generator=generator),
        )
        for k in range(EXAMPLES)
    ]

    def padded(examples: list[Any]) -> Any:
        sides = zip(*examples, strict=True)
        return tuple(nn.utils.rnn.pad_sequence(list(side), batch_first=True) for side in sides)

    return in_order(data, collate_fn=padded)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(6, 3)
    )


def labelled(model: Any, batch: Any) -> tuple[Tensor, int]:
    labels = batch[1].argmax(1)
    return F.cross_entropy(model(batch[0]), labels, reduction="sum"), len(labels)


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.head, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.head((x + self.inside(x)).mean((2, 3))))


class Attends(nn.Module):
    """A vision transformer of one block over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.places = nn.Parameter(torch.randn(9, 8) / 3)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.block(tokens).mean(1))


class UNet(nn.Module):
    """Down, up, and what was there before; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.up(F.relu(self.down(x)))], 1))


def of_pixels(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Pixels of one kind are not counted."""
    labels = (batch[0][:, 0] > 0).long().masked_fill(batch[0][:, 1] > 0.7, -100)
    total = F.cross_entropy(model(batch[0]), labels, reduction="sum", ignore_index=-100)
    return total, (labels != -100).sum()


def of_boxes(model: Any, batch: Any) -> Any:
    """A detector: classes by the number of examples, boxes by the number of those that have one, of which a share may
    have none."""
    found, has_box = model(batch[0]), batch[1][:, 0] > 0.3
    boxes = ((found - batch[1])[has_box] ** 2).sum()
    labels = F.cross_entropy(found, batch[1].argmax(1), reduction="sum")
    return (labels, len(found)), (0.5 * boxes, has_box.sum())


def siamese(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Pairs that are near where they are alike, and far where they are not."""
    distance = (model(batch[0]) - model(batch[0].flip(1))).norm(dim=1)
    alike = (batch[1][:, 0] > 0).double()
    return (alike * distance**2 + (1 - alike) * F.relu(1 - distance) ** 2).sum(), len(distance)


def triplet(model: Any, batch: Any) -> tuple[Tensor, int]:
    anchor, near, far = model(batch[0]), model(batch[0] * 0.9), model(-batch[0])
    return F.triplet_margin_loss(anchor, near, far, reduction="sum"), len(anchor)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=1), self.scale.exp() * F.normalize(self.right(y), dim=1)


def clip_loss(run: Any) -> LossSum:
    """CLIP's: each worker compares its own rows with those of all, both ways."""

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, int]:
        left, right = model(*batch)
        all_left, all_right, place = run.gather(left), run.gather(right), run.own_places(left)
        total = F.cross_entropy(left @ all_right.T, place, reduction="sum")
        return (total + F.cross_entropy(right @ all_left.T, place, reduction="sum")) / 2, len(left)

    return loss_sum


def simclr_loss(run: Any) -> LossSum:
    """Two views of each example against those of all others."""

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, int]:
        one, other = (F.normalize(model(batch[0] + 0.1 * side), dim=1) for side in (noise(batch[0]), -noise(batch[0])))
        everybody, place = torch.cat([run.gather(one), run.gather(other)]), run.own_places(one)
        likeness = one @ everybody.T
        itself = F.one_hot(place, len(everybody)).bool()
        wanted = place + len(everybody) // 2
        return F.cross_entropy(likeness.masked_fill(itself, -1e9), wanted, reduction="sum"), len(one)

    return loss_sum


class Perceptual(nn.Module):
    """A frozen net judges what another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 5, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.judges(self.makes(x))


def perceived(model: Any, batch: Any) -> tuple[Tensor, int]:
    wanted = model.judges(batch[0].flip(1)).detach()
    return ((model(batch[0]) - wanted) ** 2).sum(), wanted.numel()


class Gpt(nn.Module):
    """Embeddings, a causal block, and a head that is the embedding, or its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8) / 3)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        hidden = self.words(x) + self.places[: x.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(hidden)


def next_word(model: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside, self.head = nn.Embedding(11, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inside(self.words(x))[0])


class Seq2Seq(nn.Module):
    """Reads one text, writes another; both are padded with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.reads, self.writes = nn.LSTM(4, 5, batch_first=True), nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        lengths = (source > 0).sum(1).clamp(min=1).cpu()
        if not len(source):
            return self.head(self.words(target).new_zeros(0, target.shape[1], 5) + 0 * self.words.weight.sum())
        packed = nn.utils.rnn.pack_padded_sequence(self.words(source), lengths, True, enforce_sorted=False)
        return self.head(self.writes(self.words(target), self.reads(packed)[1])[0])


def translated(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    source, target = batch
    found = model(source, target[:, :-1])
    total = F.cross_entropy(found.flatten(0, 1), target[:, 1:].flatten(), reduction="sum", ignore_index=0)
    return total, (target[:, 1:] > 0).sum()


class PaddingSeen(nn.Module):
    """A convolution that sees the padding, so that its length counts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside, self.head = nn.Embedding(9, 4), nn.Conv1d(4, 5, 3, padding=1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inside(self.words(x).transpose(1, 2))).mean(2))


def pooled(model: Any, batch: Any) -> tuple[Tensor, int]:
    return (model(batch[0]) ** 2).sum(), len(batch[0])


class Word2Vec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(11, 4), nn.Embedding(11, 4)

    def forward(self, centre: Tensor, context: Tensor) -> Tensor:
        return (self.inner(centre) * self.outer(context)).sum(-1)


def negative_sampling(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Negatives that follow from the words themselves."""
    centre, context = batch
    wrong = (centre * 7 + context * 3) % 11
    return -(F.logsigmoid(model(centre, context)) + F.logsigmoid(-model(centre, wrong))).sum(), centre.numel()


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x)))


def ctc(model: Any, batch: Any) -> tuple[Tensor, int]:
    logs = model(batch[0]).log_softmax(-1).transpose(0, 1)
    size = len(batch[0])
    inputs, targets = torch.full((size,), 6), torch.full((size,), 2)
    if not size:
        return logs.sum(), 0
    return F.ctc_loss(logs, batch[1][:, :2], inputs, targets, reduction="sum"), size


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(11, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def bag_of_words(model: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1][:, 0] % 3, reduction="sum"), len(batch[0])


class Factors(nn.Module):
    """Users and things, each a row of numbers and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(11, 4), nn.Embedding(11, 4)
        self.bias = nn.Embedding(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        user, thing = x[:, 0], x[:, 1]
        return (self.users(user) * self.things(thing)).sum(1) + self.bias(user)[:, 0]


def ratings(model: Any, batch: Any) -> tuple[Tensor, int]:
    return ((model(batch[0]) - batch[1][:, 0]) ** 2).sum(), len(batch[0])


def gan() -> Any:
    """What makes, and what judges."""
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)
    )


def each_its_own(models: Any) -> Any:
    return tuple(torch.optim.AdamW(one.parameters(), lr=0.02, betas=(0.5, 0.9)) for one in models)


def makers_loss(models: Any, batch: Any) -> tuple[Tensor, int]:
    makes, judges = models
    found = judges(makes(noise(batch[0])))
    return F.binary_cross_entropy_with_logits(found, torch.ones_like(found), reduction="sum"), len(found)


def judges_loss(models: Any, batch: Any) -> tuple[Tensor, int]:
    makes, judges = models
    real, made = judges(batch[0]), judges(makes(noise(batch[0])).detach())
    total = F.binary_cross_entropy_with_logits(real, torch.ones_like(real), reduction="sum")
    return total + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made), reduction="sum"), len(real)


def wasserstein(models: Any, batch: Any) -> tuple[Tensor, int]:
    return -models[1](models[0](noise(batch[0]))).sum(), len(batch[0])


def critics_loss(models: Any, batch: Any) -> tuple[Tensor, int]:
    """With a penalty on the gradient by its input, which is differentiated again."""
    makes, judges = models
    made = makes(noise(batch[0])).detach()
    between = (0.5 * made + 0.5 * batch[0]).requires_grad_()
    (slope,) = torch.autograd.grad(judges(between).sum(), between, create_graph=True)
    return (judges(made) - judges(batch[0]) + 10 * (slope.norm(dim=1, keepdim=True) - 1) ** 2).sum(), len(made)


def auto_encoder() -> Any:
    return nn.Linear(5, 4), nn.Linear(2, 5)


def vae_loss(models: Any, batch: Any) -> tuple[Tensor, int]:
    """Reconstruction, and what the code may tell."""
    mean, log_variance = models[0](batch[0]).chunk(2, 1)
    code = mean + (0.5 * log_variance).exp() * noise(batch[0])[:, :2]
    told = -0.5 * (1 + log_variance - mean**2 - log_variance.exp())
    return ((models[1](code) - batch[0]) ** 2).sum() + told.sum(), len(mean)


def diffusion(model: Any, batch: Any) -> tuple[Tensor, int]:
    """The noise of each example at a time of its own."""
    x, added = batch[0], noise(batch[0])
    time = (noise(x[:, :1]) + 1) / 2
    return ((model(x * (1 - time) + added * time)[:, :3] - added[:, :3]) ** 2).sum(), len(x) * 3


def energy(model: Any, batch: Any) -> tuple[Tensor, int]:
    """Some steps down the energy's own slope inside of the loss."""
    x = noise(batch[0]).requires_grad_()
    for _ in range(3):
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        x = (x - 0.1 * slope + 0.01 * noise(x)).detach().requires_grad_()
    return (model(batch[0]) - model(x.detach())).sum(), len(x)


class Checkpointed(nn.Module):
    """Forgets what is inside, and computes it again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.enter, self.inside, self.leave = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(checkpoint(lambda y: torch.tanh(self.inside(y)), x, use_reentrant=self.reentrant))


def plain_steps(model: Any) -> Any:
    """For models with a bias whose gradient is 0 but for rounding, by whose sign AdamW would go."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def both_of(models: Any) -> Any:
    """Two optimizers of unlike kinds, which one loss moves."""
    return torch.optim.AdamW(models[0].parameters(), lr=0.05), torch.optim.SGD(models[1].parameters(), lr=0.05)


IMAGES = numbers(3, 6, 6)
CUT = ("shard parameters",)
MODELS: dict[str, Kind] = {
    "convolution": Kind(model=convolution, data=lambda: in_order(numbers(1, 6, 6)), loss_sum=labelled),
    "batch norm": Kind(
        model=Residual, data=lambda: in_order(IMAGES), spread_model=plait.convert_batch_norm, optimizer=plain_steps
    ),
    "batch norm with little": Kind(
        model=Residual, data=lambda: in_order(numbers(3, 6, 6, examples=12)), spread_model=plait.convert_batch_norm,
        optimizer=plain_steps,
    ),
    "vision transformer": Kind(model=Attends, data=lambda: in_order(IMAGES), loss_sum=labelled, optimizer=plain_steps),
    "segmentation": Kind(model=UNet, data=lambda: in_order(IMAGES), loss_sum=of_pixels),
    "detector": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=of_boxes),
    "detector in parts": Kind(
        model=mlp, data=lambda: in_order(numbers(5)), loss_sum=of_boxes, options=lambda _: {"accumulate": 2}
    ),
    "siamese": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=siamese),
    "triplets": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=triplet, optimizer=plain_steps),
    "image and text": Kind(model=TwoTowers, data=lambda: in_order(numbers(5)), gathers=clip_loss),
    "two views": Kind(model=mlp, data=lambda: in_order(numbers(5)), gathers=simclr_loss),
    "perceptual loss": Kind(
        model=Perceptual,
        data=lambda: in_order(IMAGES),
        loss_sum=perceived,
        optimizer=lambda model: torch.optim.AdamW(model.makes.parameters(), lr=0.05),
        refused=CUT,
    ),
    "language model": Kind(
        model=lambda: Gpt(tied=False),
        data=lambda: in_order(words()),
        loss_sum=next_word,
        optimizer=plain_steps,
        options=lambda _: {"accumulate": 2, "clip": 0.3},
    ),
    "tied embedding": Kind(
        model=lambda: Gpt(tied=True), data=lambda: in_order(words()), loss_sum=next_word, optimizer=plain_steps
    ),
    "recurrent": Kind(model=Recurrent, data=lambda: in_order(words()), loss_sum=next_word),
    "translation": Kind(model=Seq2Seq, data=unlike_lengths, loss_sum=translated),
    "padding seen": Kind(
        model=PaddingSeen, data=unlike_lengths, loss_sum=pooled, batches={"collated_over": "batch"}
    ),
    "word vectors": Kind(model=Word2Vec, data=lambda: in_order(words()), loss_sum=negative_sampling),
    "speech": Kind(model=Ctc, data=lambda: in_order(words()), loss_sum=ctc),
    "bag of words": Kind(model=Bag, data=lambda: in_order(words()), loss_sum=bag_of_words),
    "matrix factorisation": Kind(model=Factors, data=lambda: in_order(words()), loss_sum=ratings),
    "two losses": Kind(
        model=gan, data=lambda: in_order(numbers(5)), loss_sum=(makers_loss, judges_loss), optimizer=each_its_own,
        refused=CUT,
    ),
    "critic more often": Kind(
        model=gan, data=lambda: in_order(numbers(5)), loss_sum=(wasserstein, critics_loss), optimizer=each_its_own,
        losses=lambda step: (0,) if step % 3 == 2 else (1,), refused=CUT,
    ),
    "two optimizers, one loss": Kind(
        model=auto_encoder, data=lambda: in_order(numbers(5)), loss_sum=vae_loss, optimizer=both_of,
        options=lambda _: {"clip": 0.5},
    ),
    "diffusion": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=diffusion),
    "energy": Kind(model=mlp, data=lambda: in_order(numbers(5)), loss_sum=energy),
    "checkpointed": Kind(model=lambda: Checkpointed(False), data=lambda: in_order(numbers(5))),
    "checkpointed with reentrance": Kind(
        model=lambda: Checkpointed(True), data=lambda: in_order(numbers(5)), refused=CUT
    ),
}  # fmt: skip
