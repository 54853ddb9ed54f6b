"""Documents: texts as they come out of text files, lines of JSON and rows of Parquet."""

from __future__ import annotations

import codecs
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, installing
from plait.regular_file import open_regular_file

BLOCK_BYTES = 1 << 18
LONGEST_LINE_BYTES = 1 << 28
"""A longer line of JSONL is refused: it is read as a whole."""
_ONE_OBJECT = "write one JSON object on each line"
_SHOWN_NAMES = 12
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text; a document that is a whole file stays on disk and is read in blocks."""

    name: str
    text_bytes: int
    content: bytes | Path
    begin: int = 0
    """The position of the text in a file on disk, after its byte order mark."""

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The UTF-8 bytes from `start` to `stop`, in blocks that may split a character."""
        stop = self.text_bytes if stop is None else stop
        if isinstance(self.content, bytes):
            yield self.content[start:stop]
        else:
            yield from _read_range(self.content, self.begin + start, self.begin + stop)

    def text(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The same as text, in blocks; raises PlaitError where it has changed since it was found to be UTF-8."""
        decode = codecs.getincrementaldecoder("utf-8")().decode
        try:
            for block in self.read(start, stop):
                yield decode(block)
            yield decode(b"", final=True)
        except UnicodeDecodeError:
            raise PlaitError(f"{self.name} was changed while it was read", "run the same command again") from None


@dataclass(frozen=True, slots=True)
class Record:
    """One line of JSON or one row of a table: its columns by name, and the place that errors name."""

    place: str
    values: Mapping[str, object]
    fault: PlaitError | None = None
    """Why a line is no record; it has no values then."""


def file_document(path: Path) -> Iterator[Document]:
    """A file as one document, without a byte order mark; none where it holds nothing else."""
    with open_regular_file(path) as file:
        begin = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    text_bytes = path.stat().st_size - begin
    if text_bytes:
        yield Document(name=str(path), text_bytes=text_bytes, content=path, begin=begin)


def json_records(path: Path) -> Iterator[Record]:
    """Every line of a file of JSON objects that is not blank; one that is none is a record with a fault."""
    offset = 0
    with open_regular_file(path) as file:
        lines = iter(lambda: file.readline(LONGEST_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                offset, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
            if len(line) > LONGEST_LINE_BYTES:
                raise PlaitError(f"{path}:{number} is longer than {LONGEST_LINE_BYTES} bytes", _ONE_OBJECT)
            if line.strip():
                place = f"{path}:{number}"
                try:
                    record = Record(place, _json_object(place, offset, line))
                except PlaitError as error:
                    record = Record(place, {}, error)
                yield record
            offset += len(line)


def _json_object(place: str, offset: int, line: bytes) -> dict[str, object]:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PlaitError(
            f"{place} is not UTF-8 text at byte {offset + error.start} of the file", "convert the file to UTF-8"
        ) from None
    except ValueError as error:
        raise PlaitError(f"{place} is not JSON ({first_line(error)})", _ONE_OBJECT) from None
    except RecursionError:
        raise PlaitError(f"{place} nests its values too deeply", f"{_ONE_OBJECT}, with the text as one field") from None
    if not isinstance(values, dict):
        raise PlaitError(f"{place} is not a JSON object", _ONE_OBJECT)
    return values


def _field_hint(field: str, record: Mapping[str, object]) -> str:
    """The fields that are there, and the one that is likely meant: of a similar name, else the one with most text."""
    texts = {name: value for name, value in record.items() if isinstance(value, str)}
    longest = sorted(texts, key=lambda name: -len(texts[name]))
    return (
        f": {column_names(list(record))}{_meant(field, list(record)) or _meant_text(longest)}"
        if record
        else ", or correct it"
    )


def check_column(name: str, field: str, columns: Sequence[str]) -> None:
    """Raise PlaitError unless a table has this column, naming those that it has and the one that is likely meant."""
    if field not in columns:
        raise PlaitError(
            f'{name} has no column "{field}"', f"name one of {column_names(columns)}{_meant(field, columns)}"
        )


def _meant(field: str, names: Sequence[str]) -> str:
    return _meant_text(difflib.get_close_matches(field, names, n=1))


def _meant_text(names: Sequence[str]) -> str:
    return f'; did you mean field = "{column_names(names[:1])}"?' if names else ""


def column_names(names: Sequence[str]) -> str:
    """Names made safe for a sentence, regardless of their characters."""
    shown = [(name if name.isprintable() else ascii(name)[1:-1])[:_SHOWN_CHARACTERS] for name in names[:_SHOWN_NAMES]]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "")


def text_documents(records: Iterable[Record], field: str) -> Iterator[Document]:
    """The text in one field of each record; raises PlaitError naming the first that has none."""
    for record in records:
        if record.fault:
            raise record.fault
        if field not in record.values:
            hint = _field_hint(field, record.values)
            raise PlaitError(f'{record.place} has no field "{field}"', f"name the field that holds the text{hint}")
        yield from text_document(record.place, record.values[field])


def text_document(place: str, text: object) -> Iterator[Document]:
    """One document, or none where the text is empty: an empty document would only train on two ends of text in a
    row."""
    if not isinstance(text, str):
        raise PlaitError(f"{place}: the text is {type(text).__name__}, not a string", "choose a field of strings")
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError:
        raise PlaitError(f"{place}: the text holds half of a surrogate pair", "correct or remove that record") from None
    if content:
        yield Document(name=place, text_bytes=len(content), content=content)


def import_parquet() -> Any:
    """pyarrow's module; raises PlaitError that says how to install it."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise PlaitError("reading Parquet needs pyarrow", f"{installing('pyarrow')}") from None
    return parquet


def parquet_records(path: Path, field: str = "") -> Iterator[Record]:
    """Every row of a Parquet file, all of it or one column; raises PlaitError where that column is not there."""
    file = _open_parquet(path)
    columns = file.schema_arrow.names
    if field:
        check_column(str(path), field, columns)
    yield from _parquet_values(path, file, [field] if field else columns)


def _open_parquet(path: Path) -> Any:
    parquet = import_parquet()
    try:
        file = parquet.ParquetFile(path)
        assert file.schema_arrow.names is not None
        return file
    except Exception as error:  # a damaged file makes pyarrow raise many kinds
        raise PlaitError(f"{path} is not a readable Parquet file ({first_line(error)})", "write it again") from None


def _parquet_values(path: Path, file: Any, columns: list[str]) -> Iterator[Record]:
    row = 0
    batches = file.iter_batches(batch_size=1024, columns=columns)
    while True:
        try:
            batch = next(batches, None)
            rows = batch.to_pylist() if batch else None
        except Exception as error:
            cause = f"{path} cannot be read after row {row} ({first_line(error)})"
            raise PlaitError(cause, "write it again, text as UTF-8") from None
        if rows is None:
            return
        for values in rows:
            yield Record(f"{path}:row {row}", values)
            row += 1


def _read_range(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with open_regular_file(path) as file:
        file.seek(start)
        while start < stop:
            block = file.read(min(BLOCK_BYTES, stop - start))
            if not block:
                raise PlaitError(f"{path} became shorter while it was read", "run the same command again")
            start += len(block)
            yield block


def first_line(error: Exception) -> str:
    """An error's first line, or its type where it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
