"""Compares two runs from their files: what differs, which has the lower loss and by how much beyond the noise of seeds,
which is faster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from statistics import fmean, quantiles
from typing import Any

from plait.data.index import CorpusIndex, read_index
from plait.errors import PlaitError
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import flat_values
from plait.report.metrics import EvalReport, StepReport, median_speed, read_last_metrics, read_metrics
from plait.report.receipt import Receipt
from plait.report.receipt_file import read_receipt
from plait.run_files.comparison import (
    LossComparison,
    RunComparison,
    RunDifference,
    SeedNoise,
    SpeedComparison,
    TextRelation,
)
from plait.run_files.repeating import settings_to_repeat
from plait.run_files.summary import LossUnit, RunState, run_state
from plait.run_folder import RunFolder, run_names
from plait.working_folder import WorkingFolder

_NOT_COMPARED = (
    "forecast", "reasons", "warnings", "faster_arithmetic",
    "recipe_hash", "step_s", "machines.fingerprint.versions", "machines.peak_flops",
    "machines.left_out", "arithmetic.matmul_flops", "arithmetic.matmul_error", "cadence.copy_", "job.corpus",
    "job.budget.epoch_tokens", "job.base_fingerprint",
)  # fmt: skip
"""Keys of a plan that are not compared: measurements and forecasts, and keys that other parts of the comparison
cover."""
_READ_ALIKE = ("data.files", "data.tokenizer", "data.bad_records")
"""Keys of [data] that may differ for the same text."""
LAST_SHARE = 0.1
"""Share of a run's tokens, at its end, over which a training loss is averaged."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t with 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadRun:
    """The files of one run, read."""

    folder: RunFolder
    recipe: Mapping[str, Any]
    plan: Plan
    steps: Sequence[StepReport]
    evaluations: Sequence[EvalReport]
    receipt: Receipt | None
    state: RunState
    index: CorpusIndex | None
    """The index of its prepared data; None if they are gone."""

    @property
    def seed(self) -> int:
        return self.recipe["run.seed"]

    @property
    def learned(self) -> tuple[object, ...]:
        """See `_learned`."""
        return _learned(self.folder, self.recipe, self.plan)


def _learned(folder: RunFolder, recipe: Mapping[str, Any], plan: Plan) -> tuple[object, ...]:
    """Everything that decides what a run learned, except its seed, and except the layout, which changes only rounding.
    Earlier plans are included: a budget that was raised later is not the same as that budget from the beginning."""
    job, arithmetic = plan.job, plan.arithmetic
    earlier = [read_plan(path).job for path in sorted(folder.path.glob("plan-*.json"))]
    values = job.shape, job.sequence, job.batch_sequences, job.optimizer, job.steps, job.documents, job.base
    numbers = arithmetic.product_precision, arithmetic.gradient_transfer, arithmetic.stage_transfer
    changes = [
        (one.steps, one.optimizer) for one in earlier if (one.steps, one.optimizer) != (job.steps, job.optimizer)
    ]
    finetune = [(key, value) for key, value in sorted(recipe.items()) if key.startswith("finetune.")]
    return (values, job.corpus_hash, numbers, changes, sorted(versions_of(plan).items()), finetune)


def compare_folders(first: RunFolder, second: RunFolder, working: WorkingFolder) -> RunComparison:
    """Compare two runs; raises PlaitError if one of them cannot be read."""
    runs = _read_run(first, working), _read_run(second, working)
    one, other = runs
    text = _text_relation(one, other)
    loss = _compared_loss(one, other, text, working)
    return RunComparison(
        names=(first.path.resolve().name, second.path.resolve().name),
        states=(one.state, other.state),
        seeds=(one.seed, other.seed),
        recipe=_differences(one.recipe, other.recipe, left_out=("run.name",)),
        plan=_differences(_flat(asdict(one.plan)), _flat(asdict(other.plan)), left_out=_NOT_COMPARED),
        versions=_differences(versions_of(one.plan), versions_of(other.plan)),
        text=text,
        loss=loss if isinstance(loss, LossComparison) else None,
        why_no_loss="" if isinstance(loss, LossComparison) else loss,
        speed=_compared_speed(one, other),
        settings=settings_to_repeat(one.recipe, one.plan),
    )


def _read_run(folder: RunFolder, working: WorkingFolder) -> _ReadRun:
    plan = folder.saved_plan()
    steps, evaluations = read_metrics(folder.metrics)
    receipt = read_receipt(folder.receipt) if folder.receipt.exists() else None
    index = None
    with suppress(PlaitError):
        index = read_index(working.path / plan.job.corpus)
    return _ReadRun(
        folder=folder,
        recipe=flat_values(folder.saved_config()),
        plan=plan,
        steps=steps,
        evaluations=evaluations,
        receipt=receipt,
        state=run_state(folder, plan, receipt),
        index=index,
    )


