"""`make bench`: the same small GPT-2 trained by plait and by its peers, first for equal losses, then for time.

All contenders of a case are started together and take turns of a few steps (see pairing.py and processes.py). They do
the same mathematics on the same tokens, clipping and data loading included; losses that differ within the first turns
by more than 1e-3 in float32, or 1 % in bf16, end the benchmark before anything is timed.

plait runs in float32 and in bf16. The row "as it chooses" is the one of both that plait's own rules take for these
measurements; it is compared with what users of the peers get by default, and each precision with the peers' same one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.chosen_arithmetic import chosen_backend, chosen_precision
from benchmarks.machine import ProcessorSeconds, describe, matmul_rate
from benchmarks.pairing import Standing, alternate, compare, save, table
from benchmarks.processes import Contender, Mode, Party, Turn, waiting
from benchmarks.workload import SMOKE, BenchCase, bench_cases, prepare
from plait.machines.measured import Arithmetic

LOOP = "{python} -m benchmarks.peers.ddp_loop"
TRAINER = "{python} -m benchmarks.peers.hf_trainer"
PLAIT = "{python} -m benchmarks.plait_contender"
# The interface of a row is described in peers/README.md.
PEERS: Mapping[str, tuple[Contender, ...]] = {
    "loop": (
        Contender(name="torch loop", command=LOOP),
        Contender(name="torch loop, bf16", command=f"{LOOP} --precision bf16"),
    ),
    "trainer": (
        Contender(name="HF Trainer, defaults", command=f"{TRAINER} --settings defaults"),
        Contender(name="HF Trainer, tuned", command=f"{TRAINER} --settings tuned"),
        Contender(name="HF Trainer, tuned, bf16", command=f"{TRAINER} --settings tuned --precision bf16"),
    ),
    "half the threads": (Contender(name="torch loop, half the threads", command=LOOP, threads_divisor=2),),
}
FLOAT32, BF16 = "plait", "plait, bf16"
EQUAL_WITHIN, BF16_WITHIN = 1e-3, 1e-2
"""Absolute difference of losses in float32, and relative in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured of a case."""

    rounds: int
    steps: int
    """Of a turn; the first of them does not count."""
    checked_steps: int
    """Steps whose losses are compared before anything is timed; they warm up, too."""


FULL, QUICK, TINY = (
    Effort(rounds=12, steps=6, checked_steps=20),
    Effort(rounds=8, steps=4, checked_steps=6),
    Effort(rounds=2, steps=3, checked_steps=4),
)


def main() -> None:
    flags = _flags()
    effort = TINY if flags.smoke else QUICK if flags.quick else FULL
    results: dict[str, object] = {"machine": describe(), "effort": asdict(effort)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(_cases(flags)):
            workdir = Path(folder) / str(number)
            steps = effort.checked_steps + effort.rounds * effort.steps
            prepare(case.workload, workdir, steps=steps + 1, world_size=case.mode.ranks)
            results[case.name] = bench_case(case, workdir, effort)
    results["minutes"] = round((time.monotonic() - began) / 60, 1)
    if flags.smoke:
        return
    print(f"\n{results['minutes']} minutes; written to {save('first-run', results)}")


def bench_case(case: BenchCase, workdir: Path, effort: Effort) -> dict[str, object]:
    """Check that the contenders agree, time them in turns, print the tables; returns what the results file keeps."""
    print(f"\n### {case.name}", flush=True)
    mode, found = case.mode, chosen_backend(case.workload, case.mode)
    names: tuple[Arithmetic, ...] = ("default", "onednn", "bf16")
    rates: dict[Arithmetic, float] = {
        name: matmul_rate(processes=mode.ranks, threads=mode.threads, arithmetic=name)
        for name in names
        if name in found.machines[0].rates
    }
    contenders = _contenders(case, found.backend, "bf16" if "bf16" in rates else "float32")
    steps = effort.checked_steps + effort.rounds * effort.steps
    with waiting(contenders, mode, workdir=workdir, steps=steps) as parties:
        by_name = {party.contender.name: party for party in parties}
        checked = {name: _said(name, party).turn(effort.checked_steps) for name, party in by_name.items()}
        differences = greatest_differences({name: turn.losses for name, turn in checked.items()})
        before = ProcessorSeconds.now()
        turns = alternate(list(by_name), effort.rounds, lambda name: by_name[name].turn(effort.steps))
        others = _others(before, ProcessorSeconds.now(), turns, effort)
    seconds = {name: [turn.step_s for turn in each] for name, each in turns.items()}
    precision, reason = "float32", "this processor has no bf16"
    if BF16 in seconds:
        precision, reason = chosen_precision(found, seconds[FLOAT32], seconds[BF16])
    chosen = BF16 if precision == "bf16" else FLOAT32
    standings = {
        reference: compare(seconds, reference)
        for reference in dict.fromkeys((chosen, FLOAT32, BF16))
        if reference in seconds
    }
    _print(case, standings[chosen], chosen, rates, found.backend, differences, (*found.reasons, reason))
    return {
        "workload": asdict(case.workload),
        "mode": asdict(mode),
        "chosen": {
            "row": chosen,
            "backend": found.backend,
            "precision": precision,
            "reasons": [*found.reasons, reason],
        },
        "matmul_flops": rates,
        "share_of_rate": {
            name: _share(case, median(each), rates[_arithmetic(name, found.backend)]) for name, each in seconds.items()
        },
        "loss_differences": differences,
        "others": others,
        "standings": {reference: [asdict(one) for one in some] for reference, some in standings.items()},
        "turns": {name: [asdict(turn) for turn in each] for name, each in turns.items()},
    }


def greatest_differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each contender's greatest loss difference from plait's float32 in any of the steps, relative in bf16; ends the
    benchmark when one is too great."""
    greatest: dict[str, float] = {}
    for name, values in losses.items():
        half = name.endswith("bf16")
        differences = [
            abs(one - base) / (base if half else 1.0) for one, base in zip(values, losses[FLOAT32], strict=True)
        ]
        worst = max(range(len(differences)), key=differences.__getitem__)
        limit = BF16_WITHIN if half else EQUAL_WITHIN
        if not differences[worst] <= limit:
            sys.exit(
                f"{name} and {FLOAT32} differ by {differences[worst]:.2e} in the loss of step {worst + 1}, more than "
                f"{limit}: they do not do the same mathematics, so there is nothing to time"
            )
        greatest[name] = differences[worst]
    return greatest


