"""One rank of the benchmark of what recovery costs: plait's own worker, with the added code counted as it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from plait.launch.values.job import RankContext

FOLDER = "cost"
Kind = Literal["publishing", "saving", "numbers"]
ADDED: dict[str, tuple[Kind, Literal["wall", "cpu"]]] = {
    "plait.launch.watching.board:SlotWriter.phase": ("publishing", "wall"),
    "plait.launch.watching.board:SlotWriter.step": ("publishing", "wall"),
    "plait.launch.watching.board:SlotWriter.collective": ("publishing", "wall"),
    "plait.trainer.checkpointing.background:CheckpointSaver.begin": ("saving", "wall"),
    "plait.trainer.checkpointing.background:CheckpointSaver.ended": ("saving", "wall"),
    "plait.trainer.checkpointing.background:CheckpointSaver.finish": ("saving", "wall"),
    "plait.trainer.checkpointing.background:CheckpointSaver._write": ("saving", "cpu"),
    "plait.trainer.divergence:NumberWatch.judge": ("numbers", "wall"),
}
"""What was added, and whether training waits for it or a thread of its own does it. A call within another of its kind
counts once."""


class Counted:
    """Seconds spent in functions that are wrapped by it."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self.calls = 0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted."""

        def counted(*values: Any, **named: Any) -> Any:
            if self._depth:
                return function(*values, **named)
            self._depth += 1
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*values, **named)
            finally:
                self.wall_s += time.perf_counter() - began_s
                self.cpu_s += time.thread_time() - began_cpu_s
                self.calls += 1
                self._depth -= 1

        return counted


def main(context: RankContext, argument: str) -> None:
    """Entry of a rank: as plait.trainer.worker's, and a file of what was counted beside the run's."""

    from plait.trainer import loop, worker

    waits: dict[Kind, Counted] = {"publishing": Counted(), "saving": Counted(), "numbers": Counted()}
    threads: dict[Kind, Counted] = {kind: Counted() for kind in waits}
    for name, (kind, how) in ADDED.items():
        module, _, path = name.partition(":")
        owner, _, method = path.rpartition(".")
        where = getattr(import_module(module), owner)
        counter = waits[kind] if how == "wall" else threads[kind]
        setattr(where, method, counter.wrap(getattr(where, method)))
    began_s = [0.0]
    run = loop.run_loop

    def timed(*values: Any, **named: Any) -> Any:
        began_s[0] = time.perf_counter()
        try:
            return run(*values, **named)
        finally:
            began_s[0] = time.perf_counter() - began_s[0]

    worker.run_loop = timed
    worker.main(context, argument)
    folder = Path(json.loads(argument)["folder"]) / FOLDER
    folder.mkdir(exist_ok=True)
    told = {
        "wall_s": began_s[0],
        "seconds": {kind: waits[kind].wall_s + threads[kind].cpu_s for kind in waits},
        "calls": {kind: waits[kind].calls + threads[kind].calls for kind in waits},
    }
    (folder / f"rank-{context.rank}.json").write_text(json.dumps(told))
