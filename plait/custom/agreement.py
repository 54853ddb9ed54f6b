"""Whether all workers read the same data: what a file draws or builds before `plait.spread` may differ by worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from plait.custom.cutting import batch_size
from plait.custom.data.batches import OwnBatches
from plait.custom.data.sources import ExamplePositions
from plait.custom.group import Workers
from plait.custom.seeds import seed_everything, seed_from, seeded
from plait.custom.structure import tensors_of
from plait.errors import PlaitError
from plait.parallel.exchange import gather_json

NEARLY = 1e-2
"""Of the largest number of a tensor: how far means and largest numbers of two workers may be apart. Decoders of images
and sounds round differently on unlike machines."""
_ADVICE = (
    "what a file draws or builds before plait.spread must be the same on every worker: give random_split a seeded "
    "generator, sort what comes out of a set, and let each worker read the whole of an iterable"
)


def check_same_data(own: OwnBatches, workers: Workers) -> None:
    """Raise PlaitError where workers have data of another length, order or content: three examples are compared, or
    the first whole batch of an iterable. What is random beyond all seeds (a generator of its own), or cannot be read
    alone, is not. Every worker must call it, with its first batch at hand; blocks."""
    if workers.size == 1:
        return
    workers.announce("run.batches")()
    parts = _parts(own)
    described = {name: _described(make) for name, make in parts.items()}
    everybody = gather_json(list(described.items()), workers.sums)
    unlike = [name for name in parts if any(_differ(dict(one)[name], dict(everybody[0])[name]) for one in everybody)]
    if not unlike:
        return
    own_random = [name for name in unlike if _differ(described[name], _described(parts[name]))]
    let_through = {name for some in gather_json(own_random, workers.sums) for name in some}
    for name in unlike:
        if name not in let_through:
            ranks = [rank for rank, one in enumerate(everybody) if _differ(dict(one)[name], dict(everybody[0])[name])]
            raise PlaitError(f"worker {ranks[0]} has {name} other than worker 0 has; {_ADVICE}")


def check_same_batch(batch: Any, workers: Workers) -> None:
    """Raise PlaitError where workers have made unlike batches, each of which should be the whole one. Every worker must
    call it; blocks."""
    if workers.size > 1:
        everybody = gather_json(_described(lambda: batch), workers.sums)
        unlike = [rank for rank, one in enumerate(everybody) if _differ(one, everybody[0])]
        if unlike:
            raise PlaitError(
                f"worker {unlike[0]} gave run.share another batch than worker 0; make the whole batch alike on every "
                "worker (what is drawn between calls is the same on all)"
            )


def unlike_shapes_text(share: Any, workers: Workers) -> str:
    """What to know where workers' shares of a batch have unlike shapes beside the number of examples, in words. Every
    worker must call it; blocks."""
    if workers.size == 1:
        return ""
    try:
        size = batch_size(share)
    except PlaitError:  # a batch of a kind of its own
        size = -1
    shapes = [list(tensor.shape[1:]) for tensor in tensors_of(share) if tensor.dim() and len(tensor) == size]
    if all(one == shapes for one in gather_json(shapes, workers.sums)):
        return ""
    return (
        "the workers' shares of a batch have unlike shapes, as each is padded by itself; where a model sees the "
        'padding, run.batches(…, collated_over="batch") pads to the longest of the whole batch'
    )


def _parts(own: OwnBatches) -> dict[str, Callable[[], Any]]:
    """The compared values by name, and how to make each equal."""
    source = own.source
    if not isinstance(source, ExamplePositions):
        return {"a first batch": lambda: None if own.first is None else own.first()}
    positions = [0, source.size // 2, source.size - 1]
    found: dict[str, Callable[[], Any]] = {"a number of examples": lambda: source.size}
    if own.first_order is not None:
        order = own.first_order
        drawn = order.tolist() if isinstance(order, Tensor) else [one for batch in order for one in batch]
        positions = [drawn[0], drawn[len(drawn) // 2], drawn[-1]]
        found["an order of examples"] = lambda: drawn
    for name, position in zip(("a first example", "a middle example", "a last example"), positions, strict=True):
        found[name] = _reader(source, position)
    return found


def _reader(source: ExamplePositions, position: int) -> Callable[[], Any]:
    return lambda: source.read([position], lambda one: seed_everything(seed_from("example", one)))


def _described(make: Callable[[], Any]) -> list[Any]:
    """A digest of what must be the same to the bit, and numbers that must be nearly the same; empty where it cannot be
    made (a collate of two examples at least)."""
    try:
        with seeded(seed_from("agreement")):
            facts = list(_facts(make()))
    except Exception:  # of the person's own code: the batches themselves will tell
        return []
    exact = [one for one in facts if isinstance(one, bytes)]
    return [sha256(b"\0".join(exact)).hexdigest(), [one for one in facts if isinstance(one, tuple)]]


def _differ(one: list[Any], other: list[Any]) -> bool:
    if not one or not other:
        return False
    return one[0] != other[0] or any(
        abs(a - c) > NEARLY * max(b, d) or abs(b - d) > NEARLY * max(b, d)
        for (a, b), (c, d) in zip(one[1], other[1], strict=True)
    )


_Fact = bytes | tuple[float, float]
"""A value that must be equal, or the mean and the largest absolute number of one that must be nearly equal."""


def _facts(value: Any) -> Iterator[_Fact]:
    """What can be compared of a value on two machines: numbers, texts and tensors in anything that holds them. Of
    absolute paths only the last part, of other objects only the class."""
    yield type(value).__name__.encode()
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        value = torch.as_tensor(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield from _facts_of_tensor(torch.view_as_real(value) if value.is_complex() else value)
    elif isinstance(value, str | PurePath):
        path = PurePath(value)
        yield (path.name if path.is_absolute() else str(value)).encode()
    elif isinstance(value, float):
        yield (value, abs(value)) if value - value == 0 else (0.0, 0.0)
    elif value is None or isinstance(value, bool | int | bytes):
        yield repr(value).encode()
    else:
        for one in _members(value):
            yield from _facts(one)


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield one
    elif isinstance(value, tuple | list):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield getattr(value, field.name)


def _facts_of_tensor(value: Tensor) -> Iterator[_Fact]:
    """Whole numbers count exactly, but bytes, which images are made of."""
    yield f"{value.dtype}{tuple(value.shape)}".encode()
    if value.is_floating_point() or value.dtype == torch.uint8:
        wide = value.detach().double().nan_to_num()
        yield (float(wide.mean()), float(wide.abs().max())) if wide.numel() else (0.0, 0.0)
    else:
        yield repr(value.tolist()).encode()
