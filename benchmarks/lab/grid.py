"""The cases of a grid file: machines, cables, model and batch. Lists in a [[case]] are multiplied out.

steps = 5                     # full steps of a turn, after the first one, which warms up
rounds = 2                    # turns of the layouts that are near the fastest
layouts = 4                   # how many are tried, those of the best forecast first; without this key all of them
[model.11M]
layers = 8
…                             # the keys of a recipe's [model]
[[case]]
cores = [1.0, 1.0]            # one host for each; a list of such lists is multiplied out like the others
rate = ["50M", "1G", "unshaped"]
model = "11M"
batch_sequences = [4, 16]
sequence = 256
files = "own"                 # each host its own folder; "shared" is what torchrun needs
baselines = ["ddp", "accelerate-fsdp", "hf-trainer"]
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lab.hosts import Files
from benchmarks.lab.wiring import Rate
from plait.errors import PlaitError

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
KEYS = {"cores", "rate", "model", "batch_sequences", "sequence", "files", "baselines"}
USUAL = {"files": "own", "baselines": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One situation in which all layouts are tried."""

    cores: tuple[float, ...]
    """Of each host."""
    rate: Rate
    model: str
    shape: Mapping[str, Any]
    """The recipe's [model]."""
    batch_sequences: int
    sequence: int
    files: Files
    baselines: tuple[str, ...]

    @property
    def hosts(self) -> int:
        return len(self.cores)

    @property
    def group(self) -> str:
        """All but the rate: what a picture over bandwidth holds together."""
        shares = "+".join(f"{share:g}" for share in dict.fromkeys(self.cores))
        return f"{self.hosts} hosts of {shares} cores, {self.model}, {self.batch_sequences} × {self.sequence} tokens"

    @property
    def name(self) -> str:
        return f"{self.group}, {rate_text(self.rate)}"

    @property
    def key(self) -> str:
        """The same for the same case only, so that a finished one is known again."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a run of the lab does."""

    cases: tuple[Case, ...]
    steps: int
    rounds: int
    layouts: int | None = None
    """The most layouts of a case that are tried, those of the best forecast; None for all."""


def read_grid(path: Path) -> Grid:
    """Read a grid file; raises PlaitError in one sentence."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlaitError(f"{path} is not a grid ({error}); see benchmarks/lab/grid.toml") from None
    if not values.get("case"):
        raise PlaitError(f"{path} holds no [[case]]; add one as in benchmarks/lab/grid.toml")
    steps, rounds = values.get("steps", 5), values.get("rounds", 2)
    if steps < 1 or rounds < 1:
        raise PlaitError(f"{path}: steps = {steps} and rounds = {rounds} must be 1 or more; raise them")
    layouts = values.get("layouts")
    if layouts is not None and layouts < 1:
        raise PlaitError(f"{path}: layouts = {layouts} must be 1 or more; raise it")
    cases = [case for one in values["case"] for case in _cases(one, values.get("model", {}), path)]
    return Grid(cases=tuple(cases), steps=steps, rounds=rounds, layouts=layouts)


def rate_of_text(text: str) -> Rate:
    """ "50M" in bits a second."""
    if text == "unshaped":
        return text
    read = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])", text)
    if not read or not float(read[1]):
        raise PlaitError(f'"{text}" is no rate; write bits a second such as "50M" or "1G", or "unshaped"')
    return float(read[1]) * UNITS[read[2]]


def rate_text(rate: Rate) -> str:
    """A rate for people."""
    if rate == "unshaped":
        return "unshaped"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def _cases(one: Mapping[str, Any], models: Mapping[str, Any], path: Path) -> Iterator[Case]:
    if unknown := set(one) - KEYS:
        raise PlaitError(f"{path}: a case has no key {sorted(unknown)[0]}; write some of {', '.join(sorted(KEYS))}")
    if missing := KEYS - set(USUAL) - set(one):
        raise PlaitError(f"{path}: a case lacks {sorted(missing)[0]}; add it")
    said = {**USUAL, **one}
    cores = said["cores"] if isinstance(said["cores"][0], list) else [said["cores"]]
    lists = [_listed(said[key]) for key in ("model", "batch_sequences", "sequence", "rate")]
    for shares, model, batch, sequence, rate in product(cores, *lists):
        if model not in models:
            raise PlaitError(f'{path}: model "{model}" is not described; add [model.{model}]')
        if len(shares) < 2 or min(shares) < 0.1:
            raise PlaitError(f"{path}: cores = {shares} must be two or more shares of 0.1 or more; change them")
        yield Case(
            cores=tuple(map(float, shares)),
            rate=rate_of_text(rate),
            model=model,
            shape=models[model],
            batch_sequences=batch,
            sequence=sequence,
            files=said["files"],
            baselines=tuple(said["baselines"]),
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
