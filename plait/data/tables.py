"""Tables of text, CSV and TSV: the first row names the columns, as spreadsheets and pandas write them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.data.documents import LONGEST_LINE_BYTES, Document, Record, column_hint, first_line, text_document
from plait.errors import PlaitError
from plait.regular_file import open_regular_file
from plait.units import counted

TABLE_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"
"""What a .csv may divide its columns by; the one that gives its first row most columns is taken."""


def table_rows(path: Path, field: str) -> Iterator[Document]:
    """The text in one column of each row; raises PlaitError for a table without that column, and naming the line where
    a row does not fit the header."""
    with _opened(path) as (columns, rows):
        if field not in columns:
            raise PlaitError(f'{path} has no column "{field}"; {column_hint(field, columns)}')
        for record in rows:
            if record.fault:
                raise record.fault
            yield from text_document(record.place, record.values[field])


def table_records(path: Path) -> Iterator[Record]:
    """Every row of a table; one that does not fit the header is a record with a fault."""
    with _opened(path) as (_, rows):
        yield from rows


def table_fault(path: Path) -> str:
    """Why a table cannot be learnt from as it stands, as the end of a sentence about it; empty where it can. Reads all
    of it."""
    count = 0
    try:
        for record in table_records(path):
            count += 1
            if record.fault:
                return str(record.fault).removeprefix(f"{path} ").partition("; ")[0]
    except PlaitError as error:
        return str(error).removeprefix(f"{path} ").partition("; ")[0]
    return "" if count else "has no row below its header"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Iterator[Record]]]:
    """The names of a table's columns, and its rows."""
    with open_regular_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        csv.field_size_limit(LONGEST_LINE_BYTES)  # the module's own limit is 128 KiB of text in a row
        delimiter = "\t"
        if path.suffix.lower() != ".tsv":
            with _refusing_other_encodings(path, 0):
                delimiter = _delimiter(lines.readline())
            lines.seek(0)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        rows = _rows(path, reader)
        _, header = next(rows, (1, []))
        columns = [name.strip() for name in header]
        if twice := next((name for name in columns if name and columns.count(name) > 1), ""):
            raise PlaitError(f'{path} has two columns with the name "{twice}"; give one of them another name')
        yield columns, _records(path, columns, rows)


@contextmanager
def _refusing_other_encodings(path: Path, line: int) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise PlaitError(f"{path} is not UTF-8 text after line {line}; convert it to UTF-8 text") from None


def _delimiter(header: str) -> str:
    """The sign that divides the columns; a comma where nothing tells."""
    return max(_DELIMITERS, key=lambda sign: len(next(csv.reader([header], delimiter=sign), [])))


def _rows(path: Path, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line that it begins in."""
    line = 1
    while True:
        try:
            with _refusing_other_encodings(path, line):
                row = next(reader, None)
        except csv.Error as error:
            raise PlaitError(
                f"{path} is no table from line {line} on ({first_line(error)}); put texts with quotes or line ends in "
                "quotes, and write each quote in them twice"
            ) from None
        if row is None:
            return
        if row:
            yield line, row
        line = reader.line_num + 1  # pyright: ignore[reportAttributeAccessIssue]


def _records(path: Path, columns: list[str], rows: Iterator[tuple[int, list[str]]]) -> Iterator[Record]:
    for line, row in rows:
        if len(row) == len(columns):
            yield Record(f"{path}:{line}", dict(zip(columns, row, strict=True)))
        else:
            counts = f"{counted(len(row), 'column')} in line {line} and {len(columns)} in its header"
            yield Record(f"{path}:{line}", {}, PlaitError(f"{path} has {counts}; correct that line"))
