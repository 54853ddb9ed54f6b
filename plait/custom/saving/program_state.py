"""All that a program resumes from: weights, buffers, optimizers, schedulers, steps, and places in the data."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from plait.custom.group import Workers
from plait.custom.layouts.first_weights import broadcast_all
from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.process.launcher import RESUMED, SAVED
from plait.custom.program import Program
from plait.custom.saving.folder import has_saved, newest_saved, read_state, read_tensors, write_saved
from plait.custom.saving.optimizer_state import collect_optimizer, restore_optimizer
from plait.custom.saving.tree import from_plain, to_plain
from plait.errors import PlaitError
from plait.parallel.exchange import TENSOR_DTYPES, first_ones, gather_json, gather_tensors

MODEL = "model"


def save_program(
    folder: Path,
    program: Program,
    parallel: ParallelProgram,
    workers: Workers,
    steps: int,
    progress: Mapping[str, Any],
    extra: Any = None,
) -> None:
    """Write all of it to `folder`; `progress` is JSON of the caller, `extra` what the person keeps, as the first worker
    has it. Every worker must call it; the first one writes, and an error of its disk is raised by all."""
    workers.announce("run.save")()
    files = {MODEL: {**parallel.full_weights(), **program.named_buffers()}}
    files |= _unlike_buffers(program, workers)
    optimizers = []
    for index, optimizer in enumerate(program.optimizers):
        pieces, shapes = parallel.pieces_of(index), _whole_shapes(program, index)
        plain, tensors = collect_optimizer(optimizer, pieces, parallel.form, shapes, workers)
        optimizers.append(plain)
        files[f"optimizer-{index}"] = tensors
    scheduler_tensors: dict[str, Tensor] = {}
    schedulers = [
        to_plain(scheduler.state_dict(), f"scheduler/{number}", scheduler_tensors)
        for number, scheduler in enumerate(program.schedulers)
    ]
    files["schedulers"] = scheduler_tensors
    extra_tensors: dict[str, Tensor] = {}
    kept = to_plain(extra, "extra", extra_tensors)
    files |= {"extra": extra_tensors} if extra_tensors else {}
    state = {
        "steps": steps, "workers": workers.size, "optimizers": optimizers, "schedulers": schedulers,
        "progress": dict(progress), "extra": kept, "files": sorted(files), "buffers": sorted(program.named_buffers()),
    }  # fmt: skip

    def write() -> str:
        here = {name: {key: one.detach().cpu() for key, one in tensors.items()} for name, tensors in files.items()}
        return str(write_saved(folder, steps, state, here))

    first_ones(write, workers.sums)
    if workers.rank == 0:
        workers.launcher.tell(SAVED, folder, steps)


IfMissing = Literal["error", "begin"]
"""The effect of a resume if nothing is saved yet: an error, or the start of the run."""


def resume_program(
    folder: Path, program: Program, parallel: ParallelProgram, workers: Workers, missing: IfMissing
) -> dict[str, Any] | None:
    """Read the newest state in `folder` back, on any number of workers; returns {"steps", "workers", "progress",
    "extra"}.

    Only the first worker needs the folder. Every worker must call it; raises PlaitError where there is none (or
    returns None, with `missing` "begin"), or it is of another program.
    """
    if missing not in get_args(IfMissing):
        raise PlaitError(f'missing = "{missing}" is unknown; choose "error" or "begin"')
    workers.announce("run.resume")()
    sums = workers.sums
    where = first_ones(lambda: str(newest_saved(folder)) if missing == "error" or has_saved(folder) else "", sums)
    if not where:
        return None
    state = first_ones(lambda: read_state(Path(where)), sums)
    loaded = {name: _read(Path(where), name, workers) for name in _needed(state, workers)}
    _check(state, program, loaded[MODEL])
    with torch.no_grad():
        parallel.load_weights(loaded[MODEL])
        own = loaded.get(f"buffers-{workers.rank}", loaded[MODEL])
        for name, buffer in program.named_buffers().items():
            buffer.copy_(own[name])
    for index, optimizer in enumerate(program.optimizers):
        plain, tensors = state["optimizers"][index], loaded[f"optimizer-{index}"]
        restore_optimizer(optimizer, parallel.pieces_of(index), _whole_shapes(program, index), plain, tensors)
    for scheduler, plain in zip(program.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(from_plain(plain, loaded["schedulers"]))
    if workers.rank == 0:
        workers.launcher.tell(RESUMED, folder, state["steps"])
    found = {key: state[key] for key in ("steps", "workers", "progress")}
    return {**found, "extra": from_plain(state.get("extra"), loaded.get("extra", {}))}


def _needed(state: Mapping[str, Any], workers: Workers) -> list[str]:
    """The files to read; buffers that differed from worker to worker only for the same number of workers."""
    same = state["workers"] == workers.size
    return [name for name in state["files"] if same or not name.startswith("buffers-")]


def _read(saved: Path, name: str, workers: Workers) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}

    def read() -> None:
        tensors.update(read_tensors(saved, name))

    first_ones(read, workers.sums)
    return _first_tensors(tensors, workers)


def _first_tensors(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """The first worker's named tensors on all, on the processor; the others' argument is not looked at. Blocks."""
    if workers.size == 1:
        return dict(tensors)
    own = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    described = first_ones(lambda: own, workers.sums)
    there = {name: torch.empty(shape, dtype=TENSOR_DTYPES[dtype]) for name, dtype, shape in described}
    found = dict(tensors) if workers.rank == 0 else there
    broadcast_all(list(found.values()), workers)
    return found


def _check(state: Mapping[str, Any], program: Program, weights: Mapping[str, Tensor]) -> None:
    counts = (len(state["optimizers"]), len(state["schedulers"]))
    if counts != (len(program.optimizers), len(program.schedulers)):
        raise PlaitError(
            f"the saved program has {counts[0]} optimizers and {counts[1]} schedulers, this one "
            f"{len(program.optimizers)} and {len(program.schedulers)}; resume with the program that saved it"
        )
    here = {name: _whole_shape(one) for name, one in program.named_parameters().items()}
    here |= {name: one.shape for name, one in program.named_buffers().items()}
    for name in sorted(here.keys() ^ weights.keys()):
        where = "is not in the saved state" if name in here else "is in the saved state and not in this model"
        raise PlaitError(f"{name} {where}; resume with the model that was saved")
    for name, shape in here.items():
        if shape != weights[name].shape:
            raise PlaitError(
                f"{name} was saved with shape {tuple(weights[name].shape)} and has {tuple(shape)} now; resume with the "
                "model that was saved"
            )


def _whole_shapes(program: Program, optimizer: int) -> dict[str, torch.Size]:
    """The shapes of all weights that this optimizer's loss updates."""
    return {name: _whole_shape(p) for name, p in program.trained_by(program.loss_of(optimizer)).items()}


def _whole_shape(tensor: Tensor) -> torch.Size:
    return tensor.shape  # a sharded one's is that of the whole


def _unlike_buffers(program: Program, workers: Workers) -> dict[str, dict[str, Tensor]]:
    """Each worker's buffers where they are not the same on all: a file for each."""
    buffers = {name: buffer.detach().cpu().contiguous() for name, buffer in program.named_buffers().items()}
    if workers.size == 1 or not buffers:
        return {}
    digest = sha256()
    for buffer in buffers.values():
        digest.update(bytes(buffer.reshape(-1).view(torch.uint8).numpy()))
    if len(set(gather_json(digest.hexdigest(), workers.sums))) == 1:
        return {}
    found: dict[str, dict[str, Tensor]] = {f"buffers-{rank}": {} for rank in range(workers.size)}
    for name, buffer in buffers.items():
        for rank, one in enumerate(gather_tensors(buffer, workers.sums)):
            found[f"buffers-{rank}"][name] = one
    return found
