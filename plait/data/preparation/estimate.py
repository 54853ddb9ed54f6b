"""How many tokens a request's text will have, estimated from the sizes of its files and a sample, without preparing
it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn

from plait.data.conversations.examples import ChatExample
from plait.data.conversations.formats import SourceFormat, holds_pairs, read_examples
from plait.data.conversations.pairs import parts_of
from plait.data.documents import import_parquet
from plait.data.file_faults import FileFault
from plait.data.folders import TEXT_SUFFIXES
from plait.data.index import SampleLayout
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import readable_formats, ready_tokenizer
from plait.data.preparation.tokens import Tokenizer, bpe_vocabulary, train_bpe
from plait.data.sources import OpenSource, open_sources
from plait.data.tables import TABLE_SUFFIXES
from plait.errors import PlaitError
from plait.regular_file import open_regular_file
from plait.units import counted, format_bytes

SAMPLE_BYTES = 1 << 19
"""Bytes of text that are read; a tokenizer learns from them within a second."""
_BLOCK_BYTES = 1 << 14
_SMALLEST_BLOCK_BYTES = 1 << 10
"""Smallest block; it bounds how many small files are sampled."""
_ALL = 0.99
"""Share of the text that counts as all of it: a block that ends inside a character loses that character."""
_MOST_FILES = 16
"""Files of records of a source that are looked into."""
_MARKS = ("User:\n", "\n\nAssistant:\n")
"""The marks before a chat's messages in plait's plain template; other templates write about as much."""
_TESTED_EVERY = 4
"""Every fourth block is held back to measure the tokenizer trained on the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEstimate:
    """Text that is not prepared: its size as far as files tell it, and its tokens as a sample does."""

    files: int
    text_bytes: float
    tokens: float
    documents: float
    vocabulary: int
    added_entries: int
    """How many of the tokenizer's last entries were added after it was trained."""
    layout: SampleLayout
    sampled_bytes: int
    left_out: tuple[FileFault, ...]
    """Files that cannot be learned from, as far as a sample shows it."""

    def __str__(self) -> str:
        """The inspected part, as the end of a sentence."""
        size = f"{format_bytes(self.text_bytes)} in {counted(self.files, 'file', ',')}"
        if self.sampled_bytes >= _ALL * self.text_bytes:
            return f"from {size}, all of which was read"
        return f"from {size}, of which {format_bytes(self.sampled_bytes)} were read"


@dataclass(frozen=True, slots=True)
class _Counted:
    """Text of a part of the request: its bytes, documents and messages of chats, and the blocks of it that were
    read."""

    text_bytes: float
    documents: float
    messages: float
    sample: Sequence[str]


def estimate_text(request: DataRequest) -> TextEstimate:
    """The estimate for the files as they are now; reads `SAMPLE_BYTES` of them, and some more of tables. Raises
    PlaitError where nothing can be learned from."""
    opened = open_sources(request.sources)
    opened = opened.without([fault for source in opened.sources for fault in _encoding_faults(source)])
    opened, formats = readable_formats(opened, request.format)
    total = max(1, sum(_size(file) for file in opened.files))
    parts = [
        _counted(source, form, SAMPLE_BYTES * max(1, sum(map(_size, source.files))) / total)
        for source, form in zip(opened.sources, formats, strict=True)
    ]
    text_bytes = sum(part.text_bytes for part in parts)
    sample = [text for part in parts for text in part.sample if text]
    if not sample:
        for source, form in zip(opened.sources, formats, strict=True):
            next(read_examples(source, form, _refuse), None)
        raise PlaitError("data.files hold no text that can be read; fill them, or name others")
    sampled = sum(len(text.encode()) for text in sample)
    tokenizer = ready_tokenizer(request)
    if tokenizer is None:
        vocabulary = request.vocabulary or bpe_vocabulary(int(text_bytes))
        tokenizer, sample = _trained(sample, vocabulary, "all" if sampled >= _ALL * text_bytes else "part")
    tokens = sum(map(len, tokenizer.encode_pieces(sample)))
    bytes_per_token = sum(len(text.encode()) for text in sample) / max(1, tokens)
    documents, messages = sum(part.documents for part in parts), sum(part.messages for part in parts)
    marks = sum(map(len, tokenizer.encode_pieces(_MARKS))) / len(_MARKS)
    whole = any(form.kind != "text" for form in formats)
    return TextEstimate(
        files=len(opened.files),
        text_bytes=text_bytes,
        tokens=text_bytes / bytes_per_token + documents + messages * marks,
        documents=documents,
        vocabulary=tokenizer.vocabulary,
        added_entries=tokenizer.added_entries,
        layout="pairs" if holds_pairs(formats) else "whole" if whole else "stream",
        sampled_bytes=sampled,
        left_out=opened.left_out,
    )


def _refuse(error: PlaitError) -> NoReturn:
    raise error


def _trained(sample: list[str], vocabulary: int, read: Literal["all", "part"]) -> tuple[Tokenizer, list[str]]:
    """A tokenizer, and the texts to measure it on: not those that it learned from, where these are part of the text."""
    if read == "all" or len(sample) < _TESTED_EVERY:
        return train_bpe(sample, vocabulary), sample
    return (
        train_bpe([text for number, text in enumerate(sample) if number % _TESTED_EVERY], vocabulary),
        sample[::_TESTED_EVERY],
    )


