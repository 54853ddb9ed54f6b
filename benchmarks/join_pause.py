"""`python -m benchmarks.join_pause`: seconds for which a run stands still while a host joins it, from the last step
before to the first step after.

Three hosts in network namespaces of this machine (needs root). In each round the third one joins a run of two for the
first time ("newcomer": a run and folders of its own, so that nothing was measured with it), is killed, and joins again
("rejoin"). `--lines` prints what the leading host says, with its time after the last step before. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from benchmarks.pairing import save
from tests.end_to_end.command import Place, wait_while_running
from tests.end_to_end.namespaces import Net, has_namespaces, network

BAR_S = 10.0
PORT, RUN = 29556, "joined"
STEPS_BETWEEN = 30
PATIENCE_S = 900
wait_for = partial(wait_while_running, within_s=PATIENCE_S, look_s=0.02)
RECIPE = """
[data]
files = "play.txt"

[model]
layers = 4
width = 128
heads = 4
vocabulary = 300

[train]
sequence = 128
batch_tokens = 3584
budget = "1000000 steps"

[layout]
devices = "all"

[balance]
every = "never"

[checkpoint]
every = "10 steps"

[report]
evaluate = "never"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """How long no step was done for a host that joined, and how long that host waited before."""

    seconds: float
    waited_s: float
    lines: tuple[str, ...]
    """What the leading host said since the join, with the time after the last step before."""


class Leader:
    """`plait train` on host a, and its lines with the moments at which they came."""

    def __init__(self, net: Net, place: Place, secret: Path, overrides: list[str]) -> None:
        self.place, self._said = place, list[tuple[float, str]]()
        self.process = place.start(
            *("train", "tiny.toml", f"run.name={RUN}", "--hosts", "2", *overrides),
            *("--port", str(PORT), "--secret-file", str(secret)),
            preexec_fn=net.enter(0, 0),
            environment={"PYTHONUNBUFFERED": "1"},
        )
        threading.Thread(target=self._listen, daemon=True).start()
        wait_for(lambda: net.listens(0, PORT), self.process)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append((time.monotonic(), line.rstrip()))

    def said_after(self, began_s: float, zero_s: float) -> tuple[str, ...]:
        return tuple(f"{at_s - zero_s:8.2f} s  {line}" for at_s, line in self._said if at_s >= began_s)

    def steps(self) -> int:
        path = self.place.path(RUN) / "metrics.jsonl"
        return path.read_bytes().count(b'"loss"') if path.exists() else 0

    def starts(self) -> int:
        path = self.place.path(RUN) / "starts.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def hosts(self) -> list[str]:
        plan = self.place.path(RUN) / "plan.json"
        return [host["name"] for host in json.loads(plan.read_text())["machines"]["hosts"]] if plan.exists() else []

    def trains_on(self, names: str) -> None:
        """Wait until it has done some steps on these hosts."""
        wait_for(lambda: sorted(self.hosts()) == list(names), self.process)
        at = self.steps()
        wait_for(lambda: self.steps() >= at + STEPS_BETWEEN, self.process)

    def pause_of(self, began_s: float) -> Pause:
        """The next pause, once it is over."""
        starts, steps, last_s = self.starts(), self.steps(), time.monotonic()

        def is_over() -> bool:
            nonlocal steps, last_s
            if (now := self.steps()) == steps:
                return False
            if self.starts() > starts:
                return True
            steps, last_s = now, time.monotonic()
            return False

        wait_while_running(is_over, self.process, within_s=PATIENCE_S, look_s=0.005)
        seconds = time.monotonic() - last_s
        return Pause(seconds=seconds, waited_s=last_s - began_s, lines=self.said_after(began_s, last_s))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join_pause")
    parser.add_argument("--rounds", type=int, default=3, help="a newcomer and a rejoin each")
    parser.add_argument("--lines", action="store_true", help="print what the leading host says meanwhile")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    flags = parser.parse_args()
    if not has_namespaces():
        parser.exit(2, "join_pause makes network namespaces, which needs root and `ip`\n")
    pauses: dict[str, list[Pause]] = {"newcomer": [], "rejoin": []}
    for number in range(flags.rounds):
        with tempfile.TemporaryDirectory() as folder, network(3) as net:
            for kind, pause in _round(net, Path(folder), flags.overrides):
                pauses[kind].append(pause)
                line = f"{kind} {pause.seconds:.1f} s, after {pause.waited_s:.1f} s of waiting"
                print(f"round {number + 1}: {line}", *(pause.lines if flags.lines else ()), sep="\n", flush=True)
    print("| joins | times | median s | most | bar |")
    print("| --- | --- | --- | --- | --- |")
    for kind, found in pauses.items():
        seconds = [one.seconds for one in found]
        met = "met" if max(seconds) <= BAR_S else "missed"
        print(f"| {kind} | {len(seconds)} | {median(seconds):.1f} | {max(seconds):.1f} | {BAR_S:g} {met} |")
    result = {
        "machine": describe(),
        "overrides": flags.overrides,
        "pauses": {kind: [one.seconds for one in found] for kind, found in pauses.items()},
        "waits": {kind: [one.waited_s for one in found] for kind, found in pauses.items()},
        "lines": {kind: [one.lines for one in found] for kind, found in pauses.items()},
    }
    print(f"\nwritten to {save('join-pause', result)}")


def _round(net: Net, folder: Path, overrides: list[str]) -> Iterator[tuple[str, Pause]]:
    places, secret = [Place(folder / name, RECIPE) for name in "abc"], folder / "secret"
    processes: list[subprocess.Popen[str]] = []

    def join(index: int) -> subprocess.Popen[str]:
        process = places[index].start(
            *("join", f"{net.address(0)}:{PORT}", "--secret-file", str(secret)),
            preexec_fn=net.enter(index, index % 2),
        )
        processes.append(process)
        return process

    try:
        leader = Leader(net, places[0], secret, overrides)
        processes.append(leader.process)
        join(1)
        leader.trains_on("ab")
        yield "newcomer", _joined(leader, join)
        leader.trains_on("abc")
        os.killpg(processes[-1].pid, signal.SIGKILL)
        leader.trains_on("ab")
        yield "rejoin", _joined(leader, join)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for place in places:
            while pids := place.processes():
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)


def _joined(leader: Leader, join: Callable[[int], object]) -> Pause:
    began_s = time.monotonic()
    join(2)
    return leader.pause_of(began_s)


if __name__ == "__main__":
    main()
