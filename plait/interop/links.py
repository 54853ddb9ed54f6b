"""Links in a model's folder, which a stranger may have made: followed inside of the folder and to the files of the
Hugging Face hub's cache, and nowhere else, as whatever a run reads it keeps and exports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from plait.errors import PlaitError


def refuse_links_out(folder: Path, patterns: Iterable[str]) -> None:
    """Raise PlaitError, naming the first, for a file that fits one of these patterns and lies elsewhere."""
    homes = _homes(folder)
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            _refuse_elsewhere(folder, path, homes)


def inside(folder: Path, path: Path) -> Path:
    """The path of a file in a model's folder, which need not exist; raises PlaitError where it is a link that leads
    out."""
    _refuse_elsewhere(folder, path, _homes(folder))
    return path


def _homes(folder: Path) -> list[Path]:
    """Where the files of a folder may lie: in it, and in the blobs of the hub's cache where it is a snapshot there
    (models--OWNER--NAME/snapshots/REVISION, whose files are links to models--OWNER--NAME/blobs/HASH)."""
    own = folder.resolve()
    snapshots, repository = own.parent, own.parent.parent
    is_snapshot = snapshots.name == "snapshots" and repository.name.startswith("models--")
    return [own, repository / "blobs"] if is_snapshot else [own]


def _refuse_elsewhere(folder: Path, path: Path, homes: Iterable[Path]) -> None:
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        target = None
    if target is None or not any(target.is_relative_to(home) for home in homes):
        raise PlaitError(
            f"{path.relative_to(folder)} in {folder} is a link to a file outside of that folder, and plait follows no "
            "such link; copy the file there if you mean it"
        )
