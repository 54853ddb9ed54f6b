"""Generates a small corpus from a seed, with the difficulties of real ones: documents of all lengths, and tokens
that are never learned."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from plait.data.holdout import HoldoutSplit
from plait.data.index import SHARD_FORMAT, SampleLayout, index_row, token_dtype, write_index
from plait.data.preparation.writer import ShardWriter

_TOKENS: dict[HoldoutSplit, int] = {"train": 250, "heldout": 11}
"""Length of each split in sequences; `_write` adds a third of one, so that the held-out split does not fill its last
row."""
_SHARDS = 3


def write_synthetic(
    folder: Path, *, vocabulary: int, sequence: int, seed: int, layout: SampleLayout = "stream"
) -> Path:
    """Fill an empty folder with a corpus that `open_corpus` can read, and return the folder; token 0 is the end of
    text. Whole examples fit into a window of `sequence` tokens, and so do both examples of a pair together."""
    draws = np.random.default_rng(seed)
    write = {"stream": _write, "whole": _write_whole, "pairs": _write_pairs}[layout]
    writers = {split: write(folder, split, vocabulary, sequence, draws) for split in _TOKENS}
    index = {
        "format": SHARD_FORMAT,
        "layout": layout,
        "dtype": token_dtype(vocabulary).str,
        "vocabulary": vocabulary,
        "eot": 0,
        "tokenizer_hash": "synthetic",
        "train_bytes": writers["train"].bytes_written,
        "heldout_bytes": writers["heldout"].bytes_written,
        "shards": [index_row(entry) for entry in chain.from_iterable(w.entries for w in writers.values())],
        "sources": [{"path": f"synthetic, seed {seed}", "weight": None}],
    }
    write_index(folder, index)
    return folder


def _write(
    folder: Path, split: HoldoutSplit, vocabulary: int, sequence: int, draws: np.random.Generator
) -> ShardWriter:
    """Write documents of one token to several sequences; a third of them begin with a part that is never learned,
    and a sixth are never learned at all."""
    tokens = _TOKENS[split] * sequence + sequence // 3
    dtype = token_dtype(vocabulary)
    writer = ShardWriter(folder, split, eot=0, dtype=dtype, shard_tokens=-(-tokens // _SHARDS), marks="kept")
    while tokens > 0:
        length = min(tokens, 1 + int(draws.exponential() ** 2 * sequence / 2))
        ids = 1 + (draws.exponential(size=length) * vocabulary / 5).astype(np.int64) % (vocabulary - 1)
        marked = draws.choice([0, 0, 0, 0.5, 0.8, 1])
        writer.begin_document(0)
        writer.add(ids, (np.arange(length) < marked * length).astype(np.uint8))
        tokens -= length + 1
    writer.close_shard()
    return writer


def _write_whole(
    folder: Path, split: HoldoutSplit, vocabulary: int, sequence: int, draws: np.random.Generator
) -> ShardWriter:
    """Write examples of two tokens to one more than a sequence, each with a prompt of any length that is never
    learned."""
    tokens = _TOKENS[split] * sequence
    dtype = token_dtype(vocabulary)
    writer = ShardWriter(folder, split, eot=0, dtype=dtype, shard_tokens=-(-tokens // _SHARDS) + sequence, marks="kept")
    while tokens > 0:
        length = min(sequence + 1, 2 + int(draws.exponential() * sequence / 3))
        ids = 1 + (draws.exponential(size=length) * vocabulary / 5).astype(np.int64) % (vocabulary - 1)
        prompt = int(draws.integers(1, length))
        writer.add_whole(0, ids, (np.arange(length) < prompt).astype(np.uint8))
        tokens -= length
    writer.close_shard()
    return writer


def _write_pairs(
    folder: Path, split: HoldoutSplit, vocabulary: int, sequence: int, draws: np.random.Generator
) -> ShardWriter:
    """Write pairs with one prompt and answers of unlike lengths; a quarter of them fill their window."""
    tokens = _TOKENS[split] * sequence
    dtype = token_dtype(vocabulary)
    limit = -(-tokens // _SHARDS) + 2 * sequence
    writer = ShardWriter(folder, split, eot=0, dtype=dtype, shard_tokens=limit, marks="kept")
    while tokens > 0:
        prompt = int(draws.integers(1, max(3, sequence // 4)))
        room = sequence - 2 * (prompt - 1)  # for the answers' tokens: all of an example but one token takes room
        first = min(room - 1, 1 + int(draws.exponential() * sequence / 6))
        second = room - first if draws.random() < 1 / 4 else 1 + int(draws.exponential() * sequence / 6)
        second = min(second, room - first)
        asked = _drawn(prompt, vocabulary, draws)
        answers = [_drawn(length, vocabulary, draws) for length in (first, second)]
        left = 2 * prompt + first + second
        for answer in answers:
            ids = np.concatenate([asked, answer])
            left -= len(ids)
            marks = (np.arange(len(ids)) < prompt).astype(np.uint8)
            writer.add_whole(0, ids, marks, follow_tokens=left)
            tokens -= len(ids)
    writer.close_shard()
    return writer


def _drawn(length: int, vocabulary: int, draws: np.random.Generator) -> np.ndarray:
    return 1 + (draws.exponential(size=length) * vocabulary / 5).astype(np.int64) % (vocabulary - 1)
