"""Builds a corpus of whole examples (conversations, prompts with completions, documents, pairs of answers), with a mark
at every token that is not learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

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
from plait.data.holdout import DocumentSurvey, HoldoutSplit, hash_fraction
from plait.data.index import SHARD_FORMAT, index_row, token_dtype, write_index, write_synced
from plait.data.preparation.bpe_process import train_bpe_apart
from plait.data.preparation.build import (
    NO_ROOM,
    BuildRequest,
    disk_full_error,
    sample_of_text,
    source_entries,
)
from plait.data.preparation.kept_progress import ProgressKeeper
from plait.data.preparation.tokens import Tokenizer, bpe_vocabulary
from plait.data.preparation.writer import ShardWriter
from plait.errors import PlaitError

TEMPLATE_FILE = "chat_template.jinja"
_BATCH_CHARACTERS = 1 << 19
"""Encoded in one call, during which no signal is heeded: half a second on one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """An example, its source in the mix, and the split that it belongs to."""

    example: Example | PairExample
    source: int
    split: HoldoutSplit

    @property
    def text_bytes(self) -> int:
        return sum(len(text.encode("utf-8")) for text in self.example.texts)


def build_examples(work: BuildRequest, folder: Path) -> None:
    """Fill `folder` with the shards, the tokenizer, the chat template and, last of all, the index; every file is on the
    disk when it returns. Raises PlaitError naming the record that cannot be learnt. Goes on with what a killed one has
    left in the folder."""
    keeper = ProgressKeeper(folder, work.keep_every_bytes)
    found = _survey(work)
    total = sum(look.text_bytes for look in found)
    tokenizer = work.tokenizer or keeper.tokenizer() or _trained(work, total)
    template = template_for(tokenizer, work.template)
    writers = _write_all(work, tokenizer, template, (folder, keeper), total)
    for split, writer in writers.items():
        if not writer.entries and (split == "train" or work.holdout):
            what = "holds nothing out" if split == "heldout" else "holds everything out"
            raise PlaitError(
                f"data.holdout = {work.holdout} of {sum(look.documents for look in found)} examples {what} (those with "
                "the same prompt stay together); give more of them, another data.holdout, or 0"
            )
    tokenizer.save(folder)
    write_synced(folder / "tokenizer_config.json", json.dumps(special_settings(template.special), ensure_ascii=False))
    write_synced(folder / TEMPLATE_FILE, template.text)
    boundary_tokens = sum(writer.boundary_tokens for writer in writers.values())
    index = {
        "format": SHARD_FORMAT,
        "layout": "pairs" if holds_pairs(work.formats) else "whole",
        "template": template.where if any(form.column for form in work.formats) else "",
        "dtype": token_dtype(tokenizer.vocabulary).str,
        "vocabulary": tokenizer.vocabulary,
        "eot": tokenizer.eot,
        **({"bos": tokenizer.bos} if tokenizer.bos else {}),
        **({"boundary_tokens": boundary_tokens} if boundary_tokens else {}),
        "tokenizer_hash": tokenizer.hash,
        "held_out_by": "prompts",
        "train_bytes": writers["train"].text_bytes,
        "heldout_bytes": writers["heldout"].text_bytes,
        "shards": [index_row(entry) for entry in chain.from_iterable(each.entries for each in writers.values())],
    }
    write_index(folder, {**index, "sources": source_entries(work, found)})
    keeper.finish()


def template_for(tokenizer: Tokenizer, own: TemplateText | None) -> TemplateText:
    """The tokenizer's own template, else the plain one, with the special tokens that it may write."""
    found = own or TemplateText(
        text=("{{- bos_token -}}\n" if tokenizer.bos else "") + PLAIN_TEMPLATE,
        where=PLAIN_NAME,
        special={"bos_token": tokenizer.bos_text} if tokenizer.bos else {},
    )
    return replace(found, special={"eos_token": tokenizer.eot_text, **found.special})


