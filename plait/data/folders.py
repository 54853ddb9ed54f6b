"""The text files in a folder: which of them are read, and which are left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plait.errors import PlaitError
from plait.units import counted

TEXT_SUFFIXES = (".txt", ".md")
RECORD_SUFFIXES = (".jsonl", ".parquet", ".csv", ".tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFiles:
    """The files of a folder and the folders in it that people may want read, sorted by name, PDFs and empty ones among
    them; `left_out` counts the others by reason."""

    folder: Path
    files: tuple[Path, ...]
    left_out: tuple[tuple[str, int], ...]

    def summary(self) -> str:
        """One line for people."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out)
        others = f", not looked at: {reasons}" if reasons else ""
        return f"{self.folder}: {counted(len(self.files), 'file')}{others}"


def find_text_files(folder: Path) -> FolderFiles:
    """Find the text files of a folder and of all folders in it; raises PlaitError where there are none, or where one
    of the folders cannot be read.

    Links are not followed: they may lead out of the folder or in a circle. Hidden files and folders are left out, as
    globs leave them out.
    """
    files, left_out = list[Path](), Counter[str]()
    for path in _walk(folder):
        if reason := _reason_to_leave(path):
            left_out[reason] += 1
        else:
            files.append(path)
    found = FolderFiles(folder=folder, files=tuple(sorted(files, key=str)), left_out=tuple(sorted(left_out.items())))
    if not files:
        known = ", ".join((*TEXT_SUFFIXES, *RECORD_SUFFIXES))
        raise PlaitError(f"no text is in the folder {found.summary()}", f"put files in it that end in {known}")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Every file, and every link or hidden folder, which are not entered."""
    waiting = [folder]
    while waiting:
        inner = waiting.pop()
        try:
            entries = sorted(inner.iterdir())
        except OSError as error:
            raise PlaitError(f"the folder {inner} cannot be read ({error.strerror})", "check its permissions") from None
        for path in entries:
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                waiting.append(path)
            else:
                yield path


def _reason_to_leave(path: Path) -> str:
    """Why a file is not looked at, for the count; empty where it is."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():
        return "linked"
    if path.suffix.lower() not in (*TEXT_SUFFIXES, *RECORD_SUFFIXES, ".pdf") or not path.is_file():
        return path.suffix[:12] if path.suffix else "without a suffix"
    return ""
