"""The best plain training loop that an expert would write by hand: GPT-2 in torch, fused AdamW, DDP over gloo, in
float32 or under autocast to bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contender import Journal, Orders, read_orders
from benchmarks.workload import Workload, load_workload

# Shapes: b sequences, t tokens, h heads, d head width, w width.


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int, norm_epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, norm_epsilon)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, norm_epsilon)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        x_btw = x_btw + self.out(self._attend(self.norm1(x_btw)))
        return x_btw + self.down(F.gelu(self.up(self.norm2(x_btw)), approximate="tanh"))

    def _attend(self, x_btw: torch.Tensor) -> torch.Tensor:
        b, t, w = x_btw.shape
        q_bhtd, k_bhtd, v_bhtd = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x_btw).split(w, dim=2)
        )
        y_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        return y_bhtd.transpose(1, 2).reshape(b, t, w)


class GPT2(nn.Module):
    """GPT-2 with learned positions and a head tied to the token embedding; returns the mean loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(workload.vocabulary, workload.width)
        self.positions = nn.Embedding(workload.sequence, workload.width)
        self.blocks = nn.ModuleList(
            Block(workload.width, workload.heads, workload.norm_epsilon) for _ in range(workload.layers)
        )
        self.norm = nn.LayerNorm(workload.width, workload.norm_epsilon)

    def forward(self, inputs_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        x_btw = self.tokens(inputs_bt) + self.positions.weight[: inputs_bt.shape[1]]
        for block in self.blocks:
            x_btw = block(x_btw)
        logits_btv = F.linear(self.norm(x_btw), self.tokens.weight)
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


class Windows:
    """The tokens of one rank, read from the memory-mapped file as the loop asks for them."""

    def __init__(self, folder: Path, workload: Workload, orders: Orders) -> None:
        self._tokens = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
        self._order = np.load(folder / "order.npy", mmap_mode="r")
        self._span = np.arange(workload.sequence + 1)
        self._sequence, self._rows = workload.sequence, workload.sequences_per_rank
        self._rank, self._world_size = orders.rank, orders.world_size

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, each [sequences_per_rank, sequence]."""
        first = (step * self._world_size + self._rank) * self._rows
        starts = self._order[first : first + self._rows] * self._sequence
        window = torch.from_numpy(self._tokens[starts[:, None] + self._span].astype(np.int64))
        return window[:, :-1], window[:, 1:]


def main() -> None:
    orders, flags = read_orders()
    torch.set_num_threads(orders.threads)
    workload = load_workload(orders.workdir)
    model = GPT2(workload)
    model.load_state_dict(load_file(orders.workdir / "init.safetensors"))
    optimizer = build_optimizer(model, workload)
    net: nn.Module = model
    if orders.world_size > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    windows = Windows(orders.workdir, workload, orders)

    journal = Journal(flags)
    journal.begin()
    for step in range(orders.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=orders.precision == "bf16"):
            loss = net(*windows(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        journal.step(loss.item())


def build_optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Fused AdamW; matrices decay, vectors do not."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learning if parameter.dim() > 1]
    vectors = [parameter for parameter in learning if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": workload.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (workload.beta1, workload.beta2)
    return torch.optim.AdamW(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon, fused=True)


if __name__ == "__main__":
    main()
