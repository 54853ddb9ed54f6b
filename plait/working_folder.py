"""A command's working folder: the one with runs/ and .plait/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.arguments import check_arguments
from plait.errors import PlaitError
from plait.private_folder import CACHE, RUNS, open_to_everybody

Place = str | Path | None
"""The folder that runs/ and .plait/ lie in; None is the current one."""


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The folder with a command's runs and cache; the current one by default."""

    path: Path = Path()

    @property
    def runs(self) -> Path:
        """The folder with a folder for each run."""
        return self.path / RUNS

    @property
    def cache(self) -> Path:
        """Prepared data, trained tokenizers, plans and measurements."""
        return self.path / CACHE

    def warnings(self) -> list[str]:
        """A warning, once per command, about folders that other users can change."""
        found = open_to_everybody((self.runs, self.cache, self.cache / "data"))
        return [
            f"warning  {folder} can be changed by every user of this machine, who could move or replace what plait "
            f"writes there; close it: chmod o-w {folder}"
            for folder in found
        ]

    def relative(self, path: str) -> str:
        """A path below the cache as it reads from this folder, so that it holds where the folder is moved or mounted;
        any other path unchanged."""
        inside, cache = (self.path / path).resolve(), self.cache.resolve()
        return str(Path(self.cache.name) / inside.relative_to(cache)) if inside.is_relative_to(cache) else path


CURRENT_FOLDER = WorkingFolder()


def named_folder(folder: str | Path | None) -> WorkingFolder:
    """The working folder that a caller names, or the current one; raises PlaitError where there is none."""
    check_arguments(folder=folder)
    if folder is None:
        return CURRENT_FOLDER
    path = Path(folder).absolute()
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError):  # too long a name, or a NUL
        is_folder = False
    if not is_folder:
        raise PlaitError(f'folder = "{str(folder)[:200]}" is no folder; make it first, or name another')
    return WorkingFolder(path)
