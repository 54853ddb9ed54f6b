"""Why a file cannot be learnt from: found by its name and beginning, or by reading all of it."""

from __future__ import annotations

import codecs
import shlex
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from plait.data.documents import BLOCK_BYTES
from plait.data.folders import RECORD_SUFFIXES, TEXT_SUFFIXES
from plait.data.tables import TABLE_SUFFIXES, table_fault
from plait.errors import PlaitError
from plait.regular_file import open_regular_file

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = ".txt, .md, .csv, .tsv, .jsonl or .parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFault:
    """What is wrong with one file, as the end of a sentence that begins with its name, and how to mend it."""

    file: Path
    what: str
    mend: str = ""
    command: str = ""
    """What does so, to be typed in the current folder."""

    def __str__(self) -> str:
        """The file and its fault as one sentence, without a full stop."""
        return f"{shown_path(self.file)}, which {self.what}{f'; {self._advice}' if self.mend else ''}"

    def lines(self) -> list[str]:
        """What is printed of a file that is left out; a command has a line of its own, so that it can be copied."""
        if not self.command:
            return [f"left out {self}"]
        return [f"left out {shown_path(self.file)}, which {self.what}; {self.mend}:", f"         {self.command}"]

    def error(self, removal: str) -> PlaitError:
        """The refusal of this file; `removal` is what to do so that it is not read."""
        return PlaitError(f"{self.file} {self.what}; {self._advice or 'fill it'} or {removal}")

    @property
    def _advice(self) -> str:
        return f"{self.mend} ({self.command})" if self.command else self.mend


Encoding = Literal["utf-8", "latin1", "windows-1252", "utf-16", "unknown"]
"""What iconv calls the encoding that a text is most likely in."""
_NAMES: dict[str, str] = {"latin1": "Latin-1", "windows-1252": "Windows-1252", "utf-16": "UTF-16"}


@dataclass(frozen=True, slots=True)
class FileContent:
    """What reading all of a file found: its SHA-256, and its fault where it holds text that cannot be learnt from."""

    sha256: str
    fault: str = ""
    encoding: Encoding = "utf-8"

    def fault_of(self, file: Path) -> FileFault | None:
        """The fault, of the file of this content."""
        if not self.fault:
            return None
        if self.encoding == "utf-8":
            return FileFault(file=file, what=self.fault, mend="correct it")
        return _other_encoding(file, self.fault, self.encoding)


def kind_fault(file: Path) -> FileFault | None:
    """The fault that a file's kind, size and beginning show, without reading more of it."""
    kind = file.suffix.lower()
    if kind == ".pdf":
        command = _command("pdftotext", shown_path(file), shown_path(file.with_suffix(".txt")))
        return FileFault(file=file, what="is a PDF", mend="make text of it", command=command)
    if kind not in (*TEXT_SUFFIXES, *RECORD_SUFFIXES):
        return FileFault(file=file, what="is of no kind that plait reads", mend=f"give it as {_KINDS}")
    if file.stat().st_size == 0:
        return FileFault(file=file, what="is empty")
    if kind == ".parquet":
        return None
    try:
        with open_regular_file(file) as opened:
            block = opened.read(BLOCK_BYTES)
    except PermissionError:
        return FileFault(file=file, what="may not be read by this user", mend="change its permissions")
    if b"\0" not in block:
        return None
    if block.startswith(_UTF_16):
        return _other_encoding(file, "is UTF-16 text, not UTF-8", "utf-16")
    return _other_encoding(file, f"is binary: it has a NUL byte at byte {block.index(bytes(1))}", "unknown")


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
        return FileFault(file=file, what=what, mend="convert it to UTF-8 text")
    other = shown_path(file.with_name(f"{file.stem}-utf8{file.suffix}"))
    command = f"{_command('iconv', '-f', encoding, '-t', 'utf-8', shown_path(file))} > {shlex.quote(other)}"
    return FileFault(file=file, what=what, mend=f"convert it from {_NAMES[encoding]}", command=command)


def shown_path(file: Path) -> str:
    """A path as a person types it: from the current folder on, where the file lies in it."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _command(*words: str) -> str:
    return shlex.join(words)
