"""The folder of checkpoints: publish one by a rename, verify, choose the newest good one, delete old ones; no torch."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path

from plait.checkpoint.arrival import parse_list, part_files
from plait.checkpoint.durable import clean_stop, write_durably
from plait.checkpoint.file_check import WHOLE_FILE, HashShare, check_file, check_file_layout, damaged_file
from plait.checkpoint.manifest import MANIFEST, Manifest, StoredPart, manifest_text, parse_manifest, sort_parts
from plait.checkpoint.shared_disk import names_now, rename_for_all, sync_folder
from plait.errors import PlaitError, RunFailed
from plait.regular_file import read_regular_file

MAX_MANIFEST_BYTES = 2**28

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_LEFTOVER = re.compile(r"\.(step-(?:0|[1-9]\d*))(?:\.gen-\d+)?\.(staging|replaced|pruned)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest checkpoint that verified, and a sentence for each newer one that did not."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...]


def staging_for(folder: Path, step: int, generation: int = 0) -> Path:
    """Where the ranks write the checkpoint of `step` before it is published; out of sight of every reader, and of ranks
    of any other start (`generation`) of the run."""
    return folder / (f".step-{step}.gen-{generation}.staging" if generation else f".step-{step}.staging")


def checkpoint_for(folder: Path, step: int) -> Path:
    """The path of the published checkpoint of `step`."""
    return folder / f"step-{step}"


def publish(
    staging: Path,
    final: Path,
    *,
    step: int,
    cursor: int,
    model: dict[str, object],
    world_size: int,
    needs: Iterable[str] = (),
) -> Manifest:
    """Turn what all ranks wrote into a checkpoint by one rename; rank 0 alone calls this, after all others wrote.

    Raises RunFailed, with the staging folder gone and earlier checkpoints untouched, where that cannot be done, or
    where no rank wrote one of the tensors that it `needs`.
    """
    with clean_stop(staging):
        lists = [(rank, read_regular_file(staging / part_files(rank)[1])) for rank in range(world_size)]
        parts = sort_parts(part for rank, data in lists for part in parse_list(rank, data))
        missing = sorted(set(needs) - {part.tensor for part in parts})
        if missing:
            raise RunFailed(
                f"no worker wrote {missing[0]}, and step {step} is not saved; this is a bug in plait, please report it"
            )
        text = manifest_text(Manifest(step=step, cursor=cursor, model=model, parts=parts)).encode()
        manifest = parse_manifest(text)
        write_durably(staging / MANIFEST, text)
        keep = {MANIFEST} | {part.file for part in parts}
        for name in names_now(staging) - keep:
            (staging / name).unlink()
        sync_folder(staging)
        _swap_in(staging, final)
        return manifest


def verify_checkpoint(path: Path, share: HashShare = WHOLE_FILE) -> Manifest:
    """Read the manifest and hash every part, or a share of them; raises PlaitError that names the file and what is
    wrong with it."""
    try:
        manifest = read_manifest(path)
        by_file = groupby(sorted(manifest.parts, key=_file_of), key=_file_of)
        # hashlib lets go of the interpreter lock, so threads hash (and read from the disk) side by side.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for file, parts in by_file:
                check_file(path / file, list(parts), pool, share)
    except OSError as error:
        raise PlaitError(
            f"{error.filename or path} cannot be read ({error.strerror})",
            f"check its permissions and the disk, or move {path} away",
        ) from error
    return manifest


def newest_good(folder: Path) -> FoundCheckpoint | None:
    """The newest checkpoint in `folder` that verifies; None only where there never was one.

    Raises PlaitError where there are checkpoints and none verifies: starting afresh would hide that work was lost.
    """
    checkpoints = _published(folder)
    skipped: list[PlaitError] = []
    for step in sorted(checkpoints, reverse=True):
        try:
            return FoundCheckpoint(
                path=checkpoints[step], manifest=_verify_step(checkpoints, step), skipped=tuple(map(str, skipped))
            )
        except PlaitError as error:
            skipped.append(error)
    if skipped:
        what = skipped[0].cause
        several = f"none of the {len(skipped)} checkpoints in {folder} is whole (the newest: {what})"
        raise PlaitError(
            f"{several if len(skipped) > 1 else f'the only checkpoint in {folder} is not whole ({what})'}; "
            "bring one back from a backup, or start under another run.name"
        )
    return None


def published_checkpoints(folder: Path) -> tuple[Path, ...]:
    """The folders of all checkpoints that were saved whole, oldest first; none of them is verified."""
    return tuple(path for _, path in sorted(_published(folder).items()))


def prune(folder: Path, keep: int, whole: Collection[int], *, keep_s: float = 0.0) -> None:
    """Delete all checkpoints older than the `keep` newest whole ones, if they were made more than `keep_s` ago; one
    process at a time may call this.

    `whole` are the steps of those that the caller wrote or verified itself: nothing is hashed here, because ranks wait.
    Any other counts for nothing, and stays until there are enough newer ones; so does one whose files are not in place.
    Staging folders of steps before the newest checkpoint go too: a host that was frozen can come back and write into a
    folder that hosts share, for a start of the run that is over.
    """
    assert keep >= 1
    checkpoints = _published(folder)
    newest = max(checkpoints, default=0)
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "staging" and int(match[1].removeprefix("step-")) < newest and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    good = 0
    for step in sorted(checkpoints, reverse=True):
        if good == keep:
            if _age_s(checkpoints[step]) >= keep_s:
                _delete(checkpoints[step])
        else:
            good += step in whole and _is_in_place(checkpoints[step])


def clean_staging(folder: Path) -> None:
    """Clear away what a killed process left in `folder`; called once at the start of a run, by one process."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "replaced" and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        elif match and path.is_symlink():  # a save would write where it leads, and clear away what lies there
            path.unlink()
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def _swap_in(staging: Path, final: Path) -> None:
    # A checkpoint of this step can exist where it did not verify and the run went back before it. It is moved aside,
    # not deleted, so that at no moment all traces of a checkpoint are gone.
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        rename_for_all(final, replaced)
    rename_for_all(staging, final)
    sync_folder(final.parent)
    sync_folder(final.parent.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, without checking its files; raises PlaitError if it cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise PlaitError(f"{path} is missing", "name a folder such as runs/NAME/checkpoints/step-100, or move it away")
    try:
        return parse_manifest(read_regular_file(path, MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise damaged_file(path, str(error)) from None


def _published(folder: Path) -> dict[int, Path]:
    """Every checkpoint by its step, with those that a killed `publish` had just moved aside for a successor."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []:
        leftover = _LEFTOVER.fullmatch(path.name)
        name = leftover[1] if leftover and leftover[2] == "replaced" else path.name
        if _STEP.fullmatch(name):
            found.setdefault(int(name.removeprefix("step-")), path)
    return found


def _verify_step(checkpoints: dict[int, Path], step: int) -> Manifest:
    manifest = verify_checkpoint(checkpoints[step])
    if manifest.step != step:
        raise damaged_file(checkpoints[step] / MANIFEST, f"it is that of step {manifest.step}")
    return manifest


def _is_in_place(path: Path) -> bool:
    """Whether the manifest is whole, and each file there with its size and header; no part is read."""
    try:
        by_file = groupby(sorted(read_manifest(path).parts, key=_file_of), key=_file_of)
        for file, parts in by_file:
            check_file_layout(path / file, list(parts))
    except (OSError, PlaitError):
        return False
    return True


def _age_s(path: Path) -> float:
    """Seconds since a checkpoint was made, by the clock of its disk; one without a manifest is older than any."""
    try:
        return max(0.0, time.time() - (path / MANIFEST).stat().st_mtime)
    except OSError:
        return inf


def _file_of(part: StoredPart) -> str:
    return part.file


def _delete(path: Path) -> None:
    aside = path.with_name(f".{path.name.strip('.').removesuffix('.replaced')}.pruned")
    try:
        rename_for_all(path, aside)
    except OSError as error:
        raise RunFailed(
            f"could not delete the old checkpoint {path} ({error.strerror}); check its permissions and give the "
            "command again"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)
