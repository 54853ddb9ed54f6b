"""Packs examples of given lengths into windows without cutting any: best fit, the longest first."""

from __future__ import annotations

import numpy as np

from plait.data.balance import IntArray

# Note [best fit by bits]: each example goes into the fullest window that still has room for it (Johnson 1973: never
# over 11/9 of the fewest windows, plus one). Which amounts of free room exist is one whole number with a bit an amount,
# so the tightest one is found by a shift and the lowest bit that is set. The result is a function of the lengths alone.


def best_fit(lengths: IntArray, room: int) -> IntArray:
    """The window of each example, numbered from 0; windows hold `room` tokens, and no length is beyond it."""
    assert lengths.size == 0 or (int(lengths.min()) >= 1 and int(lengths.max()) <= room)
    window = np.empty(len(lengths), dtype=np.int64)
    open_windows: list[list[int]] = [[] for _ in range(room + 1)]
    free_bits, count = 0, 0
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        fitting = free_bits >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            number = open_windows[free].pop()
            if not open_windows[free]:
                free_bits ^= 1 << free
        else:
            free, number, count = room, count, count + 1
        window[place] = number
        if rest := free - length:
            open_windows[rest].append(number)
            free_bits |= 1 << rest
    return window
