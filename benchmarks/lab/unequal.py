"""`python -m benchmarks.lab.unequal --json OUT [--only TEXT]`: unequal hosts against the sum of what each does alone.

One unit of speed is one share of a core in all cases of a table: a host of speed 0.4 gets 0.4 of it. The measure is
tokens a second of all hosts together over the sum of what each of them reaches by itself with its part, without
messages, while the others do the same, right before and right after, at the pace that its processor has in either
(pace.py); equal shares cannot pass the slowest speed times the number of hosts.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.lab.alone import side_by_side
from benchmarks.lab.cut import LONGEST, WARM_UP, Cutting, Turn
from benchmarks.lab.drawing import bars
from benchmarks.lab.forecast import cluster_of_case, recipe_text
from benchmarks.lab.grid import Case
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.ideals import best_order
from benchmarks.lab.journal import append_line, read_lines
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner, Party, Runner, baseline_party
from benchmarks.lab.paper_request import paper_request
from benchmarks.lab.turns import take_turn
from benchmarks.lab.wiring import Rate
from benchmarks.machine import describe
from plait.errors import RunFailed
from plait.hosts.handshake import new_secret
from plait.planner.heterogeneous.batch_shares import shares_by_speed
from plait.planner.plan_file import read_plan
from plait.planner.problem.stage_partition import head_cost_in_layers
from plait.planner.resolve.request import Request
from plait.recipe.load import load_recipe
from plait.report.shares_file import read_shares

WORK = Path(__file__).parents[2] / ".plait" / "unequal"
SEQUENCE = 256
STEPS, BESIDE_STEPS = 6, 2
"""Of what is measured, and of what stands beside it."""
BALANCE_EVERY, SETTLED = 7, 22
"""Steps between looks at plait's shares or stages, and those after which they have followed what the hosts really do: a
probe lasts seconds, in which a processor of this machine may be a third slower or faster than it is for long. Where
they changed last before that, or never, all steps since then count."""
NARROW = {"layers": 6, "width": 192, "heads": 6, "vocabulary": 1024}
DEEP = {"layers": 22, "width": 128, "heads": 4, "vocabulary": 1024}
TWO, FOUR = (1.0, 0.4), (0.5, 0.5, 0.25, 0.125)
SEQUENCES = {len(TWO): 64, len(FOUR): 128}
"""Of a step, by hosts, where the batch is what is split."""
PIPED_SEQUENCES, MICROS_A_HOST = 256, 16
"""Of a pipeline's step, and its micro-batches for each stage: so filling and emptying it costs two and four alike."""
Section = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Hosts, cables, a model, and the strand that holds them together."""

    name: str
    cores: tuple[float, ...]
    rate: Rate
    batch_sequences: int
    layout: Section
    shape: Section = field(default_factory=lambda: NARROW)
    baselines: tuple[str, ...] = ()

    def case(self, sequences: int) -> Case:
        return Case(
            cores=self.cores, rate=self.rate, model="", shape=self.shape, batch_sequences=sequences,
            sequence=SEQUENCE, files="own", baselines=self.baselines,
        )  # fmt: skip


def trials() -> list[Trial]:
    """The table of the guide to unequal machines."""
    strands: dict[str, dict[str, Any]] = {
        "replicate": {},
        "shard optimizer": {"shard_what": "optimizer"},
        "shard parameters": {"shard_what": "parameters"},
    }
    found = []
    for cores in (TWO, FOUR):
        speeds = " : ".join(f"{share / cores[0]:g}" for share in cores)
        for rate in ("unshaped", 1e9):
            place = f"{speeds}, {'unshaped' if rate == 'unshaped' else '1 Gbit/s'}"
            trial = Trial(name=place, cores=cores, rate=rate, batch_sequences=SEQUENCES[len(cores)], layout={})
            for strand, more in strands.items():
                beside = strand == "replicate" and rate == "unshaped"
                layout = {strand.split()[0]: len(cores), **more}
                baselines = ("ddp", "hf-trainer") if beside else ()
                found.append(replace(trial, name=f"{place}, {strand}", layout=layout, baselines=baselines))
            layout = {"pipeline": len(cores), "micro_sequences": PIPED_SEQUENCES // (MICROS_A_HOST * len(cores))}
            deep = replace(trial, name=f"{place}, pipeline", layout=layout, shape=DEEP)
            found.append(replace(deep, batch_sequences=PIPED_SEQUENCES))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.unequal")
    parser.add_argument("--json", type=Path, required=True, help="one line a trial; what stands there is kept")
    parser.add_argument("--only", default="", help="only trials with this in their name")
    flags = parser.parse_args()
    require_root()
    sweep()
    done = {(line["name"], line["batch_sequences"]) for line in read_lines(flags.json, "name")}
    for trial in trials():
        if flags.only in trial.name and (trial.name, trial.batch_sequences) not in done:
            print(f"\n{trial.name}", flush=True)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            append_line(flags.json, {**_run(trial), "date": now, "machine": describe()})
    lines = read_lines(flags.json, "name")
    print(f"\n{table(lines)}")
    rows = {line["name"]: reached(line) for line in lines}
    flags.json.with_suffix(".svg").write_text(bars("Share of the sum of the hosts' own speeds", rows, goal=0.93))


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Shares of the sum of the speeds that each host reaches alone, as Markdown."""
    rows = ["| hosts | by speed | equal | others | by speed, of another ideal |", "| --- | --- | --- | --- | --- |"]
    for line in lines:
        found = reached(line)
        others = ", ".join(f"{name} {share:.1%}" for name, share in found.items() if name not in ("auto", "equal"))
        cells = (f"{found[name]:.1%}" if name in found else "" for name in ("auto", "equal"))
        beside = ", ".join(f"{share:.1%} of {what}" for what, share in line.get("of", {}).items())
        rows.append(f"| {line['name']} | {' | '.join(cells)} | {others} | {beside} |")
    return "\n".join(rows)


