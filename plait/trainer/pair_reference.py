"""The reference of a run on pairs: the log-probabilities that its first weights give to all answers, computed once.

They are kept beside the prepared data, under a hash of all that they depend on, so that a run that goes on, on any
number of workers, reads the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load, save
from torch import Tensor

from plait.data.loader import micros_of_pairs
from plait.data.samples.opening import all_pairs
from plait.data.samples.sizes import Overlong
from plait.data.shards import open_corpus
from plait.errors import RunFailed
from plait.launch.values.progress import NO_REPORT, ProgressReport
from plait.model.names import ADAPTER_B
from plait.parallel.communicator import Communicator
from plait.parallel.sharded_model import ShardedModel
from plait.planner.plan import Plan
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.trainer.assemble import Assembly
from plait.trainer.preference.formulas import PreferenceLoss

_FORMAT = 1
_MICROS_AT_ONCE = 16
"""Micro-batches that one evaluation takes, so that the tokens of a whole corpus are never on a device at once."""
_MOST_BYTES = 1 << 34
_TABLE, _SHA256 = "log_probabilities", "sha256"


class KeptReference:
    """The reference of one run, found or missing; of a run whose loss compares with none there is nothing to find.
    Every rank must make the same calls."""

    def __init__(self, plan: Plan, world: Communicator, *, loss: PreferenceLoss | None, overlong: Overlong) -> None:
        self._world = world
        self._overlong: Overlong = overlong
        self._table = torch.zeros(0, 2, dtype=torch.float64)
        self.is_missing = False
        """Whether it must be computed: then the assembly that `give` gets needs the weights that the run begins
        with."""
        self._is_needed = loss is not None and loss.compared_with == "base"
        if self._is_needed:
            self._path = Path(plan.job.corpus) / f"reference-{reference_key(plan, overlong)}.safetensors"
            self._pairs = all_pairs(open_corpus(Path(plan.job.corpus)))
            self._find()

    def give(self, assembly: Assembly, progress: ProgressReport = NO_REPORT, *, writes: bool = False) -> str:
        """Hand the reference to an assembly; where it is missing it is computed first, which blocks. The ranks that are
        asked to write keep it on their host. Returns a sentence about what was done, or "". Raises RunFailed where the
        numbers are not finite or cannot be kept."""
        if not self._is_needed:
            return ""
        sentence, began = "", perf_counter()
        if self.is_missing:
            self._table = compute_reference(assembly, self._overlong, progress).cpu()
            self.is_missing = False
            sentence = (
                f"reference log-probabilities of {self._pairs:,} pairs by the first weights in "
                f"{perf_counter() - began:.0f} s; kept with the prepared data"
            )
        if writes and not self._is_here:
            replace_file(self._path, _file_of(self._table))
            self._is_here = True
        assert assembly.pairs is not None
        assembly.pairs.set_reference(self._table.to(assembly.device))
        return sentence

    def _find(self) -> None:
        """The table of the first rank whose host has it: so all have the same bits."""
        own = _read(self._path, self._pairs)
        self._is_here = own is not None
        have = [bool(one) for one in self._world.gather(torch.tensor([own is not None]).double())]
        self.is_missing = not any(have)
        if not self.is_missing:
            table = own if own is not None and have.index(True) == self._world.index else None
            self._table = self._world(torch.zeros(self._pairs, 2, dtype=torch.float64) if table is None else table)


def reference_key(plan: Plan, overlong: Overlong) -> str:
    """A name for all that the reference depends on: weights, tokens (and with them the template), the longest pair and
    what becomes of longer ones, and the arithmetic."""
    weights = [plan.job.base_fingerprint, plan.job.shape.vocabulary]
    arithmetic = [plan.arithmetic.precision, plan.arithmetic.matmul_precision]
    parts = [_FORMAT, weights, plan.job.corpus_hash, [plan.job.sequence, overlong], arithmetic]
    return sha256(json.dumps(parts).encode()).hexdigest()[:16]


@torch.no_grad()
def compute_reference(
    assembly: Assembly, overlong: Overlong = "refuse", progress: ProgressReport = NO_REPORT
) -> Tensor:
    """Log-probabilities of the answers of all pairs by the weights of an assembly without its adapters, [pairs, 2] in
    float64, the same on every rank; pairs that are left out are zeros. Every rank must call it; blocks."""
    pairs = assembly.pairs
    assert pairs is not None
    micros = micros_of_pairs(assembly.corpus, assembly.loader.selection, overlong)
    with _without_adapters(assembly.model), pairs.record() as table:
        while some := list(islice(micros, _MICROS_AT_ONCE)):
            progress.phase("the reference")
            progress.collective()
            assembly.evaluate_micros(some)
    table = assembly.sums(table)
    if not torch.isfinite(table).all():
        raise RunFailed(
            "the model gives log-probabilities that are not finite before any training; its weights are damaged, or "
            'train.precision is too small for them (try "float32")'
        )
    return table


@contextmanager
def _without_adapters(sharded: ShardedModel) -> Iterator[None]:
    """In this block the adapters add nothing: their second weights are zero, and what they were again behind it."""
    sharded.settle()
    seconds = [held.tensor for held in sharded.weights if held.name.endswith(f".{ADAPTER_B}")]
    values = [tensor.clone() for tensor in seconds]
    for tensor in seconds:
        tensor.zero_()
    yield
    _restore(seconds, values)


def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _file_of(table: Tensor) -> bytes:
    digest = torch.tensor(list(sha256(table.numpy().tobytes()).digest()), dtype=torch.uint8)
    return save({_TABLE: table.contiguous(), _SHA256: digest})


def _read(path: Path, pairs: int) -> Tensor | None:
    """The table that was kept; None where there is none, or not as it was written."""
    try:
        found = load(read_regular_file(path, _MOST_BYTES))
        table, digest = found[_TABLE], bytes(found[_SHA256].tolist())
    except (OSError, ValueError, KeyError, RuntimeError):
        return None
    whole = table.dtype == torch.float64 and table.shape == (pairs, 2)
    return table if whole and sha256(table.numpy().tobytes()).digest() == digest else None
