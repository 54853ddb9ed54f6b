"""An adapter by its name, found and not yet loaded: of a run's newest checkpoint, or of a folder in PEFT's format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from plait.checkpoint.store import newest_good
from plait.errors import PlaitError
from plait.interop.base_fingerprint import base_fingerprint
from plait.interop.base_model import BaseModel, read_base_model
from plait.model.adapter_shape import AdapterShape
from plait.planner.plan import Plan
from plait.run_folder import find_run
from plait.working_folder import WorkingFolder

NO_ADAPTER = "none"
"""Stands for the base without an adapter."""
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """The place of an adapter's weights."""

    kind: Literal["checkpoint", "peft"]
    path: str
    shape: AdapterShape | None = None
    """A checkpoint's; a folder of PEFT's says itself what it holds."""


def find_adapter(name: str, base: BaseModel, working: WorkingFolder) -> StoredAdapter:
    """The adapter of a run's newest checkpoint, or of a folder of PEFT's; raises PlaitError where there is none, and
    where it is of another base."""
    folder = working.path / name
    if (folder / ADAPTER_CONFIG).is_file():
        return _of_peft(folder, base)
    run = find_run(name, working)
    plan, found = run.saved_plan(), newest_good(run.checkpoints)
    if plan.job.shape.adapter is None:
        raise PlaitError(f'"{name}" trained all weights and has no adapter; name a run of finetune.method = "lora"')
    if found is None:
        raise PlaitError(f'"{run.path}" has no checkpoint yet; train it for a while first')
    same_shape = replace(plan.job.shape, adapter=None, sequence=base.shape.sequence) == base.shape
    if not same_shape or plan.job.base_fingerprint != base_fingerprint(base):
        raise _of_another_base(name, base, f": {Path(plan.job.base).name}")
    return StoredAdapter(kind="checkpoint", path=str(found.path), shape=plan.job.shape.adapter)


def base_of_plan(plan: Plan, run: Path) -> BaseModel:
    """The model that a run's adapter was trained beside; raises PlaitError where it is gone, or is another one now."""
    base = read_base_model(Path(plan.job.base))
    if base_fingerprint(base) != plan.job.base_fingerprint:
        raise PlaitError(
            f"the model in {plan.job.base} is not the one that {run} trained its adapter on; bring that one back"
        )
    return base


def _of_peft(folder: Path, base: BaseModel) -> StoredAdapter:
    from plait.interop.adapter_in import read_adapter  # reads weights, with torch: they are small, and must fit

    loaded = read_adapter(folder, base.family, base.shape)
    if loaded.base and loaded.base != base_fingerprint(base):
        raise _of_another_base(str(folder), base, "")
    return StoredAdapter(kind="peft", path=str(folder))


def _of_another_base(name: str, base: BaseModel, which: str) -> PlaitError:
    return PlaitError(
        f'the adapter "{name}" is of another base than {base.folder}; name the model that it was trained on{which}'
    )
