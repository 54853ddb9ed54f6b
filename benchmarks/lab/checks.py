"""What a lab's hosts can do, found out on them before a case: their cables' rates, their processors' rate."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.lab.hosts import Lab, Quota
from benchmarks.lab.leftovers import scratch_of
from benchmarks.lab.rate import PORT, objection, read_rate
from benchmarks.lab.wiring import Host, Rate
from plait.errors import PlaitError

LIMIT_S = 60.0
FURTHER_TRIES = 2
"""A busy neighbour may slow down one transfer; a limit that did not take slows down none of them."""
LOOK_EVERY_S = 0.1
"""Each look costs a few milliseconds of the processors that the hosts compute with."""


def cable_rates(lab: Lab, rate: Rate) -> list[float]:
    """Bits a second from each host to the next; raises PlaitError where the limit did not take."""
    # A limit is the cable's, whatever the processors can do; without one the processors are the limit.
    if rate == "unshaped":
        return _transfers(lab, "kept")
    found = _transfers(lab, "lifted")
    for _ in range(FURTHER_TRIES):
        if objection(rate, found) is None:
            break
        found = _transfers(lab, "lifted")
    if sentence := objection(rate, found):
        raise PlaitError(sentence)
    return found


def processor_rates(lab: Lab) -> list[float]:
    """FLOP/s of float32 products on each host, all at the same time and under their quotas."""
    logs = [scratch_of(lab.name) / f"processor-{host.index}.json" for host in lab.hosts]
    started = [
        lab.start(host, [sys.executable, "-m", "benchmarks.lab.checks"], log=log)
        for host, log in zip(lab.hosts, logs, strict=True)
    ]
    for process, log in zip(started, logs, strict=True):
        _ended_well(process, log)
    return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


def _transfers(lab: Lab, quota: Quota) -> list[float]:
    """One after the other around the hosts, so that every cable is used both ways."""
    pairs = zip(lab.hosts, [*lab.hosts[1:], lab.hosts[0]], strict=True)
    return [_transfer(lab, sender, receiver, quota) for sender, receiver in pairs]


def _transfer(lab: Lab, sender: Host, receiver: Host, quota: Quota) -> float:
    script = str(Path(__file__).with_name("rate.py"))
    heard, sent = (scratch_of(lab.name) / f"rate-{end}.log" for end in ("received", "sent"))
    command = (sys.executable, "-I", "-S", script)
    listener = lab.start(receiver, [*command, "receive", receiver.address], log=heard, quota=quota)
    until(lambda: lab.listens(receiver, PORT), "the receiving end of a transfer listens", LIMIT_S)
    _ended_well(lab.start(sender, [*command, "send", receiver.address], log=sent, quota=quota), sent)
    _ended_well(listener, heard)
    return read_rate(heard)


def until(holds: Callable[[], bool], fact: str, within_s: float) -> None:
    """Wait for a fact; raises PlaitError when it does not come true in time."""
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            raise PlaitError(f"waited {within_s:.0f} s in vain until {fact}; see the logs in the lab's work folder")
        time.sleep(LOOK_EVERY_S)


def _ended_well(process: subprocess.Popen[bytes], log: Path) -> None:
    until(lambda: process.poll() is not None, "a check of the lab's hosts ends", LIMIT_S)
    if process.returncode:
        raise PlaitError(f"a check of the lab's hosts failed: {log.read_text()[-500:]}")


def _print_processor_rate(seconds: float = 2.0, size: int = 768) -> None:
    """The median, not the best: a quota shows only over several of its periods."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    left, right = torch.randn(size, size), torch.randn(size, size)
    took: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        for _ in range(4):
            torch.mm(left, right)
        took.append((time.perf_counter() - began) / 4)
    print(2 * size**3 / median(took))


if __name__ == "__main__":
    _print_processor_rate()
