"""Recognizes the kind of a source's examples by its columns, and reads each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from plait.data.conversations.examples import (
    Example,
    SampleFormat,
    TextExample,
    chat_example,
    prompt_example,
    question_column,
)
from plait.data.conversations.pairs import ANSWERS, PairExample, preference_example
from plait.data.documents import Document, Record, column_names
from plait.data.file_faults import FileFault, error_fault
from plait.data.folders import RECORD_SUFFIXES, TEXT_SUFFIXES
from plait.data.sources import OpenSource
from plait.errors import PlaitError

RequestedFormat = Literal["auto", "text", "chat", "prompt-completion", "preference"]

_USUAL_FIELD = "text"
_CHAT_COLUMNS = ("messages", "conversations")
_PROMPT_COLUMNS = ("prompt", "completion")
_LARGEST_WHOLE_BYTES = 1 << 28
_FIRST_RECORDS = 20
"""Records of a file to look at: if none has the columns of its source's format, the file holds something else."""
_ROWS_LOOKED_AT = 200
_FEWEST_SPACES = 4
"""In most rows of a column that is taken for text: names and places have fewer."""
_WITHOUT_SPACES = "\u0e00"
"""Letters from here on, Thai's first, are mostly of scripts without spaces between words: of these `_FEWEST_LETTERS`
are as good."""
_FEWEST_LETTERS = 12
_CHARACTERS_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFormat:
    """What a source holds, and the column of its conversations, or of their questions, where it holds any; of pairs
    that of the first answer, where it is one."""

    kind: SampleFormat
    column: str = ""

    @property
    def may_hold_chats(self) -> bool:
        """Whether a chat template may be needed."""
        return self.kind in ("chat", "preference")

    def __str__(self) -> str:
        named = {
            "chat": f'chat ("{self.column}")',
            "prompt-completion": "prompts with completions",
            "preference": "pairs",
        }
        return named.get(self.kind, self.kind)


def source_format(opened: OpenSource, requested: RequestedFormat) -> SourceFormat:
    """The format as requested, else as the first record's columns tell it; raises PlaitError where a source cannot
    have the requested one."""
    if requested == "text":
        return SourceFormat(kind="text")
    first = _first(opened, requested)
    if first is None or any(file.suffix.lower() in TEXT_SUFFIXES for file in opened.files):
        if requested == "auto":
            return SourceFormat(kind="text")
        raise PlaitError(
            f"{opened.source.path} is plain text, which has no columns",
            'give JSONL, CSV or Parquet, or write data.format = "auto"',
        )
    field = opened.source.field
    if requested == "auto" and isinstance(first.values.get(field), str):
        if field == _USUAL_FIELD and (chat := next((one for one in _CHAT_COLUMNS if _is_list(first, one)), None)):
            raise PlaitError(
                f'{first.place} has "{field}" and "{chat}", and it is not said which is learned',
                'write data.format = "chat" to learn the answers, or "text" to learn all of the text',
            )
        return SourceFormat(kind="text")
    if requested == "prompt-completion":
        return SourceFormat(kind="prompt-completion")
    if requested == "preference":
        return _pairs(first)
    if requested == "chat":
        column = _chat_column(first, field) or question_column(first.values)
        return SourceFormat(kind="chat", column=column or (_CHAT_COLUMNS[0] if field == _USUAL_FIELD else field))
    if found := format_of_columns(first, field):
        return found
    # One column is enough: the error then names the one that is missing.
    if any(column in first.values for column in ANSWERS):
        return _pairs(first)
    asks = any(column in first.values for column in _PROMPT_COLUMNS)
    return SourceFormat(kind="prompt-completion" if asks else "text")


def format_faults(opened: OpenSource, form: SourceFormat) -> list[FileFault]:
    """The JSONL, CSV, TSV and Parquet files that cannot be read as the source's format: they cannot be opened or, in a
    folder or a pattern, lack its columns."""
    if opened.selection:
        return []
    records = [file for file in opened.files if file.suffix.lower() in RECORD_SUFFIXES]
    may_differ = len(opened.files) > 1 and opened.source.field == _USUAL_FIELD
    find = _format_fault if may_differ else _opening_fault
    return [fault for file in records if (fault := find(file, opened.only(file), form))]


def both_texts_and_chats(opened: OpenSource) -> str:
    """The column of chats in a source whose first record has a text as well; empty where there is none."""
    first = _first_record(opened)
    if first is None or not isinstance(first.values.get(_USUAL_FIELD), str):
        return ""
    return next((column for column in _CHAT_COLUMNS if _is_list(first, column)), "")


def text_column(opened: OpenSource) -> str:
    """The column that most likely holds the text of a table that does not say so: of its first rows, the one with the
    longest texts of several words; empty where there is none."""
    lengths: dict[str, list[int]] = {}
    rows = 0
    for record in islice(opened.records(), _ROWS_LOOKED_AT):
        rows += 1
        for name, value in record.values.items():
            if isinstance(value, str) and _is_prose(value[:_CHARACTERS_LOOKED_AT]):
                lengths.setdefault(name, []).append(len(value))
    usual = {name: sum(found) for name, found in lengths.items() if len(found) >= rows / 2}
    return max(usual, key=lambda name: usual[name], default="")


