"""Files of a run whose values were changed and whose hash was made again, as somebody who hands a run on could: a
sentence or a plain answer, and never a wait, a traceback or a sign that a terminal obeys."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from plait.checked_json import sealed_text
from tests.end_to_end.command import Place
from tests.fuzz.conftest import Outcome
from tests.fuzz.mutate import json_mutant
from tests.fuzz.test_fuzz_files import GOES_ON_S, SAMPLE, TRAIN, assert_sound
from tests.matrix import CASES

EVAL = ("eval", "fuzzed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resealed:
    """A file whose hash is made again, and the command that believes it then."""

    pattern: str
    command: tuple[str, ...]
    many: float = 1.0


SUBJECTS = {
    "plan, train": Resealed(pattern="runs/fuzzed/plan.json", command=TRAIN),
    "plan, sample": Resealed(pattern="runs/fuzzed/plan.json", command=SAMPLE, many=0.5),
    "plan, eval": Resealed(pattern="runs/fuzzed/plan.json", command=EVAL, many=0.5),
    "receipt, train": Resealed(pattern="runs/fuzzed/receipt.json", command=(*TRAIN, "--verbose")),
    "index, eval": Resealed(pattern=".plait/data/*/index.json", command=EVAL, many=0.5),
}
FEW = 6


def resealed(text: bytes, name: str) -> bytes:
    """The JSON text with the hash that plait would have written."""
    values: Any = json.loads(text)
    if not isinstance(values, dict):
        return text
    values.pop("sha256", None)
    if name == "index.json":
        values.pop("index_sha256", None)
        return json.dumps(
            {**values, "index_sha256": sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}
        ).encode()
    return sealed_text(values).encode()


def test_prepared_data_of_another_run_are_not_taken_for_its_own(finished: Place, plait: Callable[..., Outcome]) -> None:
    """The index says that the same tokens have other weights: whole in itself, and not what the run was trained on."""
    [path] = finished.folder.glob(".plait/data/*/index.json")
    whole = path.read_bytes()
    values = json.loads(whole)
    values["sources"][0]["weight"] = 2.0
    try:
        path.write_bytes(resealed(json.dumps(values).encode(), path.name))
        for command in (EVAL, SAMPLE):
            told = plait(*command)
            assert told.code == 2 and "they are not those that this run was trained on" in told.err
    finally:
        path.write_bytes(whole)


def trains_long(mutant: bytes) -> bool:
    """Whether it is a plan of some thousand steps more, which are taken: nothing about it is wrong."""
    values: Any = json.loads(mutant)
    steps = values.get("steps") if isinstance(values, dict) else None
    return isinstance(steps, int) and 100 < steps < 10**6


@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES // 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_values_with_a_new_hash(subject: str, cases: int, finished: Place, plait: Callable[..., Outcome]) -> None:
    one, draw = SUBJECTS[subject], random.Random(f"resealed {subject}")
    [path] = finished.folder.glob(one.pattern)
    whole = path.read_bytes()
    try:
        for case in range(round(cases * one.many)):
            try:
                mutant = resealed(json_mutant(draw, whole), path.name)
            except (ValueError, RecursionError):  # no JSON any more: test_fuzz_files.py has those
                continue
            if trains_long(mutant):
                continue
            path.write_bytes(mutant)
            assert_sound(plait(*one.command), f"case {case}: {mutant[-3000:]!r}", GOES_ON_S)
    finally:
        path.write_bytes(whole)
