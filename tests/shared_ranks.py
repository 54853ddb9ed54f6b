"""One fork server for the ranks of tests: it takes seconds to import torch, and each rank is a fork that has it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import NOTE, Job, JobResult, Message
from tests.entry_tables import ROOT, public_functions

PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "plait.trainer.worker", "plait.custom.exact_norm.batch_norm",
    "plait.custom.planning.measure", "plait.custom.layouts.sharded_parameters", "plait.custom.verifying.verify",
    "tests.custom.parity_entries", "tests.custom.run_entries", "tests.parallel.ends_entries",
    "tests.parallel.order_entries", "tests.parallel.pipeline_entries", "tests.parallel.shard_entries",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RanksOf:
    """Runs the entries of one module of tests; a test about the server itself needs one of its own."""

    module: str

    def run(self, job: Job, *, on_message: Callable[[Message], None]) -> JobResult:
        """As ForkServer.run, without what the supervisor says in rank 0's name: that ranks are slow, on a busy machine,
        and that would stand in the place of what rank 0 said last."""

        def hear(message: Message) -> None:
            if message.kind != NOTE:
                on_message(message)

        return _server().run(replace(job, entry=_entry(self.module, job.entry)), on_message=hear)


def _entry(module: str, function: str) -> str:
    """The name in the table: several modules have functions of one name."""
    return f"{module.replace('.', '_')}_{function}"


@cache
def _server() -> ForkServer:
    """Ended with this process."""
    modules = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("tests/*/*_entries.py")]
    names = [".".join(module.parts) for module in modules]
    functions = {_entry(name, one): f"{name}:{one}" for name in names for one in public_functions(name)}
    stack = ExitStack()
    atexit.register(stack.close)
    table = EntryTable(functions=functions, preload=PRELOAD)
    return stack.enter_context(ForkServer(table, threads=1))
