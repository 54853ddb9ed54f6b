"""Sources of text: files, globs and Hugging Face datasets, read as a stream of documents."""

from __future__ import annotations

import glob
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from plait.data.documents import (
    Document,
    Record,
    check_column,
    file_document,
    first_line,
    import_parquet,
    json_records,
    parquet_records,
    text_document,
    text_documents,
)
from plait.data.file_faults import FileFault, kind_fault
from plait.data.folders import RECORD_SUFFIXES, find_text_files
from plait.data.tables import TABLE_SUFFIXES, table_records
from plait.errors import PlaitError, check_utf8, installing

_HUGGING_FACE = "hf:"
_MOST_FILES_APART = 64
"""With more files of records in one source, `by_file` does not tell them apart."""


class NotHereError(PlaitError):
    """Text that is named and not on this machine."""


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `data.files`: a file, a folder, a glob (`**` allowed) or `hf:NAME_OR_FOLDER[[:CONFIG]:SPLIT]`."""

    path: str
    weight: float | None = None
    field: str = "text"
    given_as: str = "data.files"
    """Where the user named it, for messages: a key of the recipe, an option of a command."""

    def removal(self, file: Path) -> str:
        """How to exclude one of this source's files, in words for an error."""
        if str(file) == self.path:
            return f"take it out of {self.given_as}"
        if Path(self.path).is_dir():
            return f"move it out of the folder {self.path}"
        return f"change the pattern {self.path} in {self.given_as} so that it does not match"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """A source whose files were found; each call of `documents()` or `records()` reads them from the start.

    `files` are all files that the documents depend on, in reading order; `selection` states what else they depend on:
    the split and number of rows of a Hugging Face data set.
    """

    source: Source
    files: tuple[Path, ...]
    selection: str
    documents: Callable[[], Iterator[Document]]
    records: Callable[[], Iterator[Record]]
    """Lines and rows with all their columns; a file of text has none."""

    def by_file(self) -> Iterator[tuple[str, OpenSource]]:
        """The source in parts, in reading order: each file of records by its name, and under the empty name what lies
        between them. One part where files are not read as such, or are very many."""
        runs = [(name, tuple(files)) for name, files in groupby(self.files, _file_of_records)]
        apart = {name for name, _ in runs if name}
        if self.selection or not 0 < len(apart) <= _MOST_FILES_APART:
            yield "", self
            return
        for name, files in runs:
            yield name, _open_files(self.source, files)

    def only(self, file: Path) -> OpenSource:
        """One of the files by itself."""
        return _open_files(self.source, (file,))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSources:
    """The sources of a request whose files were found, and the files among them that cannot be learned from."""

    sources: tuple[OpenSource, ...]
    left_out: tuple[FileFault, ...] = ()

    @property
    def files(self) -> list[Path]:
        """All files, each once."""
        return list(dict.fromkeys(chain.from_iterable(source.files for source in self.sources)))

    def without(self, faults: Sequence[FileFault]) -> OpenedSources:
        """The sources without the files that have a fault. Raises PlaitError where no file is left, and where none is
        left of a source with a weight: a mix without it is not the one that was asked for."""
        by_file = {fault.file: fault for fault in faults}
        return self.without_in([[by_file[file] for file in source.files if file in by_file] for source in self.sources])

    def without_in(self, faults_of: Sequence[Sequence[FileFault]]) -> OpenedSources:
        """The sources without the files that have a fault in them, which are named for each source: another source may
        read the same file by another column, and then it is not left out. Raises as `without`."""
        if not any(faults_of):
            return self
        only = len(self.files) + len(self.left_out) == 1
        kept = list[OpenSource]()
        for source, faults in zip(self.sources, faults_of, strict=True):
            faulty = {fault.file for fault in faults}
            files = tuple(file for file in source.files if file not in faulty)
            if not faulty:
                kept.append(source)
            elif files:
                kept.append(_open_files(source.source, files))
            elif source.source.weight is not None or only:
                raise faults[0].error(source.source.removal(faults[0].file))
        read = set(chain.from_iterable(source.files for source in kept))
        unread = {fault.file: fault for fault in chain.from_iterable(faults_of) if fault.file not in read}
        left_out = (*self.left_out, *unread.values())
        if not kept:
            raise PlaitError(f"none of the {len(left_out)} files can be learned from: {_first_faults(left_out)}")
        return replace(self, sources=tuple(kept), left_out=left_out)


_FIRST_FAULTS = 4


def _first_faults(faults: Sequence[FileFault]) -> str:
    named = "; ".join(f"({number}) {fault}" for number, fault in enumerate(faults[:_FIRST_FAULTS], start=1))
    return named + (f"; and {len(faults) - _FIRST_FAULTS} more" if len(faults) > _FIRST_FAULTS else "")


def open_sources(sources: Sequence[Source]) -> OpenedSources:
    """Find the files of all sources, without those whose name, size or beginning shows a fault; raises PlaitError
    before any text is read."""
    found = OpenedSources(sources=tuple(_find_source(source) for source in sources))
    named = {file for source in found.sources if not source.selection for file in source.files}
    return found.without([fault for file in found.files if file in named and (fault := kind_fault(file))])


