"""The model that a recipe goes on from (`model.from`): its folder, and the facts that a plan needs."""

from __future__ import annotations

from pathlib import Path

from plait.errors import PlaitError
from plait.planner.derive.model_size import BaseFacts
from plait.recipe.schema import RunConfig
from plait.working_folder import WorkingFolder


def base_facts(config: RunConfig, working: WorkingFolder) -> BaseFacts | None:
    """The facts about the model that a recipe goes on from, None where it begins a new one. Looks at config and headers
    alone. Raises PlaitError for a folder that cannot be used."""
    from plait.interop.base_model import read_base_model  # torch is not needed, nor are others who have no such model

    folder = base_folder(config, working)
    return None if folder is None else BaseFacts(folder=str(folder), shape=read_base_model(folder).shape)


def base_folder(config: RunConfig, working: WorkingFolder) -> Path | None:
    """The folder of the model that a recipe goes on from; None where it begins a new one."""
    source = config.model.from_
    return None if source is None else model_folder(source, working)


def is_model_source(name: str, working: WorkingFolder) -> bool:
    """Whether a name is that of a model that others made, and not a run's."""
    try:
        return (working.path / name / "config.json").is_file()
    except (OSError, ValueError):  # no path at all, or one that may not be looked at
        return False


def model_folder(source: str, working: WorkingFolder) -> Path:
    """The folder of a model in Hugging Face's format; raises PlaitError where there is none."""
    folder = (working.path / source).absolute()
    if not folder.is_dir():
        raise PlaitError(f'there is no folder "{source}"; name the folder of a model, with config.json and its weights')
    return folder