def versions_of(plan: Plan) -> Mapping[str, Any]:
    """The versions of packages that a plan was made with."""
    versions = plan.machines.fingerprint.get("versions")
    return versions if isinstance(versions, Mapping) else {}


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], left_out: Sequence[str] = ()
) -> tuple[RunDifference, ...]:
    keys = [key for key in {**first, **second} if not key.startswith(tuple(left_out))]
    found = [RunDifference(key=key, first=first.get(key), second=second.get(key)) for key in keys]
    return tuple(one for one in found if one.first != one.second)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one mapping from "job.shape.layers" to value; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _text_relation(one: _ReadRun, other: _ReadRun) -> TextRelation:
    if one.plan.job.corpus_hash == other.plan.job.corpus_hash:
        return "same tokens"
    if one.index is None or other.index is None:
        return "unknown"
    asked = [
        {key: value for key, value in run.recipe.items() if key.startswith("data.") and key not in _READ_ALIKE}
        for run in (one, other)
    ]
    files = [[file.sha256 for source in index.sources for file in source.files] for index in (one.index, other.index)]
    same = one.index.heldout_bytes == other.index.heldout_bytes and one.index.layout == other.index.layout
    return "same text" if files[0] and files[0] == files[1] and asked[0] == asked[1] and same else "other text"


def _compared_loss(one: _ReadRun, other: _ReadRun, text: TextRelation, working: WorkingFolder) -> LossComparison | str:
    """Both losses, or a sentence why they cannot be compared."""
    names = [run.folder.path.name for run in (one, other)]
    of_pairs = [bool(run.steps) and run.steps[-1].pair_accuracy is not None for run in (one, other)]
    if of_pairs[0] != of_pairs[1]:
        pairs, tokens = names if of_pairs[0] else names[::-1]
        return f"their losses measure different things: {pairs} learned from pairs of answers, {tokens} from tokens"
    measure = f"measure both on one text: plait eval {shlex.quote(names[1])} --heldout-of {shlex.quote(names[0])}"
    if text == "other text":
        return f"their losses cannot be compared: they are of different texts; {measure}"
    if text == "unknown":
        return f"their losses cannot be compared: their tokens differ, and prepared data are gone; {measure}"
    ends = [next((one for one in reversed(run.evaluations) if isfinite(one.eval_loss)), None) for run in (one, other)]
    if ends[0] is not None and ends[1] is not None:
        return _heldout_loss(one, other, (ends[0], ends[1]), text, working)
    if text == "same text":
        return f"their losses cannot be compared: tokenizers differ, and not both have a held-out loss; {measure}"
    return _training_loss(one, other)


def _heldout_loss(
    one: _ReadRun, other: _ReadRun, ends: tuple[EvalReport, EvalReport], text: TextRelation, working: WorkingFolder
) -> LossComparison | str:
    per_byte = [end.eval_nats_per_byte for end in ends]
    is_per_byte = all(value is not None and isfinite(value) for value in per_byte)
    if text == "same text" and not is_per_byte:
        return "their losses cannot be compared: the tokenizers differ, and the held-out loss is known per token alone"
    unit: LossUnit = (
        "nats per byte" if is_per_byte else "nats per token" if ends[0].pair_accuracy is None else "nats per pair"
    )
    losses = _loss_in(ends[0], unit), _loss_in(ends[1], unit)
    n_tokens = sum(shard.tokens for shard in one.index.shards if shard.split == "heldout") if one.index else None
    return LossComparison(
        unit=unit,
        text="held out",
        losses=losses,
        tokens=(_tokens_at(one, ends[0].step), _tokens_at(other, ends[1].step)),
        seeds=_seed_noise(one, other, unit, working),
        differ_by_seed_alone=one.learned == other.learned and one.seed != other.seed,
        heldout_tokens=n_tokens,
        text_error=max(losses) / sqrt(n_tokens) if n_tokens and unit != "nats per pair" else None,
    )


def _loss_in(end: EvalReport, unit: LossUnit) -> float:
    return end.eval_nats_per_byte if unit == "nats per byte" and end.eval_nats_per_byte is not None else end.eval_loss


def _tokens_at(run: _ReadRun, step: int) -> int:
    return max((report.tokens for report in run.steps if report.step <= step), default=0)


