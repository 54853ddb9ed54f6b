"""Runs one contender once: a process a rank on this machine, each answering in a JSON file of its own."""

from __future__ import annotations

import json
import os
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

from benchmarks.machine import ProcessorSeconds

ROOT = Path(__file__).parent.parent
QUIET = 0.03
RETRIES = 2
TURN_LIMIT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A row of the table: the name it has there, and a command template in which {python} is this interpreter."""

    name: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How many ranks a contender runs with, and how many threads each rank may compute with."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''} × {self.threads} thread{'s'[: self.threads - 1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contender's answer for one run: mean losses over the ranks, and times of its slowest rank."""

    losses: tuple[float, ...]
    step_s: float
    cpu_s: float
    others: float
    """Share of the machine's processor time that other programs took meanwhile."""

    @classmethod
    def from_ranks(cls, answers: list[dict[str, list[float]]], others: float) -> Turn:
        by_step = zip(*(answer["losses"] for answer in answers), strict=True)
        return cls(
            losses=tuple(sum(losses) / len(losses) for losses in by_step),
            step_s=max(median(answer["step_s"]) for answer in answers),
            cpu_s=max(median(answer["cpu_s"]) for answer in answers),
            others=others,
        )


def run_undisturbed(contender: Contender, mode: Mode, *, workdir: Path, warmup: int, steps: int) -> Turn:
    """Run a contender; again, twice at most, if other programs took a noticeable share; the least disturbed counts."""
    turns: list[Turn] = []
    while not turns or (len(turns) <= RETRIES and turns[-1].others > QUIET):
        turns.append(run_contender(contender, mode, workdir=workdir, warmup=warmup, steps=steps))
    return min(turns, key=lambda turn: turn.others)


def run_contender(contender: Contender, mode: Mode, *, workdir: Path, warmup: int, steps: int) -> Turn:
    """Run all ranks to their end; raises RuntimeError with the tail of a failing rank's output.

    Every rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS.
    """
    flags = f"--workdir {workdir} --warmup {warmup} --steps {steps} --threads {mode.threads}"
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"rank-{rank}.json" for rank in range(mode.ranks)]
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(mode.ranks)]
        commands = [f"{contender.command} {flags} --out {out}".replace("{python}", sys.executable) for out in outs]
        variables = [_rank_variables(rank, mode, port) for rank in range(mode.ranks)]
        before, children_s = ProcessorSeconds.now(), _children_s()
        _run_together(contender.name, commands, variables, logs)
        others = _others_share(before, ProcessorSeconds.now(), _children_s() - children_s)
        return Turn.from_ranks([json.loads(out.read_text()) for out in outs], others)


def _others_share(before: ProcessorSeconds, after: ProcessorSeconds, children_s: float) -> float:
    busy_s = after.busy_s - before.busy_s
    whole_s = busy_s + after.idle_s - before.idle_s
    return max(0.0, busy_s - children_s) / whole_s if whole_s else 0.0


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run_together(name: str, commands: list[str], variables: list[dict[str, str]], logs: list[Path]) -> None:
    running: list[subprocess.Popen[bytes]] = []
    files: list[IO[bytes]] = []
    try:
        for command, extra, log in zip(commands, variables, logs, strict=True):
            files.append(log.open("wb"))
            environment = {**os.environ, **extra}
            running.append(
                subprocess.Popen(
                    shlex.split(command), cwd=ROOT, env=environment, stdout=files[-1], stderr=subprocess.STDOUT
                )
            )
        failed = _first_failure(running)
        if failed is not None:
            raise RuntimeError(
                f"{name}: rank {failed} failed or ran over {TURN_LIMIT_S} s:\n{logs[failed].read_text()[-3000:]}"
            )
    finally:
        for process in running:
            process.kill()
            process.wait()
        for file in files:
            file.close()


def _first_failure(running: list[subprocess.Popen[bytes]]) -> int | None:
    deadline = time.monotonic() + TURN_LIMIT_S
    while True:
        codes = [process.poll() for process in running]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.1)


def _rank_variables(rank: int, mode: Mode, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(mode.ranks),
        "LOCAL_WORLD_SIZE": str(mode.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(mode.threads),
        "PYTHONPATH": str(ROOT),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
