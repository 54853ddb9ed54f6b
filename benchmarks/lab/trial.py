"""One case from empty namespaces to its line of results: forecast first, then turns in rounds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.lab.alone import side_by_side
from benchmarks.lab.checks import cable_rates, processor_rates
from benchmarks.lab.cut import LONGEST, QUIET, WARM_UP, Cutting, Turn
from benchmarks.lab.forecast import Forecast, Priced, cluster_of_case, forecast, recipe_text
from benchmarks.lab.grid import Case, Grid
from benchmarks.lab.hosts import Lab
from benchmarks.lab.orders import Party, Runner, baseline_party
from benchmarks.lab.probed import probed_cluster
from benchmarks.lab.turns import take_turn
from plait.machines.cluster import Cluster, cluster_json

NEAR = 1.10
"""Times the fastest: who is slower after a turn is not asked again, but for the planner's own two."""

Say = Callable[[str], None]
Take = Callable[[str, float], Turn]
"""A turn of a contender by its name, when the fastest so far takes so many seconds a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where trials happen: who runs plait, and in which folder."""

    runner: Runner
    work: Path
    grid: Grid


def run_case(case: Case, site: Site, say: Say) -> dict[str, Any]:
    """Build the hosts, check them, forecast, and let all contenders take turns; answers the case's values."""
    site.work.mkdir(parents=True, exist_ok=True)
    for left in ("runs", "recipes"):  # of a lab that was killed
        shutil.rmtree(site.work / left, ignore_errors=True)
        (site.work / left).mkdir()
    with Lab(case.cores, case.rate, work=site.work, files=site.runner.files) as lab:
        carried = cable_rates(lab, case.rate)
        say(f"  cables   asked {case.rate if case.rate == 'unshaped' else _mbit([case.rate])}, carry {_mbit(carried)}")
        flops = processor_rates(lab)
        say(f"  hosts    {', '.join(f'{rate / 1e9:.1f}' for rate in flops)} GFLOP/s")
        begun_s = time.monotonic()
        cluster = probed_cluster(lab, site.runner, case, site.work) or cluster_of_case(
            case, flops, min(carried) if case.rate == "unshaped" else case.rate
        )
        pace = mean(lab.product_s(begun_s, time.monotonic()))
        told = best_of(forecast(case, cluster, site.work / "recipes"), site.grid.layouts)
        say(f"  forecast fastest: {told.fastest}; choice: {told.chosen}")
        trial = _Trial(case, site, lab, told, say)
        names = [*(one.name for one in told.priced), *case.baselines]
        turns = in_rounds(names, trial.take, rounds=site.grid.rounds, always=(told.fastest, told.chosen))
    return _values(case, cluster, carried, flops, told, turns, trial.alone) | {"probed_product_s": pace}


def best_of(told: Forecast, most: int | None) -> Forecast:
    """A forecast's best layouts, at most so many, the planner's own two among them."""
    if most is None:
        return told
    own = {told.fastest, told.chosen}
    others = [one.name for one in told.priced if one.name not in own and one.step_s is not None]
    kept = own | set(others[: max(0, most - len(own))])
    return replace(told, priced=tuple(one for one in told.priced if one.name in kept))


def in_rounds(names: Sequence[str], take: Take, *, rounds: int, always: Sequence[str]) -> dict[str, list[Turn]]:
    """Turns of every contender in the first round, of the near ones in the others, each round begun by another."""
    turns: dict[str, list[Turn]] = {}
    fastest_s = float("inf")
    for name in names:
        turns[name] = [take(name, fastest_s)]
        fastest_s = fastest_of(turns)
    for number in range(1, rounds):
        near = [name for name in names if _again(turns[name], fastest_s, name in always)]
        first = number % max(1, len(near))
        for name in [*near[first:], *near[:first]]:
            turns[name].append(take(name, float("inf")))
    return turns


def fastest_of(turns: Mapping[str, Sequence[Turn]]) -> float:
    """Seconds of a step of the fastest contender so far."""
    known = [turn.step_s for taken in turns.values() for turn in taken if turn.ended in ("finished", "cut")]
    return min(known, default=float("inf"))


def _again(taken: Sequence[Turn], fastest_s: float, always: bool) -> bool:
    return taken[-1].ended == "finished" and (always or taken[-1].step_s <= NEAR * fastest_s)


