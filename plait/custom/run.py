"""The run that `plait.spread` returns: batches, steps, evaluation, saving, for a person's own loop."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from plait.custom.agreement import check_same_batch, check_same_data, unlike_shapes_text
from plait.custom.arithmetic.library import ProductLibrary
from plait.custom.cutting import BatchCut, batch_part, batch_size
from plait.custom.data.batches import (
    BatchPlace,
    BatchRequest,
    LastBatch,
    Order,
    OwnBatches,
    global_batch,
    own_batches,
)
from plait.custom.data.measured_shares import ShareMeter
from plait.custom.data.shares import ShareTable, WorkerShares
from plait.custom.data.sources import Collate, CollatedOver, unused_processes_text
from plait.custom.gathering import Gathering
from plait.custom.group import Workers
from plait.custom.layouts.description import CustomLayout, LayoutChoices, Releasable
from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.likeness import WorkerKinds
from plait.custom.program import Program
from plait.custom.saving.program_state import IfMissing, resume_program, save_program
from plait.custom.seeds import seed_everything, seed_from, seeded
from plait.custom.stepping.evaluate import evaluate_mean, evaluate_sums
from plait.custom.stepping.rate import RateRule, goyal_rule
from plait.custom.stepping.step import StepTaker
from plait.custom.stepping.timeline import write_timeline
from plait.custom.stepping.update import refuse_other_updates
from plait.custom.structure import on_device
from plait.errors import PlaitError
from plait.parallel.exchange import gather_json

if TYPE_CHECKING:
    from plait.custom.planning.measure import CustomPlan
    from plait.custom.stepping.recording import RecordedProgram
    from plait.proof import Verdict


class SpreadRun:
    """A program on all its workers. Each of them calls the same methods in the same order."""

    def __init__(
        self,
        program: Program,
        parallel: ParallelProgram,
        workers: Workers,
        layout: CustomLayout,
        *,
        choices: LayoutChoices,
        cut: BatchCut | None,
        kinds: WorkerKinds,
        library: ProductLibrary,
    ) -> None:
        self._program, self._parallel, self._workers, self._cut = program, parallel, workers, cut
        self._layout: CustomLayout = layout
        self._steps, self._shared = 0, False
        self._places: list[BatchPlace] = []
        self._calls = 0
        self._active: list[OwnBatches] = []
        self._meter = ShareMeter(workers, "alike" if kinds.kinds == "alike" else "unlike", kinds.names)
        self._library = library
        self._gathering = Gathering(workers)
        self._taker = StepTaker(program, parallel, workers, layout, cut, library, self._gathering)
        self._rate = RateRule()
        self._wait_s, self._names = 0.0, kinds.names
        self._own_draws, self._draws = seed_from("between", program.seed, *program.named_parameters()), 0
        """A number of this program's, and how often generators were seeded by it."""
        self._choices = choices
        self._recorded: RecordedProgram | None = None
        self._last: list[Any] = []
        """The last batch that was handed out, if any."""
        self._end = weakref.finalize(self, _release, parallel.holds(), refuse_other_updates(program))
        self._end.atexit = False

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._workers.rank

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self._workers.size

    @property
    def device(self) -> torch.device:
        """The device of this worker's models and batches."""
        return self._workers.device

    @property
    def layout(self) -> CustomLayout:
        """How the weights lie over the workers."""
        return self._layout

    @property
    def steps(self) -> int:
        """Steps taken so far, those before a resume included."""
        return self._steps

    @property
    def shares(self) -> tuple[float, ...]:
        """Each worker's part of a batch, as decided last."""
        return self._meter.shares

    @property
    def data_wait_s(self) -> float:
        """Seconds that this worker has waited for its data so far."""
        return self._wait_s + sum(own.maker.wait_s for own in self._active)

    def batches(
        self,
        data: Any,
        *,
        batch: int | None = None,
        batch_per_worker: int | None = None,
        shares: WorkerShares = "auto",
        epochs: int = 1,
        order: Order = "auto",
        last: LastBatch = "auto",
        collate: Collate | None = None,
        collated_over: CollatedOver = "share",
    ) -> Iterator[Any]:
        """This worker's share of each global batch of `batch` examples, on its device, over `epochs` passes.

        `data`: a Dataset, a list of examples, tensors of one length, a DataLoader, or an iterable (of examples if
        `batch` is given, else of global batches). `batch_per_worker` in its place grows the batch with the workers, and
        the learning rate by Goyal's rule. `collated_over="batch"`: examples of the whole batch come together in
        `collate` (padding to the longest, mixing), and each worker keeps its part. After a resume, calls go on where
        they were. Raises PlaitError in one sentence.
        """
        size = global_batch(batch, batch_per_worker, epochs, self.workers)
        self._meter.choose(shares)
        number, self._calls = self._calls, self._calls + 1
        if number == len(self._places):
            self._places.append(BatchPlace())
        request = BatchRequest(
            batch=size, epochs=epochs, order=order, last=last, collate=collate, collated_over=collated_over,
            cut=self._cut, seed=self._program.seed, number=number,
        )  # fmt: skip
        place = self._places[number]
        if self._meter.fixed or not place.shares:
            place.shares = [(0, self._meter.shares)]
        own = own_batches(data, request, ShareTable(self.workers, place.shares), self.rank, place)
        if number == 0 and (line := unused_processes_text(data)):
            self._workers.say(line)
        if batch_per_worker is not None:
            self._grow_rate(batch_per_worker, own.steps_per_epoch)
        return self._each(own)

    def share(self, batch: Any) -> Any:
        """This worker's part of a batch that the program made itself, alike on all workers (a replay buffer, an
        environment): on its device, and by the same shares as batches of data. Every worker must call it; blocks once.
        """
        if not self._shared:
            check_same_batch(batch, self._workers)
            self._shared = True
        size = batch_size(batch, self._cut)
        first, end = ShareTable(self.workers, [(0, self._meter.shares)]).own_range(0, size, self.rank)
        return on_device(batch_part(batch, first, end, self._cut), self.device)

    def step(self, batch: Any, *, losses: Literal["all"] | Sequence[int] = "all") -> Tensor:
        """One step with this worker's share of a batch: forward, backward, sums over all workers, clipping, update.

        Of several losses those of these numbers are taken, in this order, each with its optimizer. Returns the global
        mean loss: 0-dim, or one for each of several [losses]; float64. Every worker must call it for every batch.
        """
        if not self._end.alive:
            raise PlaitError("this run is closed; call plait.spread again for a new one")
        everyone = range(len(self._program.losses))
        if losses != "all" and not isinstance(losses, Sequence):
            raise PlaitError(f'losses = {losses}; give "all", or a list of numbers of losses')
        taken = list(everyone) if losses == "all" else list(losses)
        if not taken or not set(taken) <= set(everyone) or len(set(taken)) < len(taken):
            raise PlaitError(f"losses = {taken}; give some of {list(everyone)}, each once")
        began, clock = time.perf_counter(), self._meter.clock()
        given = sum(place.given for place in self._places)
        factor = self._rate.factor(self._steps)
        recorded = self._recorded
        with recorded.recorder.step(self._steps + 1) if recorded is not None else nullcontext():
            means, own_s = self._taker.take(
                batch, step=self._steps, number=given, clock=clock, rate_factor=factor, losses=taken
            )
        self._steps += 1
        if recorded is not None and recorded.is_done:
            self._recorded = None
            recorded.write()
        self._seed_between("step")
        for done in self._places:
            done.used = done.given
        if clock == "timed" and all(own.last_is_full for own in self._active):
            self._meter.note(own_s, time.perf_counter() - began, self._active)
        return means[0] if len(means) == 1 else torch.stack(means)

    def gradients(self, *, loss: int = 0) -> dict[str, Tensor]:
        """The last step's whole gradient of a loss's mean, by parameter, after clipping; parameters that nobody's
        backward reached are not in it. Every worker must call it; blocks where weights are cut."""
        return self._parallel.full_gradients(loss)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name. Every worker must call it; blocks where weights are cut."""
        return self._parallel.full_weights()

    def evaluate(self, data: Any, *, batch: int = 256, loss: int = 0) -> Tensor:
        """The exact mean of a loss over all of the data, in the models' evaluation mode: 0-dim, float64, the same on
        all workers. Every worker must call it; blocks."""
        with self._library.selected():
            mean = evaluate_mean(self._program, self._workers, data, batch, loss, self._cut)
        self._seed_between("evaluate")
        return mean

    def evaluate_sums(
        self, data: Any, sums: Callable[[Any, Any], Mapping[str, Any]], *, batch: int = 256
    ) -> dict[str, Tensor]:
        """Metrics over all of the data, in the models' evaluation mode: `sums(model, batch)` returns numbers and
        tensors by name (right answers, a confusion matrix, a count), which are added up: float64, the same on all
        workers. Every worker must call it; blocks."""
        program = self._program
        models = program.models[0] if program.single else program.models
        with self._library.selected():
            found = evaluate_sums(program, self._workers, data, batch, self._cut, lambda part: sums(models, part))
        self._seed_between("evaluate")
        return found

    def gather(self, rows: Tensor) -> Tensor:
        """All workers' rows [rows of all, …] in rank order, of this worker's [rows, …]: for losses across the batch,
        with gradients back to all rows, and for metrics.

        In a loss give `additive="no"` to plait.spread, and use what is gathered in what is returned: gradients are
        sums over all workers' losses. Every worker must call it as often and in the same order; blocks.
        """
        return self._gathering.gather(rows)

    def own_places(self, rows: Tensor) -> Tensor:
        """The indices [rows] of this worker's rows in what `gather` returns. Every worker must call it; blocks."""
        return self._gathering.own_places(rows)

    def verify(self, batch: Any) -> Verdict:
        """Whether all workers compute what one process computes on this batch, of which each gives its own share: in
        float64, on copies; see `verify_program`. Every worker must call it; blocks."""
        from plait.custom.verifying.verify import verify_program

        self._workers.announce("run.verify")()
        with seeded(seed_from("verify")):
            return verify_program(
                self._program, self._workers, self._layout, batch, cut=self._cut, weights=self.weights(),
                choices=self._choices,
            )  # fmt: skip

    def plan(self) -> CustomPlan:
        """Which layout suits this program, measured in a few steps of each on copies, with the last batch. Every worker
        must call it; blocks."""
        from plait.custom.planning.measure import plan_program

        if not self._last:
            raise PlaitError("run.plan measures steps on a batch; call it in the loop over run.batches")
        self._workers.announce("run.plan")()
        with self._library.selected(), seeded(seed_from("plan")):
            return plan_program(self._program, self._workers, self._last[0], weights=self.weights())

    def timeline(self, path: str | Path) -> None:
        """Write where the time of the last thousand steps went on each worker, as a trace for Perfetto or
        chrome://tracing. Every worker must call it; blocks."""
        write_timeline(Path(path), self._taker.spans, self._workers, self._names)

    def record_steps(self, path: str | Path, steps: int = 3) -> None:
        """Record the next steps in detail on all workers: passes, sums, messages and waits. The last of them writes
        `path`: a trace for Perfetto, or a page if the name ends with .html. Every worker must call it, before a step.
        """
        from plait.custom.stepping.recording import RecordedProgram

        self._recorded = RecordedProgram(Path(path), steps, self._workers, self._layout)
        self._workers.announce("run.record_steps")()

    def save(self, folder: str | Path, *, extra: Any = None) -> None:
        """Save all that a resume needs to `folder`, whole or not at all. Every worker must call it; blocks.

        `extra` is what the program keeps itself (an average of weights, the best loss so far), as worker 0 has it:
        numbers, texts and tensors, in lists and dicts. `resume` returns it.
        """
        places = [place.plain() for place in self._places]
        progress = {"places": places, "shares": list(self._meter.shares), "decided": self._meter.decided}
        progress["step"] = self._taker.progress()
        progress["products"] = self._library.saved()
        progress["draws"] = self._draws
        save_program(Path(folder), self._program, self._parallel, self._workers, self._steps, progress, extra)

    def resume(self, folder: str | Path, *, missing: IfMissing = "error") -> Any:
        """Go on from the newest state in `folder`, on any number of workers: to the bit on as many as saved it. Returns
        the `extra` that was saved, on every worker; None where there was none. With `missing` "begin" the run begins
        where nothing is saved yet.

        Call it before run.batches, whose calls then begin where they were. Every worker must call it; blocks.
        """
        if self._calls:
            raise PlaitError("run.resume comes too late: call it before run.batches, whose batches go on from there")
        found = resume_program(Path(folder), self._program, self._parallel, self._workers, missing)
        if found is None:
            return None
        self._steps, progress = int(found["steps"]), found["progress"]
        self._taker.resume(progress["step"])
        self._library.resume(progress.get("products", []))
        self._draws = int(progress.get("draws", 0))
        same = "same workers" if found["workers"] == self.workers else "other workers"
        self._places = [BatchPlace.from_plain(saved, same) for saved in progress["places"]]
        if same == "same workers":
            self._meter.resume(progress["shares"], progress["decided"])
        return found["extra"]

    def close(self) -> None:
        """End the run, as losing the last reference to it does: its models may be spread again. An optimizer of layout
        "shard optimizer" holds parts of weights, so make a new one; weights of "shard parameters" stay sharded."""
        self._end()

    def _each(self, own: OwnBatches) -> Iterator[Any]:
        self._active.append(own)
        try:
            began = time.perf_counter()
            for number, batch in enumerate(own):
                self._taker.spans.add("wait for data", self._steps, began, time.perf_counter())
                if number == 0:
                    check_same_data(own, self._workers)
                    own.first = None
                    # A share may hold none of those examples that are random: Note [random data].
                    own.maker.draws = any(gather_json(bool(own.maker.draws), self._workers.sums))
                    if line := unlike_shapes_text(batch, self._workers):
                        self._workers.say(line)
                self._last = [on_device(batch, self.device)]
                self._seed_between("batch")
                yield self._last[0]
                began = time.perf_counter()
        finally:
            own.place.ended = True  # also where the program breaks its loop: a resume does not go on with it
            self._active.remove(own)
            self._wait_s += own.maker.wait_s

    def _seed_between(self, what: str) -> None:
        """What a program draws itself between calls (a replay buffer, an environment) is the same on any number of
        workers, though each has drawn other numbers for its own examples."""
        self._draws += 1
        seed_everything(seed_from(what, self._own_draws, self._steps, self._draws))

    def _grow_rate(self, batch: int, steps_per_epoch: int | None) -> None:
        rule = goyal_rule(self.workers, steps_per_epoch)
        if rule != self._rate and self.workers > 1:
            self._workers.say(
                f"batch {batch * self.workers} = {batch} × {self.workers} workers; learning rates grow to "
                f"{self.workers} × "
                f"over {rule.warm_steps} steps (Goyal's rule, made for SGD)"
            )
        self._rate = rule


def _release(holds: Sequence[Releasable], guards: Sequence[RemovableHandle]) -> None:
    for one in holds:
        one.release()
    for guard in guards:
        guard.remove()
