"""Tables of text, CSV and TSV: the first row names the columns, as spreadsheets and pandas write them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal

from plait.data.documents import Record, check_column, first_line
from plait.errors import PlaitError
from plait.regular_file import open_regular_file
from plait.units import counted

TABLE_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"
"""Possible separators of a .csv; the one that gives its first row the most columns is used."""
_EXCEL_FIRST_LINE = re.compile(r'"?sep=([^\w\s"]|\t)"?', re.IGNORECASE)
"""The line that Excel may write above the header, with the separator of the columns."""
_LONGEST_CHARACTERS = 1 << 26
"""Limit of a line and of a quoted text: each is held in memory as a whole."""
_TABS_LOOKED_AT_BYTES = 1 << 26
"""How much of a table is read to find out whether its quotes are ordinary characters."""
_BLANK = " \t\r\n\x1a"
"""Characters of a blank line; old DOS programs end files with the last of these."""
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')


def table_records(path: Path, field: str = "") -> Iterator[Record]:
    """Every row of a table; one that does not fit the header is a record with a fault. Raises PlaitError where a column
    is named that is not there."""
    with _opened(path) as (columns, rows):
        if field:
            check_column(str(path), field, columns)
        yield from rows


def table_fault(path: Path) -> str:
    """Why a table cannot be learned from as it stands, as the end of a sentence about it; empty where it can. Reads all
    of it."""
    count = 0
    try:
        for record in table_records(path):
            count += 1
            if record.fault:
                return record.fault.cause.removeprefix(f"{path} ")
    except PlaitError as error:
        return error.cause.removeprefix(f"{path} ")
    return "" if count else "has no row below its header"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Iterator[Record]]]:
    """The names of a table's columns, and its rows."""
    with open_regular_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        csv.field_size_limit(_LONGEST_CHARACTERS)  # the module's own limit is 128 KiB of text in a row
        bounded, first, before, named = _bounded_lines(path, lines), "", 0, ""
        with _refusing_other_encodings(path, 0):
            for line in bounded:
                found = _EXCEL_FIRST_LINE.fullmatch(line.strip("\r\n ")) if not named else None
                if line.strip(_BLANK) and not found:
                    first = line
                    break
                before, named = before + 1, found[1] if found else named
        delimiter = named or ("\t" if path.suffix.lower() == ".tsv" else _delimiter(first))
        quoting = _quoting(path, first) if delimiter == "\t" else csv.QUOTE_MINIMAL
        reader = csv.reader(chain([first], bounded), delimiter=delimiter, quoting=quoting, strict=True)
        rows = _rows(path, reader, before)
        _, header = next(rows, (1, []))
        columns = [name.strip() for name in header]
        if twice := next((name for name in columns if name and columns.count(name) > 1), ""):
            raise PlaitError(f'{path} has two columns with the name "{twice}"', "give one of them another name")
        yield columns, _records(path, columns, rows, delimiter)


def _bounded_lines(path: Path, lines: io.TextIOWrapper) -> Iterator[str]:
    number = 0
    while line := lines.readline(_LONGEST_CHARACTERS + 1):
        number += 1
        if len(line) > _LONGEST_CHARACTERS:
            raise PlaitError(
                f"{path} has more than {_LONGEST_CHARACTERS:,} characters in line {number}",
                "divide that text into rows",
            )
        yield line


def _quoting(path: Path, header: str) -> Literal[0, 3]:
    """How the quotes of a table that tabs divide are read: as signs like others where each line has as many tabs as
    the header, and the text in one of the columns begins with a quote that does not enclose it."""
    tabs, has_bare_quote, left = header.count("\t"), False, _TABS_LOOKED_AT_BYTES
    with open_regular_file(path) as file:
        while tabs and left > 0 and (line := file.readline(left)):
            left -= len(line)
            if not line.strip(_BLANK.encode()) or not left:
                continue
            cells = line.rstrip(b"\r\n").split(b"\t")
            if len(cells) != tabs + 1:
                return csv.QUOTE_MINIMAL
            has_bare_quote |= any(cell.startswith(b'"') and not _QUOTED.fullmatch(cell) for cell in cells)
    return csv.QUOTE_NONE if has_bare_quote else csv.QUOTE_MINIMAL


@contextmanager
def _refusing_other_encodings(path: Path, line: int) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise PlaitError(f"{path} is not UTF-8 text after line {line}", "convert it to UTF-8 text") from None


def _delimiter(header: str) -> str:
    """The column separator of the header line; a comma by default."""
    return max(_DELIMITERS, key=lambda sign: len(next(csv.reader([header], delimiter=sign), [])))


def _rows(path: Path, reader: Iterator[list[str]], before: int) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line that it begins in; `before` lines were read already."""
    line = before + 1
    while True:
        try:
            with _refusing_other_encodings(path, line):
                row = next(reader, None)
        except csv.Error as error:
            if "field limit" in str(error):
                raise PlaitError(
                    f"{path} has a text of more than {_LONGEST_CHARACTERS:,} characters from line {line} on",
                    "close the quote that it begins with, or divide it into rows",
                ) from None
            raise PlaitError(
                f"{path} is not a table from line {line} on ({first_line(error)})",
                "put texts with quotes or line ends in quotes, and write each quote in them twice",
            ) from None
        if row is None:
            return
        if len(row) > 1 or "".join(row).strip(_BLANK):
            yield line, row
        line = before + reader.line_num + 1  # pyright: ignore[reportAttributeAccessIssue]


def _records(path: Path, columns: list[str], rows: Iterator[tuple[int, list[str]]], delimiter: str) -> Iterator[Record]:
    for line, row in rows:
        if len(row) == len(columns):
            yield Record(f"{path}:{line}", dict(zip(columns, row, strict=True)))
        else:
            counts = f"{counted(len(row), 'column')} in line {line} and {len(columns)} in its header"
            if len(columns) == 1:
                counts += f' (a text that holds "{delimiter}" must stand in quotes)'
            yield Record(f"{path}:{line}", {}, PlaitError(f"{path} has {counts}", "correct that line"))
