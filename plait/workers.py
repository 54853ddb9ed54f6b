"""The workers of a command: started by plait's fork server, or already running under torchrun or another launcher."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

from plait.errors import OutOfTime, PlaitError, RunFailed, StopSignal
from plait.launch.local.run import ForkServer
from plait.launch.local.torchrun import launch_variables, threads_of, torchrun_context
from plait.launch.values.copies import CopiesByStep
from plait.launch.values.entries import EntryTable
from plait.launch.values.failure import FailureFacts
from plait.launch.values.job import Job, JobResult, Message, RankContext
from plait.machines.machine import Machine
from plait.machines.requested_workers import PeakNeed
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import Plan
from plait.screen.screen import ShowProgress, ignore_progress
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

TRAINING_ENTRY, TIMING_ENTRY, CHECK_ENTRY = "train", "time_steps", "check_gradients"
RECORDING_ENTRY = "record_steps"
MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY = "measure_machine", "probe", "measure_products"
MACHINE_CHECK_ENTRY = "check_machine"
ROUTING = "routing.safetensors"
"""The file in which the one process of a proof leaves the experts of each token, for the ranks of a layout."""
COMPILER, SYMBOLIC_SHAPES = "compiler", "symbolic shapes"
ENTRIES = EntryTable(
    functions={
        TRAINING_ENTRY: "plait.trainer.worker:main",
        TIMING_ENTRY: "plait.trainer.time_steps:rank",
        RECORDING_ENTRY: "plait.trainer.record_steps:run_recording_rank",
        CHECK_ENTRY: "plait.commands.verifying.reference:run_check_rank",
        MEASURE_ENTRY: "plait.probing.host_rank:run_host_rank",
        PROBE_ENTRY: "plait.probing.rank:run_probe_rank",
        PRODUCTS_ENTRY: "plait.probing.products:run_products_rank",
        MACHINE_CHECK_ENTRY: "plait.probing.check_rank:run_machine_check_rank",
    },
    preload=(
        "plait.probing.host_rank",  # what a command asks for first
        "plait.probing.products",
        "plait.trainer.worker",
        "plait.trainer.time_steps",
        "plait.trainer.record_steps",
        "plait.commands.verifying.reference",
        "plait.probing.rank",
        "plait.probing.check_rank",
        "tensorboard.compat.proto.event_pb2",  # what rank 0 of a run needs
        "tensorboard.summary.writer.record_writer",
        "tensorboard.plugins.hparams.plugin_data_pb2",
    ),
    optional={COMPILER: "torch._dynamo", SYMBOLIC_SHAPES: "torch.fx.experimental.symbolic_shapes"},
)
"""All that a worker of plait's commands can do, on whichever host."""


def modules_needed(plan: Plan) -> tuple[str, ...]:
    """What a job of this plan needs beside the usual (Job.needs): more than a second of imports where torch's own parts
    meet its compiler, as split parameters, recomputed layers and the experts' products do without being compiled; a
    third of one in a pipeline, as autograd looks at the shape of a gradient that it is given."""
    meets = (
        plan.placement.layout.gathers_weights
        or plan.placement.layout.recompute != "none"
        or plan.job.shape.mixture is not None
        or plan.arithmetic.compile != "off"
    )
    if meets:
        return (COMPILER,)
    return (SYMBOLIC_SHAPES,) if plan.placement.layout.pipeline > 1 else ()


PROGRESS = "progress"
"""Kind of the message by which rank 0 of a job reports its progress, with the arguments of a ShowProgress."""
_LEAVE_WITHIN_S, _LOOK_S = 10.0, 0.05
OnMessage = Callable[[Message], None]


