"""A text patch on plait's files: strict about the text, indifferent to line numbers."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "plait"
MUTANTS = Path(__file__).parent / "mutants"


def mutated_copy(patch: Path | None, folder: Path) -> Path:
    """Copy plait into the folder and apply a patch; AssertionError where it no longer applies."""
    shutil.copytree(PACKAGE, folder / "plait", ignore=shutil.ignore_patterns("__pycache__"))
    if patch is not None:
        apply(patch.read_text(), folder)
    return folder


def call_mutant(patch: str | None, function: str, *arguments: Any) -> Any:
    """Call a function of tests.parity.mutant_proofs in a process that has no plait yet, and a plait with the patch."""
    assert not any(name.partition(".")[0] == "plait" for name in sys.modules)
    if patch is not None:
        sys.meta_path.insert(0, PatchedFiles(_patched_files(Path(patch), Path("patched").absolute())))
    return getattr(importlib.import_module("tests.parity.mutant_proofs"), function)(*arguments)


class PatchedFiles:
    """Imports from a folder the modules that lie there, before anybody else is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = self._folder / f"{name.replace('.', '/')}.py"
        return spec_from_file_location(name, file) if file.exists() else None


def _patched_files(patch: Path, folder: Path) -> Path:
    """The files that a patch changes, with the patch."""
    for name in re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(), flags=re.MULTILINE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE.parent / name, folder / name)
    apply(patch.read_text(), folder)
    return folder


def apply(patch: str, folder: Path) -> None:
    """Every hunk's old lines must stand exactly once in its file."""
    files = re.split(r"^--- a/.*\n\+\+\+ b/", patch, flags=re.MULTILINE)[1:]
    assert files, "the patch changes nothing"
    for one in files:
        name, _, hunks = one.partition("\n")
        text = (folder / name).read_text()
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines()
            old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "-"))
            new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "+"))
            assert old != new and text.count(old) == 1, f"no longer applies to {name}:\n{hunk}"
            text = text.replace(old, new)
        (folder / name).write_text(text)
