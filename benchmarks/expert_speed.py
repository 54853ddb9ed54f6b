"""`python -m benchmarks.expert_speed`: mixtures of experts beside a dense model, transformers, and their floor.

Three comparisons, float32, one thread a process, the same tokens; contenders take turns, and ratios are taken within
rounds (pairing.py):

1. a step of the mixture over one of a dense model in which a token meets as much;
2. transformers' own step of the same model, by its fastest way of running experts, over plait's; losses that differ end
   the benchmark;
3. `expert` = 2 on two workers over the floor: what each of them computes, by itself beside the other, and then its
   bytes through a connection of this machine with itself. Tokens go to all experts alike.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.expert_contender import RANKS, mixture_of
from benchmarks.machine import describe
from benchmarks.pairing import alternate, compare, save, table
from benchmarks.strands_floor import NUMBER_BYTES, loopback_rate
from benchmarks.strands_party import Party, Turn
from benchmarks.strands_work import Work, work_as_text
from plait.model.names import expert_of
from plait.model.shape import weight_sizes

WORK = Work(layers=4, width=384, heads=6, ffn=1024, vocabulary=2048, sequences=16)
SMOKE = Work(layers=2, width=64, heads=2, ffn=128, vocabulary=256, sequences=4, sequence=64)
SIZES = ("8 2", "32 4")
"""Experts, and those of a token: the recipe's, which the bars are for, and more and narrower ones."""
IMPLEMENTATIONS = ("eager", "grouped_mm")
"""Not transformers' "batched_mm": it copies an expert's weights for every token, 38 GiB here."""
MOST_OVER_DENSE, LEAST_OVER_TRANSFORMERS, MOST_OVER_FLOOR = 1.25, 1.3, 1.10
EQUAL_WITHIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A comparison's ratio, the median of its rounds, with the least and the greatest; what it may be, and whether it
    is."""

    what: str
    ratio: float
    least: float
    greatest: float
    bar: str
    holds: bool

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        return f"{self.what}: {self.ratio:.3f} ({self.least:.3f} … {self.greatest:.3f}), {self.bar} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="timed ones of a turn")
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--smoke", action="store_true", help="the same path with a tiny model; saves nothing")
    flags = parser.parse_args()
    work, rounds, steps = (SMOKE, 1, 1) if flags.smoke else (WORK, flags.rounds, flags.steps)
    found: list[Outcome] = []
    turns: dict[str, object] = {}
    others = 0.0
    for size in [flags.only] if flags.only else SIZES:
        for part in (_one_process(work, size, rounds, steps), _two_workers(work, size, rounds, steps)):
            outcomes, taken = part
            found += outcomes
            turns |= {f"{name} of {size}": [asdict(turn) for turn in each] for name, each in taken.items()}
            others = max([others, *(turn.others for each in taken.values() for turn in each)])
    print("\n" + "\n".join(map(str, found)))
    print(f"other programs took at most {others:.0%} of the machine in a turn")
    if not flags.smoke:
        results = {"outcomes": [asdict(one) for one in found], "turns": turns, "others": others}
        machine = {"machine": describe(), "load": os.getloadavg(), "work": asdict(work)}
        print(f"written to {save('expert-speed', {**machine, **results})}")


def _one_process(work: Work, size: str, rounds: int, steps: int) -> tuple[list[Outcome], dict[str, list[Turn]]]:
    ours = f"mixture {size}"
    theirs = [f"transformers {one} {size}" for one in IMPLEMENTATIONS]
    with _parties(work, dict.fromkeys(("dense", ours, *theirs), 1)) as parties:
        losses = {name: party.first_losses() for name, party in parties.items()}
        for name in theirs:
            worst = max(abs(one - other) for one, other in zip(losses[name], losses[ours], strict=True))
            if not worst <= EQUAL_WITHIN:
                sys.exit(f"{name} differs by {worst:.1e} in a first loss: it is other mathematics")
        turns = alternate(list(parties), rounds, lambda name: parties[name].turn(untimed=1, timed=steps))
    seconds = {name: [turn.step_s for turn in each] for name, each in turns.items()}
    print(f"\n{size} experts, one process\n" + table(compare(seconds, ours), {}, ours), flush=True)
    fastest = min(theirs, key=lambda name: sorted(seconds[name])[len(seconds[name]) // 2])
    return [
        _outcome(
            f"a mixture of {size} over a dense model of the same work", seconds, ours, "dense", most=MOST_OVER_DENSE
        ),
        _outcome(f"{fastest} over plait", seconds, fastest, ours, least=LEAST_OVER_TRANSFORMERS),
    ], turns


def _two_workers(work: Work, size: str, rounds: int, steps: int) -> tuple[list[Outcome], dict[str, list[Turn]]]:
    ours, floor = f"expert {size}", f"floor {size}"
    with _parties(work, {ours: RANKS, floor: RANKS}) as parties:
        for party in parties.values():
            party.first_losses()
        turns = alternate(list(parties), rounds, lambda name: parties[name].turn(untimed=1, timed=steps))
    bytes_s = sent_bytes(work, size) / loopback_rate()
    print(f"\nexpert = 2: {sent_bytes(work, size):,.0f} bytes a step, {bytes_s * 1e3:.1f} ms", flush=True)
    seconds = {
        ours: [turn.step_s for turn in turns[ours]],
        floor: [turn.step_s + bytes_s for turn in turns[floor]],
    }
    what = f"expert = 2 of {size} over its floor of products and bytes"
    return [_outcome(what, seconds, ours, floor, most=MOST_OVER_FLOOR)], turns


def sent_bytes(work: Work, size: str) -> float:
    """What each of two workers sends in a step: rows to experts and back, forward and backward, and its part of the
    sum of all gradients that are no expert's."""
    experts, chosen = map(int, size.split())
    shape = mixture_of(work, experts, chosen)
    rows = work.tokens / RANKS * chosen * work.width * shape.layers
    sizes = weight_sizes(shape)
    shared = sum(_numbers(one) for name, one in sizes.items() if expert_of(name) is None)
    return NUMBER_BYTES * (RANKS - 1) / RANKS * (4 * rows + 2 * shared)


def _numbers(sizes: tuple[int, ...]) -> int:
    return sizes[0] * (sizes[1] if len(sizes) > 1 else 1)


@contextmanager
def _parties(work: Work, ranks: Mapping[str, int]) -> Iterator[dict[str, Party]]:
    """Contenders that wait for their turns."""
    parties: dict[str, Party] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, number in ranks.items():
                command = f"benchmarks.expert_contender '{name}'"
                parties[name] = Party(name, command, ranks=number, work=work_as_text(work), folder=Path(folder))
            yield parties
        finally:
            for party in parties.values():
                party.end()


def _outcome(
    what: str,
    seconds: Mapping[str, list[float]],
    name: str,
    base: str,
    *,
    most: float = float("inf"),
    least: float = 0.0,
) -> Outcome:
    (standing,) = (one for one in compare({key: seconds[key] for key in (name, base)}, base) if one.name == name)
    bar = f"at least {least}" if least else f"at most {most}"
    return Outcome(
        what=what,
        ratio=standing.ratio,
        least=standing.least_ratio,
        greatest=standing.greatest_ratio,
        bar=bar,
        holds=least <= standing.ratio <= most,
    )


if __name__ == "__main__":
    main()
