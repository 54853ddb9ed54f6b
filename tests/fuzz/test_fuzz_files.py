"""Whatever is wrong in a file that plait reads, the command says so in one sentence; what it takes is undamaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from plait.recipe.schema import RunConfig
from tests.end_to_end.command import Place
from tests.fuzz.conftest import Outcome
from tests.fuzz.mutate import ODD_VALUES, byte_mutant, json_mutant, toml_mutant
from tests.matrix import CASES

Mutate = Callable[[random.Random, bytes], bytes]
HANG_S, GOES_ON_S = 5.0, 30.0
"""For a command that refuses a mutant, and for one that accepts it and trains, with real workers."""
ON_PAPER = ("plan", "tiny.toml", "--top", "0", "--cluster")
TRAIN = ("train", "tiny.toml", "run.name=fuzzed", "train.budget=4 steps", "checkpoint.keep=1", "checkpoint.every=never")
SAMPLE = ("sample", "fuzzed", "--tokens", "2", "--temperature", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A file to damage and the command that reads it."""

    pattern: str
    """Of the file, below the folder of the run."""
    command: tuple[str, ...]
    mutate: Mutate
    """Keeps the file's syntax."""
    seen: bool
    """Whether the file has a hash, so that all damage is seen."""
    many: float = 1.0
    """Cases relative to the other subjects: fewer where a command takes longer (`eval` starts workers)."""


SUBJECTS = {
    "recipe": Subject(pattern="tiny.toml", command=(*ON_PAPER, "1x4090"), mutate=toml_mutant, seen=False),
    "cluster": Subject(
        pattern="cluster.json",
        command=(*ON_PAPER, "cluster.json", "layout.replicate=auto"),
        mutate=json_mutant,
        seen=False,
    ),
    "plan": Subject(pattern="runs/fuzzed/plan.json", command=TRAIN, mutate=json_mutant, seen=True),
    "receipt": Subject(pattern="runs/fuzzed/receipt.json", command=TRAIN, mutate=json_mutant, seen=True),
    "begun recipe": Subject(pattern="runs/fuzzed/recipe.toml", command=TRAIN, mutate=toml_mutant, seen=False),
    "manifest": Subject(
        pattern="runs/fuzzed/checkpoints/*/manifest.json", command=SAMPLE, mutate=json_mutant, seen=True, many=0.5
    ),
    "weights": Subject(
        pattern="runs/fuzzed/checkpoints/*/*.safetensors", command=SAMPLE, mutate=byte_mutant, seen=True, many=0.25
    ),
    "index": Subject(
        pattern=".plait/data/*/index.json", command=("eval", "fuzzed"), mutate=json_mutant, seen=True, many=0.1
    ),
    "shards": Subject(
        pattern=".plait/data/*/*.bin", command=("eval", "fuzzed"), mutate=byte_mutant, seen=True, many=0.1
    ),
    "starts": Subject(
        pattern=".plait/data/*/*.npy", command=("eval", "fuzzed"), mutate=byte_mutant, seen=True, many=0.1
    ),
}
FEW = 10
"""Cases for each subject in `make test`."""


@pytest.mark.parametrize("subject", SUBJECTS)
def test_some_damage(subject: str, finished: Place, plait: Callable[..., Outcome]) -> None:
    fuzz(SUBJECTS[subject], finished.folder, plait, cases=FEW, seed=f"some {subject}")


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_much_damage(subject: str, finished: Place, plait: Callable[..., Outcome]) -> None:
    fuzz(SUBJECTS[subject], finished.folder, plait, cases=CASES, seed=f"much {subject}")


@pytest.mark.parametrize("cases", [FEW * 4, pytest.param(CASES * 3, marks=pytest.mark.slow)])
def test_overrides(cases: int, finished: Place, plait: Callable[..., Outcome]) -> None:
    draw = random.Random("overrides")
    for case in range(cases):
        text = override(draw)
        told = plait(*ON_PAPER, "1x4090", text)
        assert_sound(told, f"case {case}: {text[:200]!r}")


@pytest.mark.slow
def test_real_processes(finished: Place) -> None:
    """The same through the command's own process, where a crash of the interpreter would show."""
    draw = random.Random("processes")
    for case in range(CASES // 5):
        subject = SUBJECTS[draw.choice(list(SUBJECTS))]
        with damaged(subject, finished.folder, draw) as what:
            ended = finished.run(*subject.command)
        assert_sound(Outcome(code=ended.code, out=ended.out, err=ended.err, seconds=0.0), f"case {case}: {what}")


def fuzz(subject: Subject, folder: Path, plait: Callable[..., Outcome], *, cases: int, seed: str) -> None:
    """Damage the file in `cases` ways; each time the command must refuse it, or do what it does with the whole file."""
    draw, sound = random.Random(seed), plait(*subject.command)
    assert sound.code == 0, sound
    for case in range(round(cases * subject.many)):
        with damaged(subject, folder, draw) as what:
            told = plait(*subject.command)
        assert_sound(told, f"case {case}: {what}", HANG_S if told.code else GOES_ON_S)
        if subject.seen and told.code == 0:
            assert told.out == sound.out, f"case {case}: {what}"


def assert_sound(told: Outcome, what: str, within_s: float = HANG_S) -> None:
    """Exit code 0, or one sentence with exit code 1 or 2, and no waiting."""
    assert told.seconds < within_s, f"{what}: {told.seconds:.1f} s"
    assert "Traceback" not in told.out + told.err, f"{what}: {told.err[-2000:]}"
    if told.code == 0:
        return
    assert told.code == 2, f"{what}: {told}"
    assert told.err.startswith("plait: ") and told.err.count("\n") == 1, f"{what}: {told.err}"
    assert told.err.rstrip("\n").isprintable(), f"{what}: {told.err!r}"


@contextmanager
def damaged(subject: Subject, folder: Path, draw: random.Random) -> Iterator[str]:
    """One of the subject's files with a mutant in its place, inside the block; yields what was done."""
    path = draw.choice(sorted(folder.glob(subject.pattern)))
    whole, keeps_syntax = path.read_bytes(), draw.random() < 0.5
    mutant = (subject.mutate if keeps_syntax else byte_mutant)(draw, whole)
    status = path.stat()
    path.write_bytes(mutant)
    try:
        yield f"{path.name} {'values' if keeps_syntax else 'bytes'} {_difference(whole, mutant)}"
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _difference(whole: bytes, mutant: bytes) -> str:
    first = next(
        (at for at, (a, b) in enumerate(zip(whole, mutant, strict=False)) if a != b), min(len(whole), len(mutant))
    )
    return f"at byte {first}: {mutant[max(0, first - 40) : first + 80]!r}"


def override(draw: random.Random) -> str:
    """An override of a key that is there, most of the time, with an odd value."""
    section = draw.choice(list(RunConfig.model_fields))
    keys = list(getattr(RunConfig.model_fields[section].annotation, "model_fields", {"x": None}))
    key = draw.choice(
        (f"{section}.{draw.choice(keys)}",) * 8 + (section, f"{section}.", "..", f"{section}.{keys[0]}.x")
    )
    value = draw.choice((*ODD_VALUES, "[" * 3000, draw.randbytes(6).decode("latin-1").replace("\x00", "")))
    return f"{key}={value}".replace("\x00", "")
