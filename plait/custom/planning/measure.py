"""`run.plan`: a few steps of a person's own program under each layout, timed, with the memory that each takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.accelerator import free_memory_of, is_accelerator, synchronize
from plait.custom.gathering import gathering_nothing
from plait.custom.group import Workers, alone
from plait.custom.layouts.choose import parallelize_program
from plait.custom.layouts.copies import copy_program, with_own_optimizers
from plait.custom.layouts.description import CustomLayout
from plait.custom.planning.plan import CustomPlan, MeasuredLayout, choose_measured
from plait.custom.program import Program
from plait.custom.stepping.gradients import StepPlace
from plait.custom.stepping.loss_scale import LossScale
from plait.custom.stepping.loss_steps import LossSteps
from plait.custom.structure import cloned, tensors_of
from plait.custom.verifying.outcome import set_statistics
from plait.custom.verifying.shares import gather_shares, join_shares
from plait.errors import PlaitError
from plait.machines.machine import free_memory_bytes, usable_cores

STEPS = 4
"""Steps of each layout; the first warms up and is not counted."""
FREE_MEMORY_SHARE = 0.9
"""Share of the memory that is free, which a plan may fill."""
LAYOUTS: tuple[CustomLayout, ...] = ("replicate", "shard optimizer", "shard parameters")


def plan_program(
    program: Program, workers: Workers, share: Any, *, weights: Mapping[str, Tensor] | None = None
) -> CustomPlan:
    """Measure copies of a program under each layout on all workers, and on one alone; then choose as the planner does.

    `share` is this worker's part of a batch; `weights` are whole ones by name, where the program's are sharded. Every
    worker must call it; it blocks for some twenty steps and changes nothing of the run.
    """

    def copied() -> Program:
        return _fresh_copy(program, weights)

    measured = [_measured_alone(copied(), workers, share)]
    if workers.size > 1:
        measured += [_measured_layout(copied(), workers, layout, share) for layout in LAYOUTS]
    memory = -float(workers.sums.largest(torch.tensor([-_free_bytes(workers)], dtype=torch.float64)))
    return choose_measured(measured, memory * FREE_MEMORY_SHARE)


def _measured_layout(program: Program, workers: Workers, layout: CustomLayout, share: Any) -> MeasuredLayout:
    try:
        step_s, taken = _time_steps(program, workers, layout, [share])
    except PlaitError as error:
        return MeasuredLayout(layout=layout, workers=workers.size, refused=str(error))
    both = workers.sums.largest(torch.tensor([step_s, taken], dtype=torch.float64))
    return MeasuredLayout(layout=layout, workers=workers.size, step_s=float(both[0]), bytes_per_worker=float(both[1]))


def _measured_alone(program: Program, workers: Workers, share: Any) -> MeasuredLayout:
    """The first worker takes the whole batch, while the others wait; with its own threads or with all of its machine,
    whichever is faster."""
    shares = gather_shares(share, workers)
    whole = join_shares(shares)
    sums = torch.zeros(2, dtype=torch.float64)
    if workers.rank == 0:
        one = replace(alone(), device=workers.device)
        micros = shares if whole is None else [whole]
        try:
            with gathering_nothing():
                own_s, taken = _time_steps(program, one, "replicate", micros)
                with _all_threads(workers):
                    step_s, _ = _time_steps(program, one, "replicate", micros)
            sums += torch.tensor([min(own_s, step_s), taken], dtype=torch.float64)
        except (MemoryError, RuntimeError):  # the others wait for these numbers
            if workers.size == 1:
                raise
    step_s, taken = workers.sums(sums).tolist()
    if not step_s:
        return MeasuredLayout(layout="replicate", workers=1, refused="could not take the whole batch")
    return MeasuredLayout(layout="replicate", workers=1, step_s=step_s, bytes_per_worker=taken)


def _time_steps(program: Program, workers: Workers, layout: CustomLayout, micros: Sequence[Any]) -> tuple[float, float]:
    """Seconds of a step, the median of a few, and the bytes that this worker takes."""
    set_statistics(program, "all workers" if workers.size > 1 else "this worker")
    parallel = parallelize_program(program, workers, layout)
    micros = [cloned(micro) for micro in micros]
    losses = LossSteps(program, parallel, workers, LossScale(1.0))
    times, kept = [], 0.0
    for step in range(STEPS):
        workers.sums(torch.zeros(1))  # all begin together
        begin = perf_counter()
        place = StepPlace(step=step, batch=step)
        for index in range(len(program.losses)):
            if step:
                sums = losses.sum(index, micros, place)
            else:
                with _kept_bytes(program, micros) as held:
                    sums = losses.sum(index, micros, place)
                kept = max(kept, held[0])
            losses.update(index, sums, place)
        synchronize(workers.device)
        times.append(perf_counter() - begin)
    return median(times[1:]), kept + _held_bytes(program)


def _fresh_copy(program: Program, weights: Mapping[str, Tensor] | None) -> Program:
    """A copy with optimizers of the same kinds, which have no state yet."""
    copied = copy_program(program, dtype="own", weights=weights)
    try:
        return replace(with_own_optimizers(copied, program), before_update=None)
    except PlaitError as error:
        raise PlaitError(f"{error}, so no step is measured; name a layout instead") from None


def _held_bytes(program: Program) -> float:
    """Weights, gradients and optimizer state that this worker keeps."""
    named = program.named_parameters()
    weights = sum(_own_bytes(parameter) for parameter in named.values())
    gradients = sum(_own_bytes(named[name]) for names in program.trained_names for name in names)
    state = sum(
        _own_bytes(value)
        for optimizer in program.optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
    return weights + gradients + state


def _own_bytes(tensor: Tensor) -> int:
    """Bytes of the part of a tensor that is on this worker."""
    from torch.distributed.tensor import DTensor  # most of a second of imports

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@contextmanager
def _kept_bytes(program: Program, micros: Sequence[Any]) -> Iterator[list[float]]:
    """A list with one number: the bytes that were kept for backward passes, without weights and batches."""
    known = [parameter.data for parameter in program.named_parameters().values()]
    known += [tensor for micro in micros for tensor in tensors_of(micro)]
    places = {tensor.untyped_storage().data_ptr() for tensor in known if type(tensor) is Tensor}
    held: dict[int, int] = {}
    total = [0.0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            held[storage.data_ptr()] = storage.nbytes()
            total[0] = float(sum(held.values()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


@contextmanager
def _all_threads(workers: Workers) -> Iterator[None]:
    """All processors of this machine for this process, where it computes on processors."""
    before = torch.get_num_threads()
    if workers.device.type == "cpu":
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _free_bytes(workers: Workers) -> float:
    """Memory that this worker may still take: of its own GPU, or an equal part of what its machine has free."""
    if is_accelerator(workers.device):
        return float(free_memory_of(workers.device))
    return free_memory_bytes() / workers.size
