"""Plants one bottleneck in a real run, asks plait what limits it, makes the change that it advises, and runs again.

    sudo .venv/bin/python -m benchmarks.planted_bottlenecks --seed 1 --cases 20 --json benchmarks/results/planted.json

Right is a case whose cause is named, and whose predicted gain, less 1, is within 30 % of the measured one. What is
planted, and how strongly, is drawn by the seed. Needs root, as benchmarks/lab does: the hosts of "slow cable" and "slow
host" are the lab's. A reader that sleeps stands for a slow disk, and one that sleeps as it opens the data for a slow
start; a file in the place of a container's limit stands for little memory. Gains of steps are ratios of medians over a
run's second half; of a cold start, of the time a step takes with its share of the start.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.lab.checks import until
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.leftovers import GROUPS, sweep
from benchmarks.lab.orders import JoinedRunner
from benchmarks.lab.turns import start_party
from benchmarks.machine import describe
from plait.hosts.handshake import new_secret
from plait.recipe.load import parse_override
from plait.report.bottleneck import Remedy, RunBottleneck
from plait.report.metrics import read_metrics
from plait.report.rank_times_file import read_rank_times
from plait.run_files.bottleneck import bottleneck_of, measured_run
from plait.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
WORK = Path("/tmp/plait-planted")
TEXT = ROOT / "recipes" / "shakespeare.txt"
TEXT_CHARACTERS = 400_000
RUN_WITHIN_S = 420.0
PERIOD_US, LEAST_QUOTA_US = 100_000, 1_000
LARGEST_ERROR = 0.3
"""Of the predicted gain, less 1, against the measured one."""
LEAST_TRUE_GAIN = 1.5

Kind = Literal[
    "slow cable", "slow host", "starved data", "small micro-batch", "recomputation", "small memory", "cold start"
]
CAUSES: Mapping[Kind, str] = {
    "slow cable": "network",
    "slow host": "slow host",
    "starved data": "data",
    "small micro-batch": "micro-batch",
    "recomputation": "recomputation",
    "small memory": "memory",
    "cold start": "start-up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What is wrong with a run, as the lab makes it."""

    kind: Kind
    recipe: Mapping[str, Any]
    """Sections of the recipe, without the run's name."""
    bits_per_s: float = 0.0
    """Of the cables of two hosts; 0 for a run on this machine alone."""
    granted: float = 1.0
    """Share that the second host keeps of the processor time that it had in the first steps: on a machine that other
    programs use, too, a quota of the whole core would take nothing from it."""
    reading_s: float = 0.0
    """Seconds that reading a micro-batch takes in addition."""
    starting_s: float = 0.0
    """Seconds that a worker's start takes in addition."""
    memory_bytes: int = 0
    """What the machine says it has; 0: all that there is."""

    @property
    def hosts(self) -> int:
        return 2 if self.bits_per_s else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: what it says limits it, and how fast it was."""

    bottleneck: RunBottleneck | None
    step_s: float
    whole_step_s: float
    """Seconds of the run, from the start of its workers, for each step."""
    steps: int
    times: Mapping[str, Any]
    """Each rank's seconds of a step, as plait reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A case: the plant, the answer, and what making the change did."""

    kind: Kind
    strength: float
    named: str
    sentence: str
    change: str
    predicted: float
    measured: float
    is_named: bool
    is_close: bool
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    times: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def drawn(seed: int, count: int, only: Sequence[Kind] = ()) -> list[tuple[Plant, float]]:
    """Plants with their strengths; each kind about equally often."""
    draw = random.Random(seed)
    kinds: list[Kind] = list(only or CAUSES)
    order: list[Kind] = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(order)
    return [_plant(kind, draw) for kind in order]


