"""Rows of tokens read from shards, as arrays: inputs, and the target of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.data.shards import Shard
from plait.errors import RunFailed

IGNORED_TARGET = -100
"""Target of a token that does not enter the loss."""


def gather_rows(
    shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], length: int
) -> np.ndarray[Any, Any]:
    """Rows of `length` tokens in the shards' dtype: row i starts at token start[i] of shards[shard[i]]."""
    numbers = np.unique(shard)
    if len(numbers) == 1:
        return shards[numbers[0]].rows(start, length)
    rows = np.empty((len(start), length), dtype=shards[0].tokens.dtype)
    for number in numbers:
        mine = np.flatnonzero(shard == number)
        rows[mine] = shards[number].rows(start[mine], length)
    return rows


def check_ids(
    tokens: np.ndarray[Any, Any], vocabulary: int, shards: Sequence[Shard], shard: np.ndarray[Any, Any]
) -> None:
    """Raises RunFailed where rows of tokens hold an id that the tokenizer does not have: row i was read from
    shards[shard[i]]."""
    if tokens.max(initial=0) < vocabulary:
        return
    row = int(np.flatnonzero((tokens >= vocabulary).any(axis=1))[0])
    raise RunFailed(
        f"{shards[int(shard[row])].name}.bin of the prepared data is damaged: it holds the id {tokens[row].max()} and "
        f"the tokenizer has {vocabulary} entries; delete the folder of the prepared data and run `plait data` again"
    )


def make_targets(
    shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The token after each input, IGNORED_TARGET where the mask marks it; row i of `tokens` was read at start[i] of
    shards[shard[i]]."""
    if all(shards[number].mask is None for number in np.unique(shard)):
        return tokens[:, 1:]
    found = tokens[:, 1:].astype(np.int64)
    for number in np.unique(shard):
        mine = np.flatnonzero(shard == number)
        marks = shards[number].mask_rows(start[mine] + 1, found.shape[1])
        found[mine] = np.where(marks, IGNORED_TARGET, found[mine])
    return found


def windows_end_to_end(shards: Sequence[Shard], sequence: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Shard and first token of consecutive windows that cover every token; a shard's last window may extend past its
    end."""
    starts = [np.arange(0, len(shard.tokens) - 1, sequence) for shard in shards]
    numbers = np.repeat(np.arange(len(shards)), [len(each) for each in starts])
    return numbers, np.concatenate([np.empty(0, dtype=np.int64), *starts])


def padded_rows(
    shards: Sequence[Shard], eot: int, numbers: np.ndarray[Any, Any], start: np.ndarray[Any, Any], sequence: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets, each [B, sequence]; past a shard's end the inputs are <eot> and the targets
    IGNORED_TARGET."""
    inputs = np.full((len(start), sequence), eot, dtype=np.int64)
    targets = np.full((len(start), sequence), IGNORED_TARGET, dtype=np.int64)
    for row, (number, first) in enumerate(zip(numbers.tolist(), start.tolist(), strict=True)):
        shard = shards[number]
        tokens = shard.tokens[first : first + sequence + 1]
        marks = shard.mask_rows(np.array([first]), len(tokens))[0, 1:]
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = np.where(marks, IGNORED_TARGET, tokens[1:].astype(np.int64))
    return inputs, targets
