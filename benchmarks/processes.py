"""Runs contenders on this machine, a process a rank: all are started once, wait, and take turns of a few steps."""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

ROOT = Path(__file__).parent.parent
TURN_LIMIT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A row of the table: the name it has there, and a command template in which {python} is this interpreter."""

    name: str
    command: str
    threads_divisor: int = 1
    """By what its threads are fewer than the mode's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How many ranks a contender runs with, and how many threads each rank may compute with."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''} × {self.threads} thread{'s'[: self.threads - 1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contender's answer for one turn: mean losses over the ranks, and times of its slowest rank."""

    losses: tuple[float, ...]
    step_s: float
    cpu_s: float

    @classmethod
    def from_ranks(cls, answers: list[dict[str, list[float]]]) -> Turn:
        """The first step of a turn comes after another contender's and finds cold caches: it does not count."""
        by_step = zip(*(answer["losses"] for answer in answers), strict=True)
        return cls(
            losses=tuple(sum(losses) / len(losses) for losses in by_step),
            step_s=max(median(answer["step_s"][1:] or answer["step_s"]) for answer in answers),
            cpu_s=sum(median(answer["cpu_s"][1:] or answer["cpu_s"]) for answer in answers),
        )


class Party:
    """The waiting ranks of one contender."""

    def __init__(self, contender: Contender, ranks: Sequence[_Rank]) -> None:
        self.contender = contender
        self._ranks = ranks

    def turn(self, steps: int) -> Turn:
        """Take so many steps; raises RuntimeError with the tail of a failing rank's output."""
        for rank in self._ranks:
            rank.turns.write(f"{steps}\n")
            rank.turns.flush()
        return Turn.from_ranks([self._answer(number, rank) for number, rank in enumerate(self._ranks)])

    def _answer(self, number: int, rank: _Rank) -> dict[str, list[float]]:
        deadline = time.monotonic() + TURN_LIMIT_S
        while time.monotonic() < deadline:
            if select.select([rank.answers], [], [], 1.0)[0]:
                if line := rank.answers.readline():
                    return json.loads(line)
                break
            if any(one.process.poll() is not None for one in self._ranks):
                break
        told = "\n".join(one.log.read_text()[-3000:] for one in self._ranks)
        raise RuntimeError(f"{self.contender.name}: rank {number} failed or took over {TURN_LIMIT_S} s:\n{told}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    process: subprocess.Popen[bytes]
    turns: IO[str]
    answers: IO[str]
    log: Path


@contextmanager
def waiting(contenders: Sequence[Contender], mode: Mode, *, workdir: Path, steps: int) -> Iterator[list[Party]]:
    """Start all ranks of all contenders, of which each may take up to `steps` steps; end them at the block's end.

    Every rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        parties: list[Party] = []
        for number, contender in enumerate(contenders):
            place = Path(folder) / str(number)
            place.mkdir()
            own = Mode(ranks=mode.ranks, threads=max(1, mode.threads // contender.threads_divisor))
            flags = f"--workdir {workdir} --steps {steps} --threads {own.threads}"
            command = f"{contender.command} {flags}".replace("{python}", sys.executable)
            port = _free_port()
            ranks = [
                stack.enter_context(_rank(command, _rank_variables(rank, own, port), place / f"rank-{rank}.log"))
                for rank in range(mode.ranks)
            ]
            parties.append(Party(contender, ranks))
        yield parties


@contextmanager
def _rank(command: str, variables: dict[str, str], log: Path) -> Iterator[_Rank]:
    turns_out, turns_in = os.pipe()
    answers_out, answers_in = os.pipe()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*shlex.split(command), "--turns", str(turns_out), "--answers", str(answers_in)],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=(turns_out, answers_in),
        )
    os.close(turns_out)
    os.close(answers_in)
    try:
        with os.fdopen(turns_in, "w") as turns, os.fdopen(answers_out) as answers:
            yield _Rank(process=process, turns=turns, answers=answers, log=log)
    finally:
        process.kill()
        process.wait()


def _rank_variables(rank: int, mode: Mode, port: int) -> dict[str, str]:
    path = os.pathsep.join(one for one in (str(ROOT), os.environ.get("PYTHONPATH", "")) if one)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(mode.ranks),
        "LOCAL_WORLD_SIZE": str(mode.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(mode.threads),
        "PYTHONPATH": path,
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