def _training_loss(one: _ReadRun, other: _ReadRun) -> LossComparison | str:
    if empty := next((run.folder.path.name for run in (one, other) if not run.steps), None):
        return f"their losses cannot be compared: {empty} has no step yet"
    tokens = min(run.steps[-1].tokens for run in (one, other))
    means = []
    for run in (one, other):
        last = [r.loss for r in run.steps if (1 - LAST_SHARE) * tokens < r.tokens <= tokens and isfinite(r.loss)]
        if not last:
            return f"their losses cannot be compared: {run.folder.path.name} has no finite loss there"
        means.append(fmean(last))
    return LossComparison(
        unit="nats per token" if one.steps[-1].pair_accuracy is None else "nats per pair",
        text="training",
        losses=(means[0], means[1]),
        tokens=(tokens, tokens),
        seeds=None,
        differ_by_seed_alone=one.learned == other.learned and one.seed != other.seed,
        heldout_tokens=None,
        text_error=None,
    )


def _seed_noise(one: _ReadRun, other: _ReadRun, unit: LossUnit, working: WorkingFolder) -> SeedNoise | None:
    """The noise between seeds, from finished runs of this folder that differ from one of the two only by seed."""
    if one.state != "finished" or other.state != "finished":
        return None
    groups: tuple[dict[int, float], dict[int, float]] = {}, {}
    paths = dict.fromkeys([*(working.runs / name for name in run_names(working)), one.folder.path, other.folder.path])
    wanted = one.learned, other.learned
    ends = [end for path in paths if (end := _end_of(RunFolder(path), wanted))]
    for learned, seed, evaluation in ends:
        for group, like in zip(groups, wanted, strict=True):
            if learned == like:
                group[seed] = _loss_in(evaluation, unit)
    freedom = sum(len(group) - 1 for group in groups)
    if wanted[0] == wanted[1]:
        groups, freedom = (groups[0], groups[0]), len(groups[0]) - 1
    if freedom < 1 or not all(groups):
        return None
    means = fmean(groups[0].values()), fmean(groups[1].values())
    squares = sum((loss - mean) ** 2 for group, mean in zip(groups, means, strict=True) for loss in group.values())
    shared = 2 if groups[0] is groups[1] else 1
    deviation = sqrt(squares / shared / freedom)
    margin = t_95(freedom) * deviation * sqrt(sum(1 / len(group) for group in groups))
    return SeedNoise(runs=(len(groups[0]), len(groups[1])), means=means, deviation=deviation, margin=margin)


def t_95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; above 10 degrees of freedom by Cornish and Fisher's expansion."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _end_of(
    folder: RunFolder, wanted: Sequence[tuple[object, ...]]
) -> tuple[tuple[object, ...], int, EvalReport] | None:
    """What a finished run learned, its seed and its last evaluation, if it learned what is wanted."""
    with suppress(PlaitError, OSError):  # damaged, or deleted meanwhile: no evidence about seeds
        plan, recipe = folder.saved_plan(), flat_values(folder.saved_config())
        learned = _learned(folder, recipe, plan)
        if learned not in wanted or not folder.is_finished:
            return None
        _, end = read_last_metrics(folder.metrics, n_steps=1, evaluation_within=plan.cadence.evaluate_every_steps + 2)
        return (learned, recipe["run.seed"], end) if end and isfinite(end.eval_loss) else None
    return None


def _compared_speed(one: _ReadRun, other: _ReadRun) -> SpeedComparison | None:
    if not one.steps or not other.steps:
        return None
    speeds = [median_speed(run.steps) for run in (one, other)]
    if not all(isfinite(speed.tokens_per_s) and speed.tokens_per_s > 0 for speed in speeds):
        return None
    measured = [run.receipt.measured_items if run.receipt else None for run in (one, other)]
    same_batch = one.plan.batch_tokens == other.plan.batch_tokens
    forecasts = [run.plan.forecast.step_s if run.plan.forecast else None for run in (one, other)]
    return SpeedComparison(
        tokens_per_s=(speeds[0].tokens_per_s, speeds[1].tokens_per_s),
        step_s=(speeds[0].step_s_median, speeds[1].step_s_median),
        spread=(_spread(one.steps), _spread(other.steps)),
        forecast_step_s=(forecasts[0], forecasts[1]),
        items=(measured[0], measured[1]) if measured[0] and measured[1] and same_batch else None,
    )


def _spread(steps: Sequence[StepReport]) -> float:
    times = [step.step_s for step in steps]
    if len(times) < 4:
        return 0.0
    low, middle, high = quantiles(times, n=4)
    return (high - low) / middle if middle > 0 else 0.0
