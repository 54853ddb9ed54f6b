"""Failures that can be rehearsed, as values: what a person requests, what a seed draws, and what a run cannot have."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Literal

from plait.errors import PlaitError
from plait.units import format_duration, parse_amount

FaultKind = Literal["kill", "hang", "nan", "slow", "fill-disk", "corrupt", "lose-host"]
_PLACE, _STEP = re.compile(r"([0-9]{1,4})@([0-9]{1,9})"), re.compile(r"@?([0-9]{1,9})")
NO_FAULT = (
    "a drill needs a failure; name one with --kill, --hang, --nan or --slow RANK@STEP, --fill-disk or "
    "--corrupt STEP, --lose-host HOST@STEP, or have some drawn by --random 3 or --random 30min"
)
MOST_DRAWN = 1000
WITHOUT_RANK: Sequence[FaultKind] = ("fill-disk", "corrupt")
WITHOUT_RESTART: Sequence[FaultKind] = ("slow", "fill-disk")
DRAWN_KINDS: Sequence[FaultKind] = ("kill", "kill", "kill", "hang", "slow", "nan", "fill-disk", "corrupt")
"""What is drawn, kills more often than the others: three of eight."""
WRITING = "writing a checkpoint"
"""No phase of a rank's own: its thread writes while it goes on with its steps."""
STEP_PHASES = (
    "the fetch of data",
    "forward and backward",
    "the sum of gradients",
    "the update of weights",
    "the agreement after the step",
)
SAVE_PHASES = ("saving", WRITING)
LATEST_SHARE = 0.9
"""Faults are drawn from the first nine tenths of a run: after them it must have steps left to come back to."""
EVERY_S = 20.0
"""How often faults come that are drawn by time, on average."""
_RESTARTS_BETWEEN_SAVES, _DRAWS = 2, 1000
"""The third failure without a new checkpoint between them ends a run, as it should."""


FAULT_FOLDER, FULL_DISK, FAILED_SAVE = ".drill", "disk-full", "save-failed"
"""The folder in a disturbed run's, by which the drill and the run's ranks hear of each other: bad numbers that are to
come, and those that came; that the disk is full, and that a save has failed."""


def nan_file(folder: Path, rank: int, step: int, number: int) -> Path:
    """Asks `rank` for a weight that is NaN in this step, as the fault of this number."""
    return folder / f"nan-{rank}@{step}.{number:03d}"


def nan_files(folder: Path, rank: int, step: int) -> Sequence[Path]:
    """What is still to come on this rank in this step."""
    return sorted(folder.glob(f"nan-{rank}@{step}.*"))