def _contenders(case: BenchCase, backend: str, best: str) -> list[Contender]:
    ours = [Contender(name=FLOAT32, command=f"{PLAIT} --matmul-backend {backend}")]
    if best == "bf16":
        ours.append(Contender(name=BF16, command=f"{PLAIT} --matmul-backend {backend} --precision bf16"))
    theirs = [one for kind in case.peers for one in PEERS[kind]]
    return [*ours, *(one for one in theirs if best == "bf16" or not one.name.endswith("bf16"))]


def _said(name: str, party: Party) -> Party:
    print(f"  {name}", file=sys.stderr, flush=True)
    return party


def _others(
    before: ProcessorSeconds, after: ProcessorSeconds, turns: Mapping[str, Sequence[Turn]], effort: Effort
) -> float:
    """About the share of the machine's time that other programs took."""
    own_s = sum(turn.cpu_s * effort.steps for each in turns.values() for turn in each)
    busy_s = after.busy_s - before.busy_s
    whole_s = busy_s + after.idle_s - before.idle_s
    return max(0.0, busy_s - own_s) / whole_s if whole_s else 0.0


def _share(case: BenchCase, step_s: float, rate: float) -> float:
    tokens = case.workload.tokens_per_rank * case.mode.ranks
    return tokens * case.workload.flops_per_token / step_s / rate


def _arithmetic(name: str, backend: str) -> Arithmetic:
    """In what a contender multiplies: peers in float32 by torch's default library."""
    if name.endswith("bf16"):
        return "bf16"
    return "onednn" if name == FLOAT32 and backend == "onednn" else "default"


def _print(
    case: BenchCase, standings: Sequence[Standing], chosen: str, rates: Mapping[Arithmetic, float], backend: str,
    differences: Mapping[str, float], reasons: Sequence[str],
) -> None:  # fmt: skip
    tokens = case.workload.tokens_per_rank * case.mode.ranks
    columns = {
        "tokens/s": {one.name: f"{tokens / one.median_s:,.0f}" for one in standings},
        "of its matmul rate": {
            one.name: f"{_share(case, one.median_s, rates[_arithmetic(one.name, backend)]):.1%}" for one in standings
        },
        "loss off by": {name: f"{value:.0e}" for name, value in differences.items()},
    }
    told = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
    print("\n".join(["", *(f"- {reason}" for reason in reasons), f"- products of 1,024²: {told} GFLOP/s", ""]))
    print(table(standings, columns, chosen), flush=True)


def _cases(flags: argparse.Namespace) -> list[BenchCase]:
    cores = os.cpu_count() or 1
    one, many = Mode(ranks=1, threads=cores), Mode(ranks=cores, threads=1)
    if flags.smoke:
        return [BenchCase(workload=SMOKE, mode=mode, peers=("loop", "trainer")) for mode in (one, many)]
    cases = [
        case for mode in (one, many) for case in bench_cases(mode) if mode is one or (case.everywhere and cores > 1)
    ]
    return [case for case in cases if not flags.only or flags.only in case.name]


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a first run of plait and its peers, in turns.")
    parser.add_argument("--quick", action="store_true", help="fewer turns: about ten minutes on two cores")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, to see that all parts work; nothing is saved"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
