"""Runs the user's program in several local processes that record what it does, and ends them once enough is
recorded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from plait.checking.launch_command import WatchedProgram
from plait.machines.machine import usable_cores

RunEnding = Literal["ended", "enough", "failed", "silent", "out of time"]
_POLL_S = 0.05
_AFTER_FAILURE_S = 1.5
"""How long the other ranks may still report after one has failed."""
_BUSY_S = 0.2
"""CPU time that shows that ranks which write nothing are still computing."""
LIGHT_AT_LEAST_S = 5.0
"""How long a program at least runs on after the checked steps, so that passes, schedules and evaluations can end; if
the checked steps took longer, that long."""
GRACE_S = 30.0
"""From SIGTERM to SIGKILL, as in Slurm's KillWait and Kubernetes' grace period."""
OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
           "HF_HUB_DISABLE_TELEMETRY": "1", "COMET_MODE": "offline", "NEPTUNE_MODE": "offline"}  # fmt: skip
"""Set for the program, so that a check neither logs in nor downloads anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLaunch:
    """How the run of a watched program ended."""

    ending: RunEnding
    wall_s: float
    exit_codes: tuple[int | None, ...]


class RankProcess(Protocol):
    """A started rank, the leader of its own process group."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        ...


OnPace = Callable[[float, float], None]
"""Called once, after rank 0's second optimizer step: seconds to the first step, and of a step."""
StartRank = Callable[[Path, Mapping[str, str], Path], RankProcess]
"""Starts a rank; takes the request's file, the rank's environment, and the log file for its output."""


def ignore_pace(first_s: float, step_s: float) -> None:
    """An OnPace that says nothing."""


def start_process(request: Path, environment: Mapping[str, str], log: Path) -> RankProcess:
    """Start a rank in a fresh Python. -P keeps modules in the current folder from shadowing ours."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "plait.checking.watch.program", str(request)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_watched(
    program: WatchedProgram,
    folder: Path,
    *,
    workers: int,
    steps: int,
    silent_s: float,
    limit_s: float,
    after_s: float = LIGHT_AT_LEAST_S,
    working: Path | None = None,
    stop_after: int | None = None,
    grace_s: float = GRACE_S,
    on_pace: OnPace = ignore_pace,
    start: StartRank = start_process,
) -> WatchedLaunch:
    """Start the ranks, wait until their steps are recorded and then for `after_s` (or as long as the steps took, if
    that is longer), and end the ranks; blocks. The program runs in `working`, by default in the current folder.

    With `stop_after`, each rank gets SIGTERM after that many optimizer steps, and SIGKILL `grace_s` later: the ending
    is "ended" if all ranks exit before SIGKILL, else "enough".

    All output goes to rank-N.log in `folder`. No rank outlives this call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / "request.json"
    requested = {
        "folder": str(folder),
        "steps": steps,
        "program": program.name,
        "kind": program.kind,
        "arguments": list(program.arguments),
        "parent": os.getpid(),
        "working": str(working) if working is not None else "",
        "stop_after": stop_after,
    }
    request.write_text(json.dumps(requested), encoding="utf-8")
    (folder / "outputs").mkdir(exist_ok=True)
    began = time.monotonic()
    started: list[RankProcess] = []
    port = _free_port()
    try:
        for rank in range(workers):
            environment = rank_environment(os.environ, program, folder, rank, workers, port)
            started.append(start(request, environment, folder / f"rank-{rank}.log"))
        event, event_s = ("checked", after_s) if stop_after is None else ("stopping", grace_s)
        ending = _wait(started, folder, event, silent_s=silent_s, limit_s=limit_s, after_s=event_s, on_pace=on_pace)
        codes = tuple(one.poll() for one in started)
    finally:
        _end(started)
    return WatchedLaunch(ending=ending, wall_s=time.monotonic() - began, exit_codes=codes)


def rank_environment(
    own: Mapping[str, str], program: WatchedProgram, folder: Path, rank: int, workers: int, port: int
) -> dict[str, str]:
    """The environment of one rank: what torchrun sets, with GPUs hidden and libraries offline."""
    threads = own.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // workers))
    launched = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "plait-check",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    processors = {
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": own.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONUNBUFFERED": "1",
        "WANDB_DIR": str(folder / "outputs"),
        "MLFLOW_TRACKING_URI": f"file:{folder / 'outputs' / 'mlflow'}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**own, **OFFLINE, **processors, **program.environment, **launched}


def _wait(
    started: Sequence[RankProcess],
    folder: Path,
    event: Literal["checked", "stopping"],
    *,
    silent_s: float,
    limit_s: float,
    after_s: float,
    on_pace: OnPace,
) -> RunEnding:
    """Wait until the program is over, or for `after_s` after an event: all ranks have recorded their steps, or the
    first one has got its signal. After a signal, a failing rank is only a consequence of the stop."""
    files = [folder / f"rank-{rank}" / "events.jsonl" for rank in range(len(started))]
    sizes, checked = [0] * len(started), [False] * len(started)
    began = grew = time.monotonic()
    checked_at = failed_at = busy_s = 0.0
    steps_s: list[float] = []
    while True:
        now = time.monotonic()
        for rank, file in enumerate(files):
            with suppress(FileNotFoundError):
                size = file.stat().st_size
                if size != sizes[rank]:
                    grew = now
                    checked[rank] = checked[rank] or _mentions(event, file, sizes[rank]) > 0
                    if rank == 0 and len(steps_s) < 2:
                        steps_s += [now - began] * _mentions("step", file, sizes[rank])
                        if len(steps_s) > 1:
                            on_pace(steps_s[0], steps_s[1] - steps_s[0])
                    sizes[rank] = size
        if (used := sum(_processor_s(one.pid) for one in started)) > busy_s + _BUSY_S:
            busy_s, grew = used, now  # imports, and long computations
        codes = [one.poll() for one in started]
        is_stopping = event == "stopping" and any(checked)
        if all(code is not None for code in codes):
            return "failed" if any(codes) and not is_stopping else "ended"
        if any(code not in (None, 0) for code in codes) and not is_stopping:
            failed_at = failed_at or now
            if now - failed_at > _AFTER_FAILURE_S:
                return "failed"
        if all(checked) or is_stopping:
            checked_at = checked_at or now
            as_long_again = checked_at - began if after_s and event == "checked" else 0.0
            if now - checked_at >= max(after_s, as_long_again):
                return "enough"
        elif now - grew > silent_s:
            return "silent"
        elif now - began > limit_s:
            return "out of time"
        time.sleep(_POLL_S)


def _processor_s(pid: int) -> float:
    """CPU time that a process has used; 0.0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _mentions(event: str, file: Path, start: int) -> int:
    """How many events of a kind a file got after its first `start` bytes."""
    text = f'"kind": "{event}"'.encode()
    with file.open("rb") as opened:
        opened.seek(max(0, start - len(text) + 1))
        return opened.read().count(text)


def _end(started: Sequence[RankProcess]) -> None:
    """Kill all ranks and their DataLoader workers, and wait until they are gone. A rank that has just started gets its
    own process group a moment later, so the signal is repeated."""
    for one in started:
        _kill_group(one.pid)
    for one in started:
        while one.poll() is None:
            _kill_group(one.pid)
            time.sleep(_POLL_S)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's events in order, without an unfinished last line."""
    events: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):
        for line in (folder / f"rank-{rank}" / "events.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return events


def log_tail(folder: Path, rank: int, lines: int = 15) -> str:
    """The last lines that a rank printed."""
    with suppress(FileNotFoundError):
        text = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])
    return ""
