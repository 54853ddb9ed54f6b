"""Builds a corpus of whole examples (conversations, prompts with completions, documents, pairs of answers), with a mark
at every token that is not learned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import floor
from pathlib import Path

import numpy as np

from plait.data.conversations.built_in_templates import check_tokens
from plait.data.conversations.chat_template import (
    PLAIN_NAME,
    PLAIN_TEMPLATE,
    ChatTemplate,
    TemplateText,
    special_settings,
)
from plait.data.conversations.encode import EncodedExample, ExampleEncoder
from plait.data.conversations.examples import Example
from plait.data.conversations.formats import holds_pairs, read_examples
from plait.data.conversations.pairs import PairExample, parts_of
from plait.data.holdout import Holdout, HoldoutSplit, text_hash
from plait.data.index import NOTHING_COUNTED, RecordCounts, write_synced
from plait.data.preparation.build import (
    BuildRequest,
    SourceCounts,
    begun_survey,
    finish_corpus,
    source_counts,
    trained_tokenizer,
    write_shards,
)
from plait.data.preparation.kept_progress import ProgressKeeper, Writers
from plait.data.preparation.tokens import Tokenizer
from plait.data.preparation.writer import ShardWriter
from plait.errors import PlaitError
from plait.units import counted

TEMPLATE_FILE = "chat_template.jinja"
FIRST_NAMED = 3
"""Bad records that are named with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """An example, its source, and the split that it belongs to.

    `stream` is the source that its shard is of: 0 for all where they are concatenated.
    """

    example: Example | PairExample
    source: int
    stream: int
    split: HoldoutSplit

    @property
    def texts(self) -> Sequence[str]:
        return self.example.texts

    @property
    def text_bytes(self) -> int:
        return _text_bytes(self.example)


def build_examples(work: BuildRequest, folder: Path) -> None:
    """Fill `folder` with the shards, the tokenizer, the chat template and, last of all, the index; every file is on the
    disk when it returns. Raises PlaitError naming the record that cannot be learned. Goes on with what a killed one has
    left in the folder."""
    keeper = ProgressKeeper(folder, work.keep_every_bytes)
    if work.template:
        ChatTemplate(work.template).close()  # one that cannot be used is refused before any work
    bad = BadRecords(work.request.bad_records)
    found, holdout = _survey(work, bad)
    total = sum(counts.text_bytes for counts in found)
    tokenizer = work.tokenizer or keeper.tokenizer() or trained_tokenizer(work, _placed(work, holdout), total)
    template = template_for(tokenizer, work.template)
    check_tokens(template, tokenizer.backend.get_vocab(with_added_tokens=True))
    with closing(ChatTemplate(template)) as chats:
        encoder = ExampleEncoder(tokenizer, chats)

        def write(batch: Sequence[_Placed], writers: Writers) -> None:
            encoded = iter(encoder.encode_each([part for one in batch for part in parts_of(one.example)]))
            for one in batch:
                parts = [next(encoded) for _ in parts_of(one.example)]
                refused = _write(writers[one.split], one, parts, work.shard_tokens)
                keeper.counts = _counted(keeper.counts, refused, parts)
            bad.check(keeper.counts)

        placed = _placed(work, holdout)
        writers, held = write_shards(work, folder, keeper, tokenizer, placed, write, total, layout="whole")
    for split, writer in writers.items():
        if not writer.entries and (split == "train" or work.request.holdout):
            what = "holds nothing out" if split == "heldout" else "holds everything out"
            examples = sum(counts.documents for counts in found)
            raise PlaitError(
                f"data.holdout = {work.request.holdout} of {examples} examples {what} (those with the same "
                "prompt stay together); give more of them, another data.holdout, or 0"
            )
    write_synced(folder / "tokenizer_config.json", json.dumps(special_settings(template.special), ensure_ascii=False))
    write_synced(folder / TEMPLATE_FILE, template.text)
    kind = {
        "layout": "pairs" if holds_pairs(work.formats) else "whole",
        "template": template.where if any(form.column for form in work.formats) else "",
    }
    counts = {"counts": asdict(bad.with_written(keeper.counts))}
    finish_corpus(
        work, folder, keeper, tokenizer, writers, found, held, held_out_by="prompts", examples=kind, counts=counts
    )


def template_for(tokenizer: Tokenizer, own: TemplateText | None) -> TemplateText:
    """The tokenizer's own template, else the plain one, with the special tokens that it may write."""
    found = own or TemplateText(
        text=("{{- bos_token -}}\n" if tokenizer.bos else "") + PLAIN_TEMPLATE,
        where=PLAIN_NAME,
        special={"bos_token": tokenizer.bos_text} if tokenizer.bos else {},
    )
    return replace(found, special={"eos_token": tokenizer.eot_text, **found.special})