def open_source(source: Source) -> OpenSource:
    """Find the files of one source, sorted by name; raises PlaitError before any text is read."""
    return open_sources([source]).sources[0]


def _find_source(source: Source) -> OpenSource:
    if not source.path.strip():  # as a path it would mean the current folder
        raise PlaitError(f"{source.given_as} has an empty name", "name a file, a folder or a data set")
    if source.path.startswith(_HUGGING_FACE):
        return _open_hugging_face(source)
    files = _matching_files(source)
    for file in files:
        check_utf8(str(file))
        if file.suffix.lower() == ".parquet":
            import_parquet()
    return _open_files(source, files)


def _open_files(source: Source, files: tuple[Path, ...]) -> OpenSource:
    return OpenSource(
        source=source,
        files=files,
        selection="",
        documents=lambda: _file_documents(files, source.field),
        records=lambda: _file_records(files),
    )


def _file_of_records(file: Path) -> str:
    return str(file) if file.suffix.lower() in RECORD_SUFFIXES else ""


def _matching_files(source: Source) -> tuple[Path, ...]:
    pattern = source.path
    if Path(pattern).is_dir():
        return find_text_files(Path(pattern)).files
    if Path(pattern).is_file():
        return (Path(pattern),)
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    found = sorted({name for name in names if Path(name).is_file()})
    if not found:
        if Path(pattern).exists():
            raise PlaitError(
                f"{pattern} is a pipe, a socket or a device", f"name a file or folder in {source.given_as}"
            )
        raise NotHereError(
            f'no file matches "{pattern}" (looked in {Path.cwd()}); correct the path in {source.given_as}'
        )
    return tuple(Path(name) for name in found)


def _file_documents(files: tuple[Path, ...], field: str) -> Iterator[Document]:
    for file in files:
        if file.suffix.lower() in RECORD_SUFFIXES:
            yield from text_documents(_file_records((file,), field), field)
        else:
            yield from file_document(file)


def _file_records(files: tuple[Path, ...], field: str = "") -> Iterator[Record]:
    """The records of all files; of a table with `field` only that column need be read."""
    for file in files:
        kind = file.suffix.lower()
        if kind == ".jsonl":
            yield from json_records(file)
        elif kind == ".parquet":
            yield from parquet_records(file, field)
        elif kind in TABLE_SUFFIXES:
            yield from table_records(file, field)


def _open_hugging_face(source: Source) -> OpenSource:
    name, config, split = _hugging_face_parts(source.path)
    rows = _load_hugging_face(name, config, split, source.given_as)

    def documents() -> Iterator[Document]:
        check_column(source.path, source.field, rows.column_names)
        texts = rows.select_columns([source.field])  # other columns may hold images that are dear to decode
        for start in range(0, len(texts), 1024):
            for row, text in enumerate(texts[start : start + 1024][source.field], start=start):
                yield from text_document(f"{source.path}:row {row}", text)

    def records() -> Iterator[Record]:
        for row, values in enumerate(rows):
            yield Record(f"{source.path}:row {row}", values)

    return OpenSource(
        source=source,
        files=tuple(Path(entry["filename"]) for entry in rows.cache_files),
        selection=f"{split} {rows.num_rows}",
        documents=documents,
        records=records,
    )


def _hugging_face_parts(path: str) -> tuple[str, str | None, str]:
    """ "hf:a" -> ("a", None, "train"); "hf:a:test" -> ("a", None, "test"); "hf:a:en:test" -> ("a", "en", "test")."""
    name, *rest = path.removeprefix(_HUGGING_FACE).split(":")
    if not name or len(rest) > 2 or not all(re.fullmatch(r"[^/\s]+", part) for part in rest):
        raise PlaitError(f'"{path}" is not a data set', 'write "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT"')
    config = rest[0] if len(rest) == 2 else None
    return name, config, rest[-1] if rest else "train"


def _load_hugging_face(name: str, config: str | None, split: str, given_as: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise NotHereError(f"reading Hugging Face data sets needs datasets; {installing('datasets')}") from None
    if script := _script(Path(name)):
        raise PlaitError(
            f'the data set "{name}" is a program ({script}), which plait does not run', "save its rows as JSONL"
        )
    # Until version 4 the library asks whether to run a data set's program unless it is told not to.
    known = inspect.signature(datasets.load_dataset).parameters
    never: dict[str, Any] = {"trust_remote_code": False} if "trust_remote_code" in known else {}
    try:
        saved = datasets.load_from_disk(name) if _is_saved_to_disk(Path(name)) else None
        if saved is None:
            return datasets.load_dataset(name, config, split=split, **never)
    except Exception as error:  # the library raises its own, ValueError, OSError and network errors alike
        raise NotHereError(
            f'the data set "{name}" cannot be loaded ({first_line(error)}); correct {given_as}'
        ) from None
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise PlaitError(f'"{name}" has no split "{split}"', f"choose one of {', '.join(map(str, saved))}")
        return saved[split]
    if split != "train":
        raise PlaitError(f'"{name}" is one data set without splits', f'write it without ":{split}"')
    return saved


def _script(path: Path) -> str:
    """The name of the program that a data set in a local folder consists of; empty where there is none."""
    script = path if path.suffix == ".py" else path / f"{path.name}.py"
    return script.name if script.is_file() else ""


def _is_saved_to_disk(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