def _plant(kind: Kind, draw: random.Random) -> tuple[Plant, float]:
    width = draw.choice((128, 160, 192))
    layers = draw.choice((3, 4))
    match kind:
        case "slow cable":
            megabits = draw.uniform(12, 40)
            return Plant(kind=kind, recipe=_recipe(layers, width, 128, 4, 30), bits_per_s=megabits * 1e6), megabits
        case "slow host":
            share = draw.uniform(0.2, 0.4)
            recipe = _recipe(layers, width, 128, 8, 36, shares=[4, 4])
            return Plant(kind=kind, recipe=recipe, bits_per_s=2e9, granted=share), share
        case "starved data":
            reading_s = draw.uniform(0.8, 2.0)
            return Plant(kind=kind, recipe=_recipe(layers, 128, 128, 4, 16), reading_s=reading_s), reading_s
        case "small micro-batch":
            sequence = draw.choice((8, 16))
            recipe = _recipe(layers, width, sequence, 32, 30, micro_sequences=1)
            return Plant(kind=kind, recipe=recipe), sequence
        case "recomputation":
            recipe = _recipe(layers, width, 512, 3, 24, recompute="full")
            return Plant(kind=kind, recipe=recipe), width
        case "small memory":
            layers = draw.randint(44, 52)  # need 1.2 to 1.4 GB unless layers are recomputed
            return Plant(kind=kind, recipe=_recipe(layers, 192, 1024, 1, 12), memory_bytes=900 << 20), layers
        case "cold start":
            starting_s = draw.uniform(11, 25)  # plait names no start of less than ten seconds
            return Plant(kind=kind, recipe=_recipe(layers, 128, 128, 4, 20), starting_s=starting_s), starting_s


