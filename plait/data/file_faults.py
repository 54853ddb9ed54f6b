"""Why a file cannot be learned from: found by its name and beginning, or by reading all of it."""

from __future__ import annotations

import codecs
import os
import shlex
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from typing import Literal

from plait.checked_json import one_line
from plait.data.documents import BLOCK_BYTES
from plait.data.folders import RECORD_SUFFIXES, TEXT_SUFFIXES
from plait.data.tables import TABLE_SUFFIXES, table_fault
from plait.errors import PlaitError
from plait.regular_file import open_regular_file

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = ".txt, .md, .csv, .tsv, .jsonl or .parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFault:
    """A file's fault, as the end of a sentence that begins with its name, and the fix."""

    file: Path
    what: str
    advice: str = ""
    command: str = ""
    """The command that fixes it, to be typed in the current folder."""

    def __str__(self) -> str:
        """The file and its fault as one sentence, without a full stop."""
        return f"{one_line(shown_path(self.file))}, which {self.what}{f'; {self._full_advice}' if self.advice else ''}"

    def lines(self) -> list[str]:
        """Printed for a file that is left out; a command is on a separate line, so that it can be copied."""
        if not self.command:
            return [f"left out {self}"]
        name = one_line(shown_path(self.file))
        return [f"left out {name}, which {self.what}; {self.advice}:", f"         {self.command}"]

    def error(self, removal: str) -> PlaitError:
        """The refusal of this file; `removal` is what to do so that it is not read."""
        return PlaitError(f"{self.file} {self.what}; {self._full_advice or 'fill it'} or {removal}")

    @property
    def _full_advice(self) -> str:
        return f"{self.advice} ({self.command})" if self.command else self.advice


Encoding = Literal["utf-8", "latin1", "windows-1252", "utf-16", "unknown"]
"""iconv's name for the most likely encoding of a text."""
_NAMES: dict[str, str] = {"latin1": "Latin-1", "windows-1252": "Windows-1252", "utf-16": "UTF-16"}


@dataclass(frozen=True, slots=True)
class FileContent:
    """The result of reading a whole file: its SHA-256, and its fault if it contains text that cannot be learned
    from."""

    sha256: str
    fault: str = ""
    encoding: Encoding = "utf-8"

    def fault_of(self, file: Path) -> FileFault | None:
        """The fault, of the file of this content."""
        if not self.fault:
            return None
        if self.encoding == "utf-8":
            return FileFault(file=file, what=self.fault, advice="correct it")
        return _other_encoding(file, self.fault, self.encoding)


def error_fault(file: Path, error: PlaitError) -> FileFault:
    """The fault of a file of which reading raised this error."""
    return FileFault(file=file, what=error.cause.removeprefix(f"{file} "), advice=error.advice)


def kind_fault(file: Path) -> FileFault | None:
    """The fault that a file's kind, size and beginning show, without reading more of it."""
    kind = file.suffix.lower()
    if kind == ".pdf":
        command = shlex.join(["pdftotext", typed_path(file), typed_path(_free(file.with_suffix(".txt")))])
        return FileFault(file=file, what="is a PDF", advice="make text of it", command=command)
    if kind not in (*TEXT_SUFFIXES, *RECORD_SUFFIXES):
        return FileFault(file=file, what="has a type that plait does not read", advice=f"convert it to {_KINDS}")
    try:
        if file.stat().st_size == 0:
            return FileFault(file=file, what="is empty")
        with open_regular_file(file) as opened:
            block = opened.read(BLOCK_BYTES)
    except OSError as error:
        why = "permission denied" if isinstance(error, PermissionError) else str(error.strerror)
        return FileFault(file=file, what=f"cannot be opened: {why}", advice="check its permissions")
    if kind == ".parquet":
        return None
    if block.startswith(_UTF_16):
        return _other_encoding(file, "is UTF-16 text, not UTF-8", "utf-16")
    if b"\0" not in block:
        return None
    return _other_encoding(file, f"is binary: it has a NUL byte at byte {block.index(bytes(1))}", "unknown")