def _is_prose(text: str) -> bool:
    """Whether a text has several words; Thai, Chinese and Japanese are written without spaces."""
    return (
        text.count(" ") >= _FEWEST_SPACES
        or sum(sign >= _WITHOUT_SPACES and sign.isalpha() for sign in text) >= _FEWEST_LETTERS
    )


def _opening_fault(file: Path, part: OpenSource, form: SourceFormat) -> FileFault | None:
    """Why a file cannot be opened as what its name says, regardless of its format."""
    try:
        _first_record(part)
    except PlaitError as error:
        return error_fault(file, error)
    return None


def _format_fault(file: Path, part: OpenSource, form: SourceFormat) -> FileFault | None:
    try:
        firsts = list(islice((record for record in part.records() if record.fault is None), _FIRST_RECORDS))
    except PlaitError as error:
        return error_fault(file, error)
    if not firsts:
        return FileFault(file=file, what="has no record that can be read", advice="correct its first lines")
    found = [format_of_columns(record, _USUAL_FIELD) for record in firsts]
    if form in found or (form.kind == "preference" and any(own and own.kind == form.kind for own in found)):
        return None
    own, columns = found[0], column_names(list(firsts[0].values))
    if form.kind == "text" and own is None:
        return FileFault(
            file=file,
            what=f'has no column "{_USUAL_FIELD}" (its columns: {columns})',
            advice="name the file apart in data.files, with the column that holds its text as field",
        )
    what = f"holds {own}, and other files {form}" if own else f"has no columns of {form}"
    return FileFault(file=file, what=f"{what} (its columns: {columns})", advice="learn from it in a recipe of its own")


def read_examples(
    opened: OpenSource, form: SourceFormat, on_bad: Callable[[PlaitError], None]
) -> Iterator[Example | PairExample]:
    """The examples of a source, in its order; `on_bad` is called with an error that names the record for each that is
    none. Raises PlaitError for documents that are none, and for files that cannot be read."""
    readers: dict[SampleFormat, Callable[[Record], Example | PairExample]] = {
        "chat": lambda record: chat_example(record, form.column),
        "prompt-completion": prompt_example,
        "preference": preference_example,
    }
    if form.kind == "text":
        yield from _whole_texts(opened.documents())
        return
    for record in opened.records():
        try:
            if record.fault:
                raise record.fault
            example = readers[form.kind](record)
        except PlaitError as error:
            on_bad(error)
        else:
            yield example


def holds_pairs(forms: Sequence[SourceFormat]) -> bool:
    """Whether samples are pairs of answers; raises PlaitError where some are and some are not."""
    kinds = [form.kind == "preference" for form in forms]
    if any(kinds) and not all(kinds):
        raise PlaitError(
            "some of data.files hold pairs (prompt, chosen, rejected) and some do not",
            "a run learns from one or the other, so take one of them out",
        )
    return any(kinds)


def holds_examples(forms: Sequence[SourceFormat]) -> bool:
    """Whether samples are whole examples, which are packed and never cut, and not windows of one stream of text."""
    return any(form.kind != "text" for form in forms)


def _pairs(first: Record) -> SourceFormat:
    return SourceFormat(kind="preference", column=ANSWERS[0] if _is_list(first, ANSWERS[0]) else "")


def _first(opened: OpenSource, requested: RequestedFormat) -> Record | None:
    """The first record that tells a format by its columns, of the first ones of all files; else the first of all."""
    firsts, failed = list[Record](), list[PlaitError]()
    for _, part in opened.by_file():
        try:
            first = _first_record(part)
        except PlaitError as error:  # it is reported when it is read
            failed.append(error)
        else:
            firsts += [first] if first else []
    if failed and not firsts and requested != "auto":
        raise failed[0]
    return next(
        (first for first in firsts if format_of_columns(first, opened.source.field)), firsts[0] if firsts else None
    )


def _first_record(opened: OpenSource) -> Record | None:
    return next((record for record in opened.records() if record.fault is None), None)


def format_of_columns(record: Record, field: str) -> SourceFormat | None:
    """The format that a record's columns show; None where they show none."""
    if isinstance(record.values.get(field), str):
        return SourceFormat(kind="text")
    if column := _chat_column(record, field):
        return SourceFormat(kind="chat", column=column)
    if all(column in record.values for column in ANSWERS):
        return _pairs(record)
    if all(column in record.values for column in _PROMPT_COLUMNS):
        return SourceFormat(kind="prompt-completion")
    question = question_column(record.values)
    return SourceFormat(kind="chat", column=question) if question else None


def _chat_column(record: Record, field: str) -> str:
    """The column that holds a list of messages; empty where there is none."""
    named = () if field == _USUAL_FIELD else (field,)
    return next((column for column in (*named, *_CHAT_COLUMNS) if _is_list(record, column)), "")


def _whole_texts(documents: Iterator[Document]) -> Iterator[Example]:
    for document in documents:
        if document.text_bytes > _LARGEST_WHOLE_BYTES:
            raise PlaitError(
                f"{document.name} is too long to be one example beside chats", "divide it into lines of JSONL"
            )
        try:
            text = b"".join(document.read()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PlaitError(
                f"{document.name} is not UTF-8 text at byte {document.begin + error.start}", "convert it to UTF-8"
            ) from None
        yield TextExample(place=document.name, text=text)


def _is_list(record: Record, column: str) -> bool:
    value = record.values.get(column)
    return isinstance(value, Sequence) and not isinstance(value, str)
