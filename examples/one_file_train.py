"""A language model and its training in one file, to copy and to change: any number of workers has the same losses.

python examples/one_file_train.py plait/examples/shakespeare.txt
plait run examples/one_file_train.py --workers 2 -- plait/examples/shakespeare.txt --steps 200
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

import plait


class Block(nn.Module):
    """Causal attention with rotary positions, then a gated feed-forward; each behind a norm, beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, 8 * math.ceil(width / 3)
        self.norm_attention, self.norm_feedforward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k = (rotated(one, angles).transpose(1, 2) for one in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.up(self.norm_feedforward(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of numbers [rows, length, heads, head width], turned by their position's angles [length, half of it]."""
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Gpt(nn.Module):
    """Tokens [rows, length] to the logits of what follows each [rows, length, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.half_head = width // heads // 2
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                shrink = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = places[:, None] * 10_000.0 ** (-torch.arange(self.half_head, device=tokens.device) / self.half_head)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def loss_sum(model: Gpt, windows: Tensor) -> tuple[Tensor, int]:
    """The sum of the losses of all next tokens, and how many there are."""
    logits, targets = model(windows[:, :-1]), windows[:, 1:].reshape(-1)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"), targets.numel()


def read_text(paths: list[str], vocabulary: int) -> tuple[ByteLevelBPETokenizer, Tensor]:
    """A tokenizer of these files, the same on every worker, and all of their tokens."""
    text = "\n".join(Path(path).read_text() for path in paths)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocabulary, min_frequency=2, show_progress=False)
    return tokenizer, torch.tensor(tokenizer.encode(text).ids)


@torch.no_grad()
def written(model: Gpt, tokenizer: ByteLevelBPETokenizer, length: int, like: Tensor) -> str:
    """Text that the model writes after a line's end."""
    tokens = like.new_tensor([tokenizer.encode("\n").ids])
    for _ in range(length):
        chances = model(tokens[:, -256:])[0, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)[None]], 1)
    return tokenizer.decode(tokens[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="files of text to learn from")
    for name, value in (("steps", 300), ("batch", 32), ("sequence", 128), ("vocabulary", 1024), ("width", 128),
                        ("layers", 4), ("heads", 4), ("accumulate", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{value} if left out")
    parser.add_argument("--rate", type=float, default=3e-3, help="the largest learning rate; 3e-3 if left out")
    parser.add_argument("--muon", action="store_true", help="update the layers' matrices by Muon, at the same rate")
    parser.add_argument("--layout", default="auto", help="replicate, shard optimizer or shard parameters")
    parser.add_argument("--save", help="a folder to save in every 100 steps, and to go on from")
    asked = parser.parse_args()

    tokenizer, tokens = read_text(asked.text, asked.vocabulary)
    windows = tokens[: (len(tokens) - 1) // asked.sequence * asked.sequence + 1].unfold(
        0, asked.sequence + 1, asked.sequence
    )
    learn, held_out = windows[: -max(1, len(windows) // 20)], windows[-max(1, len(windows) // 20) :]

    torch.manual_seed(1)
    model = Gpt(tokenizer.get_vocab_size(), asked.width, asked.layers, asked.heads)
    hidden = [p for p in model.layers.parameters() if p.dim() == 2] if asked.muon else []
    matrices = [p for p in model.parameters() if p.dim() == 2 and all(p is not one for one in hidden)]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=asked.rate, betas=(0.9, 0.95))]
    if hidden:
        optimizers.append(plait.Muon(hidden, lr=asked.rate))
    warm = max(1, asked.steps // 20)

    def course(n: int) -> float:
        return (n + 1) / warm if n < warm else 0.55 + 0.45 * math.cos(math.pi * min(1.0, (n - warm) / asked.steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(one, course) for one in optimizers]
    run = plait.spread(
        model, optimizers, loss_sum=loss_sum, layout=asked.layout, clip=1.0, accumulate=asked.accumulate,
        schedulers=schedules,
    )  # fmt: skip
    if asked.save:
        run.resume(asked.save, missing="begin")
    epochs = math.ceil(asked.steps * asked.batch / len(learn)) + 1
    for windows in run.batches(learn, batch=asked.batch, epochs=epochs):
        loss = run.step(windows)
        if run.rank == 0 and (run.steps % 10 == 0 or run.steps <= 6):
            print(f"step {run.steps}  loss {float(loss):.6f}", flush=True)
        if asked.save and run.steps % 100 == 0:
            run.save(asked.save)
        if run.steps >= asked.steps:
            break
    mean = float(run.evaluate(held_out))  # every worker must call it
    if run.rank == 0:
        print(f"held-out loss {mean:.4f}")
    if run.layout != "shard parameters" and run.rank == 0:
        print(written(model, tokenizer, 100, held_out.to(run.device)))


if __name__ == "__main__":
    main()
