"""The folder of a saved program: step-N/, each with state.json, model.safetensors and one file an optimizer.

run.save ─► .step-N.staging/ ─► written, synced ─► one rename: step-N/ ─► the one before is removed
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.checked_json import one_line
from plait.checkpoint.durable import clean_stop, require_space, sync_folder, write_durably
from plait.errors import PlaitError

STATE_FORMAT = 1
_STEP = re.compile(r"step-(\d{1,15})")


def write_saved(folder: Path, step: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write a program's state after `step` steps: JSON and files of named tensors; returns its folder.

    Either all of it is there afterwards or nothing new. An earlier step is removed once this one stands. Raises
    RunFailed with the mend where the disk says no.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging, done = folder / f".step-{step}.staging", folder / f"step-{step}"
    shutil.rmtree(staging, ignore_errors=True)
    with clean_stop(staging):
        staging.mkdir()
        require_space(staging, sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values()))
        for name, tensors in files.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, staging / f"{name}.safetensors")
        write_durably(staging / "state.json", json.dumps({"format": STATE_FORMAT, **state}, allow_nan=False).encode())
        sync_folder(staging)
        if done.exists():  # the same step saved again
            shutil.rmtree(done)
        staging.rename(done)
        sync_folder(folder)
    for path in folder.glob("step-*"):
        if _STEP.fullmatch(path.name) and path != done:
            shutil.rmtree(path, ignore_errors=True)
    return done


def newest_saved(folder: Path) -> Path:
    """The folder of the newest whole state in `folder`; raises PlaitError where there is none."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    if not found:
        raise PlaitError(f"{folder} holds no saved state of a program; name the folder that run.save was given")
    return max(found)[1]


def read_state(saved: Path) -> dict[str, Any]:
    """The JSON of a saved state; raises PlaitError where it is none that this plait can read."""
    try:
        state = json.loads((saved / "state.json").read_text())
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise ValueError("its format is another one")
    except (OSError, ValueError) as error:
        raise PlaitError(f"{saved} cannot be read ({one_line(str(error))}); resume from another folder") from None
    return state


def read_tensors(saved: Path, name: str) -> dict[str, Tensor]:
    """One file of named tensors; raises PlaitError where it is damaged or missing."""
    path = saved / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise PlaitError(f"{path} cannot be read ({one_line(str(error))}); resume from another folder") from None
