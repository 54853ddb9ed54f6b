"""`python -m benchmarks.lab.own_program`: a ResNet-18 under plait.spread over the lab's hosts, beside DDP (root).

    speedup   2, 4 and 8 equal hosts, cables of 1 Gbit/s: so many times one of them
    unequal   two hosts of 1 : 0.4: share of the sum of what each does alone; DDP's equal parts beside it

A host alone is measured on all hosts at once, before and after what is held against it, at the pace that the processors
have meanwhile (pace.py). Steps count from the one on in which no host's part of the batch changes any more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmarks.lab.checks import until
from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import PORT
from benchmarks.machine import describe
from benchmarks.pairing import save
from plait.planner.heterogeneous.batch_shares import shares_by_speed

WORK = Path(__file__).parents[2] / ".plait" / "own-program"
RATE = 1e9
CORES, COUNTS = 0.18, (2, 4, 8)
UNEQUAL = (1.0, 0.4)
SETTLING = 13
"""Steps until measured shares hold."""
MORE_THAN_ENOUGH = 10_000
"""Steps of a host, which is ended once enough of them were counted."""
BEGINS_WITHIN_S, ENDS_WITHIN_S = 120.0, 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTurn:
    """What a host did in a turn: its step, its part of the batch, and its processor's pace (seconds of a product)."""

    step_s: float
    examples: int
    product_s: float

    @property
    def speed(self) -> float:
        """Examples a second at a pace of one product a second."""
        return self.examples / self.step_s * self.product_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab.own_program")
    parser.add_argument("case", choices=("speedup", "unequal"), nargs="+")
    parser.add_argument("--images", type=int, default=128, help="of a host and step, of equal hosts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hosts", type=int, nargs="+", default=COUNTS)
    flags = parser.parse_args()
    require_root()
    sweep()
    rows = []
    if "speedup" in flags.case:
        rows += [_case((CORES,) * hosts, [flags.images] * hosts, flags.steps) for hosts in flags.hosts]
    if "unequal" in flags.case:
        parts = shares_by_speed(flags.images, UNEQUAL)
        rows.append(_case(UNEQUAL, parts, flags.steps))
    print(f"written to {save('own-program-hosts', {'machine': describe(), 'rows': rows})}")


def _case(cores: Sequence[float], parts: Sequence[int], steps: int) -> dict[str, object]:
    """Hosts of so many cores, of which each alone does its part: alone, plait, DDP where hosts are unequal, alone."""
    unequal, examples = len(set(cores)) > 1, sum(parts)
    others = ("plait", "ddp") if unequal else ("plait",)
    WORK.mkdir(parents=True, exist_ok=True)
    with Lab(cores, RATE, work=WORK, files="shared") as lab:
        before = host_turns(lab, "alone", parts, steps)
        turns = {kind: host_turns(lab, kind, [examples] * len(parts), SETTLING * unequal + steps) for kind in others}
        alone = [before, host_turns(lab, "alone", parts, steps)]
    shares = {kind: reached(turn, alone) for kind, turn in turns.items()}
    for kind, share in shares.items():
        times = "" if unequal else f", {share * len(cores):.2f} times one"
        print(f"{len(cores)} hosts of {cores[0]:g} to {cores[-1]:g} cores, {kind}: {share:.1%} of all alone{times}")
    return {
        "cores": cores, "images": parts, "rate": RATE, "reached": shares,
        "turns": {kind: [asdict(one) for one in turn] for kind, turn in turns.items()},
        "alone": [[asdict(one) for one in turn] for turn in alone],
    }  # fmt: skip


def reached(turn: Sequence[HostTurn], alone: Sequence[Sequence[HostTurn]]) -> float:
    """Examples a second over the sum of what each host does alone, at the pace of this turn."""
    together = sum(one.examples for one in turn) / mean(one.step_s for one in turn)
    speeds = [mean(taken[host].speed for taken in alone) / one.product_s for host, one in enumerate(turn)]
    return together / sum(speeds)


def host_turns(lab: Lab, kind: str, examples: Sequence[int], steps: int) -> list[HostTurn]:
    """So many steps on all hosts, which have a processor each until they compute."""
    shares = [lab.granted(host) for host in lab.hosts]
    files = [WORK / f"{kind}-{host.index}.jsonl" for host in lab.hosts]
    for file, host, share in zip(files, lab.hosts, shares, strict=True):
        file.unlink(missing_ok=True)
        lab.grant(host, max(1.0, share))
    shared = {
        "WORLD_SIZE": "1" if kind == "alone" else str(len(lab.hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    try:
        for host, file, own in zip(lab.hosts, files, examples, strict=True):
            command = (
                sys.executable, "-m", "benchmarks.lab.own_program_host", kind, "--examples", str(own), "--steps",
                str(MORE_THAN_ENOUGH), "--out", str(file),
            )  # fmt: skip
            rank = "0" if kind == "alone" else str(host.index)
            lab.start(host, command, log=WORK / f"{file.stem}.log", environment={**shared, "RANK": rank})
        until(lambda: all(_lines(file) for file in files), "all hosts compute", BEGINS_WITHIN_S)
        for host, share in zip(lab.hosts, shares, strict=True):
            lab.grant(host, share)
        # A host that is alone has taken several steps on its whole processor, and is amid one.
        first = [len(_lines(file)) + 1 for file in files]
        began = time.monotonic()
        until(
            lambda: all(len(_lines(file)) >= begin + steps for file, begin in zip(files, first, strict=True)),
            "all hosts have computed",
            ENDS_WITHIN_S,
        )
        pace = lab.product_s(began, time.monotonic())
    finally:
        lab.end_commands()
        for host, share in zip(lab.hosts, shares, strict=True):
            lab.grant(host, share)
    counted = [_lines(file)[begin : begin + steps] for file, begin in zip(files, first, strict=True)]
    return [_told(lines, product_s) for lines, product_s in zip(counted, pace, strict=True)]


def _told(lines: Sequence[dict[str, float]], product_s: float) -> HostTurn:
    """Of the steps in which the host's part was what it is at the end."""
    last = int(lines[-1]["examples"])
    changed = max((at for at, line in enumerate(lines) if line["examples"] != last), default=-1)
    counted = [line["step_s"] for line in lines[changed + 1 :]]
    return HostTurn(step_s=mean(counted), examples=last, product_s=product_s)


def _lines(file: Path) -> list[dict[str, float]]:
    """Of the steps so far."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


if __name__ == "__main__":
    main()
