"""Training steps recorded as CUDA graphs and replayed: for small models, whose kernels a GPU runs faster than its host
launches them.

A step of a model with 125M parameters is some 900 kernels. For three rows of 1,024 tokens an H200 needs 11 ms to run
them, and the host 40 ms to launch them one by one; a replay launches them all at once. A recorded step reads and writes
the same memory each time. So the tokens are copied to where the recording found its own, documents are padded to a
fixed number with empty ones, and the learning rate lies on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from plait.accelerator import allocatable_bytes, is_accelerator
from plait.data.samples.micro import Micro
from plait.model.attention import cumulative_lengths, of_any_length
from plait.trainer.step import Scalars
from plait.units import format_duration

TakeStep = Callable[[Sequence[Micro]], Scalars]
"""Takes a step with these micro-batches; on a GPU its results may still be under way."""

UNTIMED_STEPS = 3
"""Steps at the beginning of a run in which layers are compiled and memory is allocated."""
TIMED_STEPS = 3
"""Steps that are timed, before the first recording and after it."""
HOST_BOUND = 0.9
"""Steps that keep the host busy for at least this fraction of their time are recorded: the GPU waits for launches."""
WORTHWHILE = 0.95
"""Replays must take at most this fraction of the time of the steps before."""
MOST_GRAPHS = 4
"""Recordings that are kept, for different numbers of documents. A step that fits none is launched kernel by kernel."""
SMALLEST_ROOM = 16
"""Documents that every recording has room for; beyond that, powers of two."""
SPARE_ROOM = 1.1
"""Free memory required for a recording, as a multiple of the size of a step's tensors."""


class Recorder(Protocol):
    """How a device records work."""

    def rehearse(self, work: Callable[[], Scalars]) -> Scalars:
        """Do the work as it will be recorded, so that nothing happens for the first time during recording."""
        ...

    def record(self, work: Callable[[], Scalars]) -> Callable[[], Scalars]:
        """Record the work without doing it. Each call of the result does it and returns the same tensors, filled with
        that call's results. Raises RuntimeError if the work cannot be recorded."""
        ...

    def has_room(self) -> bool:
        """Whether a step's tensors fit into memory a second time."""
        ...

    def wait(self) -> None:
        """Wait until all work is done."""
        ...


