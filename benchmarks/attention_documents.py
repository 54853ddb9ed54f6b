"""What masking documents costs: attention forward and backward with documents, against causal attention without.

Bars on a CPU: eight documents in 4,096 tokens at most 0.35 of the unmasked time, one document at most 1.1.
Run: `python benchmarks/attention_documents.py [--rounds N]`; exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from plait.model.attention import Documents, attend

TOKENS, HEADS, HEAD_WIDTH = 4096, 6, 64
CASES = (
    ("one document", (TOKENS,), 1.1),
    ("eight equal documents", (TOKENS // 8,) * 8, 0.35),
    ("eight documents of uneven lengths", (100, 900, 333, 667, 512, 512, 48, 1024), 0.35),
)


def main() -> int:
    """Print one line a case; answers 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="paired measurements of each case")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    missed = 0
    for name, lengths, bar in CASES:
        assert sum(lengths) == TOKENS
        ratio, unmasked_s = compare(lengths, arguments.rounds)
        missed += ratio > bar
        verdict = "missed" if ratio > bar else "met"
        print(f"{name}: {ratio:.3f} of the unmasked {unmasked_s * 1e3:.0f} ms; bar {bar}; {verdict}")
    return int(missed > 0)


def compare(lengths: tuple[int, ...], rounds: int) -> tuple[float, float]:
    """Median of the paired ratios masked / unmasked, and the unmasked median in seconds."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, TOKENS, HEADS, HEAD_WIDTH)
    q, k, v, upstream = (torch.randn(shape, generator=generator).requires_grad_(index < 3) for index in range(4))

    def run(documents: Documents | None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, documents), (q, k, v), upstream)

    for documents in (None, Documents(lengths)):
        run(documents)
    pairs = [(seconds(lambda: run(Documents(lengths))), seconds(lambda: run(None))) for _ in range(rounds)]
    return median(masked / unmasked for masked, unmasked in pairs), median(unmasked for _, unmasked in pairs)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
