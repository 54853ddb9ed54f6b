"""A text patch on a copy of plait: strict about the text, indifferent to line numbers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "plait"
MUTANTS = Path(__file__).parent / "mutants"


def mutated_copy(patch: Path | None, folder: Path) -> Path:
    """Copy plait into the folder and apply a patch; AssertionError where it no longer applies."""
    shutil.copytree(PACKAGE, folder / "plait", ignore=shutil.ignore_patterns("__pycache__"))
    if patch is not None:
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