class WorkerPool(Protocol):
    """Runs a job's ranks and blocks until all of them returned; raises PlaitError when one could not."""

    @property
    def working_folder(self) -> WorkingFolder:
        """The ranks' current folder, in which the command keeps its plans and measurements."""
        ...

    @property
    def fixed_workers(self) -> FixedWorkers | None:
        """The number of workers and their threads where it is given from outside; None where the plan chooses it."""
        ...

    def run(self, job: Job, on_message: OnMessage) -> JobResult: ...

    def copied_steps(self, lineage: int) -> Sequence[int]:
        """The steps of which every rank of the last job has a whole copy of its state, of this lineage, in its host's
        memory, the newest first; call it between jobs."""
        ...

    def copies(self, lineage: int) -> CopiesByStep:
        """The whole copies of this lineage in the memory of the hosts that are left, the newest step first; call it
        between jobs. Together they may lack what a lost host had."""
        ...


class HostWorkers(WorkerPool, Protocol):
    """A worker pool that knows which host has which of a plan's ranks."""

    def with_hosts(self, plan: Plan) -> Plan:
        """The plan with each host's part in it, where there are several."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """The addresses at which hosts reach each other, host 0 first; empty for a single host."""
        ...

    def host_machines(self, peak: PeakNeed = "measured") -> tuple[tuple[Machine, float | None, int], ...]:
        """Each host's machine, the rate of its processor and its number of workers; empty for a single host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A run's plan for the machines that are there now, and who came and went since the plan before, as a sentence
    (`who`). `until` says how long it is slower for it."""

    plan: Plan
    subject: Literal["hosts", "devices"]
    who: str
    until: str = ""


class CannotGoOn(RunFailed):
    """The machines that are left cannot carry the run, which is saved; `left_by` is the signal by which the one that is
    missing was stopped there, None where it was lost."""

    def __init__(self, sentence: str, left_by: StopSignal | None) -> None:
        super().__init__(sentence)
        self.left_by: StopSignal | None = left_by


class ElasticWorkers(Protocol):
    """The workers of a run, on machines that may come and go between its starts."""

    @property
    def workers(self) -> WorkerPool:
        """The workers of the present machines."""
        ...

    @property
    def may_shrink(self) -> bool:
        """Whether the run may go on without a machine that it lost."""
        ...

    def renewed(self, plan: Plan, failure: FailureFacts | None) -> Renewed | None:
        """Look at who is there, and plan again where that is not who was there before; None where nothing changed. Call
        it while no ranks run. `failure` is what ended the start before; None where it was paused.

        Raises CannotGoOn where the machines that are left cannot carry the run.
        """
        ...


PlanFor = Callable[[HostWorkers], Plan]
"""Makes a begun run's plan for the workers that are there; raises PlaitError where they cannot carry the run."""


class ForkedWorkers:
    """Workers forked on this machine from a server that has torch loaded."""

    fixed_workers = None

    def __init__(self, server: ForkServer, working_folder: WorkingFolder = CURRENT_FOLDER) -> None:
        self._server, self._ranks = server, 0
        self.working_folder = working_folder

    def with_hosts(self, plan: Plan) -> Plan:
        return replace(
            plan,
            machines=replace(plan.machines, hosts=(), left_out=()),
            placement=replace(plan.placement, host_order=()),
        )

    def host_machines(self, peak: PeakNeed = "measured") -> tuple[()]:
        return ()

    def addresses(self) -> tuple[()]:
        return ()

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        self._ranks = job.world_size
        return self._server.run(job, on_message=on_message)

    def copied_steps(self, lineage: int) -> Sequence[int]:
        return self._server.whole_steps(self._ranks, lineage)

    def copies(self, lineage: int) -> CopiesByStep:
        return self._server.copies(range(self._ranks), lineage)


