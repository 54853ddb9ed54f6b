"""What machines are sent by ssh: the wheel with the versions it is installed with, and the recipe with its text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from plait.errors import PlaitError
from plait.recipe.schema import RunConfig

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)[^;]*(;.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFiles:
    """A wheel of plait, and the lock file: every package with its version."""

    wheel: Path
    lock: str

    @property
    def name(self) -> str:
        """A hash of both: machines that have an environment of that name need nothing."""
        return sha256(self.wheel.read_bytes() + self.lock.encode()).hexdigest()[:16]


def environment_files(named: str | None) -> EnvironmentFiles:
    """The wheel that is named, or the newest in dist/; raises PlaitError where there is none."""
    wheels = [Path(named)] if named else sorted(Path("dist").glob("plait-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels or not wheels[-1].is_file():
        where = named or "dist/"
        raise PlaitError(
            f"there is no wheel of plait to send ({where}); type make wheel where plait's source is, and name the file "
            "by --with wheel=FILE, or name a Python that has plait by --with python=PATH"
        )
    return EnvironmentFiles(wheel=wheels[-1], lock="".join(f"{line}\n" for line in lock_lines("plait")))


def lock_lines(package: str) -> list[str]:
    """Every package that this one needs here, with its version."""
    found = sorted(_needed(package, set()))
    lines = [f"{name}=={version(name)}" for name in found if name != package]
    if any(line.startswith("torch==") and "+cpu" in line for line in lines):
        lines.insert(0, "--extra-index-url https://download.pytorch.org/whl/cpu")
    return lines


def _needed(package: str, seen: set[str]) -> set[str]:
    if package in seen:
        return seen
    try:
        needs = requires(package) or []
    except PackageNotFoundError:  # for another platform or Python
        return seen
    seen.add(package)
    for name in _names(needs):
        _needed(name, seen)
    return seen


def _names(requirements: Sequence[str]) -> Iterator[str]:
    for text in requirements:
        match = _REQUIREMENT.match(text)
        if match and "extra ==" not in (match[2] or ""):
            yield match[1].lower().replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """The recipe or the program and what it reads, and the settings by which they are found over there, where all lie
    in one folder."""

    paths: tuple[Path, ...]
    settings: tuple[str, ...] = ()


def input_files(target: Sequence[str], config: RunConfig | None) -> InputFiles:
    """What node 0 is sent; raises PlaitError for what is a folder, or a text that is a name on the hub."""
    if config is None:
        return InputFiles(paths=(Path(target[0]),))
    named = config.data.files
    texts = [named] if isinstance(named, str) else list(named)
    paths = [Path(text) for text in texts if isinstance(text, str)]
    if len(paths) < len(texts):
        raise PlaitError("ssh sends files by their names alone; put this recipe's texts on the first machine yourself")
    for path in paths:
        if not path.is_file():
            raise PlaitError(
                f"{path} is no single file, and ssh sends single files; put the text on machine one yourself"
            )
    settings = [f"data.files={json.dumps([path.name for path in paths])}"]
    for key, path in _other_inputs(target, config):
        paths.append(path)
        settings.append(f"{key}={json.dumps(path.name)}")
    if len({path.name for path in paths}) < len(paths):
        raise PlaitError("two files of this recipe have the same name, and ssh sends both to one folder; rename one")
    return InputFiles(paths=(Path(target[0]), *paths), settings=tuple(settings))


def _other_inputs(target: Sequence[str], config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Files beside the texts by the recipe's key, but for those whose place over there was typed."""
    read = {
        "model.from": config.model.from_,
        "data.tokenizer": config.data.tokenizer,
        "report.choices": config.report.choices,
    }
    for key, text in read.items():
        if (
            text is None
            or not (path := Path(text)).is_absolute()
            or any(word.startswith(f"{key}=/") for word in target)
        ):
            continue
        if path.is_dir():
            raise PlaitError(
                f"{key} is the folder {path}, and ssh sends single files; put it on each machine, and add "
                f"{key}=/ITS/PLACE/THERE to this command"
            )
        yield key, path
