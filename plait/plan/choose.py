"""From what was asked and what there is to what will be done: fills in every "auto" and says why.

Pure: values in, values out. `draft` settles all but the split over workers and, for a time budget, the number of
steps; those wait for a short measurement, whose result `settle` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from plait.cluster.topology import Machine
from plait.errors import PlaitError
from plait.layout import Layout
from plait.model.shape import ModelShape, parameter_count, training_flops_per_token
from plait.model.sizes import SIZES, named_shape, nearest_size
from plait.plan import rules
from plait.plan.plan import OptimizerPlan, Plan, Precision
from plait.recipe.schema import RunConfig
from plait.units import Amount, Every, format_count, format_duration, parse_amount, parse_every

CPU_MICRO_TOKENS = 4096
BYTES_PER_PARAMETER = 16
"""Weights, gradients and AdamW's two moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What the plan must know of the prepared data."""

    folder: str
    content_hash: str
    vocabulary: int
    train_tokens: int
    longest_sequence: int
    heldout_tokens: int
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to use a machine: so many workers with so many threads, and how long a step took so (None: not yet)."""

    workers: int
    threads: int
    step_s: float | None = None
    evaluate_s: float = 0.0
    """Time of one evaluation of the whole held-out part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan but for its split and, for a time budget, its steps; with the splits worth measuring."""

    plan: Plan
    budget: Amount
    splits: tuple[Split, ...]
    evaluations: Every | Literal["auto"]


def draft(
    config: RunConfig, corpus: CorpusFacts, machine: Machine, *, peak_flops: float | None, recipe_hash: str
) -> Draft:
    """Everything that can be decided before a step was timed; raises PlaitError for what cannot work."""
    why: list[str] = []
    budget, shape, flops = _size_up(config, corpus, machine, peak_flops, why)
    sequence = shape.sequence
    batch = _batch(config, flops, sequence, why)
    splits = _splits(config, machine, batch, shape, why)
    plan = Plan(
        layout=Layout(replicate=splits[0].workers),
        threads=splits[0].threads,
        device=machine.device,
        precision=_precision(config, machine, why),
        compile="blocks" if machine.device == "cuda" else "off",
        shape=shape,
        sequence=sequence,
        batch_sequences=batch,
        micro_sequences=_micro(config, machine, batch, splits[0].workers, shape, why),
        steps=_steps(budget, batch * sequence, step_s=None),
        optimizer=_optimizer(config, flops, batch * sequence, why),
        corpus=corpus.folder,
        corpus_hash=corpus.content_hash,
        documents=_documents(config, corpus, sequence, why),
        checkpoint_every=_checkpoint_every(config, why),
        checkpoint_keep=config.checkpoint.keep,
        report_every_steps=_report_every(config, machine.device),
        evaluate_every_steps=0,
        step_s=None,
        peak_flops=peak_flops,
        fingerprint=machine.fingerprint(),
        recipe_hash=recipe_hash,
        reasons=tuple(why),
    )
    evaluate = config.report.evaluate
    return Draft(
        plan=plan, budget=budget, splits=splits, evaluations="auto" if evaluate == "auto" else _in_steps(evaluate)
    )


def with_split(config: RunConfig, plan: Plan, machine: Machine, split: Split) -> Plan:
    """The plan carried out by another number of workers."""
    micro = _micro(config, machine, plan.batch_sequences, split.workers, plan.shape, [])
    return replace(
        plan,
        layout=Layout(replicate=split.workers),
        threads=split.threads,
        micro_sequences=micro,
        step_s=split.step_s,
    )


def settle(config: RunConfig, draft: Draft, machine: Machine, measured: Sequence[Split]) -> Plan:
    """The finished plan: the fastest split, and a time budget turned into steps."""
    best = min(measured, key=lambda split: split.step_s or float("inf"))
    plan = with_split(config, draft.plan, machine, best)
    why = list(plan.reasons)
    why += _split_reason(measured, best)
    steps, evaluate_every = _pace(draft, plan, best, why)
    optimizer = replace(plan.optimizer, warmup_steps=_warmup(config, steps, why))
    return replace(plan, steps=steps, evaluate_every_steps=evaluate_every, optimizer=optimizer, reasons=tuple(why))


def longer(config: RunConfig, plan: Plan, old_budget: Amount) -> Plan:
    """A begun run's plan for a raised budget: more steps, all else as it was. Raises PlaitError for a lowered one."""
    budget = budget_of(config)
    if budget.unit == old_budget.unit == "seconds":
        steps = max(plan.steps, round(plan.steps * budget.value / old_budget.value))
    else:
        steps = _steps(budget, plan.batch_tokens, step_s=plan.step_s)
    if steps < plan.steps or (budget.unit == old_budget.unit and budget.value < old_budget.value):
        raise PlaitError(
            f"train.budget = {budget} is less than the {plan.steps} steps this run was begun with; "
            "a begun run's budget may only grow (or take another run.name)"
        )
    return replace(plan, steps=steps)


