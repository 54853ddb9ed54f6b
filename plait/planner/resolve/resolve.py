"""From what was asked and what there is to what will be done: fills in every "auto" and says why.

Pure: values in, values out. `draft` settles all but the split over workers and, for a time budget, the number of
steps; those wait for a short measurement, whose result `settle` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from plait.model.shape import parameter_count, training_flops_per_token
from plait.planner.derive import scaling_rules
from plait.planner.derive.intervals import (
    balance_every_steps,
    checkpoint_every,
    in_steps,
    report_every_steps,
    steps_for,
)
from plait.planner.derive.micro_batch import usual_micro
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.derive.resources import Grounds, Need
from plait.planner.derive.training_job import begun_work, new_work
from plait.planner.plan import OptimizerPlan, Plan
from plait.planner.resolve.forecast_update import learning
from plait.planner.resolve.request import Question
from plait.planner.resolve.worker_layouts import MEASURED_TOLERANCE, Split, candidate_splits, simplest
from plait.recipe.schema import RunConfig
from plait.units import Every, format_count, format_duration, format_si

EVALUATION_SHARE = 0.06
"""Of a run's work, spent at most on looking at the held-out text along the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan but for its split and, for a time budget, its steps; with the splits worth measuring."""

    plan: Plan
    splits: tuple[Split, ...]
    evaluations: Every | Literal["auto"]
    heldout_tokens: int


def draft(
    config: RunConfig,
    corpus: CorpusFacts,
    grounds: Grounds,
    *,
    recipe_hash: str,
    begun: Plan | None = None,
    worth_trying: Callable[[Question, list[str]], tuple[Split, ...]] = candidate_splits,
) -> Draft:
    """Everything that can be decided before a step was timed; raises PlaitError for what cannot work.

    Where a run is `begun`, what it computes is as its plan says: only who does the work is open.
    """
    why: list[str] = []
    machine = grounds.machine
    work = begun_work(begun) if begun else new_work(config, corpus, grounds, why)
    shape, sequence, batch, precision = work.shape, work.shape.sequence, work.batch_sequences, work.precision
    grounds = grounds.looked_at(Need(shape=shape, batch_sequences=batch, precision=precision))
    question = Question(config=config, grounds=grounds, shape=shape, batch_sequences=batch, precision=precision)
    splits = worth_trying(question, why)
    plan = Plan(
        layout=splits[0].layout,
        threads=splits[0].threads,
        device=machine.device,
        precision=precision,
        compile="blocks" if machine.device == "cuda" else "off",
        shape=shape,
        sequence=sequence,
        batch_sequences=batch,
        micro_sequences=splits[0].micro_sequences,
        micro_limits=splits[0].micro_limits,
        shares=splits[0].shares,
        seats=splits[0].seats,
        balance_every_steps=_balance(config, grounds, splits[0], why),
        gradient_transfer=config.train.gradient_transfer,
        budget=work.budget,
        steps=steps_for(work.budget, batch * sequence, step_s=None),
        optimizer=_optimizer(config, work.flops, batch * sequence, why),
        corpus=corpus.folder,
        corpus_hash=corpus.content_hash,
        documents=_documents(config, corpus, sequence, why),
        checkpoint_every=checkpoint_every(config, why),
        checkpoint_keep=config.checkpoint.keep,
        report_every_steps=report_every_steps(config, machine.device),
        evaluate_every_steps=0,
        step_s=None,
        forecast=splits[0].forecast,
        peak_flops=grounds.peak_flops,
        fingerprint=machine.fingerprint(),
        recipe_hash=recipe_hash,
        reasons=tuple(why),
    )
    evaluate = config.report.evaluate
    return Draft(
        plan=plan,
        splits=splits,
        evaluations="auto" if evaluate == "auto" else in_steps(evaluate),
        heldout_tokens=corpus.heldout_tokens,
    )


def with_split(plan: Plan, split: Split) -> Plan:
    """The plan carried out in another way."""
    return replace(
        plan,
        layout=split.layout,
        threads=split.threads,
        micro_sequences=split.micro_sequences,
        micro_limits=split.micro_limits,
        shares=split.shares,
        seats=split.seats,
        step_s=split.step_s,
        forecast=split.forecast and learning(split.forecast, split.forecast.calibration, split.step_s),
    )


def settle(config: RunConfig, draft: Draft, measured: Sequence[Split]) -> Plan:
    """The finished plan: the simplest split that is fast, and a time budget turned into steps."""
    best = simplest(measured)
    plan = with_split(draft.plan, best)
    why = [*_split_reason(measured, best), *best.why, *plan.reasons, *_at_a_time(config, plan)]
    steps, evaluate_every = _pace(draft, plan, why)
    optimizer = replace(plan.optimizer, warmup_steps=_warmup(config, steps, why))
    return replace(plan, steps=steps, evaluate_every_steps=evaluate_every, optimizer=optimizer, reasons=tuple(why))


def _at_a_time(config: RunConfig, plan: Plan) -> list[str]:
    """Why micro-batches are not larger, unless a person named them, or the split has told why they are not smaller."""
    part, device = max(plan.parts), plan.device
    more = device == "cpu" and plan.micro_sequences > usual_micro(plan.batch_sequences, plan.layout, plan.shape)
    if config.layout.micro_sequences != "auto" or plan.micro_limits or more or part <= plan.micro_sequences:
        return []
    return [f"micro-batches of {plan.micro_sequences} of a worker's {part} sequences: what it holds comfortably"]


