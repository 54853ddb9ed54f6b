"""One contender of the strands' benchmark, alive between its turns: a process a rank that waits for the next line."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ProcessorSeconds
from benchmarks.processes import ROOT

ANSWER_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The step of the slowest rank, the share of the machine that other programs took meanwhile, and the processor
    seconds of a step, of all ranks together: those depend little on what others do."""

    step_s: float
    others: float
    processor_s: float


class Party:
    """The ranks of a contender; `end` must be called. Raises RuntimeError, with its last words, where one fails."""

    def __init__(self, name: str, command: str, *, ranks: int, work: str, folder: Path) -> None:
        self.name = name
        self._logs = [folder / f"{name} {rank}.log".replace("/", "-") for rank in range(ranks)]
        command += f" --rendezvous {folder / name.replace('/', '-').replace(' ', '-')}"
        self._ranks: list[subprocess.Popen[str]] = []
        for rank, log in enumerate(self._logs):
            with log.open("w") as errors:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *shlex.split(command), "--work", work],
                        cwd=ROOT,
                        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )

    def first_losses(self) -> list[float]:
        """Of the first steps: the mean over the ranks that know one. Blocks until the contender is ready."""
        by_step = zip(*(answer["losses"] for answer in self._answers()), strict=True)
        known = [[loss for loss in losses if loss is not None] for losses in by_step]
        return [sum(losses) / len(losses) for losses in known]

    def turn(self, *, untimed: int, timed: int) -> Turn:
        """So many steps on all ranks, the last ones timed."""
        before = ProcessorSeconds.now()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{untimed} {timed}\n")
            rank.stdin.flush()
        answers = self._answers()
        after = ProcessorSeconds.now()
        busy_s = after.busy_s - before.busy_s
        others_s = max(0.0, busy_s - sum(answer["cpu_s"] for answer in answers))
        whole_s = busy_s + after.idle_s - before.idle_s
        return Turn(
            step_s=max(answer["step_s"] for answer in answers),
            others=others_s / whole_s if whole_s else 0.0,
            processor_s=sum(answer["cpu_s"] for answer in answers) / (untimed + timed),
        )

    def end(self) -> None:
        """Let the ranks go."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()

    def _answers(self) -> list[dict[str, Any]]:
        """One answer of each rank, whichever comes first: where one has died, the others would wait for ever."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + ANSWER_LIMIT_S
        streams = {rank.stdout: number for number, rank in enumerate(self._ranks) if rank.stdout is not None}
        while len(found) < len(self._ranks):
            waiting = [stream for stream, number in streams.items() if number not in found]
            ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(next(number for number in streams.values() if number not in found), "did not answer")
            for stream in ready:
                line = stream.readline()
                if not line:
                    self._fail(streams[stream], "ended")
                if line.startswith("{"):
                    found[streams[stream]] = json.loads(line)
        return [found[number] for number in range(len(self._ranks))]

    def _fail(self, rank: int, what: str) -> None:
        last_words = self._logs[rank].read_text()[-3000:]
        raise RuntimeError(f"{self.name}: rank {rank} {what}:\n{last_words}")
