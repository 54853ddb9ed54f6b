"""How long `import plait`, its first function, and `plait --help` take, beside Python's own start.

python -m benchmarks.startup          # writes benchmarks/results/startup-DATE.json

Run it on a quiet machine: each is a process of its own, so other programs lengthen all of them. The results hold the
seconds by the clock and those of the processor, and the part of the machine that others had.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median

from benchmarks.machine import ProcessorSeconds, describe
from benchmarks.pairing import alternate, compare, save

ROUNDS = 15
BAR_S = 0.3
"""What `import plait` and `plait --help` may take at the most."""
COMMANDS = {
    "python": ["-c", "pass"],
    "import plait": ["-c", "import plait"],
    "plait.load_recipe": ["-c", "import plait; plait.load_recipe"],
    "plait --help": ["-m", "plait", "--help"],
}
BARRED = ("import plait", "plait --help")


def main() -> int:
    """Print and save the median seconds of each, and its ratio to Python's own start in the same round; 1 where a bar
    is missed."""
    for name in COMMANDS:  # compiles what was not run before
        _seconds(name)
    before = ProcessorSeconds.now(), resource.getrusage(resource.RUSAGE_CHILDREN)
    turns = alternate(list(COMMANDS), ROUNDS, _seconds)
    others = _others_share(*before)
    standings = compare({name: [clock_s for clock_s, _ in values] for name, values in turns.items()}, "python")
    for one in standings:
        bar = f"; bar {BAR_S} s, {'met' if one.median_s <= BAR_S else 'missed'}" if one.name in BARRED else ""
        cpu_s = median(cpu_s for _, cpu_s in turns[one.name])
        print(f"{one.name:20} {one.median_s:.3f} s, {cpu_s:.3f} s of the processor, {one.ratio:.2f} times python{bar}")
    path = save("startup", _result(turns, [asdict(one) for one in standings], others))
    print(f"other programs had {others:.0%} of the machine; wrote {path}")
    return int(any(one.median_s > BAR_S for one in standings if one.name in BARRED))


def _result(
    turns: Mapping[str, list[tuple[float, float]]], standings: list[dict[str, object]], others: float
) -> dict[str, object]:
    seconds = {name: {"clock_s": [c for c, _ in each], "cpu_s": [p for _, p in each]} for name, each in turns.items()}
    return {"machine": describe(), "bar_s": BAR_S, "others": others, "standings": standings, "turns": seconds}


def _others_share(began: ProcessorSeconds, own: resource.struct_rusage) -> float:
    """The share of the machine's processor time since `began` that neither idled nor went to this benchmark's own
    children, which had used `own` then."""
    now, used = ProcessorSeconds.now(), resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s, idle_s = now.busy_s - began.busy_s, now.idle_s - began.idle_s
    own_s = used.ru_utime + used.ru_stime - own.ru_utime - own.ru_stime
    return max(0.0, busy_s - own_s) / max(busy_s + idle_s, 1e-9)


def _seconds(name: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *COMMANDS[name]], stdout=subprocess.DEVNULL, check=True)
    took_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