class StepGraphs:
    """Decides by measurement whether steps are replayed, and replays them.

    `take` is the step to record, `around` is a context around each replay for observers of steps, and `tell` gets one
    sentence about the decision.
    """

    def __init__(
        self,
        take: TakeStep,
        recorder: Recorder,
        tell: Callable[[str], None],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._take, self._recorder, self._tell, self._around, self._clock = take, recorder, tell, around, clock
        self._steps = 0
        self._launching: list[_Timed] = []
        self._replaying: list[_Timed] = []
        self._graphs: list[_Graph] = []
        self._gave_up = False

    def take(self, micros: Sequence[Micro], launch: TakeStep) -> Scalars:
        """Take a step: with `launch`, kernel by kernel, or as a replay."""
        self._steps += 1
        if self._gave_up or self._steps <= UNTIMED_STEPS:
            return launch(micros)
        if len(self._launching) < TIMED_STEPS:
            scalars = self._timed(lambda: launch(micros), self._launching)
            if len(self._launching) == TIMED_STEPS:
                host_share = median(one.host_s / one.step_s for one in self._launching)
                self._gave_up = host_share < HOST_BOUND
            return scalars
        graph = self._graph_for(micros)
        if graph is None:
            return launch(micros)
        with self._around():
            return self._taken_by(graph, micros)

    def _taken_by(self, graph: _Graph, micros: Sequence[Micro]) -> Scalars:
        """A step with this recording: rehearsed the first time, recorded the second, replayed from then on."""
        graph.inputs.fill(micros)
        if not graph.is_rehearsed:
            graph.is_rehearsed = True
            return self._recorder.rehearse(lambda: self._take(graph.inputs.micros))
        if graph.replay is None:
            try:
                graph.replay = self._recorder.record(lambda: self._take(graph.inputs.micros))
            except RuntimeError as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                self._give_up(f"it cannot be recorded ({said[0]})")
                return self._take(micros)
        replay = graph.replay
        if len(self._replaying) == TIMED_STEPS:
            return _copied(replay())
        scalars = self._timed(lambda: _copied(replay()), self._replaying)
        if len(self._replaying) == TIMED_STEPS:
            self._judge()
        return scalars

    def _timed(self, take: Callable[[], Scalars], times: list[_Timed]) -> Scalars:
        self._recorder.wait()
        began = self._clock()
        scalars = take()
        launched = self._clock()
        self._recorder.wait()
        times.append(_Timed(host_s=launched - began, step_s=self._clock() - began))
        return scalars

    def _judge(self) -> None:
        """Keep the replays if they are faster, and say so."""
        before, after = (median(one.step_s for one in times) for times in (self._launching, self._replaying))
        launched, replayed = format_duration(before), format_duration(after)
        if after > WORTHWHILE * before:
            self._give_up(f"a replay takes {replayed}, and launching its kernels one by one {launched}")
            return
        self._tell(
            f"steps are replayed as a CUDA graph from now on: {replayed} each, and {launched} where the host launches "
            "their kernels one by one"
        )

    def _give_up(self, why: str) -> None:
        self._gave_up = True
        self._graphs.clear()
        self._tell(f"steps are not replayed as a CUDA graph: {why}")

    def _graph_for(self, micros: Sequence[Micro]) -> _Graph | None:
        """The smallest recording that fits these micro-batches, else a new one; None if no more are possible."""
        fitting = [graph for graph in self._graphs if graph.inputs.fit(micros)]
        if fitting:
            return min(fitting, key=lambda graph: graph.inputs.documents)
        if len(self._graphs) == MOST_GRAPHS:
            return None
        if not self._graphs and not self._recorder.has_room():
            self._give_up("its tensors do not fit into the GPU's memory a second time")
            return None
        self._graphs.append(_Graph(inputs=_Inputs(micros)))
        return self._graphs[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """The seconds of a step, and those until its last kernel was launched."""

    host_s: float
    step_s: float


@dataclass(slots=True, kw_only=True)
class _Graph:
    """A recording, its inputs, and its progress."""

    inputs: _Inputs
    is_rehearsed: bool = False
    replay: Callable[[], Scalars] | None = None


class _Inputs:
    """Micro-batches in separate memory at a fixed address."""

    def __init__(self, like: Sequence[Micro]) -> None:
        self.documents = _room_for_documents(like)
        self.micros = [self._kept(micro) for micro in like]

    def _kept(self, micro: Micro) -> Micro:
        inputs, targets = micro.inputs.clone(), micro.targets.clone()
        if micro.lengths is None:
            return Micro(inputs=inputs, targets=targets, positions=_cloned(micro.positions), lengths=None)
        ends = torch.empty(self.documents + 1, dtype=torch.int32, device=inputs.device)
        return Micro(
            inputs=inputs,
            targets=targets,
            positions=_cloned(micro.positions),
            lengths=(),
            ends=of_any_length(ends) if is_accelerator(ends.device) else ends,
        )

    def fit(self, micros: Sequence[Micro]) -> bool:
        """Whether these micro-batches can be copied here."""
        alike = [one.inputs.shape for one in micros] == [one.inputs.shape for one in self.micros]
        return alike and max((len(one.lengths or ()) for one in micros), default=0) <= self.documents

    def fill(self, micros: Sequence[Micro]) -> None:
        """Copy these micro-batches here. Missing documents are empty ones at the end."""
        for kept, micro in zip(self.micros, micros, strict=True):
            kept.inputs.copy_(micro.inputs)
            kept.targets.copy_(micro.targets)
            if kept.positions is not None and micro.positions is not None:
                kept.positions.copy_(micro.positions)
            if kept.ends is not None and micro.lengths is not None:
                empty = (0,) * (self.documents - len(micro.lengths))
                ends = cumulative_lengths((*micro.lengths, *empty))
                kept.ends.copy_(ends.pin_memory() if is_accelerator(kept.ends.device) else ends, non_blocking=True)


def _room_for_documents(micros: Sequence[Micro]) -> int:
    most = max((len(one.lengths or ()) for one in micros), default=0)
    return max(SMALLEST_ROOM, 1 << (most - 1).bit_length()) if most else 0


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _copied(scalars: Scalars) -> Scalars:
    """The results in memory that the next replay does not overwrite."""
    held = {one.name: getattr(scalars, one.name) for one in fields(scalars)}
    return replace(scalars, **{name: one.clone() for name, one in held.items() if isinstance(one, Tensor)})


class CudaRecorder:
    """Records the work of the current GPU as CUDA graphs, which share one pool of memory: no two run at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: Callable[[], Scalars]) -> Scalars:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            scalars = _copied(work())
        torch.cuda.current_stream().wait_stream(self._stream)
        return scalars

    def record(self, work: Callable[[], Scalars]) -> Callable[[], Scalars]:
        graph = torch.cuda.CUDAGraph()
        # "relaxed": other threads, such as the loader's and NCCL's, continue to use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"):
            scalars = work()

        def replay() -> Scalars:
            graph.replay()
            return scalars

        return replay

    def has_room(self) -> bool:
        held = torch.cuda.memory_allocated()
        return allocatable_bytes(self._stream.device) > SPARE_ROOM * (torch.cuda.max_memory_allocated() - held)

    def wait(self) -> None:
        torch.cuda.synchronize()