class _Trial:
    """Gives each turn a run of its own, and takes its files away afterwards."""

    def __init__(self, case: Case, site: Site, lab: Lab, told: Forecast, say: Say) -> None:
        self._case, self._site, self._lab, self._told, self._say = case, site, lab, told, say
        self._count = 0
        self.alone: list[list[Turn]] = []
        """Right after each turn of the choice: what hosts of a machine that changes its pace are held against."""

    def take(self, name: str, fastest_s: float) -> Turn:
        self._count += 1
        run = f"{self._case.key}-{self._count}"
        folder = self._site.work / "runs" / run
        cutting = Cutting(steps=self._site.grid.steps, fastest_s=fastest_s)
        logs = self._site.work / "logs" / run
        party = self._party(name, run, folder)
        turn = take_turn(self._lab, party, cutting, logs)
        shutil.rmtree(folder, ignore_errors=True)
        if turn.ended != "failed":
            shutil.rmtree(logs, ignore_errors=True)
        said = self._told.of(name).step_s if name not in self._case.baselines else None
        self._say(f"  {name:60} {_turn_text(turn)}{f' (forecast {said:.3g})' if said else ''}")
        # Unequal hosts have no common floor, and of more than two nobody asks.
        if name == self._told.chosen and len(self._case.cores) == 2 and len(set(self._case.cores)) == 1:
            self.alone.append(self._alone())
        return turn

    def _alone(self) -> list[Turn]:
        """Every host with an equal part of the batch and no messages: what nobody's step can be shorter than, where
        hosts are alike."""
        site, case = self._site, self._case
        part = replace(case, batch_sequences=-(-case.batch_sequences // case.hosts))
        turns = side_by_side(self._lab, site.runner, [part] * case.hosts, site.work, steps=site.grid.steps)
        for host, turn in enumerate(turns):
            self._say(f"  {f'host {host} alone with its part':60} {_turn_text(turn)}")
        return turns

    def _party(self, name: str, run: str, folder: Path) -> Party:
        case, steps = self._case, WARM_UP + LONGEST * self._site.grid.steps
        if name in case.baselines:
            folder.mkdir(parents=True)
            work = {
                "shape": self._told.shape.to_dict(), "sequence": case.sequence,
                "batch_sequences": case.batch_sequences, "steps": steps,
            }  # fmt: skip
            return baseline_party(name, work, folder, self._lab.hosts)
        recipe = self._site.work / "recipes" / f"{run}.toml"
        recipe.write_text(recipe_text(case, self._told.of(name).layout, name=run, steps=steps))
        return self._site.runner.party(recipe, folder, self._lab.hosts)


def _values(
    case: Case, cluster: Cluster, carried: Sequence[float], flops: Sequence[float], told: Forecast,
    turns: Mapping[str, Sequence[Turn]], alone: Sequence[Sequence[Turn]],
) -> dict[str, Any]:  # fmt: skip
    return {
        "key": case.key,
        "case": asdict(case) | {"name": case.name, "group": case.group},
        "carried_bits_per_s": list(carried),
        "flops": list(flops),
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "cluster": cluster_json(cluster),
        "fastest": told.fastest,
        "chosen": told.chosen,
        "refused": dict(told.refused),
        "crossings": [list(crossing) for crossing in told.crossings],
        "layouts": {one.name: _with_turns(one, turns[one.name]) for one in told.priced},
        "alone": [[turn.to_values() for turn in beside] for beside in alone],
        "baselines": {name: [turn.to_values() for turn in turns[name]] for name in case.baselines},
    }


def _with_turns(one: Priced, turns: Sequence[Turn]) -> dict[str, Any]:
    return asdict(one) | {"turns": [turn.to_values() for turn in turns]}


def _turn_text(turn: Turn) -> str:
    if turn.ended == "failed":
        return f"failed: {turn.sentence}"
    spread = f" ({min(turn.seconds):.3g} … {max(turn.seconds):.3g})" if len(turn.seconds) > 1 else ""
    noise = f", others {turn.others:.0%}" if turn.others > QUIET else ""
    words = {"finished": "", "cut": ", one step", "longer": ", cut off"}[turn.ended]
    return f"{'> ' if turn.ended == 'longer' else ''}{turn.step_s:.3f} s{spread}{words}{noise}"


def _mbit(rates: Sequence[float]) -> str:
    return " ".join(f"{rate / 1e6:.0f}" for rate in rates) + " Mbit/s"
