"""The findings of a check as values, and the advice for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ProgramFindingKind = Literal[
    "world_size", "accumulation", "scale", "mean_of_means", "missing_sum", "never_summed", "lost_micro_batches",
    "uneven_ranks", "weights_apart", "rates_apart", "same_batch", "repeated_samples", "samples_left_out",
    "dropout_alike", "batch_norm", "partial_clipping", "clipping_before_sum", "schedule", "evaluation_data",
    "stale_gradients", "uneven_steps", "update", "unexplained", "resumed_weights", "resumed_data", "resumed_optimizer",
    "resumed_schedule", "resumed_random", "resumed_loss", "printed_loss", "same_order", "weight_decay",
]  # fmt: skip
FIXES: Mapping[ProgramFindingKind, str] = {
    "world_size": "DistributedDataParallel and fully_shard already divide the sum by the number of ranks: divide or "
    "multiply exactly once",
    "accumulation": "before backward, divide the loss by the number of micro-batches per step",
    "scale": "look for a factor that one process would not have, or for micro-batches that are counted wrongly",
    "mean_of_means": "sum the losses of all tokens, all_reduce the token count over all ranks and micro-batches of the "
    "step, and divide by it (under DDP, which averages, also multiply by the number of ranks)",
    "missing_sum": "include these parameters: all_reduce their gradients too, or register them with DDP",
    "never_summed": "wrap the model in DistributedDataParallel, or all_reduce every gradient before optimizer.step()",
    "lost_micro_batches": "call zero_grad() once per step, before the first micro-batch, and use no_sync() around all "
    "micro-batches except the last",
    "uneven_ranks": "give every example the same weight: weight ranks by their number of examples",
    "weights_apart": "seed all ranks equally before creating the model, or broadcast the weights of rank 0 (DDP does)",
    "rates_apart": "compute the learning rate from values that are the same on all ranks",
    "same_batch": "give the DataLoader a DistributedSampler, or take every N-th batch by rank",
    "repeated_samples": "give the DataLoader a DistributedSampler, so that each example is drawn once per pass",
    "samples_left_out": "set num_replicas to the number of running ranks, and rank to this rank's number",
    "dropout_alike": "after creating and wrapping the model, seed each rank with seed + rank",
    "batch_norm": "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping (on CPUs: "
    "plait.convert_batch_norm under plait.spread), or use layers without batch statistics",
    "partial_clipping": "clip all gradients by one norm: torch.nn.utils.clip_grad_norm_(model.parameters(), …) handles "
    "DTensors; otherwise all_reduce the sum of squares before taking the root",
    "clipping_before_sum": "clip once per step, after the last backward pass and after the gradients are summed",
    "schedule": "call scheduler.step() once per optimizer step, or create the schedule for the actual number of calls",
    "evaluation_data": "evaluate each example once: remove the padding that a DistributedSampler adds (Accelerate: "
    "gather_for_metrics), or evaluate all data on one rank",
    "stale_gradients": "call optimizer.zero_grad() in every step",
    "uneven_steps": "let every rank take every step: give all ranks the same number of batches (drop_last, or "
    "DistributedDataParallel.join), and let all ranks skip the same steps",
    "update": "apply the same update to the same gradients on every rank; if ranks update different parameters, "
    "share the results",
    "unexplained": "look at how this parameter's gradient is computed: hooks, custom autograd functions, code that "
    "only one rank runs",
    "resumed_weights": "save and load the state_dict of the whole model, in its own dtype, on every rank",
    "resumed_data": "save how many batches of the pass have been used (or the DataLoader's state_dict, with "
    "torchdata's StatefulDataLoader), and continue there with the same seed and epoch",
    "resumed_optimizer": "save optimizer.state_dict() with the model, and load it after creating the optimizer",
    "resumed_schedule": "save scheduler.state_dict() and the number of steps taken, and load them",
    "resumed_random": "save each rank's torch.get_rng_state() (and numpy's and Python's), and set it after loading",
    "resumed_loss": "check what else the loss depends on: buffers, averaged weights, loss scales, counters",
    "printed_loss": "all_reduce the loss and its count before printing",
    "same_order": "call sampler.set_epoch(epoch) at the beginning of each epoch",
    "weight_decay": "put biases and norms into a parameter group with weight_decay=0 unless this is intended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFinding:
    """A difference from one process, or something that the program's author should know."""

    kind: ProgramFindingKind
    is_fault: bool
    """Whether it makes the program differ from one process; otherwise it is a note."""
    what: str
    where: str = ""
    """File and line of the responsible call, if known."""
    parameter: str = ""
    """The first parameter concerned, in the model's order."""
    parameters: int = 0
    """Number of parameters concerned."""
    step: int | None = None
    one_process: str = ""

    @property
    def fix(self) -> str:
        return FIXES[self.kind]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "fault": self.is_fault,
            "what": self.what,
            "where": self.where or None,
            "parameter": self.parameter or None,
            "parameters": self.parameters or None,
            "step": self.step,
            "one_process": self.one_process or None,
            "fix": self.fix,
        }