def with_reports(config: RunConfig, plan: Plan) -> Plan:
    """A begun run's plan with what its recipe now says of checkpoints and reports."""
    every, evaluate = config.checkpoint.every, config.report.evaluate
    return replace(
        plan,
        checkpoint_every=plan.checkpoint_every if every == "auto" else parse_every(every),
        checkpoint_keep=config.checkpoint.keep,
        report_every_steps=(
            plan.report_every_steps if config.report.every == "auto" else _report_every(config, plan.device)
        ),
        evaluate_every_steps=plan.evaluate_every_steps if evaluate == "auto" else round(_in_steps(evaluate).value),
    )


def budget_of(config: RunConfig) -> Amount:
    """The budget that was asked for; without one, ten minutes, or 20 tokens a parameter where a size was named."""
    if config.train.budget != "auto":
        return parse_amount(config.train.budget)
    if config.model.size != "auto":
        parameters = parameter_count(named_shape(config.model.size, vocabulary=32768, sequence=1024))
        return Amount(rules.TOKENS_PER_PARAMETER * parameters, "tokens")
    return Amount(600, "seconds")


def _size_up(
    config: RunConfig, corpus: CorpusFacts, machine: Machine, peak_flops: float | None, why: list[str]
) -> tuple[Amount, ModelShape, float]:
    """Budget, shape and the run's training FLOPs (a first guess where the budget is time)."""
    budget = budget_of(config)
    rate = rules.EXPECTED_MFU * (peak_flops or 100e12 * machine.devices)
    vocabulary = _vocabulary(config, corpus)
    size = config.model.size
    if config.train.budget == "auto":
        what = "20 tokens a parameter (Hoffmann 2022)" if size != "auto" else "no model size or budget was asked for"
        why.append(f"budget {budget}: {what}")
    if size == "auto":
        flops = _free_flops(config, budget, rate, corpus.train_tokens)
        best = rules.best_parameters(flops=flops, unique_tokens=corpus.train_tokens)
        size = nearest_size(best, vocabulary)
    shape = _shape(config, size, vocabulary, corpus, why)
    if config.model.size == "auto":
        why.append(
            f"model {format_count(parameter_count(shape))} parameters: learns most within the budget "
            "(20 tokens a parameter, at most four passes over the text)"
        )
    per_token = 6 * parameter_count(shape)
    tokens = _tokens(config, budget, rate / per_token, shape.sequence)
    return budget, shape, per_token * tokens


def _free_flops(config: RunConfig, budget: Amount, rate: float, unique_tokens: int) -> float:
    """Training FLOPs that a budget comes to while size and batch are still open."""
    if budget.unit == "seconds":
        return rate * budget.value
    parameters, flops = 1e6, 1e12
    for _ in range(50):  # size, FLOPs and batch depend on each other; this settles within a few rounds
        tokens = budget.value if budget.unit == "tokens" else budget.value * _open_batch(config, flops)
        parameters = max(tokens / rules.TOKENS_PER_PARAMETER, 1e5)
        flops = 6 * parameters * tokens
    return flops


def _open_batch(config: RunConfig, flops: float) -> float:
    asked = config.train.batch_tokens
    return rules.batch_tokens(flops) if asked == "auto" else float(asked)


def _tokens(config: RunConfig, budget: Amount, tokens_per_s: float, sequence: int) -> float:
    if budget.unit == "tokens":
        return budget.value
    if budget.unit == "seconds":
        return budget.value * tokens_per_s
    asked = config.train.batch_tokens
    batch = 16384 if asked == "auto" else asked
    return budget.value * max(batch, sequence)


def _vocabulary(config: RunConfig, corpus: CorpusFacts) -> int:
    asked = config.model.vocabulary
    if asked == "auto":
        return ceil(corpus.vocabulary / 64) * 64
    if asked < corpus.vocabulary:
        raise PlaitError(
            f"the tokenizer has {corpus.vocabulary} entries, more than model.vocabulary = {asked}; "
            f'choose at least {corpus.vocabulary}, or "auto"'
        )
    return asked


