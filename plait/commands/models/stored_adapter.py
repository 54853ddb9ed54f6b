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
from plait.model.weights import SAVED_TABLES
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
    vocabulary: int = 0
    """Rows of the vocabulary's tables that it brings; 0: it brings none."""


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
    own = of_checkpoint(found.path, plan)
    rows = base.shape.vocabulary if own.vocabulary else plan.job.shape.vocabulary
    same_shape = replace(plan.job.shape, adapter=None, sequence=base.shape.sequence, vocabulary=rows) == base.shape
    if not same_shape or plan.job.base_fingerprint != base_fingerprint(base):
        raise _of_another_base(name, base, f": {Path(plan.job.base).name}")
    return own


def of_checkpoint(path: Path, plan: Plan) -> StoredAdapter:
    """The adapter in a checkpoint of a run that trains one."""
    shape = plan.job.shape
    assert shape.adapter is not None
    rows = shape.vocabulary if shape.adapter.modules_to_save else 0
    return StoredAdapter(kind="checkpoint", path=str(path), shape=shape.adapter, vocabulary=rows)


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
    rows = max((len(loaded.weights[table]) for table in SAVED_TABLES if table in loaded.weights), default=0)
    return StoredAdapter(kind="peft", path=str(folder), vocabulary=rows)


def _of_another_base(name: str, base: BaseModel, which: str) -> PlaitError:
    return PlaitError(
        f'the adapter "{name}" is of another base than {base.folder}; name the model that it was trained on{which}'
    )
