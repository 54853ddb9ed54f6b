"""Models of many kinds in float64, each with data and a loss that is a sum: what `plait.spread` must carry exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EXAMPLES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its examples; `refused` layouts are those that cannot carry it."""

    model: nn.Module
    data: list[Any]
    loss_sum: Callable[[Any, Any], tuple[Tensor, Any]] = lambda model, batch: squared(model(batch[0]), batch[1])
    refused: tuple[str, ...] = ()


def squared(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The sum of squared differences, and how many."""
    return ((output - target) ** 2).sum(), target.numel()


def entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of cross-entropies of labels that are not -100, and their count: it differs from example to example."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), (labels != -100).sum()


def numbers(*shape: int, out: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(*shape), torch.randn(out)) for _ in range(EXAMPLES)]


def texts(vocabulary: int = 11, length: int = 6) -> list[tuple[Tensor, Tensor]]:
    found = []
    for example in range(EXAMPLES):
        words = torch.randint(0, vocabulary, (length + 1,))
        labels = words[1:].clone()
        labels[: example % 4] = -100
        found.append((words[:-1], labels))
    return found


def mlp() -> Case:
    return Case(model=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), data=numbers(5))


class Layers(nn.Module):
    """A row of alike blocks in a ModuleList."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(depth))
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def deep() -> Case:
    return Case(model=Layers(), data=numbers(5))


def convolutions() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(20, 3)
    )
    return Case(model=model, data=numbers(2, 8, 8))


class Residual(nn.Module):
    """A block of a ResNet with norms that do not look at the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norms[1](self.two(F.relu(self.norms[0](self.one(x)))))


def resnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Sequential(Residual(4), Residual(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return Case(model=model, data=numbers(1, 8, 8))


def depthwise() -> Case:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1), nn.SiLU(), nn.Flatten(), nn.Linear(96, 3))
    return Case(model=model, data=numbers(4, 6, 6))


def autoencoder() -> Case:
    model = nn.Sequential(nn.Conv1d(1, 3, 4, stride=2), nn.Tanh(), nn.ConvTranspose1d(3, 1, 4, stride=2))
    data = [(x, x) for x in torch.randn(EXAMPLES, 1, 10)]
    return Case(model=model, data=data)


class Recurrent(nn.Module):
    """A recurrent net over words."""

    def __init__(self, kind: type[nn.RNNBase], *, bidirectional: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.cells = kind(6, 5, num_layers=2, batch_first=True, bidirectional=bidirectional)  # type: ignore[call-arg]
        self.head = nn.Linear(10 if bidirectional else 5, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.words(x))[0])


def text_case(model: nn.Module, **more: Any) -> Case:
    return Case(model=model, data=texts(), loss_sum=lambda model, batch: entropy(model(batch[0]), batch[1]), **more)


def lstm() -> Case:
    return text_case(Recurrent(nn.LSTM))


def gru() -> Case:
    return text_case(Recurrent(nn.GRU, bidirectional=True))


def rnn() -> Case:
    return text_case(Recurrent(nn.RNN))


class Encoder(nn.Module):
    """torch's own Transformer encoder, with positions in a buffer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.register_buffer("places", torch.randn(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x) + self.places))


def encoder() -> Case:
    return text_case(Encoder())


def tied() -> Case:
    return text_case(Encoder(tied=True))


class Translator(nn.Module):
    """torch's encoder-decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.both = nn.Transformer(8, 2, 1, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.both(self.words(x), self.words(x.flip(1))))


def translator() -> Case:
    return text_case(Translator())


class Frozen(nn.Module):
    """A body that is not trained under a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def frozen() -> Case:
    return Case(model=Frozen(), data=numbers(5))


class Counting(nn.Module):
    """A buffer that is changed in place by each forward, and does not touch the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inside(x)


def counting() -> Case:
    return Case(model=Counting(), data=numbers(5))


class FlatWeights(nn.Module):
    """Weights that are views of one parameter, and an output that is a view of an input of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(5 * 4 + 4 * 3) / 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.flat[:20].view(5, 4), self.flat[20:].view(4, 3)
        return (torch.tanh(x @ first) @ second).view(-1, 3)[:, :]


def views() -> Case:
    return Case(model=FlatWeights(), data=numbers(5))


class OneMemory(nn.Module):
    """Two parameters that lie in one tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(5, 6)
        self.left, self.right = nn.Parameter(memory[:, :3]), nn.Parameter(memory[:, 3:])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.left + torch.tanh(x @ self.right)


def one_memory() -> Case:
    return Case(model=OneMemory(), data=numbers(5), refused=("shard optimizer", "shard parameters"))


class Unused(nn.Module):
    """A part that no forward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Linear(5, 3), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused() -> Case:
    return Case(model=Unused(), data=numbers(5))