def beginning_fault(file: Path) -> FileFault | None:
    """The fault that the first bytes of a text or a table show, where it is too large to be read on the way."""
    if file.suffix.lower() not in (*TEXT_SUFFIXES, *TABLE_SUFFIXES):
        return None
    check = _Utf8Check()
    with open_regular_file(file) as opened:
        check.add(opened.read(BLOCK_BYTES))
    return FileContent("", check.fault, check.encoding).fault_of(file)


def read_content(file: Path) -> FileContent:
    """Read all of a file once, a table twice."""
    check = _Utf8Check() if file.suffix.lower() in (*TEXT_SUFFIXES, *TABLE_SUFFIXES) else None
    state = sha256()
    with open_regular_file(file) as opened:
        while block := opened.read(1 << 20):
            state.update(block)
            if check:
                check.add(block)
    if check is None:
        return FileContent(state.hexdigest())
    check.end()
    if check.fault:
        return FileContent(state.hexdigest(), check.fault, check.encoding)
    return FileContent(state.hexdigest(), table_fault(file) if file.suffix.lower() in TABLE_SUFFIXES else "")


class _Utf8Check:
    """Finds the first byte of a file that is not UTF-8 text, and guesses what the text is in instead."""

    def __init__(self) -> None:
        self.fault = ""
        self.encoding: Encoding = "utf-8"
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._offset, self._is_ascii = 0, True

    def add(self, block: bytes) -> None:
        """Check the next block of the file."""
        if self.fault:
            return
        if b"\0" in block:
            self.fault = f"is binary: it has a NUL byte at byte {self._offset + block.index(bytes(1))}"
            self.encoding = "unknown"
            return
        waiting = len(self._decoder.getstate()[0])
        try:
            self._is_ascii = self._decoder.decode(block).isascii() and self._is_ascii
        except UnicodeDecodeError as error:
            self.fault = f"is not UTF-8 text at byte {self._offset - waiting + error.start}"
            # A file that was UTF-8 up to here is damaged, and in no other encoding. Latin-1 has no letters from 0x80
            # to 0x9f; Windows' extension of it has quotes and dashes there.
            was_ascii = self._is_ascii and block[: max(0, error.start - waiting)].isascii()
            other: Encoding = "windows-1252" if any(0x80 <= byte <= 0x9F for byte in block) else "latin1"
            self.encoding = other if was_ascii else "unknown"
        self._offset += len(block)

    def end(self) -> None:
        """Check that the file does not end inside a character."""
        waiting = len(self._decoder.getstate()[0])
        if waiting and not self.fault:
            self.fault, self.encoding = f"is not UTF-8 text at byte {self._offset - waiting}", "unknown"


def _other_encoding(file: Path, what: str, encoding: Encoding) -> FileFault:
    """The fault of a file that is not UTF-8, with the command that makes it so."""
    if encoding not in _NAMES:
        return FileFault(file=file, what=what, advice="convert it to UTF-8 text")
    other = typed_path(_free(file.with_name(f"{file.stem}-utf8{file.suffix}")))
    command = f"{shlex.join(['iconv', '-f', encoding, '-t', 'utf-8', typed_path(file)])} > {shlex.quote(other)}"
    return FileFault(file=file, what=what, advice=f"convert it from {_NAMES[encoding]}", command=command)


def shown_path(file: Path) -> str:
    """A path as a person reads it: from the current folder on, where the file lies in it; bytes of its name that are
    not UTF-8 as escapes."""
    here = Path.cwd()
    return os.fsencode(file.relative_to(here) if file.is_relative_to(here) else file).decode(errors="backslashreplace")


def typed_path(file: Path) -> str:
    """A path as an argument of a command, which would take a leading "-" for an option."""
    path = shown_path(file)
    return f"./{path}" if path.startswith("-") else path


def _free(file: Path) -> Path:
    """This path, or the same with a number where something has that name, so that nothing is overwritten."""
    numbered = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(2))
    return next(path for path in chain([file], numbered) if not os.path.lexists(path))
