"""An evaluation from the side of the command: its workers are started and shown, and their answers put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import ceil, fsum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from plait.accelerator import gpu_count
from plait.commands.evaluating.request import EvaluationAnswer, EvaluationRequest, read_answer, write_rows
from plait.commands.models.found_model import FoundModel
from plait.commands.models.opened_model import devices_to_evaluate_on
from plait.data.choices import ChoiceRow
from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, Message
from plait.machines.machine import free_memory_bytes, usable_cores
from plait.model.shape import ModelShape, parameter_count
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import Plan
from plait.screen.screen import ShowProgress
from plait.workers import PROGRESS
from plait.working_folder import WorkingFolder

EVALUATION_ENTRIES = EntryTable(
    functions={"evaluate": "plait.commands.evaluating.rank:run_evaluation_rank"},
    preload=("plait.commands.evaluating.rank",),
)
"""Apart from the entries of other commands: a host that joined a run never evaluates for the one that leads."""
MICRO_TOKENS = 4096
"""Tokens that a model of a folder reads at a time, about: what a processor's cache holds well."""
WORKER_PROCESS_BYTES = 2**29
"""A worker's process beside weights and scores."""
SCORES_AT_ONCE = 2
"""How many times as large as a micro-batch's float32 logits the memory is that a forward pass takes beside weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredText:
    """A prepared text of `tokens` tokens that predict something: one part of the corpus in `folder`."""

    folder: Path
    part: Literal["heldout", "train"]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLosses:
    """The result of an evaluation."""

    loss_sum: float
    """In nats, over all tokens of the text."""
    tokens: int
    row_losses: tuple[float, ...]
    """Loss of each choice, in nats."""


def run_evaluation(
    found: FoundModel,
    what: MeasuredText | Sequence[ChoiceRow],
    *,
    like: Plan | None,
    show: ShowProgress,
    working: WorkingFolder,
    count: FixedWorkers | None = None,
) -> MeasuredLosses:
    """Measure a text or choices on all workers; blocks until they are done.

    Micro-batches and documents are as in the plan `like`, or usual ones. `count` is for tests: all workers, if left
    out. Raises Interrupted where a signal came, RunFailed where a worker died.
    """
    with TemporaryDirectory(prefix="plait-eval-") as folder:
        request = _request(found, what, like, folder)
        if not isinstance(what, MeasuredText):
            write_rows(folder, tuple(what))
        count = count or evaluation_workers(request, _micros(request, what))
        job = Job(
            entry="evaluate",
            argument=request.to_json(),
            world_size=count.workers,
            threads=count.threads,
            at_stop="abandon",
        )

        def on_message(message: Message) -> None:
            if message.kind == PROGRESS:
                show(*(message.values[key] for key in ("done", "total", "stage")))

        with ForkServer(EVALUATION_ENTRIES, working_folder=working.path) as server:
            server.run(job, on_message=on_message).require_finished()
        return put_together([read_answer(folder, rank) for rank in range(count.workers)])


def _request(
    found: FoundModel, what: MeasuredText | Sequence[ChoiceRow], like: Plan | None, folder: str
) -> EvaluationRequest:
    plan = found.run.plan if found.run else None
    is_text = isinstance(what, MeasuredText)
    most = (
        min(like.placement.micro_limits or (like.placement.micro_sequences,)) * like.job.sequence
        if like
        else MICRO_TOKENS
    )
    return EvaluationRequest(
        model=found.stored.resolved(),
        precision=plan.arithmetic.precision if plan else "float32",
        matmul_backend=plan.arithmetic.matmul_backend if plan else "default",
        corpus=str(what.folder.resolve()) if is_text else "",
        part=what.part if is_text else "heldout",
        micro_sequences=max(1, most // found.stored.shape.sequence) if is_text else 1,
        documents=like.job.documents if like else "mask",
        overlong=found.run.folder.saved_config().data.overlong if found.run else "refuse",
        eot=found.tokenizer.eot,
        gpus=devices_to_evaluate_on(found.run.devices if found.run else "auto", gpu_count()),
        folder=folder,
    )


def _micros(request: EvaluationRequest, what: MeasuredText | Sequence[ChoiceRow]) -> int:
    """How many micro-batches there are, at least; documents that end within a window add none."""
    if not isinstance(what, MeasuredText):
        return len(what)
    return ceil(what.tokens / (request.model.shape.sequence * request.micro_sequences))


def evaluation_workers(request: EvaluationRequest, micros: int) -> FixedWorkers:
    """One worker for each GPU; on a processor one for each core, as far as there are micro-batches for them and memory
    for a copy of the weights in each. A single one has all cores."""
    cores, most = usable_cores(), max(1, micros)
    if request.gpus:
        workers = min(len(request.gpus), most)
    else:
        workers = max(1, min(cores, most, int(free_memory_bytes() // bytes_of_worker(request.model.shape, request))))
    return FixedWorkers(workers=workers, threads=max(1, cores // workers))


def bytes_of_worker(shape: ModelShape, request: EvaluationRequest) -> int:
    """About the memory that one worker takes on a processor, in bytes."""
    logits = 4 * shape.sequence * request.micro_sequences * shape.vocabulary
    return 4 * parameter_count(shape) + SCORES_AT_ONCE * logits + WORKER_PROCESS_BYTES


def put_together(answers: Sequence[EvaluationAnswer]) -> MeasuredLosses:
    """The workers' answers as one; the sums are exactly rounded, so the same in any order."""
    rows = zip_longest(*(answer.row_losses for answer in answers))
    return MeasuredLosses(
        loss_sum=fsum(chain.from_iterable(answer.text_losses for answer in answers)),
        tokens=round(fsum(chain.from_iterable(answer.text_tokens for answer in answers))),
        row_losses=tuple(loss for turn in rows for loss in turn if loss is not None),
    )
