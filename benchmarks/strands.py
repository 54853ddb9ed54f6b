"""`make bench-strands`: each strand's step on two ranks of one thread, over torch's own means for that strand.

All contenders of a group start from the same weights and train on the same tokens; losses that differ by more than 1e-4
end the benchmark before anything is timed. Then they take turns (strands_work.py), and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.machine import describe, matmul_rate
from benchmarks.pairing import alternate, compare, save
from benchmarks.strands_floor import floor_of, loopback_rate
from benchmarks.strands_groups import CONTENDERS, GROUPS, Comparison, Group
from benchmarks.strands_party import Party, Turn
from benchmarks.strands_work import SMOKE, WORKS, Work, work_as_text

EQUAL_WITHIN = 1e-4
DISTURBED = 0.1
"""Share of the machine that other programs may take before a turn is taken once more."""
CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A comparison for one model: medians over the rounds, the ratio's least and greatest, and the floor."""

    strand: str
    model: str
    ours_s: float
    peer: str
    peer_s: float
    ratio: float
    least_ratio: float
    greatest_ratio: float
    bar: float | None
    products_s: float
    bytes_s: float


def main() -> None:
    flags = _flags()
    works = SMOKE if flags.smoke else {name: WORKS[name] for name in flags.models}
    matmul_flops, loopback_bytes_s = matmul_rate(processes=2, threads=1), loopback_rate()
    rates = {"matmul_flops": matmul_flops, "loopback_bytes_s": loopback_bytes_s}
    print(f"2 processes × 1 thread: {matmul_flops / 1e9:.0f} GFLOP/s in float32 products, "
          f"{loopback_bytes_s / 1e9:.2f} GB/s over loopback\n")  # fmt: skip
    print(heading(), flush=True)
    results: list[Result] = []
    turns: dict[str, dict[str, list[Turn]]] = {}
    for group in GROUPS:
        kept = tuple(one for one in group.comparisons if flags.only is None or one.strand.startswith(flags.only))
        for model, work in works.items() if kept else ():
            work = long_form(work, flags.smoke) if group.long else work
            taken = take_turns(replace(group, comparisons=kept), model, work, flags)
            turns.setdefault(model, {}).update({f"{name}, {work.sequence}": t for name, t in taken.items()})
            for comparison in kept:
                results.append(judged(comparison, model, work, taken, rates))
                print(line(results[-1]), flush=True)
    if not flags.smoke:
        found = {model: {name: [asdict(t) for t in each] for name, each in by.items()} for model, by in turns.items()}
        facts = {"machine": describe(), "works": {name: asdict(work) for name, work in works.items()}, **rates}
        path = save("strands", {**facts, "results": [asdict(one) for one in results], "turns": found})
        print(f"\nwritten to {path}")


def take_turns(group: Group, model: str, work: Work, flags: argparse.Namespace) -> dict[str, list[Turn]]:
    """Every contender's turns in every round, once all of them have shown that they do the same mathematics."""
    names = list(dict.fromkeys(name for one in group.comparisons for name in (one.ours, *one.peers)))
    text = work_as_text(work)
    parties: dict[str, Party] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                who = CONTENDERS[name]
                command = f"{who.module} '{who.kind}'"
                parties[name] = Party(name, command, ranks=who.ranks, work=text, folder=Path(folder))
            check_equal({name: parties[name].first_losses() for name in names})

            def turn(name: str) -> Turn:
                print(f"  {model}: {name}", file=sys.stderr, flush=True)
                # Untimed first: what a step hides under the next one's forward is under way from then on.
                untimed, timed = (0, 1) if group.long else (1, flags.steps or work.timed_steps)
                once = parties[name].turn(untimed=untimed, timed=timed)
                if once.others <= DISTURBED or flags.smoke:
                    return once
                return min(once, parties[name].turn(untimed=untimed, timed=timed), key=lambda turn: turn.others)

            return alternate(names, flags.rounds, turn)
        finally:
            for party in parties.values():
                party.end()


def check_equal(losses: dict[str, list[float]]) -> None:
    """End the benchmark where a contender's first losses are not the first one's."""
    reference = next(iter(losses))
    for name, values in losses.items():
        worst = max(abs(one - base) for one, base in zip(values, losses[reference], strict=True))
        if not worst <= EQUAL_WITHIN:
            sys.exit(f"{name} and {reference} differ by {worst:.2e} in a first loss, more than {EQUAL_WITHIN}: they do "
                     "not do the same mathematics, so there is nothing to time")  # fmt: skip


def judged(
    comparison: Comparison, model: str, work: Work, turns: dict[str, list[Turn]], rates: dict[str, float]
) -> Result:
    """plait over the fastest of the peers, round by round."""
    seconds = {name: [turn.step_s for turn in each] for name, each in turns.items()}
    peer = min(comparison.peers, key=lambda name: median(seconds[name]))
    awaited = {"peer": [comparison.share * value for value in seconds[peer]], "ours": seconds[comparison.ours]}
    ours = compare(awaited, "peer")[1]
    floor = floor_of(comparison.strand, work, ranks=CONTENDERS[comparison.ours].ranks, **rates)
    return Result(
        strand=comparison.strand,
        model=model,
        ours_s=ours.median_s,
        peer=peer if comparison.share == 1 else f"{comparison.share:g} × {peer}",
        peer_s=median(awaited["peer"]),
        ratio=ours.ratio,
        least_ratio=ours.least_ratio,
        greatest_ratio=ours.greatest_ratio,
        bar=comparison.bar,
        products_s=floor.products_s,
        bytes_s=floor.bytes_s,
    )


def long_form(work: Work, smoke: bool) -> Work:
    """The same model with one long sequence a step."""
    return replace(work, sequences=1, sequence=work.sequence * 4 if smoke else CONTEXT_TOKENS)


COLUMNS = (
    "strand", "model", "ms a step", "peer", "peer's ms", "ratio", "least … greatest", "bar", "products, ms", "bytes, ms"
)  # fmt: skip


def heading() -> str:
    """The table's first two lines; what remains is a `line` a result."""
    return _cells(COLUMNS) + "\n" + _cells(["---"] * len(COLUMNS))


def line(one: Result) -> str:
    """A row of the table, printed as soon as it is known."""
    ours, peers, products, sent = (f"{s * 1e3:.1f}" for s in (one.ours_s, one.peer_s, one.products_s, one.bytes_s))
    spread = f"{one.least_ratio:.3f} … {one.greatest_ratio:.3f}"
    bar = "" if one.bar is None else f"{one.bar:.2f}{'' if one.ratio <= one.bar else ' missed'}"
    return _cells([one.strand, one.model, ours, one.peer, peers, f"{one.ratio:.3f}", spread, bar, products, sent])


def _cells(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time plait's strands and torch's own means for them, in turns.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contender (default 5)")
    parser.add_argument(
        "--steps", type=int, help="timed steps a turn (default: 2 of 11M, 1 of 50M and of long sequences)"
    )
    parser.add_argument("--models", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--only", metavar="STRAND", help="only rows whose strand begins so: replicate, shard, tensor …")
    parser.add_argument("--smoke", action="store_true", help="a tiny model; nothing is saved")
    return parser.parse_args()


if __name__ == "__main__":
    main()
