"""What unequal hosts could reach at the best, from what each of them does alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

Split = tuple[int, ...]


def best_order(
    tokens_per_s: Sequence[float], *, layers: int, head_layers: float, micros: int, batch_tokens: int
) -> tuple[float, Split, tuple[int, ...]]:
    """Tokens a second of the best split with the hosts in their best order, the first one staying; its layers, and the
    number of the host at each place."""
    found: list[tuple[float, Split, tuple[int, ...]]] = []
    for order in permutations(range(1, len(tokens_per_s))):
        hosts = (0, *order)
        there = [tokens_per_s[host] for host in hosts]
        asked = {"layers": layers, "head_layers": head_layers, "micros": micros, "batch_tokens": batch_tokens}
        found.append((*best_split(there, **asked), hosts))
    return max(found, key=lambda one: one[0])


def best_split(
    tokens_per_s: Sequence[float], *, layers: int, head_layers: float, micros: int, batch_tokens: int
) -> tuple[float, Split]:
    """Tokens a second of the best pipeline of whole layers with its bubble but without messages, and its layers.

    `tokens_per_s` is each host's with the whole model, stages in the order of the hosts; the head, which costs as much
    as `head_layers`, is the last one's. A micro-batch passes all stages once, and the slowest stage sets the pace of
    the others.
    """
    weight = layers + head_layers

    def step_s(split: Sequence[int]) -> float:
        cost = [*split[:-1], split[-1] + head_layers]
        stages = [held / weight * batch_tokens / micros / speed for held, speed in zip(cost, tokens_per_s, strict=True)]
        return sum(stages) + (micros - 1) * max(stages)

    best = min(_splits(layers, len(tokens_per_s)), key=step_s)
    return batch_tokens / step_s(best), best


def _splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal layers to stages, at least one to each."""
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        for rest in _splits(layers - first, stages - 1):
            yield (first, *rest)