def _survey(work: BuildRequest) -> list[DocumentSurvey]:
    """Read every example once: what cannot be learnt is found here, before hours of work."""
    found = []
    for number, source in enumerate(work.sources):
        seen = DocumentSurvey()
        for one in _examples(work, number):
            seen += DocumentSurvey(documents=1, text_bytes=one.text_bytes, held_documents=int(one.split == "heldout"))
            work.on_progress(seen.text_bytes, 0, "reading")
        if not seen.text_bytes:
            raise PlaitError(f"{source.source.path} holds no text; fill it or take it out of {source.source.given_as}")
        found.append(seen)
    return found


def _examples(work: BuildRequest, number: int) -> Iterator[_Placed]:
    # Sources without weights are one stream, as those of text.
    source = number if work.sources[0].source.weight is not None else 0
    for example in read_examples(work.sources[number], work.formats[number]):
        held = hash_fraction([example.question.encode("utf-8")]) < work.holdout
        yield _Placed(example=example, source=source, split="heldout" if held else "train")


def _trained(work: BuildRequest, total: int) -> Tokenizer:
    def training_texts() -> Iterator[str]:
        done = 0
        for one in chain.from_iterable(_examples(work, number) for number in range(len(work.sources))):
            done += one.text_bytes
            work.on_progress(done, total, "training the tokenizer")
            if one.split == "train":
                yield from one.example.texts

    def wait() -> None:
        work.on_progress(0, 0, "building the tokenizer's vocabulary")

    return train_bpe_apart(sample_of_text(training_texts(), total), work.vocabulary or bpe_vocabulary(total), wait)


def _write_all(
    work: BuildRequest, tokenizer: Tokenizer, template: TemplateText, place: tuple[Path, ProgressKeeper], total: int
) -> dict[HoldoutSplit, ShardWriter]:
    folder, keeper = place

    def writer(split: HoldoutSplit) -> ShardWriter:
        dtype = token_dtype(tokenizer.vocabulary)
        return ShardWriter(folder, split, eot=tokenizer.eot, dtype=dtype, shard_tokens=work.shard_tokens, marks="kept")

    writers: dict[HoldoutSplit, ShardWriter] = {"train": writer("train"), "heldout": writer("heldout")}
    encoder, done = ExampleEncoder(tokenizer, ChatTemplate(template)), 0
    try:
        count, done = keeper.begin(tokenizer, writers)
        for batch in _batches(work, count):
            work.on_progress(done, total, "tokenizing")
            encoded = iter(encoder.encode([part for one in batch for part in parts_of(one.example)]))
            for one in batch:
                parts = [next(encoded) for _ in parts_of(one.example)]
                _write(writers[one.split], one, parts, work.shard_tokens)
            count, done = count + len(batch), done + sum(one.text_bytes for one in batch)
            keeper.written(count, done, writers)
        for each in writers.values():
            each.close_shard()
    except OSError as error:
        if error.errno in NO_ROOM:
            raise disk_full_error(folder, sum(each.bytes_written for each in writers.values()), done, total) from error
        raise
    work.on_progress(total, total, "tokenizing")
    return writers


def _write(writer: ShardWriter, one: _Placed, parts: list[EncodedExample], shard_tokens: int) -> None:
    left = sum(len(part.ids) for part in parts)
    if left >= shard_tokens:
        raise PlaitError(f"{one.example.place} has {left} tokens, too many for one example; divide it")
    if len(parts) == 2 and np.array_equal(parts[0].ids, parts[1].ids):
        raise PlaitError(
            f"{one.example.place}: the chosen and the rejected answer become the same tokens, so there is no "
            "preference; mend or remove that pair"
        )
    for part in parts:
        left -= len(part.ids)
        writer.add_whole(one.source, part.ids, part.mask, follow_tokens=left)
        writer.text_bytes += part.learned_bytes
        writer.boundary_tokens += part.straddles


def _batches(work: BuildRequest, first: int) -> Iterator[list[_Placed]]:
    """All examples from number `first` on."""
    batch, characters = list[_Placed](), 0
    examples = chain.from_iterable(_examples(work, number) for number in range(len(work.sources)))
    for one in islice(examples, first, None):
        batch.append(one)
        characters += sum(map(len, one.example.texts))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
