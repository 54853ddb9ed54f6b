"""Prepares the corpus folder of a data request: finds an earlier one, or makes a new one that appears with one
rename."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from plait.data.conversations.built_in_templates import named_template
from plait.data.conversations.chat_template import PLAIN_TEMPLATE, TemplateText, find_template
from plait.data.conversations.formats import RequestedFormat, SourceFormat, format_faults, holds_examples, source_format
from plait.data.file_faults import FileContent, FileFault
from plait.data.folders import TEXT_SUFFIXES
from plait.data.holdout import FEWEST_DOCUMENTS
from plait.data.index import SHARD_FORMAT
from plait.data.preparation.build import BuildRequest, DataRequest, Progress
from plait.data.preparation.fingerprint import FileStamp, cached_contents, exclusive_lock, file_stamp, read_files
from plait.data.preparation.kept_progress import KEEP_EVERY_BYTES, has_kept_progress
from plait.data.preparation.stream import build_stream
from plait.data.preparation.tokens import Tokenizer, load_tokenizer
from plait.data.preparation.whole import build_examples
from plait.data.shards import SHARD_TOKENS, open_corpus
from plait.data.sources import OpenedSources, OpenSource, open_sources
from plait.errors import PlaitError
from plait.private_folder import make_private_folder

HASHES = "hashes.json"
"""The file with the findings of reading the sources; it is next to the prepared data."""
_EXAMPLES_READ = 4
"""Raised when examples come to be read or rendered in another way, so that those prepared before are made again."""
_HELD_OUT = 2
"""Raised when other documents or examples come to be held out, so that corpora prepared before are made again."""


def refuse_left_out(faults: Sequence[FileFault]) -> None:
    """Raise PlaitError for the first of the files that cannot be read."""
    raise faults[0].error("take it out of the files that are named")


def prepare_corpus(
    request: DataRequest,
    cache: Path,
    on_progress: Progress,
    on_left_out: Callable[[Sequence[FileFault]], None] = refuse_left_out,
    *,
    shard_tokens: int = SHARD_TOKENS,
    keep_every_bytes: int = KEEP_EVERY_BYTES,
) -> Path:
    """Make the corpus folder under `cache`/data, or find an earlier one, and return its path; raises PlaitError that
    says what to do. If some files cannot be read, `on_left_out` is called once with all of them; the default refuses
    them.

    Blocks while another process prepares the same data. If it is killed at any moment, no incomplete corpus folder
    appears, and the next call goes on where it was, from the last `keep_every_bytes` of text on, with the same result.
    """
    _check(request)
    on_progress = _throttled(on_progress)
    tokenizer = ready_tokenizer(request)
    home = cache / "data"
    try:
        opened = open_sources(request.sources)
        make_private_folder(home)
        stamps = {path: file_stamp(path) for path in opened.files}
        known = home / HASHES
        found = read_files(opened.files, known, lambda path: on_progress(0, 0, f"looking at {path.name}"))
        contents = dict(zip(opened.files, found, strict=True))
        opened, formats = readable_sources(opened, contents, request.format)
        if opened.left_out:
            on_left_out(opened.left_out)
        work = replace(
            _build_request(request, opened, contents, formats, tokenizer),
            shard_tokens=shard_tokens,
            on_progress=on_progress,
            keep_every_bytes=keep_every_bytes,
        )
        folder = home / _key(work)
        with exclusive_lock(
            folder.with_suffix(".lock"), lambda: on_progress(0, 0, "waiting for another process that prepares it")
        ):
            if not _is_usable(folder):
                _make(work, folder, stamps)
    except OSError as error:
        place = error.filename or home
        raise PlaitError(
            f"{place}: {error.strerror}; free space or check its permissions, then run it again"
        ) from error
    return folder


def find_prepared(request: DataRequest, cache: Path) -> Path | None:
    """The folder of a corpus that was prepared earlier, found without reading the text; None where there is none."""
    _check(request)
    home = cache / "data"
    try:
        opened = open_sources(request.sources)
        found = cached_contents(opened.files, home / HASHES)
        if found is None:
            return None
        contents = dict(zip(opened.files, found, strict=True))
        opened, formats = readable_sources(opened, contents, request.format)
    except OSError:
        return None
    folder = home / _key(_build_request(request, opened, contents, formats, ready_tokenizer(request)))
    return folder if folder.is_dir() else None


def _build_request(
    request: DataRequest,
    opened: OpenedSources,
    contents: Mapping[Path, FileContent],
    formats: tuple[SourceFormat, ...],
    tokenizer: Tokenizer | None,
) -> BuildRequest:
    return BuildRequest(
        request=request,
        sources=opened.sources,
        file_hashes={file: contents[file].sha256 for file in opened.files},
        left_out=opened.left_out,
        tokenizer=tokenizer,
        shard_tokens=SHARD_TOKENS,
        on_progress=lambda *_: None,
        formats=formats,
        template=_own_template(request, formats),
    )


def readable_sources(
    opened: OpenedSources, contents: Mapping[Path, FileContent], requested: RequestedFormat
) -> tuple[OpenedSources, tuple[SourceFormat, ...]]:
    """The sources without files whose content or whose columns show a fault, and the format of each; raises PlaitError
    where nothing is left."""
    return readable_formats(
        opened.without([fault for file in opened.files if (fault := contents[file].fault_of(file))]), requested
    )


def readable_formats(
    opened: OpenedSources, requested: RequestedFormat
) -> tuple[OpenedSources, tuple[SourceFormat, ...]]:
    """The sources without files whose columns show a fault, and the format of each; raises as `readable_sources`."""
    formats = [source_format(source, requested) for source in opened.sources]
    faults = [format_faults(source, form) for source, form in zip(opened.sources, formats, strict=True)]
    if not any(faults):
        return opened, tuple(formats)
    opened = opened.without_in(faults)
    return opened, tuple(source_format(source, requested) for source in opened.sources)


def _check(request: DataRequest) -> None:
    weights = [source.weight for source in request.sources]
    if not weights:
        raise PlaitError("data.files is empty; name at least one file")
    given = [weight for weight in weights if weight is not None]
    if given and len(given) < len(weights):
        raise PlaitError("some entries of data.files have a weight and some have none; give all of them one, or none")
    if not all(math.isfinite(weight) and weight > 0 for weight in given):
        raise PlaitError(f"data weights {given} must be positive numbers; take a source that is not wanted out")
    if not 0 <= request.holdout < 1:
        raise PlaitError(f"data.holdout = {request.holdout} is not a fraction; choose for example 0.05, or 0 for none")


def ready_tokenizer(request: DataRequest) -> Tokenizer | None:
    """The requested tokenizer, or None where it must be trained first."""
    if request.tokenizer == "bpe":
        return None
    tokenizer = load_tokenizer(request.tokenizer)
    if request.vocabulary is not None and tokenizer.vocabulary > request.vocabulary:
        raise PlaitError(
            f'tokenizer "{request.tokenizer}" has {tokenizer.vocabulary} entries, more than model.vocabulary = '
            f"{request.vocabulary}; raise model.vocabulary to that or choose a smaller tokenizer"
        )
    return tokenizer


def _own_template(request: DataRequest, formats: Sequence[SourceFormat]) -> TemplateText | None:
    """The chat template that belongs to the tokenizer; None where it has none, or no source needs one."""
    if not any(form.may_hold_chats for form in formats):
        return None
    file = Path(request.tokenizer)
    shipped = request.tokenizer in ("gpt2", "bpe")
    own = None if shipped else file if file.is_dir() else file.parent
    folders = [*request.template_folders, *([own] if own else [])]
    return find_template(folders) if request.chat_template == "auto" else named_template(request.chat_template, folders)


def _throttled(on_progress: Progress) -> Progress:
    """A Progress that forwards at most one call per MiB within a stage, as a corpus may have millions of documents."""
    last = (0, "")

    def report(done: int, total: int, stage: str) -> None:
        nonlocal last
        if stage != last[1] or done - last[0] >= 1 << 20 or done == total:
            last = (done, stage)
            on_progress(done, total, stage)

    return report


def _key(work: BuildRequest) -> str:
    """A folder name that identifies the result: a hash of file contents and request, without paths and times."""
    sources = [_source_key(source, work.file_hashes) for source in work.sources]
    tokenizer = work.tokenizer.hash if work.tokenizer else f"bpe {work.request.vocabulary}"
    parts = [SHARD_FORMAT, sources, tokenizer, work.request.holdout, work.shard_tokens]
    if work.request.holdout and (holds_examples(work.formats) or not _has_few_documents(work.sources)):
        parts.append({"held out": _HELD_OUT})
    if work.tokenizer and (work.tokenizer.bos or work.tokenizer.adds_prefix):
        parts.append([work.tokenizer.bos, work.tokenizer.adds_prefix])
    if holds_examples(work.formats):
        found = work.template
        template = [found.text, sorted(found.special.items())] if found else PLAIN_TEMPLATE
        parts += [
            [(form.kind, form.column) for form in work.formats],
            template,
            _EXAMPLES_READ,
            work.request.bad_records,
        ]
    return sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _has_few_documents(sources: Sequence[OpenSource]) -> bool:
    """Whether there are so few, as files tell, that the tail of each is held out: as it was in all versions."""
    files = [file for source in sources for file in source.files]
    return 0 < len(files) < FEWEST_DOCUMENTS and all(file.suffix in TEXT_SUFFIXES for file in files)


def _source_key(source: OpenSource, hashes: dict[Path, str]) -> list[object]:
    files = [(file.suffix, hashes[file]) for file in source.files]
    return [source.source.field, source.source.weight, source.selection, files]


def _is_usable(folder: Path) -> bool:
    """Whether the corpus exists; a damaged one is deleted, as it can be made again."""
    if not folder.is_dir():
        return False
    try:
        open_corpus(folder)
    except PlaitError:
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)  # of a link never what it leads to
        return False
    return True


def _make(work: BuildRequest, folder: Path, stamps: dict[Path, FileStamp]) -> None:
    aside = folder.with_name(f".{folder.name}.part")
    goes_on = has_kept_progress(aside)  # left by a killed process: the lock is ours
    try:
        if not goes_on:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(mode=0o700)
        build = build_examples if holds_examples(work.formats) else build_stream
        build(work, aside)
        changed = next((path for path, before in stamps.items() if file_stamp(path) != before), None)
        if changed:
            raise PlaitError(f"{changed} was changed while it was being prepared; run the same command again")
        _sync_folder(aside)
        aside.rename(folder)
        _sync_folder(folder.parent)
    except BaseException as error:
        if isinstance(error, Exception) or not has_kept_progress(aside):  # a person who stops it may go on
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
