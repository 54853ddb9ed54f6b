"""`python -m benchmarks.spread_programs`: steps of three programs under plait.spread, DDP, FSDP2 and Accelerate.

Two ranks of one thread each, the same weights and batches; first losses that differ end the benchmark. Contenders take
turns, and ratios are taken within rounds (pairing.py): of steps, and of the processor seconds of all ranks, which a
busy machine disturbs less. Products are by the library that plait.spread chooses for itself, and by torch's own for its
peers; `--products onednn` selects oneDNN for all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.spread_work import PROGRAMS
from benchmarks.strands_party import Party, Turn

CONTENDERS = ("plait replicate", "ddp", "accelerate", "plait shard_parameters", "fsdp2")
PAIRS = {"plait replicate": ("ddp", "accelerate"), "plait shard_parameters": ("fsdp2",)}
EQUAL_WITHIN = 1e-3
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=PROGRAMS, action="append")
    parser.add_argument("--products", choices=("chosen", "onednn"), default="chosen")
    flags = parser.parse_args()
    results: dict[str, object] = {"products": flags.products}
    for program in flags.only or PROGRAMS:
        turns = take_turns(program, flags.rounds, flags.steps, flags.products)
        others = max(turn.others for each in turns.values() for turn in each)
        for ours, peers in PAIRS.items():
            for what in ("step_s", "processor_s"):
                seconds = {name: [getattr(turn, what) for turn in turns[name]] for name in (ours, *peers)}
                standings = compare(seconds, ours)
                print(f"\n{program}, {what}\n" + table(standings, {}, ours), flush=True)
                results[f"{program}, {ours}, {what}"] = [asdict(one) for one in standings]
        results[f"{program}, others at most"] = others
        print(f"other programs took at most {others:.0%} of the machine in a turn")
    load = os.getloadavg()
    print(f"\nwritten to {save('spread', {'machine': describe(), 'load': load, 'results': results})}")


def take_turns(program: str, rounds: int, steps: int, products: str) -> dict[str, list[Turn]]:
    """Every contender's turns, once all of them have shown that they do the same mathematics."""
    parties: dict[str, Party] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in CONTENDERS:
                command = f"benchmarks.spread_contender '{name}' --products {products}"
                parties[name] = Party(name, command, ranks=RANKS, work=program, folder=Path(folder))
            losses = {name: party.first_losses() for name, party in parties.items()}
            for name, values in losses.items():
                worst = max(abs(one - other) for one, other in zip(values, losses[CONTENDERS[0]], strict=True))
                if not worst <= EQUAL_WITHIN:
                    sys.exit(f"{name} differs by {worst:.1e} in a first loss of {program}: it is other mathematics")

            return alternate(CONTENDERS, rounds, lambda name: parties[name].turn(untimed=1, timed=steps))
        finally:
            for party in parties.values():
                party.end()


if __name__ == "__main__":
    main()