CheckOutcome = Literal["proven", "differs", "cannot judge"]
EXIT_CODES: Mapping[CheckOutcome, int] = {"proven": 0, "differs": 1, "cannot judge": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of `plait check`."""

    outcome: CheckOutcome
    workers: int
    steps: int
    """Optimizer steps that were compared."""
    parameters: int
    largest_error: float | None
    """The largest difference between gradients, relative to what was summed into them."""
    findings: tuple[ProgramFinding, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why the program cannot be judged, or what the proof does not cover."""
    changed: tuple[str, ...] = ()
    """Replacements made to run the program here, such as gloo for NCCL."""
    wall_s: float = 0.0
    stopped_after: int | None = None
    """With a rehearsed stop: steps that the program had taken when it ended."""
    resumed_after: int | None = None
    """With a rehearsed stop: the step after which the second start continued."""

    @property
    def ok(self) -> bool:
        return self.outcome == "proven"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def faults(self) -> tuple[ProgramFinding, ...]:
        return tuple(one for one in self.findings if one.is_fault)

    def as_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "workers": self.workers,
            "steps": self.steps,
            "parameters": self.parameters,
            "largest_error": self.largest_error,
            "findings": [one.as_json() for one in self.findings],
            "reasons": list(self.reasons),
            "changed": list(self.changed),
            "wall_s": round(self.wall_s, 2),
            "stopped_after": self.stopped_after,
            "resumed_after": self.resumed_after,
        }

    def __str__(self) -> str:
        return "\n".join(check_report_lines(self))


def check_report_lines(report: CheckReport) -> Sequence[str]:
    """The report as it is printed."""
    lines = [f"changed  {one}" for one in report.changed]
    for finding in sorted(report.findings, key=lambda one: not one.is_fault):
        lines += _finding_lines(finding)
    of = (
        f"{report.steps} steps on {report.workers} workers"
        if report.steps != 1
        else f"1 step on {report.workers} workers"
    )
    if report.outcome == "proven" and report.stopped_after is not None:
        lines.append(f"proven   {of}: {_resumed_text(report)}")
    elif report.outcome == "proven":
        error = f", largest difference {report.largest_error:.0e}" if report.largest_error else ""
        lines.append(f"proven   {of}: all {report.parameters} gradients and updates match one process{error}")
    elif report.outcome == "differs":
        count = len(report.faults)
        lines.append(f"differs  {of}: {count} {'fault' if count == 1 else 'faults'}, see above")
    else:
        lines.append("cannot judge this program")
    lines += [f"note     {one}" if report.outcome != "cannot judge" else f"because  {one}" for one in report.reasons]
    return lines


def _resumed_text(report: CheckReport) -> str:
    stopped, resumed = report.stopped_after or 0, report.resumed_after or 0
    again = "" if stopped <= resumed else f", after repeating {stopped - resumed} of its steps"
    return f"stopped after step {stopped} and started again, it continues as if it had never stopped{again}"


def _finding_lines(finding: ProgramFinding) -> list[str]:
    lines = [f"{'fault' if finding.is_fault else 'note':8} {finding.what}"]
    if finding.where:
        lines.append(f"  where        {finding.where}")
    if finding.one_process:
        lines.append(f"  one process  {finding.one_process}")
    lines.append(f"  usual fix    {finding.fix}")
    return lines
