"""Folders that only their owner can enter: runs and prepared data hold people's text, and models that learned it."""

from __future__ import annotations

from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; one that exists stays as it is.

    What lies in it is out of reach for others whatever its own rights are, so a `chmod` of one folder shares it.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # an error where something else has the name
