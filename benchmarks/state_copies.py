"""`python -m benchmarks.state_copies`: at which rate workers copy their state into memory that outlives them.

So many processes at a time write buffers into slots that were taken before, as ranks do after a step; each round's rate
is that of the slowest. Prints the median over the rounds, for `state_copy_rate` in planner/calibration/constants.toml.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from statistics import median

from plait.launch.in_memory.memory import AgentMemory, RankMemory

PAUSE_S = 0.05
"""Between two copies, as there are steps: what lies in the caches is then not the buffer."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_copies")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 36, 200])
    parser.add_argument("--rounds", type=int, default=15)
    flags = parser.parse_args()
    print("| MB a copy | GB/s of the slowest worker, median | least … greatest |")
    print("| --- | --- | --- |")
    for megabytes in flags.megabytes:
        rates = [
            min(rates_of_round) for rates_of_round in zip(*_rates(flags.workers, megabytes, flags.rounds), strict=True)
        ]
        print(f"| {megabytes} | {median(rates):.2f} | {min(rates):.2f} … {max(rates):.2f} |", flush=True)


def _rates(workers: int, megabytes: int, rounds: int) -> list[list[float]]:
    """GB/s of each round, for each worker."""
    found = []
    with closing(AgentMemory()) as memory:
        pipes = []
        for rank in range(workers):
            reader, writer = os.pipe()
            if os.fork() == 0:
                rates = _worker(RankMemory(memory.descriptor, rank), megabytes * 10**6, rounds)
                os.write(writer, " ".join(map(str, rates)).encode())
                os._exit(0)
            os.close(writer)
            pipes.append(reader)
        for reader in pipes:
            with os.fdopen(reader) as lines:
                found.append([float(rate) for rate in lines.read().split()])
            os.wait()
    return found


def _worker(memory: RankMemory, nbytes: int, rounds: int) -> list[float]:
    data, rates = memoryview(bytearray(os.urandom(1000)) * (nbytes // 1000)), []
    for slot in range(2):
        memory.reserve(slot, nbytes)
    for number in range(rounds + 2):
        time.sleep(PAUSE_S)
        began_s, slot = time.perf_counter(), number % 2
        memory.begin(slot)
        memory.write(slot, 0, data)
        memory.finish(slot, step=number, lineage=1, text=b"", data_bytes=nbytes)
        rates.append(nbytes / (time.perf_counter() - began_s) / 1e9)
    return rates[2:]


if __name__ == "__main__":
    main()
