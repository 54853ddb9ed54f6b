"""The folder of checkpoints: publish one by a rename, verify, choose the newest good one, delete old ones; no torch."""

from __future__ import annotations

import mmap
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path

from plait.checkpoint.arrival import parse_list, part_files
from plait.checkpoint.durable import clean_stop, sync_folder, write_durably
from plait.checkpoint.manifest import (
    Manifest,
    StoredPart,
    manifest_text,
    parse_manifest,
    safetensors_header,
    sort_parts,
)
from plait.errors import PlaitError, RunFailed
from plait.regular_file import read_regular_file

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**28

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_LEFTOVER = re.compile(r"\.(step-(?:0|[1-9]\d*))\.(staging|replaced|pruned)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest checkpoint that verified, and a sentence for each newer one that did not."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...]


def staging_for(folder: Path, step: int) -> Path:
    """Where the ranks write the checkpoint of `step` before it is published; out of sight of every reader."""
    return folder / f".step-{step}.staging"


def checkpoint_for(folder: Path, step: int) -> Path:
    """Where the published checkpoint of `step` lies."""
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
    where nobody wrote one of the tensors that it `needs`.
    """
    with clean_stop(staging):
        lists = [(rank, (staging / part_files(rank)[1]).read_bytes()) for rank in range(world_size)]
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
        for path in staging.iterdir():
            if path.name not in keep:
                path.unlink()
        sync_folder(staging)
        _swap_in(staging, final)
        return manifest


def verify_checkpoint(path: Path) -> Manifest:
    """Read the manifest and hash every part; raises PlaitError that names the file and what is wrong with it."""
    try:
        manifest = _read_manifest(path / MANIFEST)
        by_file = groupby(sorted(manifest.parts, key=lambda part: part.file), key=lambda part: part.file)
        # hashlib lets go of the interpreter lock, so threads hash (and read from the disk) side by side.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for file, parts in by_file:
                check_file(path / file, list(parts), pool)
    except OSError as error:
        raise PlaitError(
            f"{error.filename or path} cannot be read ({error.strerror}); mend its rights or disk, or move {path} away"
        ) from error
    return manifest


def newest_good(folder: Path) -> FoundCheckpoint | None:
    """The newest checkpoint in `folder` that verifies; None only where there never was one.

    Raises PlaitError where there are checkpoints and none verifies: starting afresh would hide that work was lost.
    """
    checkpoints = _published(folder)
    skipped: list[str] = []
    for step in sorted(checkpoints, reverse=True):
        try:
            return FoundCheckpoint(
                path=checkpoints[step], manifest=_verify_step(checkpoints, step), skipped=tuple(skipped)
            )
        except PlaitError as error:
            skipped.append(str(error))
    if skipped:
        what = skipped[0].partition(";")[0]  # without its advice to take an older one
        several = f"none of the {len(skipped)} checkpoints in {folder} is whole (the newest: {what})"
        raise PlaitError(
            f"{several if len(skipped) > 1 else f'the only checkpoint in {folder} is not whole ({what})'}; "
            "bring one back from a backup, or start under another run.name"
        )
    return None


def published_checkpoints(folder: Path) -> tuple[Path, ...]:
    """The folders of all checkpoints that were saved whole, oldest first; none of them is verified."""
    return tuple(path for _, path in sorted(_published(folder).items()))


def prune(folder: Path, keep: int) -> None:
    """Delete all checkpoints older than the `keep` newest ones that verify; one process at a time may call this."""
    assert keep >= 1
    checkpoints = _published(folder)
    good = 0
    for position, step in enumerate(sorted(checkpoints, reverse=True)):
        if good == keep:
            _delete(checkpoints[step])
        elif len(checkpoints) - position > keep - good:  # else nothing can be left to delete: spare the hashing
            good += _is_good(checkpoints, step)


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
        final.rename(replaced)
    staging.rename(final)
    sync_folder(final.parent)
    sync_folder(final.parent.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _read_manifest(path: Path) -> Manifest:
    if not path.is_file():
        raise PlaitError(f"{path} is missing; name a folder such as runs/NAME/checkpoints/step-100, or move it away")
    try:
        return parse_manifest(read_regular_file(path, MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None


def check_file(path: Path, parts: Sequence[StoredPart], pool: ThreadPoolExecutor) -> None:
    """Hash all parts of one file, the threads of `pool` side by side; raises PlaitError that says what is wrong."""
    header, expected = safetensors_header(parts)
    if set(parts) != set(expected) or len({part.key for part in parts}) < len(parts):
        raise _damaged(path.parent / MANIFEST, f"it misplaces the parts of {path.name}")
    if not path.is_file():
        raise PlaitError(
            f"{path} is missing; bring it back, or move {path.parent} away to go on from an older checkpoint"
        )
    size, wanted = path.stat().st_size, len(header) + sum(part.nbytes for part in parts)
    if size != wanted:
        raise _damaged(path, f"it has {size} bytes instead of {wanted}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        if memory[: len(header)] != header:
            raise _damaged(path, "its header is not the one that manifest.json asks for")
        with memoryview(memory) as view:
            digests = list(pool.map(lambda part: _digest(view, part), expected))
        for part, digest in zip(expected, digests, strict=True):
            if digest != part.sha256:
                raise _damaged(path, f"the bytes of {part.key} do not match manifest.json")


def _digest(view: memoryview, part: StoredPart) -> str:
    with view[part.begin : part.begin + part.nbytes] as data:
        return sha256(data).hexdigest()


def _damaged(path: Path, why: str) -> PlaitError:
    return PlaitError(f"{path} is damaged: {why}; move {path.parent} away to go on from an older checkpoint")


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
        raise _damaged(checkpoints[step] / MANIFEST, f"it is that of step {manifest.step}")
    return manifest


def _is_good(checkpoints: dict[int, Path], step: int) -> bool:
    try:
        _verify_step(checkpoints, step)
    except PlaitError:
        return False
    return True


def _delete(path: Path) -> None:
    aside = path.with_name(f".{path.name.strip('.').removesuffix('.replaced')}.pruned")
    try:
        path.rename(aside)
    except OSError as error:
        raise RunFailed(
            f"could not delete the old checkpoint {path} ({error.strerror}); mend its rights and give the command again"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)
