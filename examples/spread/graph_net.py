"""A graph network cleans noisy drawings: each dark pixel of a digit is a node, neighbours are joined, and every graph
has another number of nodes: python graph_net.py [--steps 40]."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait

DIGITS = Path(__file__).parents[1] / "data" / "digits.npz"
Graph = tuple[Tensor, Tensor, Tensor]
"""Noisy ink of each node [nodes, 1], edges as pairs of nodes [2, edges], clean ink [nodes, 1]."""


class GraphNet(nn.Module):
    def __init__(self, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.neighbours = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(nodes)
        count = x.new_zeros(len(x), 1).index_add(0, edges[1], x.new_ones(edges.shape[1], 1)).clamp(min=1)
        for own, neighbours in zip(self.own, self.neighbours, strict=True):
            heard = torch.zeros_like(x).index_add(0, edges[1], neighbours(x)[edges[0]])
            x = x + F.relu(own(x) + heard / count)
        return self.head(x)


def graphs(count: int = 1200) -> list[Graph]:
    with np.load(DIGITS) as files:
        images = torch.from_numpy(files["images"][:count]).float() / 255
    noise = torch.Generator().manual_seed(0)
    return [graph_of(image, noise) for image in images]


def graph_of(image: Tensor, noise: torch.Generator) -> Graph:
    places = (image > 0.1).nonzero()
    ink = image[places[:, 0], places[:, 1]].unsqueeze(1)
    near = (places.unsqueeze(0) - places.unsqueeze(1)).abs().amax(-1) == 1
    return ink + 0.3 * torch.randn(ink.shape, generator=noise), near.nonzero().T, ink


def joined(batch: list[Graph]) -> Graph:
    """Graphs side by side as one: the edges of each count its own nodes from where the ones before it end."""
    starts = np.cumsum([0, *(len(nodes) for nodes, _, _ in batch)])[:-1]
    edges = [edges + int(start) for (_, edges, _), start in zip(batch, starts, strict=True)]
    return torch.cat([nodes for nodes, _, _ in batch]), torch.cat(edges, 1), torch.cat([ink for _, _, ink in batch])


def loss_of(model: nn.Module, batch: Graph):
    nodes, edges, ink = batch
    return F.mse_loss(model(nodes, edges), ink, reduction="sum"), len(ink)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=36)
steps = parser.parse_args().steps

torch.manual_seed(0)
data = graphs()
model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
run = plait.spread(model, optimizer, loss_sum=loss_of)

for step, batch in enumerate(run.batches(data, batch=32, collate=joined)):
    if step == steps:
        break
    loss = run.step(batch)
    print(f"step {step + 1}  loss {loss:.5f}")