def _run(trial: Trial) -> dict[str, Any]:
    runner = JoinedRunner(new_secret().text)
    WORK.mkdir(parents=True, exist_ok=True)
    for left in ("runs", "recipes", "logs"):
        shutil.rmtree(WORK / left, ignore_errors=True)
        (WORK / left).mkdir()
    with Lab(trial.cores, trial.rate, work=WORK, files=runner.files) as lab:
        parts = shares_by_speed(trial.batch_sequences, trial.cores)
        contenders = _contenders(lab, runner, trial)
        before = _alone(lab, runner, trial, parts)
        turns = {"auto": _take(lab, contenders["auto"], "auto", STEPS, SETTLED)}
        alone = [before, _alone(lab, runner, trial, parts)]  # on both sides of what is held against it
        turns |= {name: _take(lab, party, name, BESIDE_STEPS) for name, party in contenders.items() if name != "auto"}
    if not turns["auto"].seconds:
        raise RunFailed(f"plait's own run did not end: {turns['auto'].sentence}")
    speeds = speeds_at(turns["auto"], alone, parts)
    beside = _beside(trial, runner, speeds, mean(turns["auto"].product_s))
    own_tokens_per_s = _tokens_per_s(turns["auto"], trial.batch_sequences)
    for what, tokens_per_s in beside.items():
        print(f"  auto         {own_tokens_per_s / tokens_per_s:.1%} of {what}", flush=True)
    line = {
        "name": trial.name,
        "cores": list(trial.cores),
        "rate": trial.rate,
        "batch_sequences": trial.batch_sequences,
        "alone": [[turn.to_values() for turn in taken] for taken in alone],
        "turns": {name: turn.to_values() for name, turn in turns.items()},
        "of": {what: own_tokens_per_s / tokens_per_s for what, tokens_per_s in beside.items()},
    }
    for name, share in reached(line).items():
        print(f"  {name:12} {share:.1%} of the sum of the speeds", flush=True)
    return line


def reached(line: Mapping[str, Any]) -> dict[str, float]:
    """What each contender of a trial reached of the sum of the speeds, where it ran."""
    parts = shares_by_speed(line["batch_sequences"], line["cores"])
    alone = [[Turn.from_values(turn) for turn in taken] for taken in line["alone"]]
    turns = {name: Turn.from_values(turn) for name, turn in line["turns"].items()}
    return {
        name: _tokens_per_s(turn, line["batch_sequences"]) / sum(speeds_at(turn, alone, parts))
        for name, turn in turns.items()
        if turn.seconds
    }


def _alone(lab: Lab, runner: Runner, trial: Trial, parts: Sequence[int]) -> list[Turn]:
    """Every host with its part and no messages, all at once."""
    turns = side_by_side(lab, runner, [trial.case(count) for count in parts], WORK, steps=STEPS)
    if not all(turn.seconds for turn in turns):
        raise RunFailed(f"a host alone did not compute: {turns[0].sentence}")
    told = ", ".join(f"{turn.step_s:.3g} s for {count}" for turn, count in zip(turns, parts, strict=True))
    print(f"  alone        {told}", flush=True)
    return turns


