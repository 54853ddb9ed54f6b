"""The two kinds of lines in metrics.jsonl, steps and evaluations: written, read, trimmed, and their typical speed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite, nan
from os import SEEK_END
from pathlib import Path
from statistics import median
from typing import Any

from plait.checked_json import parse_json, typed_value
from plait.errors import PlaitError
from plait.regular_file import open_regular_file, read_regular_file
from plait.report.atomic import replace_file

RECEIPT_WARM_UP_STEPS = 3
MOST_METRICS_BYTES = 1 << 32
"""Twenty million steps."""
SMALLEST_USUAL_SCALE = 1.0
"""If gradients are not finite even at this scale of losses, the cause is not float16's range."""
_BLOCK_BYTES, _LONGEST_LINE_BYTES = 1 << 16, 1 << 20
LEFT_OUT_IF_NONE = (
    "choices_accuracy",
    "choices_accuracy_per_byte",
    "expert_load_max",
    "expert_dropped",
    "auxiliary_losses",
    "reward_margin",
    "pair_accuracy",
    "eval_nats_per_byte",
    "loss_scale",
    "updates_skipped",
)
"""Keys of runs that ask multiple-choice questions, of models with experts or with auxiliary objectives, of runs that
learn from pairs or do not, and of those in float16."""
MAY_BE_NULL = frozenset({"mfu", "step", "tokens", "expert_load_max", "expert_dropped", "auxiliary_losses"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step. `tokens` counts those that entered the loss since the run began, on all ranks together.

    `loss` is the mean over this step's tokens in nats, or over its pairs of answers; `mfu` a fraction of the peak, None
    where the peak is unknown.
    """

    step: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    data_wait_s: float
    expert_load_max: float | None = None
    """In a mixture of experts, the busiest expert's tokens over the mean, of the layer where that is most."""
    expert_dropped: float | None = None
    """If experts have a capacity, the share of the tokens' choices that found no room, over all layers."""
    auxiliary_losses: Mapping[str, float | None] | None = None
    """The mean loss of each head in the middle ("layer_4") and depth of prediction ahead ("ahead_1"), without its
    weight; `loss` is that of the next token alone. None as a value is what was not finite."""
    reward_margin: float | None = None
    """When training on pairs, the mean of beta × the log-ratio of the chosen answer less that of the rejected."""
    pair_accuracy: float | None = None
    """Share of the pairs whose margin is above 0."""
    loss_scale: float | None = None
    """In float16, what the loss was multiplied by so that its gradients fit the range of float16."""
    updates_skipped: int | None = None
    """In float16, the updates skipped since the run began because a gradient was not finite."""

    @property
    def is_skipped(self) -> bool:
        """Whether only float16's range was exceeded: the update was skipped, and the next step has a smaller scale."""
        too_large = self.loss_scale is not None and self.loss_scale > SMALLEST_USUAL_SCALE
        return too_large and isfinite(self.loss) and not isfinite(self.grad_norm)

    @property
    def is_finite(self) -> bool:
        """Whether both loss and gradient were finite."""
        return isfinite(self.loss) and isfinite(self.grad_norm)

    def to_line(self) -> str:
        """The JSON line, newline included; what is not finite becomes null, for JSON has no word for it."""
        return _line(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation, after `step`: the exact mean loss over the held-out part, in nats per token and per byte; of
    pairs of answers the loss a pair, the mean margin and the share with a margin above 0.

    In a run that asks multiple-choice questions also the share that it answers right, by the log-probability of a
    choice and by that a byte of it; else these are None, and not in the file.
    """

    step: int
    eval_loss: float
    eval_nats_per_byte: float | None = None
    choices_accuracy: float | None = None
    choices_accuracy_per_byte: float | None = None
    reward_margin: float | None = None
    pair_accuracy: float | None = None

    def to_line(self) -> str:
        """The JSON line, newline included; what is not finite becomes null."""
        return _line(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over the steps of a run."""

    step_s_median: float
    tokens_per_s: float
    mfu: float | None


def read_metrics(path: Path) -> tuple[list[StepReport], list[EvalReport]]:
    """All lines of a metrics.jsonl, empty where there is none; raises PlaitError naming a line that is neither kind.

    A last line without its newline is being written this moment, or was when the run was killed: it is left out.
    """
    steps: list[StepReport] = []
    evaluations: list[EvalReport] = []
    for number, line in enumerate(_whole_lines(path), start=1):
        report = _parse(line)
        if report is None:
            raise PlaitError(
                f"{path}:{number} is not a line of metrics; give the run's command again, it repairs the file"
            )
        if isinstance(report, StepReport):
            steps.append(report)
        else:
            evaluations.append(report)
    return steps, evaluations


def read_last_metrics(
    path: Path, *, n_steps: int, evaluation_within: int
) -> tuple[Sequence[StepReport], EvalReport | None]:
    """The last `n_steps` steps of a metrics.jsonl, oldest first, and its last evaluation, if that is among the last
    `evaluation_within` lines; read from the end, so that it takes no longer for a long run.

    Nothing where there is no file. Raises PlaitError where one of these lines is neither kind.
    """
    steps: list[StepReport] = []
    evaluation: EvalReport | None = None
    for number, line in enumerate(_lines_from_end(path)):
        if len(steps) == n_steps and (evaluation or number >= evaluation_within):
            break
        if len(steps) == n_steps and b'"eval_loss"' not in line:
            continue
        report = _parse(line)
        if report is None:
            raise PlaitError(
                f"{path}, line {number + 1} from its end, is not a line of metrics; give the run's command again, it "
                "repairs the file"
            )
        if isinstance(report, EvalReport):
            evaluation = evaluation or report
        elif len(steps) < n_steps:
            steps.append(report)
    return steps[::-1], evaluation


def median_speed(reports: Sequence[StepReport], starts: Collection[int] = (0,)) -> Speed:
    """The run's typical speed; `starts` are the numbers of steps done at which a process started or went on.

    The first steps of each start are left out, for they also warm caches up, unless nothing else is there.
    """
    warming = {start + offset for start in starts for offset in range(1, RECEIPT_WARM_UP_STEPS + 1)}
    kept = [report for report in reports if report.step not in warming] or list(reports)
    if not kept:
        return Speed(step_s_median=nan, tokens_per_s=nan, mfu=None)
    mfus = [report.mfu for report in kept if report.mfu is not None]
    return Speed(
        step_s_median=median(report.step_s for report in kept),
        tokens_per_s=median(report.tokens_per_s for report in kept),
        mfu=median(mfus) if mfus else None,
    )


def trim_metrics(path: Path, last_step: int) -> None:
    """Cut all lines written after `last_step`, and incomplete ones, before a run continues from a checkpoint of that
    step.

    An evaluation made after `last_step` itself stays. A reader sees the old file or the new one, and always gets a new
    one: what a worker of an earlier start still writes goes into the old. Raises RunFailed.
    """
    if not path.exists():
        return
    kept = [line for line in _whole_lines(path) if (report := _parse(line)) and report.step <= last_step]
    replace_file(path, b"".join(line + b"\n" for line in kept))


def _line(report: StepReport | EvalReport) -> str:
    values = {
        field.name: _finite_numbers(getattr(report, field.name))
        for field in fields(report)
        if field.name not in LEFT_OUT_IF_NONE or getattr(report, field.name) is not None
    }
    return json.dumps(values, allow_nan=False) + "\n"


def _finite_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return _finite(value)


def _finite(value: float | None) -> float | None:
    return value if value is None or isfinite(value) else None


def _whole_lines(path: Path) -> list[bytes]:
    return _text(path).split(b"\n")[:-1] if path.exists() else []


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """All whole lines of a file, the last one first."""
    try:
        with open_regular_file(path) as file:
            begin, rest = file.seek(0, SEEK_END), b""
            is_whole = False  # what follows the last newline is no whole line
            while begin:
                end, begin = begin, max(0, begin - _BLOCK_BYTES)
                file.seek(begin)
                first, *lines = (file.read(end - begin) + rest).split(b"\n")
                if lines:
                    yield from reversed(lines if is_whole else lines[:-1])
                    is_whole = True
                rest = first
                if len(rest) > _LONGEST_LINE_BYTES:
                    raise ValueError("it has a line that is too long")
            if is_whole:
                yield rest
    except FileNotFoundError:
        return
    except ValueError as error:
        raise PlaitError(f"{path} cannot be read ({error}); move it away, then give the run's command again") from None


def _text(path: Path) -> bytes:
    try:
        return read_regular_file(path, MOST_METRICS_BYTES)
    except ValueError as error:
        raise PlaitError(f"{path} cannot be read ({error}); move it away, then give the run's command again") from None


def _parse(line: bytes) -> StepReport | EvalReport | None:
    """The report that a line holds, None where it holds none."""
    try:
        values: Any = parse_json(line)
        kind = StepReport if "loss" in values else EvalReport
        # What was not finite when it was written is null; for `mfu` null says that there is none.
        lost = {name for name, value in values.items() if value is None} - MAY_BE_NULL
        report = typed_value(kind, values | dict.fromkeys(lost, 0.0))
    except (ValueError, TypeError, AttributeError):
        return None
    counts = (report.step, report.tokens) if isinstance(report, StepReport) else (report.step,)
    return replace(report, **dict.fromkeys(lost, nan)) if min(counts) >= 0 else None
