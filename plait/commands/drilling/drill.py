"""`plait drill`: trains a recipe twice, once left alone and once with failures on purpose, and compares the two."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from plait.commands.drilling.faults import Fault, drawn_faults, require_possible
from plait.commands.drilling.injector import Injector
from plait.commands.monitoring.account import account_of, ledger_of
from plait.commands.planning.run_folder import RunFolder, run_folder
from plait.commands.train import train
from plait.errors import Interrupted, PlaitError
from plait.recipe.load import RecipeSource, load_recipe
from plait.report.incidents import read_incidents
from plait.report.metrics import median_speed, read_metrics
from plait.screen.screen import Screen
from plait.units import counted, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

FinalEqual = Literal["bits", "samples", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """What came of a drill; times are seconds from the fault on."""

    seed: int
    faults: Sequence[Mapping[str, Any]]
    """For each: kind, rank, step, found_after_s, back_after_s, steps_lost; null where it did not come to that. Nobody
    looks for one that is only slow."""
    samples_lost: int
    samples_repeated: int
    samples_skipped: int
    """Left out on purpose, after bad numbers."""
    final_equal: FinalEqual
    useful_share: float

    @property
    def ok(self) -> bool:
        """Whether every fault was survived, and nothing was lost by it."""
        back = all(fault["back_after_s"] is not None for fault in self.faults)
        return back and self.final_equal == "bits" and self.samples_lost == self.samples_repeated == 0

    def to_json(self) -> str:
        """One JSON object."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"ok": self.ok, **values})


def drill(
    recipe: RecipeSource,
    overrides: Sequence[str],
    *,
    faults: Sequence[Fault],
    drawn: int,
    seed: int | None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> DrillReport:
    """Train NAME-left-alone, then NAME-drill with these faults and so many that a seed draws; compare their ends.

    Raises PlaitError for faults that the run cannot have, and where a drill of that name has begun already.
    """
    name = load_recipe(recipe, overrides).run.name
    alone, drilled = (run_folder(f"{name}-{end}", working) for end in ("left-alone", "drill"))
    if drilled.has_begun:
        raise PlaitError(f'"{drilled.path}" is there from an earlier drill; move it away, or delete it')
    _train(recipe, overrides, alone, screen, working)
    plan = alone.saved_plan()
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    step_s = median_speed(read_metrics(alone.metrics)[0]).step_s_median
    more = drawn_faults(drawn, ranks=plan.world_size, steps=plan.steps, step_s=step_s, seed=seed)
    planned = sorted([*faults, *more], key=lambda fault: fault.step)
    require_possible(planned, ranks=plan.world_size, steps=plan.steps)
    screen.print(f"drill    {', '.join(map(str, planned))} (seed {seed})")
    with Injector(planned, drilled.path) as injector:
        _train(recipe, overrides, drilled, screen, working)
    return _report(alone, drilled, planned, injector, seed)


def drill_lines(report: DrillReport) -> list[str]:
    """A report in a few lines for people."""
    lines = []
    for fault in report.faults:
        what = f"{fault['kind']} {fault['rank']}@{fault['step']}"
        if fault["back_after_s"] is None:
            lines.append(f"fault    {what}: not carried out, or not survived")
            continue
        back = format_duration(fault["back_after_s"])
        if fault["found_after_s"] is None:
            lines.append(f"fault    {what}: waited for, the next step after {back}, nothing lost")
            continue
        found = format_duration(fault["found_after_s"])
        lost = counted(fault["steps_lost"], "step")
        lines.append(f"fault    {what}: found after {found}, back after {back}, {lost} lost")
    end = {"bits": "the same bits", "samples": "the same samples, other bits", "no": "another end"}[report.final_equal]
    skipped = f", {report.samples_skipped} skipped on purpose" if report.samples_skipped else ""
    lines.append(f"samples  {report.samples_lost} lost, {report.samples_repeated} counted twice{skipped}")
    lines.append(f"end      {end} as the run that was left alone; {report.useful_share:.1%} of the time was useful")
    return lines


def _train(
    recipe: RecipeSource, overrides: Sequence[str], folder: RunFolder, screen: Screen, working: WorkingFolder
) -> None:
    named = [*overrides, f"run.name={folder.path.name}"]
    end = train(recipe, named, screen=screen, working=working)
    if end.stopped_by != "finished":
        raise Interrupted(end.stopped_by)


def _report(
    alone: RunFolder, drilled: RunFolder, planned: Sequence[Fault], injector: Injector, seed: int
) -> DrillReport:
    incidents, back = read_incidents(drilled.incidents)
    restarts, faults = iter(zip(incidents, back, strict=False)), []
    for number, fault in enumerate(planned):
        told: dict[str, Any] = {"kind": fault.kind, "rank": fault.rank, "step": fault.step}
        told |= dict.fromkeys(("found_after_s", "back_after_s", "steps_lost"))
        done_at, past_at = injector.done_at.get(number), injector.past_at.get(number)
        followed = next(restarts, None) if fault.restarts else None
        if done_at is not None and followed is not None:
            found_s = max(0.0, datetime.fromisoformat(followed[0].at).timestamp() - done_at)
            told["found_after_s"] = round(found_s, 3)
            told["back_after_s"] = round(found_s + followed[1].back_after_s, 3)
            told["steps_lost"] = followed[0].steps_lost
        elif done_at is not None and past_at is not None:
            told |= {"back_after_s": round(past_at - done_at, 3), "steps_lost": 0}
        faults.append(told)
    account = account_of(drilled)
    return DrillReport(
        seed=seed,
        faults=faults,
        samples_lost=account.samples_lost,
        samples_repeated=account.samples_repeated,
        samples_skipped=account.samples_skipped,
        final_equal=_compared(alone, drilled),
        useful_share=account.useful_share,
    )


def _compared(alone: RunFolder, drilled: RunFolder) -> FinalEqual:
    last = f"step-{alone.saved_plan().steps}"
    one, other = (_manifest(folder.checkpoints / last) for folder in (alone, drilled))
    if one is not None and one == other:
        return "bits"
    return "samples" if ledger_of(alone) == ledger_of(drilled) else "no"


def _manifest(checkpoint: Path) -> bytes | None:
    path = checkpoint / "manifest.json"
    return path.read_bytes() if path.exists() else None
