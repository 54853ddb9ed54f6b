"""Records which examples each DataLoader of a rank yields, pass by pass."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as loaders

from plait.checking.watch.call_site import call_site
from plait.checking.watch.journal import Journal

_INDICES_AT_MOST = 4096
"""Indices recorded per batch; of a larger batch, a hash is recorded."""


class DataWatch:
    """Watches the iterators of DataLoaders, which subclasses and wrappers use, too."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._sees_metrics = journal, False
        self._loaders: list[Any] = []
        self._passes: dict[int, int] = {}
        self._place: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._indices: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        iterator = loaders._BaseDataLoaderIter
        _around(iterator, "__init__", self._begin)
        _around(iterator, "_reset", self._again)
        _around(iterator, "_next_index", self._see_indices)
        _around(iterator, "__next__", self._see_batch)

    def _begin(self, original: Callable[..., Any], iterator: Any, loader: DataLoader[Any]) -> None:
        if not any(one is loader for one in self._loaders):
            self._loaders.append(loader)
        self._indices[iterator] = deque()
        self._open_pass(iterator, loader)
        original(iterator, loader)

    def _again(self, original: Callable[..., Any], iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # persistent workers begin another pass with the same iterator
            self._indices[iterator] = deque()
            self._open_pass(iterator, loader)
        original(iterator, loader, first_iter)

    def _see_metrics(self) -> None:
        """Record calls of Accelerate's gather_for_metrics, which drops the duplicates at the end of a pass. It is
        looked for when data is drawn: importing it for programs that do not use it would take seconds."""
        accelerate = sys.modules.get("accelerate")
        if self._sees_metrics or accelerate is None or not hasattr(accelerate, "Accelerator"):
            return
        self._sees_metrics = True

        def gather(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            self._journal.write("gathers_for_metrics")
            return original(*arguments, **keywords)

        _around(accelerate.Accelerator, "gather_for_metrics", gather)

    def _open_pass(self, iterator: Any, loader: DataLoader[Any]) -> None:
        self._see_metrics()
        number = next(i for i, one in enumerate(self._loaders) if one is loader)
        self._passes[number] = self._passes.get(number, -1) + 1
        self._place[iterator] = (number, self._passes[number])
        self._journal.write("pass", loader=number, passed=self._passes[number], site=call_site(), **_facts(loader))

    def _see_indices(self, original: Callable[..., Any], iterator: Any) -> Any:
        indices = original(iterator)
        self._indices[iterator].append(indices)
        return indices

    def _see_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        loader, passed = self._place.get(iterator, (-1, -1))
        try:
            batch = original(iterator)
        except StopIteration:
            self._journal.write("pass_ends", loader=loader, passed=passed)
            raise
        waiting = self._indices.get(iterator)
        indices = waiting.popleft() if waiting else None
        flat = [indices] if isinstance(indices, int) else indices
        known = isinstance(flat, list) and len(flat) <= _INDICES_AT_MOST and all(type(one) is int for one in flat)
        self._journal.write(
            "draw", loader=loader, passed=passed, indices=flat if known else None, content=_content(batch)
        )
        return batch


def _facts(loader: DataLoader[Any]) -> dict[str, Any]:
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(
        batches, "batch_sampler", batches
    )  # Accelerate's BatchSamplerShard holds the one that it shares out
    # With the program's own batch sampler, a DataLoader has a sampler that it never uses.
    sampler = getattr(inner, "sampler", None) if batches is not None else getattr(loader, "sampler", None)
    dataset = loader.dataset
    is_map = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
    replicas = getattr(sampler, "num_replicas", getattr(batches, "num_processes", None))
    return {
        "dataset_length": len(dataset) if is_map else None,  # pyright: ignore[reportArgumentType]
        "dataset_kind": type(dataset).__name__,
        "sampler": type(sampler).__name__,
        "sampler_length": _length(sampler),
        "replicas": replicas if isinstance(replicas, int) else None,
        "epoch": getattr(sampler, "epoch", None),
        "shuffles": getattr(sampler, "shuffle", None),
        "replacement": bool(getattr(sampler, "replacement", False)),
        "drop_last": bool(getattr(inner, "drop_last", getattr(loader, "drop_last", False))),
        "batch_size": getattr(inner, "batch_size", getattr(loader, "batch_size", None)),
    }


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None


def _content(batch: Any) -> list[str]:
    """A short hash of each example of a batch, from its row in the first tensor; empty if there is no such tensor."""
    first = _first_tensor(batch)
    if first is None or first.dim() == 0 or first.shape[0] > _INDICES_AT_MOST:
        return []
    rows = first.detach().reshape(first.shape[0], -1).contiguous()
    return [hashlib.blake2b(_bytes(row), digest_size=8).hexdigest() for row in rows]


def _bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes() if row.numel() else b""


def _first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    inner = list(values.values()) if hasattr(values, "values") else values if isinstance(values, list | tuple) else []
    return next((found for one in inner if (found := _first_tensor(one)) is not None), None)


def _around(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return around(original, *arguments, **keywords)

    setattr(owner, name, wrapped)
