"""Batches made in a thread, or in processes of a DataLoader, while the last one is computed with, as far as that
changes nothing."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset

from plait.custom.seeds import generator_states, seed_everything, seed_from

READ_AHEAD = 2
"""Batches that wait, made, beside the one in use and the one in the making."""

ENDS_WITHIN_S = 10.0
"""How long the end of a program waits for the batch in the making."""

BeforeExample = Callable[[int], None]
"""Called with the position of an example before it is read."""
MakeBatch = Callable[[BeforeExample], Any]
_PASSED_OVER, _ENDED = object(), object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """A DataLoader's settings for the worker processes that make its batches: the data set, how many processes, batches
    prefetched by each, the timeout for a batch (0: none), and `worker_init_fn`. The processes are forked."""

    data: Any
    number: int
    prefetch: int
    timeout_s: float
    begin: Callable[[int], None] | None


class _Made(Dataset[Any]):
    """A data set whose items are whole batches. Its attributes are those of the user's data set, because a
    `worker_init_fn` reads and sets them on `get_worker_info().dataset`."""

    def __init__(self, read: Callable[[Any, BeforeExample], Any], before: BeforeExample, data: Any) -> None:
        vars(self).update(_made_by=(read, before), _data=data)

    def __getitem__(self, asked: Any) -> Any:
        read, before = vars(self)["_made_by"]
        return read(asked, before)

    def __len__(self) -> int:
        return len(vars(self)["_data"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_data"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_data"], name, value)


class BatchMaker:
    """Makes batches in order, and knows how long the program waited for them.

    Note [random data]: a data set that draws random numbers (augmentation) must draw the same ones after a resume, and
    must not draw from generators that the model's dropout uses at the same time. So each example is read after seeding
    by (seed, pass, position), whoever reads it; the first batch shows whether anything was drawn. If nothing was, later
    ones are made in a thread. Processes have separate generators: there every example is read after seeding.
    """

    def __init__(
        self, seed: int, *, may_thread: Literal["may thread", "in turn"], processes: Processes | None = None
    ) -> None:
        self._seed, self._may_thread, self._turn = seed, may_thread == "may thread", 0
        self._processes = processes
        self.wait_s = 0.0
        self.draws: bool | None = None
        """Whether making a batch draws random numbers, on any worker; None before the first."""

    def in_turn(self, makers: Iterable[MakeBatch | None]) -> Iterator[Any]:
        """The batches of all makers, in turn; those without a maker are passed over."""
        pending = iter(makers)
        if self._processes is not None:
            yield from self._from_processes(pending, self._processes)
            return
        while True:
            began = time.perf_counter()
            batch = self._next(pending)
            self.wait_s += time.perf_counter() - began
            if batch is _ENDED:
                return
            if batch is not _PASSED_OVER:
                yield batch
                if not self.draws and self._may_thread:
                    break
        yield from self._from_thread(pending)

    def _seed_example(self, position: int) -> None:
        seed_everything(seed_from("example", self._seed, position))

    def _next(self, pending: Iterator[MakeBatch | None]) -> Any:
        if self.draws is not False:
            seed_everything(seed_from("batch", self._seed, self._turn))
        self._turn += 1
        before = generator_states() if self.draws is None else ()
        make: Any = next(pending, _ENDED)
        if make is None or make is _ENDED:
            return _PASSED_OVER if make is None else _ENDED
        batch = make(self._seed_example if self.draws else unseeded)
        if self.draws is None:
            self.draws = generator_states() != before
            if self.draws:  # once more, with the seeds that this batch would have at any later time
                seed_everything(seed_from("batch", self._seed, self._turn - 1))
                batch = make(self._seed_example)
        return batch

    def _from_processes(self, makers: Iterator[MakeBatch | None], processes: Processes) -> Iterator[Any]:
        """The batches of makers that are partial functions, alike but for the last argument, which is sent there."""
        wanted = (make for make in makers if make is not None)
        first: Any = next(wanted, None)
        if first is None:
            return
        read = partial(first.func, *first.args[:-1])
        loader = DataLoader(
            _Made(read, self._seed_example, processes.data),
            batch_size=None,
            sampler=(make.args[-1] for make in chain([first], wanted)),
            num_workers=processes.number,
            prefetch_factor=processes.prefetch,
            timeout=processes.timeout_s,
            multiprocessing_context="fork",
            worker_init_fn=processes.begin,
            generator=torch.Generator(),  # not the program's own
        )
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, _ENDED)
            self.wait_s += time.perf_counter() - began
            if batch is _ENDED:
                return
            yield batch

    def _from_thread(self, makers: Iterator[MakeBatch | None]) -> Iterator[Any]:
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=READ_AHEAD)
        over = threading.Event()
        thread = threading.Thread(target=_make_all, args=(makers, ready, over), name="plait-data", daemon=True)
        ended = False

        def end() -> None:
            over.set()
            thread.join(ENDS_WITHIN_S)

        # A program may end amid its batches. A thread that is in torch's code when the interpreter goes aborts it.
        atexit.register(end)
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                kind, value = ready.get()
                self.wait_s += time.perf_counter() - began
                ended = kind != "batch"
                if kind == "end":
                    return
                if kind == "raised":
                    raise value
                yield value
        finally:
            over.set()
            if ended:
                thread.join()
                atexit.unregister(end)


def unseeded(position: int) -> None:
    """For data without randomness, which need no seed before an example is read."""


def _make_all(makers: Iterator[MakeBatch | None], ready: queue.Queue[tuple[str, Any]], over: threading.Event) -> None:
    try:
        for make in makers:
            if make is not None and not _put(ready, ("batch", make(unseeded)), over):
                return
        _put(ready, ("end", None), over)
    except BaseException as error:  # raised where the result is awaited
        _put(ready, ("raised", error), over)


def _put(ready: queue.Queue[tuple[str, Any]], item: tuple[str, Any], over: threading.Event) -> bool:
    """Wait for room; False once no more is wanted."""
    while not over.is_set():
        try:
            ready.put(item, timeout=0.2)
        except queue.Full:
            continue
        return True
    return False
