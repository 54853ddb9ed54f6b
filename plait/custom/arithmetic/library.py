"""Chooses the library for the user's float32 matrix products on CPUs: once, measured on the program's own products."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Literal

import torch

from plait.custom.arithmetic.recorded import WorkCounts, WorkRecorder, describe_work, total_flops
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.errors import PlaitError
from plait.machines.machine import detect_cpu_machine
from plait.machines.measured import ProductRates
from plait.model.matmul import MatmulLibrary, has_onednn, matmul_library, precision_is_set
from plait.parallel.exchange import gather_json
from plait.working_folder import CURRENT_FOLDER

# Note [within plait's calls]: the switch is torch's, for the whole process. It is turned only while a step or an
# evaluation of this run goes on, so that the program's other products, and other runs, are what they were.

FIRST_LOOKED_AT = 1
"""Number of the first step whose products are recorded: step 0 also checks the loss."""
LEAST_FLOPS = 1e9
"""FLOPs of a worker's products in a step, some ten milliseconds, below which no second is spent on measuring them."""

RequestedLibrary = Literal["measured", "default"]
MeasureWork = Callable[[WorkCounts], ProductRates]


class ProductLibrary:
    """The library of a run's products; torch's own until the second step, whose products are recorded.

    Every worker must call the same methods in the same order. Where a person has set torch's precision of float32
    products himself, and on GPUs, nothing is changed.
    """

    def __init__(
        self,
        program: Program,
        workers: Workers,
        requested: RequestedLibrary,
        measure: MeasureWork | None = None,
    ) -> None:
        self._workers, self._measure = workers, measure
        possible = requested == "measured" and workers.device.type == "cpu" and has_onednn() and _is_plain(program)
        self._choice: Literal["open", "made"] = "open" if possible else "made"
        self.library: MatmulLibrary = "default"
        self._everybody: list[list[str]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Compute a step, counted over the whole run, in the block; after the one that is recorded all decide."""
        if self._choice == "made" or number < FIRST_LOOKED_AT:
            with self.selected():
                yield
            return
        with WorkRecorder() as recorder:
            yield
        self._choice = "made"
        self._decide(recorder.counts)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Multiply by the library within the block: Note [within plait's calls]."""
        if self.library == "default" or precision_is_set():
            yield
            return
        with matmul_library(self.library):
            yield

    def saved(self) -> list[list[str]]:
        """For each worker its machine and library, as JSON; nothing while undecided, and where nothing is chosen."""
        return self._everybody

    def resume(self, saved: Sequence[Sequence[str]]) -> None:
        """Go on with the libraries of a saved run, where as many workers are on the same machines: the bits depend on
        them. Else what suits these machines is found out again. Every worker must call it; blocks."""
        if self._choice == "made":
            return
        own = saved[self._workers.rank] if len(saved) == self._workers.size else []
        same = len(own) == 2 and own[0] == detect_cpu_machine().digest()
        if not all(gather_json(same, self._workers.sums)):
            return
        self._choice, self.library = "made", "onednn" if own[1] == "onednn" else "default"
        self._everybody = [list(one) for one in saved]
        if self.library == "onednn":
            self._workers.say("matrix products by oneDNN, as in the saved run")

    def _decide(self, counts: WorkCounts) -> None:
        """Measure the products, or read what was measured of them before on this machine; then all take what suits each
        machine."""
        from plait.planner.derive.arithmetic import choose_backends
        from plait.probing.kept import KeptRates, keep_timings, load_timings, nearest

        here = detect_cpu_machine()
        work = json.dumps([describe_work(counts), self._workers.size, torch.get_num_threads()])
        name = f"program {sha256(work.encode()).hexdigest()[:32]}"
        found = nearest(load_timings(CURRENT_FOLDER, here).rates, name, ())
        kept = found.ranks if found else ()
        own = {
            "machine": here.digest(), "flops": total_flops(counts), "set": precision_is_set(),
            "rates": [one.to_values() for one in kept[:1]],
        }  # fmt: skip
        answers = gather_json(own, self._workers.sums)
        self._everybody = [[one["machine"], "default"] for one in answers]
        flops = [float(one["flops"]) for one in answers]
        if any(one["set"] for one in answers) or not all(flops) or sum(flops) < LEAST_FLOPS * len(flops):
            return
        if not all(one["rates"] for one in answers):
            measured = self._measured(counts)
            keep_timings(CURRENT_FOLDER, here, rates=[KeptRates(name=name, sizes=(), ranks=(measured,))])
            answers = gather_json({"rates": [measured.to_values()]}, self._workers.sums)
        chosen = choose_backends("auto", "float32", [_rates_of(one) for one in answers])
        self._everybody = [[one, chosen.host_backends.get(one, chosen.backend)] for one, _ in self._everybody]
        self.library = chosen.host_backends.get(here.digest(), chosen.backend)
        for reason in chosen.reasons:
            self._workers.say(reason)

    def _measured(self, counts: WorkCounts) -> ProductRates:
        if self._measure is not None:
            return self._measure(counts)
        from plait.custom.arithmetic.measured import measure_recorded

        return measure_recorded(counts)


def _rates_of(values: Mapping[str, Any]) -> ProductRates:
    try:
        return ProductRates.from_values(values["rates"][0])
    except (ValueError, KeyError, IndexError):
        raise PlaitError(
            "a worker reported impossible speeds of matrix products; install the same commit of plait on all hosts"
        ) from None


def _is_plain(program: Program) -> bool:
    """Whether no module is compiled: a compiled one would be compiled again for the step that is recorded."""
    modules = (module for model in program.models for module in model.modules())
    return not any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None for module in modules
    )
