"""What latent attention computes, keeps and sends in place of heads' queries, keys and values: a part of a Workload.

Under `tensor` the down-projections and their norms are of a rank's own rows, with whole weights; latents are gathered,
and all behind them is cut by heads. Legend: t degree of the axis `tensor`, arrays over candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.model.shape import ModelShape
from plait.model.weights import kernel_width, scored_width
from plait.planner.problem.candidates import Counts, Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWork:
    """Widths of one layer's latent attention; what belongs to heads is of all heads together."""

    width: int
    query_rank: int
    """0: queries are made from the stream."""
    latent: int
    """Of keys and values, their part with positions included."""
    key_value_rank: int
    queries: int
    keys_and_values: int
    """As one product makes them, without positions."""
    values: int
    kernel: int
    """Queries, keys, or values as attention's kernel takes them, zeros included."""

    @property
    def whole_weights(self) -> int:
        """Weights of a layer that no rank of `tensor` has a part of alone."""
        return self.width * (self.query_rank + self.latent)

    @property
    def widest(self) -> int:
        """Numbers of the largest matrix."""
        return max(inner * columns for inner, columns, _ in self.products)

    @property
    def products(self) -> tuple[tuple[int, int, str], ...]:
        """(inner, columns) of each product of a layer, and what `tensor` cuts of it: rows, columns or inner."""
        narrow = [(self.width, self.query_rank, "rows")] if self.query_rank else []
        return (
            *narrow,
            (self.query_rank or self.width, self.queries, "columns"),
            (self.width, self.latent, "rows"),
            (self.key_value_rank, self.keys_and_values, "columns"),
            (self.values, self.width, "inner"),
        )

    @property
    def gathered_share(self) -> float:
        """Width of what ranks of `tensor` gather before attention, over that of the stream."""
        return ((self.query_rank or self.width) + self.latent) / self.width

    def inputs(self, t: Counts) -> Reals:
        """Numbers a token of what products read before there are heads."""
        stream = self.width / t + (0 if self.query_rank else self.width * (t > 1))
        return np.asarray(stream + self.query_rank + self.latent, dtype=np.float64)

    def kept(self, t: Counts) -> Reals:
        """Numbers a token that a layer keeps for its backward pass: inputs, what is normed, what the kernel keeps."""
        padded = self.values if self.values < self.kernel else 0
        return self.inputs(t) + (self.query_rank + self.latent + 4 * self.kernel + padded) / t

    def products_kept(self, t: Counts) -> Reals:
        """Numbers a token of what products give before attention, and of attention's own result."""
        down = self.query_rank + self.latent
        return np.asarray((down + self.queries + self.keys_and_values + self.kernel) / t, dtype=np.float64)

    def turned(self, t: Counts) -> Reals:
        """Numbers a token between the halves of a split backward pass: inputs of products, and gradients of results."""
        grads = self.query_rank + self.latent + self.queries + self.keys_and_values
        return self.inputs(t) + (grads + self.values) / t


def latent_numbers(shape: ModelShape) -> dict[str, Any]:
    """The fields of a Workload that latent attention sets: heads are as wide as keys and values are on average."""
    if shape.latent is None:
        return {}
    work = LatentWork(
        width=shape.width,
        query_rank=shape.latent.query_rank,
        latent=shape.size_of("latent"),
        key_value_rank=shape.latent.key_value_rank,
        queries=shape.size_of("query_heads"),
        keys_and_values=shape.size_of("key_value_heads"),
        values=shape.size_of("heads"),
        kernel=shape.heads * kernel_width(shape),
    )
    weights = sum(inner * columns for inner, columns, _ in work.products)
    return {"head_width": scored_width(shape) // (2 * shape.heads), "projection_weights": weights, "latent": work}