class TorchrunWorkers:
    """The processes that a launcher started: rank 0 decides, and sends the others each job through the launcher's
    store, or through its own where the launcher has none.

    Raises PlaitError where rank 0 is not found, or the processes contradict each other.
    """

    working_folder = CURRENT_FOLDER

    def __init__(self, context: RankContext) -> None:
        # torch: only here, where it is needed anyway
        from plait.parallel.launcher_store import launcher_has_store, open_launcher_store

        self._store = open_launcher_store("orders", context.rank, context.stop_requested)
        self._has_own_store = not launcher_has_store()
        self._context = context
        self._context = self._placed(context) if self._has_own_store else context
        self._n_orders = 0
        self.fixed_workers = FixedWorkers(workers=context.world_size, threads=self._context.threads)

    def _placed(self, context: RankContext) -> RankContext:
        """The context, with this host's ranks counted where the launcher does not say how many there are; every rank
        calls it. Raises PlaitError where the launcher gave a rank twice, or another number of ranks to some."""
        rank, world_size = context.rank, context.world_size
        if self._store.add(f"rank-{rank}", 1) > 1:
            raise PlaitError(f"two processes have RANK = {rank} in the environment; give each its own")
        own = (
            f"{platform.node()} {Path('/proc/self/ns/mnt').readlink()}" if sys.platform == "linux" else platform.node()
        )
        self._store.set(f"place-{rank}", json.dumps([world_size, own]))
        places: list[str] = []
        for other in range(world_size):
            size, place = json.loads(self._waited(f"place-{other}", f"RANK = {other} has not come"))
            if size != world_size:
                raise PlaitError(
                    f"WORLD_SIZE is {size} for RANK = {other} and {world_size} for RANK = {rank}; give all the same"
                )
            places.append(place)
        variables = launch_variables(os.environ)
        here = [other for other, place in enumerate(places) if place == own]
        if variables is None or variables.local_world_size is not None:
            return context
        local_rank = here.index(rank) if variables.local_rank is None else variables.local_rank
        count = len(here)
        return replace(context, local_rank=local_rank, local_world_size=count, threads=threads_of(count))

    def _waited(self, key: str, otherwise: str) -> bytes:
        from plait.parallel.launcher_store import APPEARS_WITHIN_S

        deadline = time.monotonic() + APPEARS_WITHIN_S
        while True:
            try:
                self._store.wait([key], timedelta(seconds=1))
                return self._store.get(key)
            except Exception as error:
                if not _is_timeout(error):
                    raise PlaitError("rank 0 is gone; see what it said") from error
            if self._context.stop_requested() or time.monotonic() > deadline:
                waited_s = time.monotonic() - deadline + APPEARS_WITHIN_S
                raise PlaitError(f"{otherwise} within {waited_s:.0f} s; see what it printed")

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._context.rank == 0

    def with_hosts(self, plan: Plan) -> Plan:
        return replace(plan, machines=replace(plan.machines, hosts=()))

    def host_machines(self, peak: PeakNeed = "measured") -> tuple[()]:
        return ()

    def addresses(self) -> tuple[()]:
        return ()

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        began = time.monotonic()
        self._send_order({"entry": job.entry, "argument": job.argument, "everybody": job.world_size > 1})
        channel: Callable[[str, Any], None] = lambda kind, values: on_message(  # noqa: E731
            Message(rank=0, kind=kind, values=values)
        )
        world_size = self._context.world_size if job.world_size > 1 else 1
        self._call(job.entry, job.argument, replace(self._context, channel=channel, world_size=world_size))
        stopped = "SIGTERM" if self._context.stop_requested() else "finished"
        return JobResult(stopped_by=stopped, wall_s=time.monotonic() - began)

    def copied_steps(self, lineage: int) -> tuple[()]:
        """None: no process outlives the ranks."""
        return ()

    def copies(self, lineage: int) -> CopiesByStep:
        return {}

    def serve(self) -> None:
        """Run rank 0's jobs until it dismisses the workers; every rank but 0 calls this."""
        while (order := self._next_order()) is not None:
            if order["everybody"]:
                self._call(order["entry"], order["argument"], self._context)

        if self._has_own_store:
            self._store.add("left", 1)

    def dismiss(self) -> None:
        """Tell the other ranks that no further job will come, and serve the store until they know; rank 0 calls it."""
        self._send_order(None)
        deadline = time.monotonic() + _LEAVE_WITHIN_S
        while self._has_own_store and self._store.add("left", 0) < self._context.world_size - 1:
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)

    def _call(self, entry: str, argument: str, context: RankContext) -> None:
        ENTRIES.load(entry)(replace(context, rendezvous=f"env://job-{self._n_orders}"), argument)

    def _send_order(self, order: dict[str, Any] | None) -> None:
        self._n_orders += 1
        self._store.set(f"order-{self._n_orders}", json.dumps(order))

    def _next_order(self) -> dict[str, Any] | None:
        self._n_orders += 1
        while True:
            try:
                return json.loads(self._store.get(f"order-{self._n_orders}"))
            except Exception as error:  # the store's own timeout, while rank 0 prepares data
                if not _is_timeout(error):
                    raise PlaitError("rank 0 is gone; see what it said") from error


