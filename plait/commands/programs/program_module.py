"""A program that is named as a module, as `python -m` takes it: where its file is. Nothing of it is imported here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from plait.commands.programs.program_file import ProgramFile
from plait.errors import PlaitError

MAIN = "__main__"
_Found = Path | list[Path]
"""The file of a module, or the folders of a package: several where no folder has an __init__.py; none: nothing."""


def program_module(name: str) -> ProgramFile:
    """The program of a module that Python would find from the current folder; of a package its `__main__`. Raises
    PlaitError where there is none."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise PlaitError(_no_name_text(name))
    found: _Found = [Path.cwd(), *(Path(one) for one in sys.path if one)]
    for number, part in enumerate(parts, start=1):
        so_far = ".".join(parts[:number])
        if isinstance(found, Path):
            raise PlaitError(f"{so_far} is not there: {found} is a module, and no package; check the name {name}")
        found = _below(part, found) or (_installed(part) if number == 1 else [])
        if not found:
            raise PlaitError(
                f"there is no module {so_far} in {Path.cwd()}, nor an installed one; check its name, or go to the "
                f"folder that has {parts[0]} in it"
            )
    if isinstance(found, Path):
        return ProgramFile(path=found, module=name)
    if isinstance(main := _below(MAIN, found), Path):
        return ProgramFile(path=main, module=f"{name}.{MAIN}")
    modules = sorted({f"{name}.{path.stem}" for folder in found for path in folder.glob("[!_]*.py")})
    few = f": {', '.join(modules[:5])}{', …' if len(modules) > 5 else ''}" if modules else ""
    raise PlaitError(f"{name} is a package without {MAIN}.py, which would be run; name one of its modules{few}")


def _below(part: str, folders: Sequence[Path]) -> _Found:
    """The module or package of this name in one of the folders, in Python's order."""
    for folder in folders:
        if (folder / part / "__init__.py").is_file():
            return [folder / part]
        if (folder / f"{part}.py").is_file():
            return folder / f"{part}.py"
    return [folder / part for folder in folders if (folder / part).is_dir()]


def _installed(part: str) -> _Found:
    """The module that Python finds by other means than its path, such as an editable installation."""
    spec = find_spec(part) if part != MAIN else None
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(one) for one in spec.submodule_search_locations]
    return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else []


def _no_name_text(name: str) -> str:
    if name.endswith(".py") or "/" in name:
        module = ".".join(Path(name).with_suffix("").parts)
        return f"{name} is a file; leave out -m, or name the module: plait run -m {module}"
    return f'"{name}" is no name of a module; give it as in an import: plait run -m package.module'
