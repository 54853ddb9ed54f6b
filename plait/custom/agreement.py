"""Whether all workers read the same data: what a file draws or builds before `plait.spread` may differ by worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from plait.custom.data.batches import OwnBatches
from plait.custom.data.sources import ExamplePositions
from plait.custom.exchange import gather_json
from plait.custom.group import Workers
from plait.custom.seeds import seed_everything, seed_from, seeded
from plait.errors import PlaitError

_RANDOM = "random"
"""In place of the digest of an example that is another one each time it is read."""
_ADVICE = (
    "what a file draws or builds before plait.spread must be the same on every worker: give random_split a seeded "
    "generator, sort what comes out of a set, and let each worker read the whole of an iterable"
)


def check_same_data(own: OwnBatches, workers: Workers) -> None:
    """Raise PlaitError where workers have data of another length, order or content: three examples are compared, or
    the first whole batch of an iterable. An example that is random beyond all seeds (a generator of its own) is not.
    Every worker must call it, with its first batch at hand; blocks."""
    if workers.size == 1:
        return
    workers.announce("run.batches")()
    described = _of_positions(own, own.source) if isinstance(own.source, ExamplePositions) else _of_stream(own)
    everybody = gather_json(list(described.items()), workers)
    for rank, theirs in enumerate(everybody):
        for (name, value), (other, first) in zip(theirs, everybody[0], strict=True):
            if name != other or (value != first and _RANDOM not in (value, first)):
                raise PlaitError(f"worker {rank} has {name} other than worker 0 has; {_ADVICE}")


def _of_positions(own: OwnBatches, source: ExamplePositions) -> dict[str, str]:
    found = {"a number of examples": str(source.size)}
    positions = [0, source.size // 2, source.size - 1]
    if source.draw is not None:
        order = own.order(source, 0)
        drawn = order.tolist() if isinstance(order, Tensor) else [one for batch in order for one in batch]
        found["an order of examples"] = _digest(order)
        positions = [drawn[0], drawn[len(drawn) // 2], drawn[-1]]
    for name, position in zip(("a first example", "a middle example", "a last example"), positions, strict=True):
        twice = {_example_digest(source, position) for _ in range(2)}
        found[name] = twice.pop() if len(twice) == 1 else _RANDOM
    return found


def _example_digest(source: ExamplePositions, position: int) -> str:
    with seeded(seed_from("agreement")):
        return _digest(source.read([position], lambda one: seed_everything(seed_from("example", one))))


def _of_stream(own: OwnBatches) -> dict[str, str]:
    return {"a first batch": "" if own.first is None else _digest(own.first())}


def _digest(value: Any) -> str:
    return sha256(b"\0".join(_bytes_of(value))).hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    """What can be compared of a value on two machines: numbers, texts and tensors in anything that holds them. Of
    absolute paths only the last part, of other objects only the class."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        dense = (torch.view_as_real(value) if value.is_complex() else value).detach().cpu().contiguous()
        yield f"{dense.dtype}{tuple(dense.shape)}".encode()
        yield bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        array: Any = value
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes() if array.dtype.kind in "biufc" else b""
    elif isinstance(value, str | PurePath):
        path = PurePath(value)
        yield (path.name if path.is_absolute() else str(value)).encode()
    elif value is None or isinstance(value, bool | int | float | bytes):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _bytes_of(key)
            yield from _bytes_of(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _bytes_of(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _bytes_of(getattr(value, field.name))
    yield type(value).__name__.encode()