def _balance(config: RunConfig, grounds: Grounds, split: Split, why: list[str]) -> int:
    """Steps between changes of the shares while the run goes on, 0 for never."""
    here = grounds.machine
    every = balance_every_steps(config, "unequal" if grounds.several or split.shares or here.unlike else "alike")
    unequal = f"beside {here.name} it has {', '.join(here.unlike)}" if here.unlike else "they are not equal"
    reason = "machines of a run over several hosts may slow down" if grounds.several else unequal
    if every and config.balance.every == "auto" and split.layout.batch_parts > 1:
        why.append(f"shares of the batch may change every {every} steps: {reason} (balance.every)")
    elif every and config.balance.every == "auto" and split.layout.pipeline > 1 and split.layout.virtual_stages == 1:
        why.append(
            f"layers may move between stages every {every} steps: {reason}, or be faster than they were while "
            "they were measured (balance.every)"
        )
    return every


def _optimizer(config: RunConfig, flops: float, batch_tokens: int, why: list[str]) -> OptimizerPlan:
    asked = config.optimizer
    lr = asked.lr
    if lr == "auto":
        usual = scaling_rules.batch_tokens(flops)
        lr = float(
            f"{scaling_rules.lr_for_batch(scaling_rules.peak_lr(flops), batch=batch_tokens, usual_batch=usual):.3g}"
        )
        why.append(f"peak learning rate {lr:g}: for {flops:.1e} FLOPs and this batch (DeepSeek LLM 2024, Malladi 2022)")
    clip = 1.0 if asked.clip == "auto" else asked.clip
    return OptimizerPlan(
        lr=lr,
        warmup_steps=0,
        weight_decay=0.1 if asked.weight_decay == "auto" else asked.weight_decay,
        betas=(0.9, 0.95) if asked.betas == "auto" else asked.betas,
        clip=None if clip == "never" else clip,
        schedule="cosine" if asked.schedule == "auto" else asked.schedule,
    )


def _warmup(config: RunConfig, steps: int, why: list[str]) -> int:
    asked = config.optimizer.warmup_steps
    if asked != "auto":
        return asked
    warmup = scaling_rules.warmup_steps(steps)
    why.append(f"warm-up {warmup} steps: a twentieth of the run, 10 to 2,000 steps (after Goyal 2017)")
    return warmup


def _documents(config: RunConfig, corpus: CorpusFacts, sequence: int, why: list[str]) -> Literal["mask", "join"]:
    asked = config.data.mask_documents
    if asked != "auto":
        return "mask" if asked else "join"
    mean = corpus.train_tokens / max(1, corpus.documents)
    short = mean < 8 * sequence
    told = f"documents have {format_count(mean)} tokens on average"
    why.append(
        f"attention stays inside documents: {told}" if short else f"documents are joined: {told}, few windows hold two"
    )
    return "mask" if short else "join"


def _split_reason(measured: Sequence[Split], best: Split) -> list[str]:
    if len(measured) < 2:
        return []
    alike = len({split.workers for split in measured}) < len(measured)
    words = [_layout_words(split) if alike else f"{split.workers}" for split in measured]
    told = ", ".join(
        f"{name} × {split.threads} threads {format_duration(split.step_s or 0)}"
        for split, name in sorted(zip(measured, words, strict=True), key=lambda pair: pair[0].workers)
    )
    winner = _layout_words(best) if alike else f"{best.workers} worker{'s' if best.workers > 1 else ''}"
    if best.step_s == min(split.step_s or 0.0 for split in measured):
        return [f"{winner}: fastest step of those timed ({told})"]
    return [f"{winner}: the simplest within {MEASURED_TOLERANCE:.0%} of the fastest step of those timed ({told})"]


def _layout_words(split: Split) -> str:
    what = f" splitting {split.layout.shard_what}" if split.layout.shard > 1 else ""
    return f"{split.layout}{what}"


def _pace(draft: Draft, plan: Plan, why: list[str]) -> tuple[int, int]:
    """Steps, and steps between evaluations (0: only at the end)."""
    budget = plan.budget
    # An evaluation is a forward pass, a third of a step's work, over the held-out tokens.
    evaluation_steps = draft.heldout_tokens / (3 * plan.batch_tokens)
    rough = steps_for(budget, plan.batch_tokens, step_s=plan.step_s)
    rounds = max(1, min(10, int(EVALUATION_SHARE * rough / evaluation_steps))) if evaluation_steps else 0
    asked = None if draft.evaluations == "auto" else round(draft.evaluations.value)
    steps = rough
    if budget.unit == "seconds" and plan.step_s:
        spent = rounds * evaluation_steps if asked is None else _evaluating(rough, asked, evaluation_steps)
        steps = max(1, round(rough - spent))
        why.append(
            f"{steps} steps: {budget} at {format_duration(plan.step_s)} a step, as measured, evaluations included"
        )
    if evaluation_steps > 0.2 * steps:
        why.append("looking at the held-out text takes long beside this run; a smaller data.holdout shortens it")
    return steps, (ceil(steps / rounds) if rounds > 1 else 0) if asked is None else asked


def _evaluating(rough: int, every: int, evaluation_steps: float) -> float:
    """What evaluations take of a time that holds so many steps: one at the end, and one each `every` steps unless 0."""
    if not every:
        return evaluation_steps
    steps = (rough - evaluation_steps) / (1 + evaluation_steps / every)
    return rough - steps


def described(plan: Plan) -> str:
    """One line on what will be trained, for people."""
    shape = plan.shape
    flops = training_flops_per_token(shape, plan.sequence, "full")
    return (
        f"{format_count(parameter_count(shape))} parameters ({shape.layers} layers, width {shape.width}, {shape.heads} "
        f"heads, vocabulary {shape.vocabulary}), {plan.steps} steps of {plan.batch_sequences} × {plan.sequence} "
        f"tokens, {format_si(flops, 'FLOP')} a token"
    )