def _beside(trial: Trial, runner: Runner, speeds: Sequence[float], pace_s: float) -> dict[str, float]:
    """What else the strand is held against, in tokens a second at that pace: a pipeline against its best split,
    parameters that travel all the time against equal hosts which are as fast together."""
    if "pipeline" in trial.layout:
        batch = trial.batch_sequences
        best, split, order = best_order(
            speeds,
            layers=trial.shape["layers"],
            head_layers=_head_layers(trial),
            micros=batch // trial.layout["micro_sequences"],
            batch_tokens=batch * SEQUENCE,
        )
        layers = ", ".join(f"{held} on host {host}" for held, host in zip(split, order, strict=True))
        return {f"the best whole-number split, layers: {layers}": best}
    if trial.layout.get("shard_what") != "parameters":
        return {}
    shutil.rmtree(WORK / "runs")
    (WORK / "runs").mkdir()
    equal = replace(trial, cores=(sum(trial.cores) / len(trial.cores),) * len(trial.cores), baselines=())
    with Lab(equal.cores, equal.rate, work=WORK, files=runner.files) as lab:
        turn = _take(lab, _contenders(lab, runner, equal)["auto"], "equal hosts", STEPS)
    if not turn.seconds:
        return {}
    return {"equal hosts of the same total": _tokens_per_s(turn, equal.batch_sequences) * mean(turn.product_s) / pace_s}


def _head_layers(trial: Trial) -> float:
    """What head and loss cost in layers: as measured for the run's own plan, for the ideal knows what plait knows."""
    told = read_plan(WORK / "runs" / "auto" / "plan.json").forecast
    measured = told.head_cost_in_layers if told else None
    return head_cost_in_layers(_request(trial).workload) if measured is None else measured


def _contenders(lab: Lab, runner: Runner, trial: Trial) -> dict[str, Party]:
    """plait's own shares or stages, equal ones, and what others offer."""
    equal: Section = {"shares": [trial.batch_sequences // len(trial.cores)] * len(trial.cores)}
    if "pipeline" in trial.layout:
        layers, hosts = trial.shape["layers"], len(trial.cores)
        equal = {"stage_layers": [layers // hosts + (at < layers % hosts) for at in range(hosts)]}
    found: dict[str, Party] = {}
    for name, more in (("auto", {}), ("equal", equal)):
        recipe = WORK / "recipes" / f"{name}.toml"
        text = recipe_text(
            trial.case(trial.batch_sequences), {**trial.layout, **more}, name=name, steps=SETTLED + LONGEST * STEPS
        )
        every = f"{BALANCE_EVERY} steps" if name == "auto" else "never"
        recipe.write_text(f'{text}\n[balance]\nevery = "{every}"\n')
        found[name] = runner.party(recipe, WORK / "runs" / name, lab.hosts)
    for kind in trial.baselines:
        folder = WORK / "runs" / kind
        folder.mkdir(parents=True)
        work = {
            "shape": _request(trial).job.shape.to_dict(), "sequence": SEQUENCE,
            "batch_sequences": trial.batch_sequences,
            "steps": WARM_UP + LONGEST * STEPS,
        }  # fmt: skip
        found[kind] = baseline_party(kind, work, folder, lab.hosts)
    return found


def _request(trial: Trial) -> Request:
    path = WORK / "recipes" / "shape.toml"
    path.write_text(recipe_text(trial.case(trial.batch_sequences), {}, name="shape", steps=1))
    cluster = cluster_of_case(trial.case(trial.batch_sequences), [1e11] * len(trial.cores), 1e9)
    return paper_request(load_recipe(path), cluster)


def _take(lab: Lab, party: Party, name: str, steps: int, warm_up: int = WARM_UP) -> Turn:
    cutting = Cutting(steps=steps, fastest_s=float("inf"), warm_up=warm_up)
    changes = WORK / "runs" / name / "shares.jsonl"
    turn = take_turn(lab, party, cutting, WORK / "logs" / name, lambda: warmed_up(changes))
    if not turn.seconds:
        print(f"  {name:12} failed: {turn.sentence}", flush=True)
    return turn


def warmed_up(changes: Path) -> int:
    """Steps of a run before those that count: the first, and all up to the one that obeyed the last early change."""
    return max([WARM_UP, *(line.step for line in read_shares(changes) if line.step <= SETTLED)])


def speeds_at(turn: Turn, alone: Sequence[Sequence[Turn]], parts: Sequence[int]) -> list[float]:
    """Tokens a second of each host by itself, at the pace that its processor had in a turn of all.

    By means over whole turns, of steps and of the pace: medians of a pace that jumps between two would not go together.
    """
    if not all(min(one.product_s, default=0.0) for one in (turn, *(host for taken in alone for host in taken))):
        raise RunFailed("the processors' pace was not seen during a turn; see benchmarks/lab/pace.py")
    return [
        mean(_tokens_per_s(taken[host], count) * taken[host].product_s[host] for taken in alone) / turn.product_s[host]
        for host, count in enumerate(parts)
    ]


def _tokens_per_s(turn: Turn, sequences: int) -> float:
    return sequences * SEQUENCE / mean(turn.seconds) if turn.seconds else 0.0


if __name__ == "__main__":
    main()
