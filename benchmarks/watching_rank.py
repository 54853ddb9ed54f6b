"""One rank of the benchmark of watching: `bare` or `watched` steps of the same work, four of them in a turn's step."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.strands_contender import assembled, plan_for
from benchmarks.strands_work import TakeStep, join, serve
from plait.trainer.assemble import Assembly
from plait.trainer.balance.actions import GATHERED_STEPS, Rebalancer
from plait.trainer.balance.meter import attach_meter, clock_of
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars
from tests.plans import changed


def main() -> None:
    work, flags = join()
    assembly = assembled(work, changed(plan_for(work, '{"replicate": 2}'), steps=10**9))
    serve(watched_steps(assembly, Path(flags.rendezvous).parent) if flags.kind == "watched" else bare_steps(assembly))


def bare_steps(assembly: Assembly) -> TakeStep:
    """Takes GATHERED_STEPS steps that nobody watches, and returns the mean loss of the last."""
    state = TrainState()

    def take(_: int) -> float:
        nonlocal state
        mean_loss = 0.0
        for _ in range(GATHERED_STEPS):
            state, scalars = assembly.step(state)
            mean_loss = mean_of(scalars)
        return mean_loss

    return take


def watched_steps(assembly: Assembly, folder: Path) -> TakeStep:
    """The same steps with their times measured and gathered, and the balance of shares reckoned after them.

    Rank 0 writes the share of the time that the reckoning took to the file `spent` of `folder`.
    """
    assembly, meter = attach_meter(assembly, clock_of(torch.device("cpu")))
    balance = Rebalancer(assembly, meter, folder / "shares.jsonl", assembly.sums, report=lambda **_: None)
    state = TrainState()

    def take(_: int) -> float:
        nonlocal state
        mean_loss, began_s = 0.0, time.perf_counter()
        for _ in range(GATHERED_STEPS):
            state, scalars = balance.step(assembly.step, state)
            mean_loss = mean_of(scalars)
        reckons_s = time.perf_counter()
        balance.rebalance_if_due(state)
        ended_s = time.perf_counter()
        if assembly.sums.index == 0:
            with (folder / "spent").open("a") as out:
                out.write(f"{(ended_s - reckons_s) / (ended_s - began_s)}\n")
        return mean_loss

    return take


def mean_of(scalars: Scalars) -> float:
    """A step's loss: the sum over all tokens, by their number."""
    loss, tokens = scalars.totals.tolist()
    return loss / tokens


if __name__ == "__main__":
    main()
