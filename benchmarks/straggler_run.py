"""A run on the lab's hosts for `benchmarks.straggler`: prepared, started, followed, and disturbed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lab.hosts import PERIOD_US, ROOT, Lab
from benchmarks.lab.leftovers import groups_of
from benchmarks.lab.wiring import limiting
from benchmarks.straggler_rank import ASK, TIMES
from plait.commands.preparing.corpus import corpus_facts, data_request
from plait.data.preparation.prepare import prepare_corpus
from plait.data.shards import open_corpus
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.machine import detect_cpu_machine
from plait.planner.derive.resources import Resources
from plait.planner.plan_file import write_plan
from plait.planner.resolve.resolve import draft, settle
from plait.recipe.load import load_recipe, recipe_text
from plait.report.straggler import RankTimes, Watch
from plait.report.straggler_words import FindingKind, StragglerFinding

RATE = 1e9
SLOW_DEVICE, SLOW_LINK, SLOW_DATA = 0.3, 0.1, 1.5
"""Of the processor time; of the cable's rate; usual steps that reading takes longer."""
SLOW_PERIOD_US = 4 * PERIOD_US
"""The kernel takes no quota below a millisecond."""
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.005
BATCH_SEQUENCES = 8
RECIPE = """
[data]
files = "{text}"
holdout = 0
[model]
layers = 4
width = 128
heads = 4
vocabulary = 2048
[train]
sequence = 128
batch_tokens = {tokens}
budget = "1M steps"
precision = "float32"
[layout]
replicate = {hosts}
"""


class Run:
    """A run under way on a lab's hosts, followed step by step through a watch as `plait train` has it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        count = len(lab.hosts)
        self._sequences = [BATCH_SEQUENCES // count] * count
        self._watch = Watch([chr(ord("a") + host.index) for host in lab.hosts], shares="fixed")
        self._started: list[subprocess.Popen[bytes]] = []
        self._lines = self._read()
        self.step = 0
        self.told: list[tuple[int, StragglerFinding]] = []
        self.step_s: list[float] = []
        self.compute_s: list[list[float]] = [[] for _ in lab.hosts]

    def start(self) -> None:
        for host in self._lab.hosts:
            command = [sys.executable, "-m", "benchmarks.straggler_rank", str(self._folder), str(host.index)]
            environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            log = self._folder / f"host{host.index}.log"
            self._started.append(self._lab.start(host, command, log=log, environment=environment))

    def go(self, steps: int) -> list[tuple[int, StragglerFinding]]:
        """Follow so many steps; answers what was said meanwhile."""
        before = len(self.told)
        for _ in range(steps):
            line = next(self._lines)
            self.step = line["step"]
            self.step_s.append(line["step_s"])
            times = [
                RankTimes(rank=rank, compute_s=compute, wait_s=wait, data_s=data, link_s=link)
                for rank, (compute, wait, data, link) in enumerate(line["ranks"])
            ]
            for own, one in zip(self.compute_s, times, strict=True):
                own.append(one.compute_s)
            finding = self._watch.observe(self.step, times, self._sequences)
            self._ask()
            if finding is not None:
                self.told.append((self.step, finding))
        return self.told[before:]

    def _ask(self) -> None:
        """Have messages timed, or no longer."""
        if self._watch.asks_for_links:
            (self._folder / ASK).touch()
        else:
            (self._folder / ASK).unlink(missing_ok=True)

    def catch_up(self) -> int:
        """The step under way: all lines that are there have been followed."""
        written = len((self._folder / TIMES).read_text().split("\n")) - 1
        self.go(max(0, written - self.step))
        return self.step + 1

    def _read(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + PATIENCE_S
        while not (self._folder / TIMES).exists():
            self._check(end)
        with (self._folder / TIMES).open() as file:
            text = ""
            while True:
                text += file.readline()
                if text.endswith("\n"):
                    yield json.loads(text)
                    text, end = "", time.monotonic() + PATIENCE_S
                else:
                    self._check(end)

    def _check(self, end: float) -> None:
        if any(process.poll() is not None for process in self._started) or time.monotonic() > end:
            raise PlaitError(f"the run has stopped; see what its ranks said in {self._folder}")
        time.sleep(LOOK_EVERY_S)


def disturb(lab: Lab, kind: FindingKind, rank: int, delay: Path, usual_s: float) -> Callable[[], None]:
    """Make a host's processor, cable or data slow; answers what undoes it."""
    host = lab.hosts[rank]
    if kind == "device":
        _grant(lab, rank, host.cores * SLOW_DEVICE, period_us=SLOW_PERIOD_US)
        return lambda: _grant(lab, rank, host.cores, period_us=PERIOD_US)
    if kind == "data":
        delay.write_text(f"{SLOW_DATA * usual_s:.4f}")
        return delay.unlink
    _limit(lab, rank, RATE * SLOW_LINK)
    return lambda: _limit(lab, rank, RATE)


def _grant(lab: Lab, rank: int, cores: float, *, period_us: int) -> None:
    group = groups_of(lab.hosts[rank].namespace)[0]
    (group / "cpu.cfs_period_us").write_text(str(period_us))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * period_us)))


def _limit(lab: Lab, rank: int, rate: float) -> None:
    for command in limiting(lab.name, [lab.hosts[rank]], rate):
        subprocess.run(command, check=True)


def prepare_run(hosts: int, folder: Path) -> None:
    """Put recipe and plan into a folder, where nothing is left of an earlier run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recipe = folder / "recipe.toml"
    text, tokens = ROOT / "recipes" / "shakespeare.txt", BATCH_SEQUENCES * 128
    recipe.write_text(RECIPE.format(text=text, hosts=hosts, tokens=tokens))
    config = load_recipe(recipe)
    corpus = open_corpus(prepare_corpus(data_request(config), ROOT / ".plait", lambda *_: None))
    resources = Resources(machine=replace(detect_cpu_machine(), cores=hosts), peak_flops=None)
    outline = draft(config, corpus_facts(corpus), resources, recipe_hash="")
    plan = replace(
        settle(config, outline, outline.layouts),
        placement=replace(
            settle(config, outline, outline.layouts).placement, layout=Layout(replicate=hosts), threads=1
        ),
    )
    recipe.write_text(recipe_text(config))
    write_plan(plan, folder / "plan.json")
