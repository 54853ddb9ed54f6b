"""The folder of a saved program: step-N/, each with state.json, model.safetensors and one file an optimizer.

run.save ─► .step-N.staging/ ─► written, synced ─► one rename: step-N/ ─► the one before is removed
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.checked_json import one_line
from plait.checkpoint.durable import clean_stop, require_space, write_durably
from plait.checkpoint.shared_disk import rename_for_all, sync_folder
from plait.errors import PlaitError
from plait.regular_file import read_regular_file

STATE_FORMAT = 2
_STEP = re.compile(r"step-(\d{1,15})(\.before)?")
"""A saved step; ".before" is what it was until the same step was saved again, there only if that was interrupted."""
_COMPLEX = "@complex"
"""How the names of complex tensors end in a file, which holds none."""
_FILE = re.compile(r"model|schedulers|extra|optimizer-\d{1,9}|buffers-\d{1,9}")
_FIELDS = {"steps": int, "workers": int, "optimizers": list, "schedulers": list, "progress": dict, "files": list}


def write_saved(folder: Path, step: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write a program's state after `step` steps: JSON and files of named tensors; returns its folder.

    Either all of it is there afterwards or nothing new. An earlier step is removed once this one stands. Raises
    RunFailed where the disk says no.
    """
    staging, done = folder / f".step-{step}.staging", folder / f"step-{step}"
    with clean_stop(staging), _only_writer(folder):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        require_space(staging, sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values()))
        for name, tensors in files.items():
            save_file(_apart(tensors), staging / f"{name}.safetensors")
        write_durably(staging / "state.json", json.dumps({"format": STATE_FORMAT, **state}, allow_nan=False).encode())
        sync_folder(staging)
        before = folder / f"step-{step}.before"
        if done.exists():  # the same step saved again
            shutil.rmtree(before, ignore_errors=True)
            rename_for_all(done, before)
        rename_for_all(staging, done)
        sync_folder(folder)
        for path in folder.glob("step-*"):
            if _STEP.fullmatch(path.name) and path != done:
                shutil.rmtree(path, ignore_errors=True)
    return done


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Make a folder of saved states, and keep other processes from writing to it meanwhile, where its disk locks
    folders: two runs that were given one folder save whole states in turn. Blocks while another one writes."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in memory of its own: a file of them holds no views, and complex numbers as pairs of real
    ones."""
    seen: set[int] = set()
    found = {}
    for given, tensor in tensors.items():
        name = f"{given}{_COMPLEX}" if tensor.is_complex() else given
        whole = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
        place = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if place in seen else whole
        seen.add(place)
    return found


def has_saved(folder: Path) -> bool:
    """Whether there is a whole state in `folder`."""
    return bool(_saved(folder))


def newest_saved(folder: Path) -> Path:
    """The folder of the newest whole state in `folder`; raises PlaitError where there is none."""
    found = _saved(folder)
    if not found:
        raise PlaitError(f"{folder} holds no saved state of a program; name the folder that run.save was given")
    return max(found, key=lambda one: (one[0], one[1].suffix == ""))[1]


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """The folders of states in `folder`, each with its step."""
    return [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]


def read_state(saved: Path) -> dict[str, Any]:
    """The JSON of a saved state; raises PlaitError where it is none that this plait can read."""
    try:
        state = json.loads(read_regular_file(saved / "state.json"))
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise ValueError("its format is another one")
        for name, kind in _FIELDS.items():
            if not isinstance(state.get(name), kind):
                raise ValueError(f"{name} is missing or of another kind")
        if not all(isinstance(name, str) and _FILE.fullmatch(name) for name in state["files"]):
            raise ValueError("it names files that no saved state has")
    except (OSError, ValueError) as error:
        raise PlaitError(f"{saved} cannot be read ({one_line(str(error))}); resume from another folder") from None
    return state


def read_tensors(saved: Path, name: str) -> dict[str, Tensor]:
    """One file of named tensors; raises PlaitError where it is damaged or missing."""
    path = saved / f"{name}.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PlaitError(f"{path} cannot be read ({one_line(str(error))}); resume from another folder") from None
    return {
        name.removesuffix(_COMPLEX): torch.view_as_complex(one) if name.endswith(_COMPLEX) else one
        for name, one in found.items()
    }