def carried_out(file: Path) -> Path:
    """The new name of a file once its rank has done what it asks for."""
    return file.with_name(f"done-{file.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure, which comes in the step after `step`, or `at_s` seconds after the run's first step.

    `rank` is the worker, of "lose-host" the host; "fill-disk" and "corrupt" have none. It comes in that `phase` of the
    worker's step ("" as soon as the step begins), after that `fraction` of the time that the phase takes. `dice`
    decides what is left open: which byte of a checkpoint, for instance.
    """

    kind: FaultKind
    rank: int = 0
    step: int = 0
    at_s: float | None = None
    phase: str = ""
    fraction: float = 0.0
    dice: int = 0

    @property
    def restarts(self) -> bool:
        """Whether the run has to start its workers again for it; others it waits for, or trains on."""
        return self.kind not in WITHOUT_RESTART

    def __str__(self) -> str:
        who = "" if self.kind in WITHOUT_RANK else f"{self.rank}"
        when = f"@{self.step}" if self.at_s is None else f" after {format_duration(self.at_s)}"
        return f"{self.kind} {who}{when}{self.phase and f' in {self.phase}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrilledPlan:
    """The part of a run's plan that a drill needs: `save_every` is the number of steps between its saves, 0 if it saves
    at its end alone; `hosts` is 1 if it trains on this machine alone. `kinds` may be drawn."""

    ranks: int
    steps: int
    save_every: int
    hosts: int = 1
    kinds: Sequence[FaultKind] = DRAWN_KINDS
    steps_done: int = 0
    """By the run before the drill begins."""


def parse_fault(kind: FaultKind, text: str) -> Fault:
    """A fault from "RANK@STEP", or from "STEP" if it has no rank; raises PlaitError for anything else."""
    if kind in WITHOUT_RANK:
        if (found := _STEP.fullmatch(text)) is None:
            raise PlaitError(f'--{kind} {text} is not a step; write it as "20"')
        return Fault(kind=kind, step=int(found[1]))
    if (found := _PLACE.fullmatch(text)) is None:
        what = "host" if kind == "lose-host" else "rank"
        raise PlaitError(f'--{kind} {text} is not a {what} and a step; write it as "1@20"')
    return Fault(kind=kind, rank=int(found[1]), step=int(found[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """The faults that a person named, and how many more the seed draws, or for how many seconds some come."""

    seed: int
    named: Sequence[Fault] = ()
    drawn: int = 0
    seconds: float = 0.0

    @property
    def lost_hosts(self) -> int:
        """Number of hosts besides this one that the named faults need."""
        return max((fault.rank for fault in self.named if fault.kind == "lose-host"), default=0)

    def faults(self, plan: DrilledPlan, step_s: float) -> list[Fault]:
        """The faults in their order, for a run whose steps take `step_s`; of a run that is training already the drawn
        ones come by time, from now on. Raises PlaitError for those that the run cannot have."""
        if self.seconds or (self.drawn and plan.steps_done):
            more = faults_by_time(plan, self.seed, seconds=self.seconds or inf, count=self.drawn or inf)
        else:
            more = drawn_faults(self.drawn, plan, self.seed)
        faults = [*with_moments(self.named, plan, self.seed), *more]
        require_possible(faults, plan)
        return sorted(faults, key=lambda fault: fault.step if fault.at_s is None else fault.at_s / step_s)


def parse_random(text: str) -> tuple[int, float]:
    """The number of faults to draw, or the seconds for which they come: of "5" or "30min". Raises PlaitError for
    anything else."""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_DRAWN)) and int(text) <= MOST_DRAWN:
        return int(text), 0.0
    try:
        amount = parse_amount(text)
    except PlaitError:
        amount = None
    if amount is None or amount.unit != "seconds":
        raise PlaitError(f"--random {text}: write how many failures, such as 5, or for how long, such as 30min")
    return 0, amount.value


def with_moments(faults: Sequence[Fault], plan: DrilledPlan, seed: int) -> list[Fault]:
    """Faults that a person named, each with the moment within its step that the seed draws: the same for the same
    faults in the same order."""
    dice = random.Random(f"moments {seed}")
    return [_with_moment(fault, plan, dice) for fault in faults]


def drawn_faults(count: int, plan: DrilledPlan, seed: int) -> list[Fault]:
    """This many faults, whose kinds, ranks, steps and phases the seed draws, in the order of their steps.

    Of those after which workers start again at most two come between two saves, where there are saves enough.
    """
    dice = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(_DRAWS):
        faults = sorted((_drawn(plan, dice) for _ in range(count)), key=lambda fault: fault.step)
        if plan.save_every and most_between_saves(faults, plan.save_every) <= _RESTARTS_BETWEEN_SAVES:
            break
    return faults


def most_between_saves(faults: Sequence[Fault], save_every: int) -> int:
    """The most restarts between two saves that go well; after each full disk one fails."""
    failed: list[int] = []
    for fault in faults:
        if fault.kind == "fill-disk":
            failed.append(max(fault.step // save_every + 1, failed[-1] + 1 if failed else 0))
    saves = [fault.step // save_every for fault in faults if fault.restarts]
    return max(Counter(done - sum(one <= done for one in failed) for done in saves).values(), default=0)


def faults_by_time(plan: DrilledPlan, seed: int, *, seconds: float = inf, count: float = inf) -> list[Fault]:
    """Faults of mixed kinds, one about every 20 seconds, the first after 10 at the earliest: this many, or for a run of
    this many seconds."""
    dice, at_s, faults = random.Random(f"times {seed}"), 0.0, list[Fault]()
    while len(faults) < count:
        at_s += dice.uniform(0.5, 1.5) * EVERY_S
        if at_s >= LATEST_SHARE * seconds:
            break
        faults.append(replace(_drawn(plan, dice), step=0, at_s=round(at_s, 3)))
    return faults


def require_possible(faults: Sequence[Fault], plan: DrilledPlan) -> None:
    """Raise PlaitError for what the run does not have, and where there is nothing to rehearse."""
    if not faults:
        raise PlaitError(NO_FAULT)
    for fault in faults:
        if fault.kind == "lose-host":
            if not 1 <= fault.rank < plan.hosts:
                raise PlaitError(
                    f"{fault}: host 0 is this command itself; choose another host, 1 for the first that joins"
                )
        elif fault.rank >= plan.ranks:
            raise PlaitError(f"{fault}: the run has ranks 0 to {plan.ranks - 1}; choose one of them")
        if fault.at_s is None and not plan.steps_done < fault.step < plan.steps:
            first = plan.steps_done + 1
            raise PlaitError(f"{fault}: the run has {plan.steps} steps; choose one from {first} to {plan.steps - 1}")
        if fault.kind in WITHOUT_RANK:
            _require_saves(fault, plan)


def _require_saves(fault: Fault, plan: DrilledPlan) -> None:
    if not plan.save_every:
        raise PlaitError(f"{fault}: the run saves at its end alone; name a shorter checkpoint.every, such as 10 steps")
    latest = plan.steps - 2 * plan.save_every
    if fault.at_s is None and fault.step > latest:
        raise PlaitError(
            f"{fault}: it needs two saves after it, which come about every {plan.save_every} steps, and the run has "
            f"{plan.steps}; choose a step up to {max(latest, 0)}, or a shorter checkpoint.every"
        )


def _drawn(plan: DrilledPlan, dice: random.Random) -> Fault:
    last = max(1, int(plan.steps * LATEST_SHARE))
    latest_save = last - 3 * plan.save_every
    saves = plan.save_every > 0 and latest_save >= 1
    kinds: list[FaultKind] = [kind for kind in plan.kinds if saves or kind not in WITHOUT_RANK]
    kind = dice.choice(kinds)
    step = dice.randint(1, latest_save if kind in WITHOUT_RANK else last)
    rank = 0 if kind in WITHOUT_RANK else dice.randrange(plan.ranks)
    return _with_moment(Fault(kind=kind, rank=rank, step=step), plan, dice)


def _with_moment(fault: Fault, plan: DrilledPlan, dice: random.Random) -> Fault:
    saves = plan.save_every > 0 and fault.step + plan.save_every <= LATEST_SHARE * plan.steps
    phase, fraction = dice.choice((*STEP_PHASES, *(SAVE_PHASES if saves else ()))), dice.random()
    if fault.kind in ("nan", *WITHOUT_RESTART):
        phase, fraction = "", 0.0
    return replace(fault, phase=phase, fraction=round(fraction, 3), dice=dice.randrange(1 << 31))
