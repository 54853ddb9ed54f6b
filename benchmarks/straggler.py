"""Does a run name who holds it up? Real processes on the lab's hosts, one of them disturbed at a random step.

`python -m benchmarks.straggler --json OUT [--trials 40] [--healthy 5000] [--seed 1]` (root): for 2 and for 4 hosts a
1 M parameter model trains in steps of about 0.1 s. In half of the time nothing happens; then a host gets 30 % of its
processor time, or its cable a tenth of its rate, or its data come late. A trial is right when the first word after the
onset names the kind and the place within 20 steps; any word while nothing happens is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.hosts import ROOT, Lab, require_root
from benchmarks.lab.turns import Stamp, others_between
from benchmarks.machine import describe
from benchmarks.straggler_run import RATE, SLOW_DATA, SLOW_DEVICE, SLOW_LINK, Run, disturb, prepare_run
from plait.report.straggler_words import FindingKind, StragglerFinding

WORK = ROOT / ".plait" / "straggler"
CORES = 1.2
"""Of all hosts together: less than a machine of two cores has to spare. Where other programs leave a host less than its
quota, a lower quota slows it down by less than it should: see `took_factor`."""
WITHIN_STEPS = 20
SETTLE_STEPS = 60
"""After a trouble's end, before the next may begin or steps count as healthy."""
GAP_STEPS = (10, 40)
KINDS: tuple[FindingKind, ...] = ("device", "link", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trouble, and what was said of it."""

    hosts: int
    kind: FindingKind
    rank: int
    onset_step: int
    """The first step that may have been slow as a whole."""
    verdict: str
    """right, wrong or missed."""
    took_factor: float
    """What it really did: times as long as before, of that rank's computing (device) or of the whole step."""
    after_steps: int | None
    """From the onset to the word."""
    ended: bool
    """Whether its end was told as well."""
    sentences: tuple[str, ...]


def trial(lab: Lab, run: Run, kind: FindingKind, rank: int) -> Trial:
    """Disturb one host for a while, and judge what is said."""
    series = run.compute_s[rank] if kind == "device" else run.step_s
    usual_s, before_s = median(run.step_s[-20:]), median(series[-20:])
    restore = disturb(lab, kind, rank, WORK / f"delay-{rank}", usual_s)
    onset = run.catch_up() + 1  # the one under way is slow in part
    try:
        said = run.go(WITHIN_STEPS + 5)
        took_factor = median(series[-WITHIN_STEPS:]) / before_s
    finally:
        restore()
    said += run.go(SETTLE_STEPS)
    begun = [(step, finding) for step, finding in said if finding.phase == "begins"]
    in_time = [(step, finding) for step, finding in begun if step <= onset + WITHIN_STEPS]
    return Trial(
        hosts=len(lab.hosts), kind=kind, rank=rank, onset_step=onset,
        verdict=verdict(kind, rank, len(lab.hosts), in_time[0][1] if in_time else None),
        took_factor=took_factor,
        after_steps=in_time[0][0] - onset if in_time else None,
        ended=any(finding.phase == "ends" and finding.kind == kind for _, finding in said),
        sentences=tuple(finding.sentence for _, finding in said),
    )  # fmt: skip


def verdict(kind: FindingKind, rank: int, hosts: int, first: StragglerFinding | None) -> str:
    """Whether the first word was right: of a link between two hosts both, else the host whose cable it is."""
    if first is None:
        return "missed"
    place = (0, 1) if kind == "link" and hosts == 2 else (rank,)
    return "right" if (first.kind, first.ranks) == (kind, place) else "wrong"


def series(
    hosts: int, cores: float, kinds: Sequence[FindingKind], healthy: int, choice: random.Random
) -> dict[str, Any]:
    """One run on so many hosts: a trial of each of `kinds`, and the false alarms of its healthy steps."""
    prepare_run(hosts, WORK)
    done: list[Trial] = []
    with Lab([cores / hosts] * hosts, RATE, work=WORK, files="shared") as lab:
        run = Run(lab, WORK)
        run.start()
        run.go(SETTLE_STEPS)
        before = Stamp.of(lab)
        alarms = [finding.sentence for _, finding in run.go(healthy) if finding.phase == "begins"]
        others = others_between(before, Stamp.of(lab))
        quiet_steps, usual_s = healthy, median(run.step_s)
        for kind in kinds:
            gap = choice.randint(*GAP_STEPS)
            alarms += [finding.sentence for _, finding in run.go(gap) if finding.phase == "begins"]
            quiet_steps += gap
            done.append(trial(lab, run, kind, choice.randrange(hosts)))
            print(f"  {done[-1].kind:6} rank {done[-1].rank}: {_words(done[-1])}", flush=True)
    return {
        "hosts": hosts, "step_s": usual_s, "trials": [asdict(one) for one in done],
        "healthy_steps": quiet_steps, "false_alarms": alarms,
        "others": others,
    }  # fmt: skip


def _words(one: Trial) -> str:
    when = f" after {one.after_steps} steps" if one.after_steps is not None else ""
    said = one.sentences[0] if one.sentences else "nothing was said"
    return f"{one.verdict}{when} ({one.took_factor:.1f} times as long): {said}"


def told(found: Sequence[dict[str, Any]]) -> str:
    """The outcome in a few lines."""
    lines = []
    for one in found:
        counts = Counter(trial["verdict"] for trial in one["trials"])
        late = [trial["after_steps"] for trial in one["trials"] if trial["verdict"] == "right"]
        ended = sum(trial["ended"] for trial in one["trials"])
        lines.append(
            f"{one['hosts']} hosts, {one['step_s'] * 1000:.0f} ms a step: {dict(counts)} of {len(one['trials'])}, "
            f"after {median(late) if late else 0:.0f} steps ({max(late, default=0)} at most), {ended} ends told; "
            f"{len(one['false_alarms'])} false alarms in {one['healthy_steps']} steps; "
            f"others took {one['others']:.0%} of the machine"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.straggler")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=40, help="half of them with each number of hosts")
    parser.add_argument("--healthy", type=int, default=5000, help="steps without trouble, half of them likewise")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="divisors of 8")
    parser.add_argument("--cores", type=float, default=CORES, help="of all hosts together")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    require_root()
    choice, began, found = random.Random(flags.seed), time.monotonic(), []
    print(f"seed {flags.seed}")
    for hosts in flags.hosts:
        trials, healthy = (count // len(flags.hosts) for count in (flags.trials, flags.healthy))
        kinds = [flags.kinds[number % len(flags.kinds)] for number in range(trials)]
        choice.shuffle(kinds)
        found.append(series(hosts, flags.cores, kinds, healthy, choice))
        values = {
            "seed": flags.seed, "machine": describe(), "took_s": time.monotonic() - began, "within_steps": WITHIN_STEPS,
            "slow": {"device": SLOW_DEVICE, "link": SLOW_LINK, "data": SLOW_DATA}, "series": found,
        }  # fmt: skip
        flags.json.write_text(json.dumps(values, indent=1) + "\n")
        print(told(found[-1:]), flush=True)


if __name__ == "__main__":
    main()