def _is_timeout(error: Exception) -> bool:
    return "timeout" in str(error).lower()


def ask_rank_0(workers: WorkerPool, job: Job, kind: str, show: ShowProgress = ignore_progress) -> dict[str, Any]:
    """Run a job whose rank 0 sends one message of this kind, and return its values; raises Interrupted where a
    signal came. `show` gets the job's progress where rank 0 tells it."""
    answers: list[Message] = []

    def collect(message: Message) -> None:
        if message.kind == PROGRESS:
            show(*(message.values[key] for key in ("done", "total", "stage")))
        if message.kind == kind:
            answers.append(message)

    try:
        workers.run(job, collect).require_finished()
    except OutOfTime:  # workers that end too slowly have answered all the same
        if not answers:
            raise
    if not answers:
        raise PlaitError(f"a worker ended without an answer ({job.entry}); this is a bug in plait, please report it")
    return dict(answers[0].values)


@cache
def _launched_workers() -> TorchrunWorkers | None:
    """The workers that a launcher started, this process among them: for as long as it lives, and opened by all ranks
    before anything else, so that none waits for a rank 0 that has failed."""
    context = torchrun_context()
    return None if context is None else TorchrunWorkers(context)


@contextmanager
def worker_pool(
    working: WorkingFolder = CURRENT_FOLDER, entries: EntryTable = ENTRIES, started: ForkServer | None = None
) -> Iterator[HostWorkers]:
    """The workers at hand, forked from a server that was `started` before, if any; under torchrun the block runs on
    rank 0 alone, and the others leave when it ends."""
    workers = _launched_workers()
    if workers is None:
        with nullcontext(started) if started else ForkServer(entries, working_folder=working.path) as server:
            yield ForkedWorkers(server, working)
        return
    try:
        yield workers
    finally:
        workers.dismiss()


def serve_under_torchrun() -> bool:
    """Under torchrun, on any rank but 0, serve rank 0 until it is done and return True; else return False."""
    workers = _launched_workers()
    if workers is None or workers.leads:
        return False
    workers.serve()
    return True


def dismiss_torchrun_ranks() -> None:
    """Under torchrun, on rank 0 and with nothing to do, dismiss the other ranks, which would wait for ever."""
    workers = _launched_workers()
    if workers is not None:
        workers.dismiss()


def refuse_torchrun() -> None:
    """Raise PlaitError where torchrun started this process, which then has all its workers already."""
    if _launched_workers() is not None:
        dismiss_torchrun_ranks()
        raise PlaitError(
            "--hosts starts workers, and a launcher has started this process as one; leave --hosts out, or run plait "
            "without the launcher"
        )


def make_log_folder(folder: Path) -> str:
    """Create the folder for what a run's ranks print and for their tracebacks; returns its path."""
    path = folder / "logs"
    path.mkdir(exist_ok=True)  # not what is above: a run's folder that was moved is not made again
    return str(path)
