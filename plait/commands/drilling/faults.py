"""Failures that can be rehearsed, as values: a rank that is killed, stopped or given bad numbers at a step."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import PlaitError

FaultKind = Literal["kill", "hang", "nan", "slow"]
_PLACE = re.compile(r"([0-9]{1,4})@([0-9]{1,9})")
LATEST_SHARE = 0.9
"""Faults are drawn from the first nine tenths of a run: after them it must have steps left to come back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rank that is killed (SIGKILL) or made to hang (SIGSTOP) once this step is reported, `after_s` later, or one of
    whose weights becomes NaN right before this step."""

    kind: FaultKind
    rank: int
    step: int
    after_s: float = 0.0

    @property
    def restarts(self) -> bool:
        """Whether the run has to start its workers again for it; one that is only slow it waits for."""
        return self.kind != "slow"

    def __str__(self) -> str:
        return f"{self.kind} {self.rank}@{self.step}"


def parse_fault(kind: FaultKind, text: str) -> Fault:
    """A fault from "RANK@STEP"; raises PlaitError for anything else."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise PlaitError(f'--{kind} {text} is not a rank and a step; write it as "1@20"')
    return Fault(kind=kind, rank=int(found[1]), step=int(found[2]))


def drawn_faults(count: int, *, ranks: int, steps: int, step_s: float, seed: int) -> list[Fault]:
    """So many faults at steps, ranks and moments within a step that the seed draws, in the order of their steps."""
    dice = random.Random(seed)
    last = max(1, int(steps * LATEST_SHARE))
    return sorted(
        (
            Fault(
                kind=dice.choice(("kill", "kill", "hang")),
                rank=dice.randrange(ranks),
                step=dice.randint(1, last),
                after_s=dice.uniform(0.0, step_s),
            )
            for _ in range(count)
        ),
        key=lambda fault: fault.step,
    )


def require_possible(faults: Sequence[Fault], *, ranks: int, steps: int) -> None:
    """Raise PlaitError for a rank or a step that the run does not have, and where there is nothing to rehearse."""
    if not faults:
        raise PlaitError(
            "a drill needs a failure; name one with --kill, --hang, --nan or --slow RANK@STEP, or have some drawn "
            "by --random 3"
        )
    for fault in faults:
        if fault.rank >= ranks:
            raise PlaitError(f"{fault}: the run has ranks 0 to {ranks - 1}; choose one of them")
        if not 1 <= fault.step < steps:
            raise PlaitError(f"{fault}: the run has {steps} steps; choose one from 1 to {steps - 1}")
