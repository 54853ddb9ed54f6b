"""Real `plait` processes in a folder of their own, and what their runs left behind."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

MARK = "PLAIT_TEST_PLACE"
CALM = {
    "OMP_WAIT_POLICY": "PASSIVE"
}  # threads that wait leave the cores of a busy machine to others; no number changes
STEPS = 60
RECIPE = f"""
[data]
files = "play.txt"

[model]
layers = 2
width = 32
heads = 2
vocabulary = 300

[train]
sequence = 16
batch_tokens = 112
budget = "{STEPS} steps"
matmul_backend = "default"

[layout]
replicate = 2
micro_sequences = 2

[checkpoint]
every = "10 steps"

[report]
evaluate = "30 steps"
"""
"""Seven sequences a step: no number of workers but one shares them evenly, and the last micro-batch is short. The
library of products is named: runs of one recipe are compared to the bit, and "auto" measures it for each again."""

SUMMED = (
    "layout", "device", "precision", "compile", "shape", "sequence", "batch_sequences", "micro_sequences",
    "micro_limits", "shares", "balance_every_steps", "gradient_transfer", "stage_transfer", "deterministic",
    "matmul_precision", "matmul_backend", "host_backends", "steps", "optimizer", "documents", "corpus_hash",
)  # fmt: skip
"""What of a plan decides how sums are made, and with that each bit, beside the threads of each worker."""
COUNTED = ("step", "tokens", "loss", "grad_norm", "lr")
EVALUATED = ("step", "eval_loss", "eval_nats_per_byte")


def some_text(lines: int, seed: int = 1) -> str:
    """Lines of made-up words, the same for the same seed."""
    draw = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ren", "tor", "us", "wy", "ga", "éa", "den"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(60)]
    return "".join(" ".join(draw.choices(words, k=draw.randint(4, 9))).capitalize() + ".\n" for _ in range(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one sentence on stderr of a command that failed as a command should."""
        assert self.err.startswith("plait: ") and self.err.endswith("\n"), self.err
        assert self.err.count("\n") == 1 and "Traceback" not in self.out + self.err, self.err
        return self.err.removeprefix("plait: ").strip()


class Place:
    """A folder with a text and a recipe, where commands run; every process that they start carries the place's mark."""

    def __init__(self, folder: Path, recipe: str | None = RECIPE) -> None:
        """Without a recipe the folder has both already."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._mark = uuid.uuid4().hex
        if recipe is not None:
            (folder / "play.txt").write_text(some_text(400))
            (folder / "tiny.toml").write_text(recipe)

    def start(
        self,
        *arguments: str,
        module: Sequence[str] = ("-m", "plait"),
        terminal: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start `plait` in a session of its own, which `terminal`, an open one, controls if it is given."""
        return subprocess.Popen(
            [sys.executable, *module, *arguments],
            cwd=self.folder,
            env={**os.environ, **CALM, **environment, MARK: self._mark, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=more.pop("stdin", subprocess.DEVNULL) if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
            text=True,
            start_new_session=True,
            **({} if terminal is None else {"preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}),
            **more,
        )

    def run(self, *arguments: str, within_s: float = 150, **more: Any) -> Ended:
        """Run `plait` to its end."""
        return ended(self.start(*arguments, **more), within_s)

    def train(self, name: str, *overrides: str, **more: Any) -> Ended:
        return self.run("train", "tiny.toml", f"run.name={name}", *overrides, **more)

    def start_training(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        return self.start("train", "tiny.toml", f"run.name={name}", *overrides)

    def processes(self) -> list[int]:
        """Living processes of this place: those that were started with its mark, and all their forks."""
        wanted = f"{MARK}={self._mark}".encode()
        return [pid for pid in all_pids() if wanted in _environment(pid) and _is_alive(pid)]

    def rank_process(self, name: str, rank: int) -> int:
        """The process that writes the log of a rank."""
        found = self.rank_processes(name, rank)
        assert len(found) == 1, found
        return found[0]

    def rank_processes(self, name: str, rank: int) -> list[int]:
        """The same, as a list that is empty where the rank has not begun yet, or has ended."""
        log = str(self.path(name) / "logs" / f"rank-{rank}.log")
        return [pid for pid in self.processes() if log in _open_files(pid)]

    def assert_nobody_left(self) -> None:
        """All processes, and with them all ports, are gone within five seconds."""
        wait_until(lambda: not self.processes(), within_s=5)

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def checkpoints(self, name: str) -> list[int]:
        """Steps of the published checkpoints, oldest first."""
        return sorted(int(path.name[5:]) for path in (self.path(name) / "checkpoints").glob("step-*"))

    def manifest(self, name: str, step: int = STEPS) -> bytes:
        return (self.path(name) / "checkpoints" / f"step-{step}" / "manifest.json").read_bytes()

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path(name) / "metrics.jsonl").read_text().splitlines()]

    def numbers(self, name: str) -> list[tuple[Any, ...]]:
        """What of metrics.jsonl must be the same in every run of the same recipe: all but the clock's part."""
        return [tuple(line[key] for key in (COUNTED if "loss" in line else EVALUATED)) for line in self.lines(name)]

    def plan(self, name: str, file: str = "plan.json") -> dict[str, Any]:
        """The fields of a run's plan and of its parts."""
        plan = json.loads((self.path(name) / file).read_text())
        parts = [plan[part] for part in ("job", "placement", "arithmetic", "machines", "cadence")]
        return {key: value for values in (plan, *parts) for key, value in values.items()}

    def sums(self, name: str) -> dict[str, Any]:
        """What of a run's plan decides each bit, wherever it runs."""
        plan = self.plan(name)
        hosts = [host["threads"] for host in plan["hosts"] for _ in range(host["workers"])]
        threads = hosts or [plan["threads"]] * plan["layout"]["replicate"]
        return {"threads": threads, **{key: plan[key] for key in SUMMED}}

    def copy_run(self, old: str, new: str) -> Path:
        """Another run in the same state, under a name of its own."""
        shutil.copytree(self.path(old), self.path(new))
        recipe = self.path(new) / "recipe.toml"
        recipe.write_text(recipe.read_text().replace(f'name = "{old}"', f'name = "{new}"'))
        return self.path(new)


def ended(process: subprocess.Popen[str], within_s: float = 150) -> Ended:
    """Wait for a command's end."""
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not over within {within_s} s: {out[-2000:]}\n{err[-2000:]}") from None
    return Ended(code=process.returncode, out=out, err=without_waiting(err or ""))


def without_waiting(said: str) -> str:
    """Without the lines that tell for how long something has gone on: a busy machine says them, and a quiet one not."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if not (line.startswith("working  ") and line.rstrip().endswith(" so far")))


def kill_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to the command and all its workers at once, as a terminal does."""
    os.killpg(process.pid, number)


def wait_while_running(
    fact: Callable[[], bool], process: subprocess.Popen[str], *, within_s: float = 90, look_s: float = 0.0005
) -> None:
    """Block until a fact holds; fails at once, with what it said, when the process ends before that."""
    deadline = time.monotonic() + within_s
    while not fact():
        if process.poll() is not None:
            raise AssertionError(f"over too soon: {ended(process)}")
        assert time.monotonic() < deadline, f"not so within {within_s} s"
        threading.Event().wait(look_s)


def wait_until(fact: Callable[[], bool], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"not so within {within_s} s"
        threading.Event().wait(0.01)


def flip_bit(path: Path, at: float = 0.5) -> None:
    """Damage one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(bytes(data))


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if re.fullmatch(r"\d+", entry.name)]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _open_files(pid: int) -> list[str]:
    try:
        return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
