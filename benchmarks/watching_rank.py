"""One rank of the benchmark of watching: `bare` or `watched` steps of the same work, four of them in a turn's step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.strands_contender import assembled, plan_for
from benchmarks.strands_work import join, serve
from plait.trainer.balance.actions import GATHERED_STEPS, Rebalancer
from plait.trainer.balance.meter import attach_meter, clock_of
from plait.trainer.state import TrainState


def main() -> None:
    work, flags = join()
    assembly = assembled(work, replace(plan_for(work, '{"replicate": 2}'), steps=10**9))
    folder, state = Path(flags.rendezvous).parent, TrainState()
    if flags.kind == "watched":
        assembly, meter = attach_meter(assembly, clock_of(torch.device("cpu")))
        balance = Rebalancer(assembly, meter, folder / "shares.jsonl", assembly.sums, report=lambda **_: None)

    def four_bare_steps(_: int) -> float:
        nonlocal state
        for _ in range(GATHERED_STEPS):
            state, scalars = assembly.step(state)
            loss, tokens = scalars.totals.tolist()
        return loss / tokens

    def four_watched_steps(_: int) -> float:
        nonlocal state
        began_s = time.perf_counter()
        for _ in range(GATHERED_STEPS):
            state, scalars = balance.step(assembly.step, state)
            loss, tokens = scalars.totals.tolist()
        reckons_s = time.perf_counter()
        balance.rebalance_if_due(state)
        ended_s = time.perf_counter()
        if assembly.sums.index == 0:
            with (folder / "spent").open("a") as out:
                out.write(f"{(ended_s - reckons_s) / (ended_s - began_s)}\n")
        return loss / tokens

    serve(four_watched_steps if flags.kind == "watched" else four_bare_steps)


if __name__ == "__main__":
    main()
