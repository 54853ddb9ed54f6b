"""The model that a recipe goes on from (`model.from`): its folder, and the facts that a plan needs."""

from __future__ import annotations

import shutil
from pathlib import Path

from plait.data.preparation.fingerprint import exclusive_lock, read_files
from plait.errors import PlaitError, disk_advice
from plait.interop.base_fingerprint import base_fingerprint
from plait.interop.base_model import read_base_model
from plait.interop.gguf import convert_gguf
from plait.interop.hub import PREFIX, fetch_model
from plait.interop.small_files import CONFIGS, LICENCES, TOKENIZER, copy_small_files, refuse_model_links
from plait.planner.derive.adapters import refuse_pairs
from plait.planner.derive.model_size import BaseFacts
from plait.private_folder import make_private_folder
from plait.recipe.finetune import ADAPTER_METHODS
from plait.recipe.schema import RunConfig
from plait.units import counted
from plait.working_folder import WorkingFolder

GGUF = ".gguf"


def base_facts(config: RunConfig, working: WorkingFolder) -> BaseFacts | None:
    """The facts about the model that a recipe goes on from, None where it begins a new one. Looks at config and headers
    alone. Raises PlaitError for a folder that cannot be used."""
    folder = base_folder(config, working)
    if folder is None:
        return None
    base = read_base_model(folder)
    refuse_pairs(config, base.shape)
    told_apart = config.finetune.method in ADAPTER_METHODS or config.finetune.learns_pairs
    fingerprint = base_fingerprint(base) if told_apart else ""
    left_out = f"{counted(base.left_out, 'module')} of {folder.name} for tokens further ahead (multi-token prediction)"
    reasons = (f"left out: {left_out}; the model goes on without",) if base.left_out else ()
    return BaseFacts(folder=str(folder), shape=base.shape, fingerprint=fingerprint, reasons=reasons)


def base_folder(config: RunConfig, working: WorkingFolder) -> Path | None:
    """The folder of the model that a recipe goes on from; None where it begins a new one."""
    source = config.model.from_
    return None if source is None else model_folder(source, working)


def is_model_source(name: str, working: WorkingFolder) -> bool:
    """Whether a name is that of a model that others made, and not a run's."""
    if name.startswith(PREFIX) or name.endswith(GGUF):
        return True
    try:
        return (working.path / name / "config.json").is_file()
    except (OSError, ValueError):  # no path at all, or one that may not be looked at
        return False


def model_folder(source: str, working: WorkingFolder) -> Path:
    """The folder of a model in Hugging Face's format: the one named, or that which a .gguf file was converted to or a
    hub's files were fetched to, once. Raises PlaitError where there is none, and for links that lead out of it."""
    if source.startswith(PREFIX):
        fetched = fetch_model(source)
        refuse_model_links(fetched)
        return fetched
    folder = (working.path / source).absolute()
    if source.endswith(GGUF) and not folder.is_dir():
        return _converted(folder, working.cache / "models")
    if not folder.is_dir():
        raise PlaitError(f'there is no folder "{source}"; name the folder of a model, with config.json and its weights')
    refuse_model_links(folder)
    return folder


def _converted(file: Path, home: Path) -> Path:
    """The folder that a .gguf file was converted to, now or earlier."""
    if not file.is_file():
        raise PlaitError(f'there is no file "{file}"; name a .gguf file, or the folder of a model')
    try:
        make_private_folder(home)
        (content,) = read_files([file], home / "hashes.json", lambda path: None)
        folder = home / content.sha256[:32]
        with exclusive_lock(folder.with_suffix(".lock"), lambda: None):
            if not folder.is_dir():
                _convert(file, folder)
    except OSError as error:
        raise PlaitError(f"{error.filename or home}: {error.strerror}; {disk_advice(error)}, then try again") from error
    return folder


def _convert(file: Path, folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed process: the lock is ours
    try:
        aside.mkdir(mode=0o700)
        convert_gguf(file, aside)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def keep_base_files(source: str, target: Path) -> None:
    """Keep the small files of the model in folder `source` with a run, unless they are kept already; nothing for an
    empty `source`. Raises PlaitError where the disk refuses them."""
    if not source or target.exists():
        return
    aside = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        copy_small_files(Path(source), aside, (*CONFIGS, *TOKENIZER, *LICENCES))
        aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise PlaitError(f"{target} cannot be written ({error.strerror}); {disk_advice(error)}") from error