def _recipe(layers: int, width: int, sequence: int, batch: int, steps: int, **layout: object) -> dict[str, Any]:
    shape = {"layers": layers, "width": width, "heads": width // 32, "vocabulary": 512}
    train = {
        "sequence": sequence, "batch_tokens": batch * sequence, "budget": f"{steps} steps", "precision": "float32",
        "matmul_backend": "default",
    }  # fmt: skip
    return {
        "data": {"files": str(WORK / "text.txt"), "holdout": 0.02},
        "model": shape,
        "train": train,
        "layout": layout,
        "balance": {"every": "never"},
        "checkpoint": {"every": "never"},
        "recover": {"state_every": "never"},
        "report": {"evaluate": "never", "every": "1 steps"},
        "run": {"workers": 1, "threads": 1},
    }


def relieved(plant: Plant, remedy: Remedy) -> Plant:
    """The plant after the change that was advised."""
    if remedy.setting:
        values = parse_override(remedy.setting)
        [(section, keys)] = values.items()
        recipe = {**plant.recipe, section: {**plant.recipe[section], **keys}}
        return replace(plant, recipe=recipe)
    match plant.kind:
        case "slow cable":
            return replace(plant, bits_per_s=plant.bits_per_s * remedy.factor)
        case "slow host" if remedy.change.startswith("leaving"):
            return replace(plant, recipe={**plant.recipe, "layout": {}}, granted=1.0, bits_per_s=0.0)
        case "slow host":
            return replace(plant, granted=1.0)
        case "starved data":
            return replace(plant, reading_s=plant.reading_s / remedy.factor)
        case _:
            return replace(plant, memory_bytes=0)


def judged(plant: Plant, strength: float, before: Outcome, after: Outcome | None) -> Verdict:
    """Whether the cause was named and its gain was right."""
    found = before.bottleneck
    remedy = found.remedies[0] if found and found.remedies else None
    of = "whole_step_s" if found and found.cause == "start-up" else "step_s"
    measured = getattr(before, of) / getattr(after, of) if after else 0.0
    predicted = remedy.gain if remedy else 1.0
    return Verdict(
        kind=plant.kind,
        strength=strength,
        named=found.cause if found else "",
        sentence=found.sentence if found else "",
        change=remedy.change if remedy else "",
        predicted=predicted,
        measured=measured,
        is_named=found is not None and found.cause == CAUSES[plant.kind],
        is_close=abs(predicted - measured) <= LARGEST_ERROR * abs(measured - 1),
        seconds={"before": getattr(before, of), "after": getattr(after, of) if after else 0.0},
        times={"before": before.times, "after": after.times if after else {}},
    )


def take(plant: Plant, name: str, lab: Lab | None) -> Outcome:
    """Train a plant's run to its end."""
    recipe, folder, logs = WORK / "recipes" / f"{name}.toml", WORK / "runs" / name, WORK / "logs" / name
    logs.mkdir(parents=True)
    recipe.write_text(_toml({**plant.recipe, "run": {**plant.recipe["run"], "name": name}}))
    if lab is None:
        _train_here(plant, recipe, logs)
    else:
        _train_on_hosts(plant, lab, recipe, folder, logs)
    return outcome(RunFolder(folder))


def outcome(folder: RunFolder) -> Outcome:
    """What the files of a finished run say."""
    steps, _ = read_metrics(folder.metrics)
    seconds = [step.step_s for step in steps]
    times = measured_run(folder.saved_plan(), steps, read_rank_times(folder.rank_times), folder.totals.start_s)
    return Outcome(
        bottleneck=bottleneck_of(folder),
        step_s=median(seconds[len(seconds) // 2 :]),
        whole_step_s=folder.totals.wall_s / len(seconds),
        steps=len(seconds),
        times=asdict(times) if times else {},
    )


def _train_here(plant: Plant, recipe: Path, logs: Path) -> None:
    command = [sys.executable, "-m", "plait", "train", str(recipe), "--no-check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if plant.reading_s or plant.starting_s:
        environment |= {
            "PYTHONPATH": f"{WORK / 'slow_reader'}:{ROOT}",
            "PLANTED_READING_S": str(plant.reading_s),
            "PLANTED_STARTING_S": str(plant.starting_s),
        }
    if plant.memory_bytes:
        (WORK / "limit").write_text(f"{plant.memory_bytes}\n")
        limit = "/sys/fs/cgroup/memory/memory.limit_in_bytes"
        command = ["unshare", "-m", "sh", "-c", f'mount --bind {WORK / "limit"} {limit} && exec "$@"', "sh", *command]
    with (logs / "host0.log").open("wb") as log:
        subprocess.run(
            command, cwd=WORK, env=environment, stdout=log, stderr=log, timeout=RUN_WITHIN_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip


def _train_on_hosts(plant: Plant, lab: Lab, recipe: Path, folder: Path, logs: Path) -> None:
    lab.limit(plant.bits_per_s)
    lab.grant(lab.hosts[1], lab.hosts[1].cores)
    party = JoinedRunner(new_secret().text).party(recipe, folder, lab.hosts)
    started = start_party(lab, party, logs)
    try:
        if plant.granted < 1:
            _slow_down(plant, lab, folder, started[0])
        until(lambda: (folder / "receipt.json").exists() or started[0].poll() is not None, "the run ends", RUN_WITHIN_S)
        until(lambda: started[0].poll() is not None, "its command ends", RUN_WITHIN_S)
    finally:
        lab.end_commands()


def _slow_down(plant: Plant, lab: Lab, folder: Path, lead: subprocess.Popen[bytes]) -> None:
    """Take processor time from the second host, once its first steps have shown how much it uses."""
    usage = GROUPS[1] / lab.hosts[1].namespace / "cpuacct.usage"

    def more_than(steps: int) -> bool:
        file = folder / "metrics.jsonl"
        return lead.poll() is not None or (file.exists() and len(file.read_text().splitlines()) > steps)

    until(lambda: more_than(1), "the first steps end", RUN_WITHIN_S)
    begun_s, used_ns = time.monotonic(), int(usage.read_text())
    until(lambda: more_than(6), "more steps end", RUN_WITHIN_S)
    share = (int(usage.read_text()) - used_ns) / 1e9 / (time.monotonic() - begun_s)
    quota = GROUPS[0] / lab.hosts[1].namespace  # of longer periods than the lab's, as the kernel grants 1 ms at least
    (quota / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (quota / "cpu.cfs_quota_us").write_text(str(max(LEAST_QUOTA_US, round(plant.granted * share * PERIOD_US))))


SLOW_READER = '''"""A slow disk: opening it sleeps for PLANTED_STARTING_S, reading a batch for PLANTED_READING_S."""
import importlib.machinery, os, sys, time

class _Slowed:
    def find_spec(self, name, path, target=None):
        if name != "plait.data.loader":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def slow(module):
            load(module)
            read, make = module.Loader._fetch, module.Loader.__init__

            def opened(self, *arguments, **named):
                time.sleep(float(os.environ["PLANTED_STARTING_S"]))
                make(self, *arguments, **named)

            def fetch(self, position, samples):
                time.sleep(float(os.environ["PLANTED_READING_S"]))
                return read(self, position, samples)

            module.Loader.__init__, module.Loader._fetch = opened, fetch

        spec.loader.exec_module = slow
        return spec

sys.meta_path.insert(0, _Slowed())
'''


def _toml(values: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(values)


def run_case(plant: Plant, strength: float, number: int) -> Verdict:
    """Both runs of a case, one right after the other."""
    if plant.hosts == 1:
        return _pair(plant, strength, number, None)
    with Lab((0.95, 0.95), plant.bits_per_s, work=WORK, files="own") as lab:
        return _pair(plant, strength, number, lab)


def _pair(plant: Plant, strength: float, number: int, lab: Lab | None) -> Verdict:
    planted = plant if plant.hosts == 1 else replace(plant, recipe=_with_layout(plant, {"replicate": 2}))
    before = take(planted, f"case{number}-planted", lab)
    found = before.bottleneck
    after = None
    if found and found.remedies:
        changed = relieved(planted, found.remedies[0])
        after = take(changed, f"case{number}-changed", lab if changed.hosts > 1 else None)
    return judged(plant, strength, before, after)


def _with_layout(plant: Plant, more: Mapping[str, object]) -> dict[str, Any]:
    return {**plant.recipe, "layout": {**plant.recipe["layout"], **more}}


def _line(number: int, one: Verdict) -> str:
    named = "named" if one.is_named else f"NAMED {one.named or 'nothing'}"
    gains = f"predicted {one.predicted:.2f}, measured {one.measured:.2f}"
    close = "close" if one.is_close else "FAR"
    return f"{number:2} {one.kind:18} {one.strength:6.3g}  {named:16} {close:5} {gains}: {one.change}"


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """How many cases were right; gains also of the cases whose true gain is large enough to tell."""
    strong = [one for one in verdicts if one.measured >= LEAST_TRUE_GAIN]
    return {
        "cases": len(verdicts),
        "named_right": sum(one.is_named for one in verdicts),
        "gain_close": sum(one.is_close for one in verdicts),
        "cases_with_true_gain_of_1.5": len(strong),
        "gain_close_of_these": sum(one.is_close for one in strong),
    }


def main() -> None:
    """Take the cases, write each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--only", action="append", default=[], choices=list(CAUSES))
    parser.add_argument("--json", type=Path, required=True)
    flags = parser.parse_args()
    require_root()
    sweep()
    shutil.rmtree(WORK, ignore_errors=True)
    for name in ("recipes", "runs", "logs", "slow_reader"):
        (WORK / name).mkdir(parents=True)
    (WORK / "text.txt").write_text(TEXT.read_text()[:TEXT_CHARACTERS])
    (WORK / "slow_reader" / "sitecustomize.py").write_text(SLOW_READER)
    verdicts: list[Verdict] = []
    failed: list[str] = []
    for number, (plant, strength) in enumerate(drawn(flags.seed, flags.cases, flags.only)):
        try:
            verdict = run_case(plant, strength, number)
        except Exception as error:  # one case that cannot be run must not take the others with it
            failed.append(f"{plant.kind} ({strength:.3g}): {error}")
            print(f"{number:2} {plant.kind:18} failed: {error}", flush=True)
            continue
        verdicts.append(verdict)
        print(_line(number, verdict), flush=True)
        load = os.getloadavg()[1]
        flags.json.write_text(
            json.dumps(
                {
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "machine": describe(), "seed": flags.seed, "load_of_five_minutes": load,
                    **summary(verdicts), "failed": failed, "verdicts": [asdict(one) for one in verdicts],
                },
                indent=1,
            ) + "\n"
        )  # fmt: skip
    print(json.dumps(summary(verdicts)))


if __name__ == "__main__":
    main()
