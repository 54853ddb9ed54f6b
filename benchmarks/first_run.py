"""`make bench`: the same small GPT-2 trained by plait and by its peers, first for equal losses, then for time.

Contenders take turns (see pairing.py), first as one process with a thread a core, then as a one-thread process a core.
They do the same mathematics on the same tokens, clipping and data loading included; losses that differ by more than
1e-3 within 20 steps end the benchmark before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe, matmul_rate
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.processes import Contender, Mode, Turn, run_contender, run_undisturbed
from benchmarks.workload import FIRST_RUN, SMOKE, Workload, prepare

# The first row is the reference of all ratios; the interface of a row is described in peers/README.md.
CONTENDERS = (
    Contender(name="plait", command="{python} -m benchmarks.plait_contender"),
    Contender(name="torch loop", command="{python} -m benchmarks.peers.ddp_loop"),
    Contender(name="HF Trainer, tuned", command="{python} -m benchmarks.peers.hf_trainer --settings tuned"),
    Contender(name="HF Trainer, defaults", command="{python} -m benchmarks.peers.hf_trainer --settings defaults"),
)
EQUAL_STEPS = 20
EQUAL_WITHIN = 1e-3


def main() -> None:
    flags = _flags()
    workload = SMOKE if flags.smoke else FIRST_RUN
    cores = os.cpu_count() or 1
    modes = [Mode(ranks=1, threads=cores)] + ([Mode(ranks=cores, threads=1)] if cores > 1 else [])
    contenders = [one for one in CONTENDERS if flags.only is None or one.name in flags.only]
    results: dict[str, object] = {"machine": describe(), "workload": asdict(workload), "steps": flags.steps}
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            workdir = Path(folder) / str(mode.ranks)
            steps = max(flags.warmup + flags.steps, EQUAL_STEPS)
            prepare(workload, workdir, steps=steps, world_size=mode.ranks)
            results[str(mode)] = bench_mode(contenders, mode, workload, workdir, flags)
    if not flags.smoke:
        print(f"\nwritten to {save('first-run', results)}")


def bench_mode(
    contenders: list[Contender], mode: Mode, workload: Workload, workdir: Path, flags: argparse.Namespace
) -> dict[str, object]:
    """Check that the contenders agree, time them in turns, print the table; returns what the results file keeps."""
    by_name = {contender.name: contender for contender in contenders}
    reference = contenders[0].name

    def run(name: str, warmup: int, steps: int) -> Turn:
        print(f"  {mode}: {name}", file=sys.stderr, flush=True)
        take_turn = run_contender if flags.smoke else run_undisturbed
        return take_turn(by_name[name], mode, workdir=workdir, warmup=warmup, steps=steps)

    checked = {name: run(name, 0, EQUAL_STEPS) for name in by_name}
    difference = greatest_difference({name: turn.losses for name, turn in checked.items()}, reference)
    rate = matmul_rate(processes=mode.ranks, threads=mode.threads)
    turns = alternate(list(by_name), flags.rounds, lambda name: run(name, flags.warmup, flags.steps))
    standings = compare({name: [turn.step_s for turn in each] for name, each in turns.items()}, reference)
    tokens = workload.tokens_per_rank * mode.ranks
    columns = {
        "tokens/s": {one.name: f"{tokens / one.median_s:,.0f}" for one in standings},
        "of the matmul rate": {
            one.name: f"{tokens * workload.flops_per_token / one.median_s / rate:.1%}" for one in standings
        },
    }
    print(f"\n### {mode}, {rate / 1e9:.0f} GFLOP/s in float32 matmuls, losses equal within {difference:.1e}\n")
    print(table(standings, columns, reference), flush=True)
    return {
        "matmul_flops": rate,
        "greatest_loss_difference": difference,
        "standings": [asdict(one) for one in standings],
        "turns": {name: [asdict(turn) for turn in each] for name, each in turns.items()},
    }


def greatest_difference(losses: dict[str, tuple[float, ...]], reference: str) -> float:
    """The greatest loss difference from the reference in any of the steps; ends the benchmark when it is too great."""
    greatest = 0.0
    for name, values in losses.items():
        differences = [abs(one - base) for one, base in zip(values, losses[reference], strict=True)]
        worst = max(range(len(differences)), key=differences.__getitem__)
        if not differences[worst] <= EQUAL_WITHIN:
            sys.exit(
                f"{name} and {reference} differ by {differences[worst]:.2e} in the loss of step {worst + 1}, more than "
                f"{EQUAL_WITHIN}: they do not do the same mathematics, so there is nothing to time"
            )
        greatest = max(greatest, differences[worst])
    return greatest


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a first run of plait and its peers, in turns.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps a turn (default 20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default 5)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these contenders")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, to see that all parts work; nothing is saved"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