class Branches(nn.Module):
    """Examples choose the branch, so that one worker may never reach what another one trains."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x[:1]), self.two(x[1:])]) if bool(x[0, 0] > 0) else self.one(x)


def branches() -> Case:
    data = [
        (torch.full((5,), 1.0 if example < 4 else -1.0) * (1 + example), torch.ones(3)) for example in range(EXAMPLES)
    ]

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, int]:
        positive = batch[0][:, 0] > 0
        output = torch.zeros_like(batch[1])
        if positive.any():
            output[positive] = model.one(batch[0][positive])
        if (~positive).any():
            output[~positive] = model.two(batch[0][~positive])
        return squared(output, batch[1])

    return Case(model=Branches(), data=data, loss_sum=loss_sum, refused=("shard parameters",))


class Scaled(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.tensor(1.5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inside(x)


def scalar() -> Case:
    return Case(model=Scaled(), data=numbers(5))


class Table(nn.Module):
    """Categories and numbers of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 3) for size in (4, 9))
        self.body = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))

    def forward(self, kinds: Tensor, values: Tensor) -> Tensor:
        found = [table(kinds[:, column]) for column, table in enumerate(self.tables)]
        return self.body(torch.cat([*found, values], dim=1))


def table() -> Case:
    data = [
        {"kinds": torch.randint(0, 4, (2,)), "values": torch.randn(2), "target": torch.randn(3)}
        for _ in range(EXAMPLES)
    ]

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, int]:
        return squared(model(batch["kinds"], batch["values"]), batch["target"])

    return Case(model=Table(), data=data, loss_sum=loss_sum)


def weight_norm() -> Case:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))
    return Case(model=model, data=numbers(5))


class Graph(nn.Module):
    """Sums over neighbours; nodes that are there are told by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = torch.tanh(layer(edges @ nodes) + nodes)
        return nodes


def graph() -> Case:
    data = [
        (torch.randn(5, 4), (torch.rand(5, 5) < 0.4).double(), torch.randn(5, 4), torch.arange(5) <= example % 5)
        for example in range(EXAMPLES)
    ]

    def loss_sum(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        nodes, edges, target, there = batch
        return (((model(nodes, edges) - target) ** 2).sum(-1) * there).sum(), there.sum()

    return Case(model=Graph(), data=data, loss_sum=loss_sum)


class Reentrant(Layers):
    """Reentrant checkpoints over a layer that is used twice: its gradients come twice in a pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in (*self.layers, self.layers[0]):
            kept = checkpoint(layer, x, use_reentrant=True)
            assert isinstance(kept, Tensor)
            x = x + kept
        return self.leave(x)


def reentrant() -> Case:
    return Case(model=Reentrant(), data=numbers(5), refused=("shard parameters",))


class UNet(nn.Module):
    """Skips from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 4, 3, padding=1)])
        self.up = nn.ModuleList([nn.Conv1d(4, 3, 3, padding=1), nn.Conv1d(6, 1, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down[0](x))
        two = F.interpolate(F.relu(self.down[1](F.avg_pool1d(one, 2))), scale_factor=2.0)
        return self.up[1](torch.cat([one, self.up[0](two)], dim=1))


def unet() -> Case:
    return Case(model=UNet(), data=[(x, x) for x in torch.randn(EXAMPLES, 1, 8)])


def bilinear() -> Case:
    data = [(torch.randn(4), torch.randn(5), torch.randn(3)) for _ in range(EXAMPLES)]
    return Case(
        model=nn.Bilinear(4, 5, 3),
        data=data,
        loss_sum=lambda model, batch: squared(model(batch[0], batch[1]), batch[2]),
    )


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(5, 5) / 2 for _ in range(3)])
        self.named = nn.ParameterDict({"out": torch.randn(5, 3)})

    def forward(self, x: Tensor) -> Tensor:
        for one in self.many:
            x = torch.tanh(x @ one)
        return x @ self.named["out"]


def listed() -> Case:
    return Case(model=Listed(), data=numbers(5))


def transformer(kind: str) -> Case:
    """A tiny model of one of transformers' families, with its own labels where it has them."""
    import transformers

    small = {
        "vocab_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
    }
    names: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 8,
                 "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", {**small, "max_position_embeddings": 16}),
        "bert": ("BertConfig", "BertForMaskedLM", {**small, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
                 "attention_probs_dropout_prob": 0.0}),
        "qwen": ("Qwen2Config", "Qwen2ForCausalLM", {**small, "max_position_embeddings": 16, "num_key_value_heads": 1}),
    }  # fmt: skip
    config, model, settings = names[kind]
    built = getattr(transformers, model)(getattr(transformers, config)(**settings))
    for module in list(built.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):  # theirs computes in float32, whatever the weights are
                setattr(module, name, nn.RMSNorm(8, eps=1e-6))
    return Case(
        model=built,
        data=texts(),
        loss_sum=lambda model, batch: entropy(model(input_ids=batch[0]).logits, batch[1]),
    )


CASES: dict[str, Callable[[], Case]] = {
    each.__name__: each
    for each in (
        mlp, deep, convolutions, resnet, depthwise, autoencoder, lstm, gru, rnn, encoder, tied, translator, frozen,
        counting, views, one_memory, unused, branches, scalar, table, weight_norm, graph, reentrant, unet,
        bilinear, listed,
    )
}  # fmt: skip
CASES |= {kind: (lambda kind=kind: transformer(kind)) for kind in ("gpt2", "llama", "bert", "qwen")}