def _encoding_faults(source: OpenSource) -> Iterator[FileFault]:
    """The files that `plait data` will leave out because of their encoding, as far as a sample shows it."""
    if source.selection:
        return
    for file in _some(source.files):
        if file.suffix.lower() in (*TEXT_SUFFIXES, *TABLE_SUFFIXES) and not all(map(_is_utf_8, _blocks(file, 1))):
            yield FileFault(file=file, what="is not UTF-8 text", advice="convert it to UTF-8 text")


def _counted(source: OpenSource, form: SourceFormat, sample_bytes: float) -> _Counted:
    """Estimates a source's contents; about `sample_bytes` of it are read."""
    texts = [file for file in source.files if file.suffix.lower() in TEXT_SUFFIXES]
    tables = [] if source.selection else [file for file in source.files if file.suffix.lower() not in TEXT_SUFFIXES]
    size, all_bytes = sum(map(_size, texts)), max(1, sum(map(_size, source.files)))
    sample = _spread(texts, sample_bytes * size / all_bytes)
    found = _Counted(size, len(texts), 0, [block.decode("utf-8", "ignore") for block in sample])
    if source.selection:
        return _added(found, [_records(source, form, sample_bytes, None)], 1.0)
    if not tables:
        return found
    some = _some(tables)
    share = sample_bytes * sum(map(_size, tables)) / all_bytes / len(some)
    parts = [_records(one, form, share, one.files[0]) for one in (source.only(file) for file in some)]
    return _added(found, parts, sum(map(_size, tables)) / max(1, sum(map(_size, some))))


def _added(found: _Counted, parts: Sequence[_Counted], factor: float) -> _Counted:
    return _Counted(
        found.text_bytes + factor * sum(part.text_bytes for part in parts),
        found.documents + factor * sum(part.documents for part in parts),
        factor * sum(part.messages for part in parts),
        [*found.sample, *(text for part in parts for text in part.sample)],
    )


def _records(source: OpenSource, form: SourceFormat, sample_bytes: float, file: Path | None) -> _Counted:
    """The records of one file, or of a data set: the first ones are read, the others counted by the room that they
    take."""
    texts, nbytes, messages, place, found = list[str](), 0, 0, "", "all"
    try:
        for example in read_examples(source, form, lambda error: None):
            if nbytes >= max(sample_bytes, _BLOCK_BYTES):
                found = "part"
                break
            text, place = "\n".join(example.texts), example.place
            texts.append(text)
            nbytes += len(text.encode())
            messages += sum(len(part.messages) for part in parts_of(example) if isinstance(part, ChatExample))
    except PlaitError:  # plait data will name the record
        found = "part" if texts else "all"
    share = _share_before(place, source, file) if found == "part" else 1.0
    return _Counted(nbytes / share, len(texts) / share, messages / share, texts)


def _share_before(place: str, source: OpenSource, file: Path | None) -> float:
    """The part of a file, or of a data set, up to the record at this place, which ends with its line or row."""
    found = re.search(r"\d+$", place)
    number = int(found[0]) if found else 1
    if file is None:
        return (number + 1) / max(number + 1, int(source.selection.split()[-1]))
    if file.suffix.lower() == ".parquet":
        return (number + 1) / max(number + 1, import_parquet().read_metadata(file).num_rows)
    with open_regular_file(file) as lines:
        return max(1, sum(map(len, islice(lines, number)))) / _size(file)


def _spread(files: Sequence[Path], sample_bytes: float) -> list[bytes]:
    """Blocks from all over the files, in the proportion of their sizes; all of them where that is no more."""
    sizes = list(map(_size, files))
    if sum(sizes) <= sample_bytes:
        return [block for file in files for block in _blocks(file, _size(file) // _BLOCK_BYTES + 1)]
    count = max(1, round(sample_bytes / max(_SMALLEST_BLOCK_BYTES, min(_BLOCK_BYTES, sum(sizes) / len(files)))))
    places = [(index + 0.5) * sum(sizes) / count for index in range(count)]
    blocks, before = list[bytes](), 0
    for file, size in zip(files, sizes, strict=True):
        inside = bisect_left(places, before + size) - bisect_left(places, before)
        blocks += _blocks(file, inside) if inside else []
        before += size
    return blocks


def _blocks(file: Path, count: int) -> list[bytes]:
    """This many blocks, evenly spread over a file, which may begin and end inside a character."""
    step = max(_BLOCK_BYTES, _size(file) // max(1, count))
    with open_regular_file(file) as opened:
        found = list[bytes]()
        for start in range(0, _size(file), step):
            opened.seek(start)
            found.append(opened.read(_BLOCK_BYTES))
    return found[: max(1, count)]


def _is_utf_8(block: bytes) -> bool:
    """Whether a block that may begin and end inside a character is UTF-8."""
    edge = next((index for index, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)
    try:
        block[edge:].decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start + edge >= len(block) - 3 and error.reason == "unexpected end of data"
    return True


def _some(files: Sequence[Path]) -> Sequence[Path]:
    """Files from all over the list, not too many of them."""
    return files if len(files) <= _MOST_FILES else [files[i * len(files) // _MOST_FILES] for i in range(_MOST_FILES)]


def _size(file: Path) -> int:
    return file.stat().st_size
