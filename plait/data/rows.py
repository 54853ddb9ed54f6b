"""Rows of tokens from shards, as arrays: inputs, and the target after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.data.shards import Shard

NOT_COUNTED = -100
"""The target that enters no loss."""


def gather(
    shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], length: int
) -> np.ndarray[Any, Any]:
    """Rows of `length` tokens in the shards' own type: row i from start[i] of shards[shard[i]]."""
    numbers = np.unique(shard)
    if len(numbers) == 1:
        return shards[numbers[0]].rows(start, length)
    rows = np.empty((len(start), length), dtype=shards[0].tokens.dtype)
    for number in numbers:
        mine = np.flatnonzero(shard == number)
        rows[mine] = shards[number].rows(start[mine], length)
    return rows


def targets(
    shards: tuple[Shard, ...], shard: np.ndarray[Any, Any], start: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The token after each one, NOT_COUNTED where that is marked."""
    if all(shards[number].mask is None for number in np.unique(shard)):
        return tokens[:, 1:]
    found = tokens[:, 1:].astype(np.int64)
    for number in np.unique(shard):
        mine = np.flatnonzero(shard == number)
        marks = shards[number].mask_rows(start[mine] + 1, found.shape[1])
        found[mine] = np.where(marks, NOT_COUNTED, found[mine])
    return found


def windows_end_to_end(shards: Sequence[Shard], sequence: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Shard and first token of the windows that hold every token; a shard may end before its last one does."""
    starts = [np.arange(0, len(shard.tokens) - 1, sequence) for shard in shards]
    numbers = np.repeat(np.arange(len(shards)), [len(each) for each in starts])
    return numbers, np.concatenate([np.empty(0, dtype=np.int64), *starts])


def padded_rows(
    shards: Sequence[Shard], eot: int, numbers: np.ndarray[Any, Any], start: np.ndarray[Any, Any], sequence: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets; past a shard's end the inputs are <eot> and the targets NOT_COUNTED."""
    inputs = np.full((len(start), sequence), eot, dtype=np.int64)
    targets = np.full((len(start), sequence), NOT_COUNTED, dtype=np.int64)
    for row, (number, first) in enumerate(zip(numbers.tolist(), start.tolist(), strict=True)):
        shard = shards[number]
        tokens = shard.tokens[first : first + sequence + 1]
        marks = shard.mask_rows(np.array([first]), len(tokens))[0, 1:]
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = np.where(marks, NOT_COUNTED, tokens[1:].astype(np.int64))
    return inputs, targets
