"""`python -m benchmarks.watching`: what it costs to measure who computes and who waits, in shares of a step.

Two ranks of one thread each, once as a run of several workers always is (marks in every step, figures of all ranks
brought together every fourth, and judged), and once bare; both alive, in turns, compared round by round. Beside the
ratio stands what rank 0 spent by its own clock on bringing together and judging, the wait for the other rank's figures
included: much steadier than a difference of two steps.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save
from benchmarks.strands_party import Party, Turn
from benchmarks.strands_work import WORKS, Work, work_as_text
from plait.trainer.balance.actions import GATHERED_STEPS

MODELS = {
    "1M": Work(layers=4, width=128, heads=4, ffn=352, vocabulary=1024, sequences=8, timed_steps=20),
    "11M": WORKS["11M"],
}
BAR = 0.005
"""Of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching")
    parser.add_argument("--rounds", type=int, default=15)
    flags = parser.parse_args()
    found = {}
    print("| model | ms a step, bare | ratio of steps | least … greatest | by rank 0's clock | bar |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model, work in MODELS.items():
        turns, spent = take_turns(work, flags.rounds)
        seconds = {name: [turn.step_s for turn in each] for name, each in turns.items()}
        watched, bare_s = compare(seconds, "bare")[1], median(seconds["bare"])
        spread = f"{watched.least_ratio:.3f} … {watched.greatest_ratio:.3f}"
        bar = f"{BAR:.1%}{'' if spent <= BAR else ' missed'}"
        print(
            f"| {model} | {bare_s * 1e3 / GATHERED_STEPS:.1f} | {watched.ratio:.4f} | {spread} | {spent:.3%} | {bar} |",
            flush=True,
        )
        found[model] = {"turns": {name: [asdict(t) for t in each] for name, each in turns.items()}, "spent": spent}
    print(f"\nwritten to {save('watching', {'machine': describe(), 'models': found})}")


def take_turns(work: Work, rounds: int) -> tuple[dict[str, list[Turn]], float]:
    """Turns of both, and the share of its steps that rank 0 spent on what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        spent = Path(folder) / "spent"
        parties = {
            kind: Party(kind, f"benchmarks.watching_rank {kind}", ranks=2, work=work_as_text(work), folder=Path(folder))
            for kind in ("bare", "watched")
        }
        try:
            losses = [party.first_losses() for party in parties.values()]
            if losses[0] != losses[1]:
                raise SystemExit("what is watched does not do the same mathematics as what is not")
            turns = alternate(list(parties), rounds, lambda kind: parties[kind].turn(untimed=1, timed=work.timed_steps))
        finally:
            for party in parties.values():
                party.end()
        shares = [float(line) for line in spent.read_text().split()]
    return turns, median(shares)


if __name__ == "__main__":
    main()
