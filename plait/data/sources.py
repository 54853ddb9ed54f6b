"""Sources of text: files, globs and Hugging Face datasets, read as a stream of documents."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, installing

TEXT_SUFFIXES = (".txt", ".md")
BLOCK_BYTES = 1 << 18
_HUGGING_FACE = "hf:"


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `data.files`: a path, a glob (`**` allowed) or `hf:NAME_OR_FOLDER[[:CONFIG]:SPLIT]`."""

    path: str
    weight: float | None = None
    field: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text; a document that is a whole file stays on disk and is read in blocks."""

    name: str
    text_bytes: int
    content: bytes | Path

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The UTF-8 bytes from `start` to `stop`, in blocks that may split a character."""
        stop = self.text_bytes if stop is None else stop
        if isinstance(self.content, bytes):
            yield self.content[start:stop]
        else:
            yield from _read_range(self.content, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """A source whose files were found; each call of `documents()` reads them from the start.

    `files` are all files that the documents depend on, in reading order; `selection` states what else they depend on:
    the split and number of rows of a Hugging Face data set.
    """

    source: Source
    files: tuple[Path, ...]
    selection: str
    documents: Callable[[], Iterator[Document]]


def open_source(source: Source) -> OpenSource:
    """Find the files of a source, sorted by name; raises PlaitError before any text is read."""
    if source.path.startswith(_HUGGING_FACE):
        return _open_hugging_face(source)
    files = _matching_files(source.path)
    for file in files:
        _check_kind(file)
    return OpenSource(source=source, files=files, selection="", documents=lambda: _file_documents(files, source.field))


def _matching_files(pattern: str) -> tuple[Path, ...]:
    if Path(pattern).is_dir():
        raise PlaitError(f'{pattern} is a folder; write which files in it to read, for example "{pattern}/**/*.txt"')
    if Path(pattern).is_file():
        return (Path(pattern),)
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    found = sorted({name for name in names if Path(name).is_file()})
    if not found:
        raise PlaitError(f'no file matches "{pattern}" (looked in {Path.cwd()}); mend the path in data.files')
    return tuple(Path(name) for name in found)


def _check_kind(file: Path) -> None:
    if file.suffix == ".parquet":
        _import_parquet()
    elif file.suffix not in (*TEXT_SUFFIXES, ".jsonl"):
        raise PlaitError(f"{file} is of no kind that plait reads; give it as .txt, .md, .jsonl or .parquet")
    if file.stat().st_size == 0:
        raise PlaitError(f"{file} is empty; fill it or take it out of data.files")


def _file_documents(files: tuple[Path, ...], field: str) -> Iterator[Document]:
    for file in files:
        if file.suffix == ".jsonl":
            yield from _json_lines(file, field)
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file, field)
        else:
            yield Document(name=str(file), text_bytes=file.stat().st_size, content=file)


def _read_range(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            block = file.read(min(BLOCK_BYTES, stop - start))
            if not block:
                raise PlaitError(f"{path} became shorter while it was read; run the same command again")
            start += len(block)
            yield block


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield from _text_document(f"{path}:{number}", _json_text(path, number, offset, line, field))
            offset += len(line)


def _json_text(path: Path, number: int, offset: int, line: bytes, field: str) -> object:
    place = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PlaitError(
            f"{place} is not UTF-8 text at byte {offset + error.start} of the file; convert the file to UTF-8"
        ) from None
    except ValueError as error:
        raise PlaitError(f"{place} is not JSON ({error}); write one JSON object on each line") from None
    if not isinstance(record, dict) or field not in record:
        raise PlaitError(f'{place} has no field "{field}"; name the field that holds the text, or mend the line')
    return record[field]


def _text_document(place: str, text: object) -> Iterator[Document]:
    """One document, or none where the text is empty: an empty document would only train on two ends of text in a
    row."""
    if not isinstance(text, str):
        raise PlaitError(f"{place}: the text is {type(text).__name__}, not a string; choose a field of strings")
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError:
        raise PlaitError(f"{place}: the text holds half of a surrogate pair; mend or remove that record") from None
    if content:
        yield Document(name=place, text_bytes=len(content), content=content)


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise PlaitError(f"reading Parquet needs pyarrow; {installing('pyarrow')}") from None
    return parquet


def _parquet_rows(path: Path, field: str) -> Iterator[Document]:
    parquet = _import_parquet()
    try:
        file = parquet.ParquetFile(path)
        columns = file.schema_arrow.names
    except (OSError, ValueError) as error:
        raise PlaitError(f"{path} is not a readable Parquet file ({_first_line(error)}); write it again") from None
    if field not in columns:
        raise PlaitError(f'{path} has no column "{field}"; name one of {", ".join(columns)}')
    row = 0
    batches = file.iter_batches(batch_size=1024, columns=[field])
    while True:
        try:
            batch = next(batches, None)
            texts = batch.column(0).to_pylist() if batch else None
        except (OSError, ValueError) as error:
            sentence = f"{path} cannot be read after row {row} ({_first_line(error)}); write it again, text as UTF-8"
            raise PlaitError(sentence) from None
        if texts is None:
            return
        for text in texts:
            yield from _text_document(f"{path}:row {row}", text)
            row += 1


def _open_hugging_face(source: Source) -> OpenSource:
    name, config, split = _hugging_face_parts(source.path)
    rows = _load_hugging_face(name, config, split)
    if source.field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise PlaitError(f'{source.path} has no column "{source.field}"; name one of {columns}')
    rows = rows.select_columns([source.field])  # other columns may hold images that are dear to decode
    files = tuple(Path(entry["filename"]) for entry in rows.cache_files)

    def documents() -> Iterator[Document]:
        for start in range(0, len(rows), 1024):
            texts = rows[start : start + 1024][source.field]
            for row, text in enumerate(texts, start=start):
                yield from _text_document(f"{source.path}:row {row}", text)

    return OpenSource(source=source, files=files, selection=f"{split} {rows.num_rows}", documents=documents)


def _hugging_face_parts(path: str) -> tuple[str, str | None, str]:
    """ "hf:a" -> ("a", None, "train"); "hf:a:test" -> ("a", None, "test"); "hf:a:en:test" -> ("a", "en", "test")."""
    name, *rest = path.removeprefix(_HUGGING_FACE).split(":")
    if not name or len(rest) > 2 or not all(re.fullmatch(r"[^/\s]+", part) for part in rest):
        raise PlaitError(f'"{path}" is not a data set; write "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT"')
    config = rest[0] if len(rest) == 2 else None
    return name, config, rest[-1] if rest else "train"


def _load_hugging_face(name: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise PlaitError(f"reading Hugging Face data sets needs datasets; {installing('datasets')}") from None
    try:
        saved = datasets.load_from_disk(name) if _is_saved_to_disk(Path(name)) else None
        if saved is None:
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises its own, ValueError, OSError and network errors alike
        raise PlaitError(f'the data set "{name}" cannot be loaded ({_first_line(error)}); mend data.files') from None
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise PlaitError(f'"{name}" has no split "{split}"; choose one of {", ".join(map(str, saved))}')
        return saved[split]
    if split != "train":
        raise PlaitError(f'"{name}" is one data set without splits; write it without ":{split}"')
    return saved


def _is_saved_to_disk(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
