"""The order of a GPU's streams, with streams that only note which waits for which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from plait.parallel.reduction import SideStream


class NotedStream:
    """A stream of which only the work that it and those it waited for were given is known."""

    current: NotedStream

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.done = device, set[str]()

    def wait_stream(self, other: NotedStream) -> None:
        self.done |= other.done


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[NotedStream]:
    @contextmanager
    def on(stream: NotedStream) -> Iterator[None]:
        before, NotedStream.current = NotedStream.current, stream
        yield
        NotedStream.current = before

    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "Stream", NotedStream)
    monkeypatch.setattr(cuda, "stream", on)
    monkeypatch.setattr(cuda, "current_stream", lambda device: NotedStream.current)
    return NotedStream


def arrive(side: SideStream, stream: NotedStream, gradient: str) -> None:
    """A gradient is computed on a stream, and noted there."""
    stream.done.add(gradient)
    NotedStream.current = stream
    side.arrived()


@pytest.mark.parametrize("order", ["fc", "cf", "fcf", "cfc", "ffccff", "cffc"])
@pytest.mark.parametrize("begins", ["f", "c"])
def test_a_transfer_comes_after_every_gradient_that_arrived_whichever_stream_made_it(
    noted: type[NotedStream], order: str, begins: str
) -> None:
    """c computes; f is FSDP2's own. Without a note of each arrival only the last one's stream would be waited for."""
    streams = {"c": noted(), "f": noted()}
    noted.current = streams["c"]
    side = SideStream(torch.device("cuda"))
    for place, name in enumerate(order):
        arrive(side, streams[name], f"gradient {place}")
    noted.current = streams[begins]
    with side.after_compute():
        seen = set(noted.current.done)
    assert seen >= {f"gradient {place}" for place in range(len(order))}