def _shape(config: RunConfig, size: str, vocabulary: int, corpus: CorpusFacts, why: list[str]) -> ModelShape:
    asked = config.model.model_dump(exclude={"size", "vocabulary"})
    explicit: dict[str, Any] = {key: value for key, value in asked.items() if value != "auto"}
    provisional = named_shape(size, vocabulary=vocabulary, sequence=1024, **explicit)
    sequence = _sequence(config, parameter_count(provisional), corpus, why)
    return replace(provisional, sequence=sequence)


def _sequence(config: RunConfig, parameters: int, corpus: CorpusFacts, why: list[str]) -> int:
    asked = config.train.sequence
    longest = corpus.longest_sequence
    if asked != "auto":
        if asked > longest:
            raise PlaitError(
                f"train.sequence = {asked} is longer than the data allow ({format_count(corpus.train_tokens)} training "
                f"tokens); choose at most {longest}"
            )
        return asked
    usual = rules.usual_sequence(parameters)
    sequence = usual if usual <= longest else max(2, longest // 16 * 16 or longest)
    why.append(f"sequence {sequence}: " + ("usual for this size" if sequence == usual else "all that the data allow"))
    return sequence


def _batch(config: RunConfig, flops: float, sequence: int, why: list[str]) -> int:
    """Sequences of a step."""
    asked = config.train.batch_tokens
    if asked != "auto":
        if asked < sequence:
            raise PlaitError(
                f"train.batch_tokens = {asked} is less than one sequence of {sequence} tokens; "
                f"choose at least {sequence}, or a shorter train.sequence"
            )
        if asked % sequence:
            why.append(f"batch {asked // sequence * sequence} tokens: the whole sequences in {asked}")
        return asked // sequence
    sequences = max(1, round(rules.batch_tokens(flops) / sequence))
    if sequences >= 8:
        sequences = round(sequences / 8) * 8
    why.append(f"batch {sequences * sequence} tokens: suits {flops:.1e} training FLOPs (DeepSeek LLM 2024)")
    return sequences


def _splits(config: RunConfig, machine: Machine, batch: int, shape: ModelShape, why: list[str]) -> tuple[Split, ...]:
    """The numbers of workers worth a measurement; one when it was named or the devices decide."""
    named = config.layout.replicate
    if machine.device == "cuda":
        if named not in ("auto", machine.devices):
            raise PlaitError(
                f"layout.replicate = {named}, but this machine has {machine.devices} GPUs; choose {machine.devices}, "
                "or hide the others with CUDA_VISIBLE_DEVICES"
            )
        candidates = [machine.devices]
    else:
        powers = [2**k for k in range(machine.cores.bit_length()) if 2**k <= machine.cores]
        candidates = sorted({*powers, machine.cores}) if named == "auto" else [named]
    if candidates[0] > batch:
        raise PlaitError(
            f"{candidates[0]} workers cannot share {batch} sequences a step: each needs one; raise train.batch_tokens "
            f"to {candidates[0]} sequences or lower layout.replicate"
        )
    if named != "auto" and machine.device == "cpu" and named > machine.cores:
        why.append(f"{named} workers on {machine.cores} cores: as asked, though they will take turns")
    need = BYTES_PER_PARAMETER * parameter_count(shape)
    if machine.device == "cpu" and need * candidates[0] > machine.memory_bytes:
        raise PlaitError(
            f"{candidates[0]} copies of this model need {need * candidates[0] / 2**30:.1f} GiB for weights and "
            f"optimizer, and the machine has {machine.memory_bytes / 2**30:.1f}; choose a smaller model.size"
        )
    fitting = [n for n in candidates if n <= batch and (n == 1 or need * n < 0.5 * machine.memory_bytes)]
    workers = fitting if machine.device == "cpu" and named == "auto" else candidates
    return tuple(Split(workers=n, threads=max(1, machine.cores // n)) for n in workers)


def _precision(config: RunConfig, machine: Machine, why: list[str]) -> Precision:
    asked = config.train.precision
    if asked != "auto":
        return asked
    if machine.device == "cuda":
        why.append("precision bf16 with float32 master weights: the GPUs' fast arithmetic")
        return "bf16"
    why.append("precision float32: the fastest arithmetic of most processors")
    return "float32"


def _micro(config: RunConfig, machine: Machine, batch: int, workers: int, shape: ModelShape, why: list[str]) -> int:
    """Sequences a worker takes at a time."""
    part = ceil(batch / workers)
    asked = config.layout.micro_sequences
    if asked != "auto":
        return min(asked, part)
    if machine.device == "cpu":
        limit = max(1, CPU_MICRO_TOKENS // shape.sequence)
    else:
        # Activations of a layer kept for backward in bf16 with flash attention: about 34 bytes a token and width
        # (Korthikanti et al. 2022, arXiv 2205.05198), plus what SwiGLU keeps.
        free = 0.8 * machine.memory_bytes - BYTES_PER_PARAMETER * parameter_count(shape)
        per_sequence = shape.sequence * shape.layers * (34 * shape.width + 6 * shape.ffn)
        if free < per_sequence:
            raise PlaitError(
                f"a GPU of {machine.memory_bytes / 2**30:.0f} GiB does not hold this model, its optimizer and one "
                "sequence; choose a smaller model.size or train.sequence"
            )
        limit = max(1, min(int(free / per_sequence), 65536 // shape.sequence))
    rounds = ceil(part / limit)
    micro = ceil(part / rounds)
    if rounds > 1:
        why.append(f"{rounds} micro-batches of {micro} sequences a step: what a worker holds comfortably at a time")
    return micro


def _optimizer(config: RunConfig, flops: float, batch_tokens: int, why: list[str]) -> OptimizerPlan:
    asked = config.optimizer
    lr = asked.lr
    if lr == "auto":
        usual = rules.batch_tokens(flops)
        lr = float(f"{rules.lr_for_batch(rules.peak_lr(flops), batch=batch_tokens, usual_batch=usual):.3g}")
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
    warmup = rules.warmup_steps(steps)
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


def _checkpoint_every(config: RunConfig, why: list[str]) -> Every:
    if config.checkpoint.every != "auto":
        return parse_every(config.checkpoint.every)
    why.append("a checkpoint every minute: that much is lost at most")
    return Every(60, "seconds")


def _report_every(config: RunConfig, device: str) -> int:
    asked = config.report.every
    if asked != "auto":
        return max(1, round(_in_steps(asked).value))
    return 10 if device == "cuda" else 1


def _in_steps(text: str) -> Every:
    every = parse_every(text)
    if every.unit != "steps":
        raise PlaitError(f'"{text}" under [report] must count steps; write for example "100 steps" or "never"')
    return every


def _steps(budget: Amount, batch_tokens: int, *, step_s: float | None) -> int:
    if budget.unit == "steps":
        return max(1, round(budget.value))
    if budget.unit == "tokens":
        return max(1, round(budget.value / batch_tokens))
    return max(1, int(budget.value / step_s)) if step_s else 1


def _split_reason(measured: Sequence[Split], best: Split) -> list[str]:
    if len(measured) < 2:
        return []
    told = ", ".join(
        f"{s.workers} × {s.threads} threads {format_duration(s.step_s or 0)}"
        for s in sorted(measured, key=lambda s: s.workers)
    )
    return [f"{best.workers} worker{'s' if best.workers > 1 else ''}: fastest step of those measured ({told})"]


def _pace(draft: Draft, plan: Plan, split: Split, why: list[str]) -> tuple[int, int]:
    """Steps, and steps between evaluations (0: only at the end)."""
    step_s, evaluate_s = split.step_s or 0.0, split.evaluate_s
    budget = draft.budget
    rounds = 10
    if budget.unit == "seconds" and step_s:
        rounds = max(1, min(10, int(0.06 * budget.value / evaluate_s))) if evaluate_s else 10
        seconds = max(step_s, budget.value - rounds * evaluate_s)
        steps = _steps(Amount(seconds, "seconds"), plan.batch_tokens, step_s=step_s)
        why.append(f"{steps} steps: {budget} at {format_duration(step_s)} a step, as measured")
    else:
        steps = _steps(budget, plan.batch_tokens, step_s=None)
        if step_s and evaluate_s:
            rounds = max(1, min(10, int(0.06 * steps * step_s / evaluate_s)))
    if draft.evaluations != "auto":
        return steps, round(draft.evaluations.value)
    return steps, (ceil(steps / rounds) if rounds > 1 else 0)


def described(plan: Plan) -> str:
    """One line on what will be trained, for people."""
    shape = plan.shape
    flops = training_flops_per_token(shape, plan.sequence, "full")
    return (
        f"{format_count(parameter_count(shape))} parameters ({shape.layers} layers, width {shape.width}, {shape.heads} "
        f"heads, vocabulary {shape.vocabulary}), {plan.steps} steps of {plan.batch_sequences} × {plan.sequence} tokens, "
        f"{format_count(flops)}FLOP a token"
    )


assert SIZES  # the names that model.size may take