class BadRecords:
    """Counts the records that cannot be learned from; raises PlaitError once they are more than the recipe allows."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._records = self._read = 0
        self._first = list[str]()

    def count(self) -> None:
        """Count one usable record."""
        self._records += 1

    def add(self, error: PlaitError) -> None:
        """Count one record that is no example, and why."""
        self._records, self._read = self._records + 1, self._read + 1
        self._first = [*self._first, str(error)][:FIRST_NAMED]
        if self._limit == 0:
            raise self._too_many(self._read, self._first)

    def check(self, written: RecordCounts = NOTHING_COUNTED) -> None:
        """Raise PlaitError if too many records were skipped: while reading, and `written` while encoding."""
        counts = self.with_written(written)
        if counts.skipped > self._limit * self._records:
            raise self._too_many(counts.skipped, counts.first_skipped)

    def with_written(self, written: RecordCounts) -> RecordCounts:
        """The counts of reading and of writing together."""
        first = (*self._first, *written.first_skipped)[:FIRST_NAMED]
        return replace(written, records=self._records, skipped=self._read + written.skipped, first_skipped=first)

    def _too_many(self, skipped: int, first: Sequence[str]) -> PlaitError:
        allowed = floor(self._limit * self._records)
        return PlaitError(
            f"{skipped} of {counted(self._records, 'record', ',')} cannot be learned from, and data.bad_records = "
            f"{self._limit:g} allows {allowed or 'none'}; the first is {first[0]}"
        )


def _survey(work: BuildRequest, bad: BadRecords) -> tuple[list[SourceCounts], Holdout]:
    """Read every record once: what is no example is found here, before hours of work."""
    counts, survey = [], begun_survey(work)
    for number in range(len(work.sources)):
        examples = text_bytes = 0
        for example, file in _read(work, number, bad.add):
            bad.count()
            nbytes = _text_bytes(example)
            survey.add_example(_prompt_hash(example), nbytes, number, file)
            examples, text_bytes = examples + 1, text_bytes + nbytes
            work.on_progress(text_bytes, 0, "reading")
        counts.append((examples, text_bytes))
    bad.check()
    found = [source_counts(source, *each) for source, each in zip(work.sources, counts, strict=True)]
    return found, survey.choose("whole")


def _skip(error: PlaitError) -> None:
    """For each further reading: bad records were counted in the first."""


def _read(
    work: BuildRequest, number: int, on_bad: Callable[[PlaitError], None] = _skip
) -> Iterator[tuple[Example | PairExample, str]]:
    """The examples of a source, each with the file that `OpenSource.by_file` tells apart."""
    for file, part in work.sources[number].by_file():
        for example in read_examples(part, work.formats[number], on_bad):
            yield example, file


def _placed(work: BuildRequest, holdout: Holdout) -> Iterator[_Placed]:
    weighted = work.sources[0].source.weight is not None  # sources without weights are one stream, as those of text
    for number in range(len(work.sources)):
        for example, file in _read(work, number):
            split = holdout.split_of_prompt(_prompt_hash(example), number, file)
            yield _Placed(example=example, source=number, stream=number if weighted else 0, split=split)


def _prompt_hash(example: Example | PairExample) -> int:
    return text_hash([example.question.encode("utf-8")])


def _text_bytes(example: Example | PairExample) -> int:
    return sum(len(text.encode("utf-8")) for text in example.texts)


def _write(
    writer: ShardWriter, one: _Placed, encoded: Sequence[EncodedExample | PlaitError], shard_tokens: int
) -> PlaitError | None:
    """Write an example, or return the reason that it cannot be learned."""
    parts = [part for part in encoded if not isinstance(part, PlaitError)]
    if refused := next((part for part in encoded if isinstance(part, PlaitError)), None):
        return refused
    left = sum(len(part.ids) for part in parts)
    if left >= shard_tokens:
        return PlaitError(f"{one.example.place} has {left} tokens, too many for one example; divide it")
    if len(parts) == 2 and np.array_equal(parts[0].ids, parts[1].ids):
        return PlaitError(
            f"{one.example.place}: the chosen and the rejected answer become the same tokens, so there is no "
            "preference; correct or remove that pair"
        )
    for part in parts:
        left -= len(part.ids)
        writer.add_whole(one.stream, part.ids, part.mask, follow_tokens=left)
        writer.text_bytes += part.learned_bytes
        writer.boundary_tokens += part.straddles
    return None


def _counted(
    counts: RecordCounts, refused: PlaitError | None, parts: Sequence[EncodedExample | PlaitError]
) -> RecordCounts:
    if refused:
        first = (*counts.first_skipped, str(refused))[:FIRST_NAMED]
        return replace(counts, skipped=counts.skipped + 1, first_skipped=first)
    chats = [part for part in parts if isinstance(part, EncodedExample) and part.is_chat]
    if not chats:
        return counts
    remarks = Counter(counts.remarks)
    remarks.update(remark for part in chats for remark in part.remarks)
    return replace(counts, chats=counts.chats + len(chats), remarks=dict(remarks))
