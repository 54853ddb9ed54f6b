"""The numbers of training that a recipe leaves open: the optimizer's, the warm-up, whether documents are masked, and
the batch where a trained model is tuned."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from plait.errors import PlaitError
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import hidden_matrix_numbers
from plait.planner.derive import published_rules
from plait.planner.derive.derived import Derived
from plait.planner.derive.model_size import BaseFacts, CorpusFacts
from plait.planner.derive.published_rules import (
    EXAMPLES_PER_STEP,
    FULL_LR,
    FULL_LR_AFTER,
    LORA_LR_OVER_FULL,
    PAIRS_AFTER,
    examples_batch_tokens,
    finetuning_lr,
    finetuning_warmup_steps,
    preference_numbers,
)
from plait.planner.plan import OptimizerKind, OptimizerPlan
from plait.recipe.finetune import ADAPTER_METHODS, FinetuneMethod, FinetuneObjective, FinetuneSection
from plait.recipe.schema import OptimizerSection, RunConfig
from plait.units import counted, format_count, power_of_ten, times_text

MOST_TIMES_PUBLISHED_LR = 10
"""A requested learning rate this many times above the published rules is warned of: runs end well at several times."""

MOST_TIMES_SHOWN = 10_000
"""Beyond this factor its exact size tells nobody anything."""

BASE_LR = 2e-5
"""AdamW's peak learning rate where a run goes on from a trained model and names none: the one with which Llama 2 was
tuned further (Touvron et al. 2023, section 3.1)."""

MUON_MOMENTUM = 0.95
"""Muon's usual momentum (Jordan et al. 2024)."""
MUON_UP_TO_FLOPS = 1e15
"""Runs from scratch of at most this size take Muon where a recipe names no optimizer: runs of 1e12 to 2e13 FLOPs
ended with 1 to 3 % less loss than AdamW's (docs/speed.md). Larger ones were not measured, and keep AdamW."""
MUON_COST_AT_MOST = 0.15
"""Largest part of a step that Muon's products may add where a recipe names no optimizer."""
SGD_MOMENTUM = 0.9
SGD_WEIGHT_DECAY = 1e-4
"""SGD's usual numbers (He et al. 2015; Goyal et al. 2017), for weight decay that is part of the gradient."""


def optimizer_plan(
    config: RunConfig, flops: float, shape: ModelShape, batch_tokens: int, base: BaseFacts | None = None
) -> Derived[OptimizerPlan]:
    """The optimizer's numbers for a run of this many training FLOPs, its warm-up still open; `base` is the model that
    it goes on from. Raises PlaitError for an optimizer that has nothing to update."""
    requested, method = config.optimizer, config.finetune.method
    kind = optimizer_kind(config, flops=flops, muon_cost=_muon_cost(shape, batch_tokens), is_trained=base is not None)
    if kind == "muon" and method in ADAPTER_METHODS:
        raise PlaitError(
            f'optimizer.kind = "muon" has nothing to update: finetune.method = "{method}" trains adapters alone, whose '
            "two factors are no matrices of layers",
            'take optimizer.kind out, or write finetune.method = "full"',
        )
    lr, why, warnings = requested.lr, list[str](), tuple[str, ...]()
    if method != "auto":
        lr = FULL_LR[config.finetune.objective] if lr == "auto" else lr  # finetuning_optimizer says which, and why
    elif kind != "sgd" and requested.lr == "auto" and base is not None:
        lr = BASE_LR
        why.append(f"peak learning rate {lr:g}: cautious, as the model is trained already (optimizer.lr)")
    elif kind != "sgd":
        found = _peak_lr(requested.lr, flops, batch_tokens, kind)
        lr, why, warnings = found.value, [*found.reasons], found.warnings
    assert lr != "auto"  # the schema refuses SGD without one
    clip = 1.0 if requested.clip == "auto" else requested.clip
    plan = with_usual_numbers(requested, kind, lr=lr, clip=None if clip == "never" else clip)
    if kind == "sgd" and "auto" in (requested.momentum, requested.weight_decay):
        why.append(
            f"SGD with momentum {plan.momentum:g}, weight decay {plan.weight_decay:g} as part of the gradient "
            "(He 2015, Goyal 2017)"
        )
    if kind == "muon":
        why.append(muon_reason(requested))
        if requested.adamw_lr != "auto" and method == "auto":
            beside = _peak_lr(requested.adamw_lr, flops, batch_tokens, kind, key="optimizer.adamw_lr")
            warnings = (*warnings, *beside.warnings)
    tuned = Derived(value=plan) if method == "auto" else finetuning_optimizer(method, plan, config)
    return Derived(value=tuned.value, reasons=(*why, *tuned.reasons), warnings=warnings)


def optimizer_kind(config: RunConfig, *, flops: float, muon_cost: float, is_trained: bool) -> OptimizerKind:
    """The optimizer that a recipe names, else Muon for short runs from scratch whose rate and betas are left open.

    `muon_cost` is what Muon's products would add to a step, as a part of it. `is_trained` says whether the run goes on
    from a trained model.
    """
    if config.optimizer.kind != "auto":
        return config.optimizer.kind
    if config.optimizer.lr != "auto" or config.optimizer.betas != "auto":
        return "adamw"  # numbers that somebody chose for AdamW
    is_from_scratch = config.finetune.method == "auto" and not is_trained
    pays = flops <= MUON_UP_TO_FLOPS and muon_cost <= MUON_COST_AT_MOST
    return "muon" if is_from_scratch and pays else "adamw"


def _muon_cost(shape: ModelShape, batch_tokens: int) -> float:
    """About what Muon's products add to a step, as a part of its FLOPs: 30 width³ for a square matrix, of which a step
    takes 6 width² for each token, as it does for the vocabulary's tables."""
    return 5 * shape.width / batch_tokens * hidden_matrix_numbers(shape) / parameter_count(shape)


def muon_reason(requested: OptimizerSection) -> str:
    """What Muon updates, at what rate AdamW updates the rest, and why Muon was chosen if plait chose it."""
    rate = (
        "at the same learning rate, as Muon's updates have the size of AdamW's (Liu 2025)"
        if requested.adamw_lr == "auto"
        else f"at a peak learning rate of {requested.adamw_lr:g}"
    )
    choice = (
        '; taken because the run is short (optimizer.kind = "adamw" for AdamW alone)'
        if requested.kind == "auto"
        else ""
    )
    return (
        "Muon for the layers' matrices, each orthogonalized as a whole (Jordan 2024); AdamW for embedding, head, "
        f"norms, biases and routers, {rate}{choice}"
    )


def with_usual_numbers(
    requested: OptimizerSection, kind: OptimizerKind, *, lr: float, clip: float | None, warmup_steps: int = 0
) -> OptimizerPlan:
    """A recipe's optimizer with this learning rate, clipping and warm-up; what else it leaves open is as published."""
    usual_decay = SGD_WEIGHT_DECAY if kind == "sgd" else 0.1
    return OptimizerPlan(
        lr=lr,
        warmup_steps=warmup_steps,
        weight_decay=usual_decay if requested.weight_decay == "auto" else requested.weight_decay,
        betas=(0.9, 0.95) if requested.betas == "auto" else requested.betas,
        clip=clip,
        schedule="cosine" if requested.schedule == "auto" else requested.schedule,
        kind=kind,
        momentum=_momentum_of(requested, kind),
        adamw_lr=_adamw_lr_beside(requested, lr) if kind == "muon" else None,
    )


def _momentum_of(requested: OptimizerSection, kind: OptimizerKind) -> float:
    """SGD's or Muon's momentum; 0 for AdamW, which has betas."""
    usual = {"adamw": 0.0, "muon": MUON_MOMENTUM, "sgd": SGD_MOMENTUM}[kind]
    return usual if requested.momentum == "auto" else requested.momentum


def _adamw_lr_beside(requested: OptimizerSection, lr: float) -> float:
    """AdamW's learning rate beside Muon's `lr`."""
    return lr if requested.adamw_lr == "auto" else requested.adamw_lr


def _peak_lr(
    requested: float | Literal["auto"],
    flops: float,
    batch_tokens: int,
    kind: OptimizerKind,
    key: str = "optimizer.lr",
) -> Derived[float]:
    usual = published_rules.usual_batch_tokens(flops)
    times = published_rules.muon_lr_over_adamw(flops) if kind == "muon" else 1.0
    of_adamw = published_rules.lr_for_batch(published_rules.peak_lr(flops), batch=batch_tokens, usual_batch=usual)
    published = times * of_adamw
    if requested == "auto":
        lr = float(f"{published:.3g}")
        rule = f"for {power_of_ten(flops)} FLOPs and this batch (DeepSeek LLM 2024, Malladi 2022)"
        if times > 1:
            rule += f", times {times:.2g} for Muon in a run this short (docs/speed.md)"
        return Derived(value=lr, reasons=(f"peak learning rate {lr:g}: {rule}",))
    if requested <= MOST_TIMES_PUBLISHED_LR * published:
        return Derived(value=requested)
    known = requested < MOST_TIMES_SHOWN * published
    times = times_text(requested / published) if known else f"over {MOST_TIMES_SHOWN:,} times"
    doubt = (
        f"{key} = {requested:g} is {times} what published rules give for this run "
        f"({published:.2g}); it will probably diverge"
    )
    return Derived(value=requested, warnings=(doubt,))


def warmup_steps(config: RunConfig, steps: int) -> Derived[int]:
    """Steps over which the learning rate rises."""
    if config.finetune.method != "auto":
        return finetuning_warmup(config, steps)
    requested = config.optimizer.warmup_steps
    if requested != "auto":
        return Derived(value=requested)
    warmup = published_rules.usual_warmup_steps(steps)
    rule = "half of this short run" if warmup == steps // 2 else "a twentieth of the run, 10 to 2,000 steps"
    reason = f"warm-up {counted(warmup, 'step')}: {rule} (after Goyal 2017)"
    return Derived(value=warmup, reasons=(reason,) if warmup else ())


def documents_mode(config: RunConfig, corpus: CorpusFacts, sequence: int) -> Derived[Literal["mask", "join"]]:
    """Whether attention stays inside documents ("mask") or crosses them within a window ("join")."""
    requested = config.data.mask_documents
    if corpus.layout != "stream":
        if requested is False:
            raise PlaitError("examples never see each other; take data.mask_documents = false out")
        return Derived(value="mask")
    if requested != "auto":
        return Derived(value="mask" if requested else "join")
    mean = corpus.train_tokens / max(1, corpus.documents)
    text = f"documents have {format_count(mean)} tokens on average"
    if mean < 8 * sequence:
        return Derived(value="mask", reasons=(f"attention stays inside documents: {text}",))
    return Derived(value="join", reasons=(f"documents are joined: {text}, few windows hold two",))


def finetuning_batch(
    method: FinetuneMethod, objective: FinetuneObjective, sequence: int, corpus: CorpusFacts
) -> Derived[int]:
    """Sequences of a step: as many as hold the usual number of examples."""
    mean = corpus.tokens_per_document
    tokens = examples_batch_tokens(method, min(mean, sequence))
    sequences = published_rules.divisible_batch(tokens / sequence)
    usual = PAIRS_AFTER.get(objective, "as Llama 2 was tuned")
    source = usual if method == "full" else "LoRA bears large batches less well, Schulman 2025"
    what = "examples" if objective == "sft" else "pairs"
    reason = (
        f"batch {sequences * sequence} tokens: about {max(sequences, round(sequences * sequence / mean))} {what} of "
        f"{format_count(mean)} tokens, {EXAMPLES_PER_STEP[method]} are usual ({source})"
    )
    return Derived(value=sequences, reasons=(reason,))


def finetuning_optimizer(method: FinetuneMethod, plan: OptimizerPlan, config: RunConfig) -> Derived[OptimizerPlan]:
    """The optimizer's numbers with the usual learning rate and weight decay of fine-tuning where a recipe leaves them
    open."""
    objective, why = config.finetune.objective, list[str]()
    if objective != "sft":
        why.append(_pairs_reason(config.finetune))
    requested, lr = config.optimizer, finetuning_lr(method, objective)
    if plan.kind != "sgd" and requested.lr == "auto":
        whole = FULL_LR_AFTER[objective]
        among = (
            f"{PAIRS_AFTER[objective]}, Schulman 2025" if objective in PAIRS_AFTER else "Schulman 2025, Dettmers 2023"
        )
        times = f"{LORA_LR_OVER_FULL} times that of full fine-tuning ({among})"
        why.append(f"peak learning rate {lr:g}: {whole if method == 'full' else times}")
        plan = replace(plan, lr=lr, adamw_lr=_adamw_lr_beside(requested, lr) if plan.kind == "muon" else None)
    if requested.weight_decay == "auto" and (method in ADAPTER_METHODS or objective != "sft"):
        small = "adapters are small already (Dettmers 2023)"
        held = "the reference holds the weights (Lambert 2024)" if objective == "dpo" else "as for DPO (Lambert 2024)"
        why.append(f"no weight decay: {small if method in ADAPTER_METHODS else held}")
        plan = replace(plan, weight_decay=0.0)
    return Derived(value=plan, reasons=tuple(why))


def _pairs_reason(tuning: FinetuneSection) -> str:
    """What a run on pairs does with them."""
    beta, margin = preference_numbers(tuning)
    smoothed = f", label smoothing {tuning.label_smoothing:g}" if tuning.label_smoothing else ""
    if tuning.objective == "orpo":
        return (
            f"ORPO: the preferred answers are learned, and {beta:g} times the odds ratio of both answers; there is no "
            "reference (Hong 2024)"
        )
    if tuning.objective == "simpo":
        return (
            f"SimPO with beta {beta:g}, margin {margin:g}{smoothed}: means over an answer's tokens are compared; there "
            "is no reference (Meng 2024)"
        )
    if tuning.reference == "none":
        return f"DPO with beta {beta:g}{smoothed} and no reference: nothing holds the model to what it was"
    return (
        f"DPO with beta {beta:g}{smoothed}: answers are compared with what the model gave before; that takes one "
        "forward pass over all pairs before the first step, and is kept beside the prepared data"
    )


def finetuning_warmup(config: RunConfig, steps: int) -> Derived[int]:
    """Steps over which the learning rate rises."""
    if config.optimizer.warmup_steps != "auto":
        return Derived(value=config.optimizer.warmup_steps)
    warmup = finetuning_warmup_steps(steps, config.finetune.objective)
    usual = "3 % of the run, 10 steps or more (Taori 2023)"
    pairs = "a tenth of the run, 10 to 150 steps (Lambert 2024, Rafailov 2023)"
    reason = f"warm-up {counted(warmup, 'step')}: {usual if config.finetune.objective == 'sft' else pairs}"
    return Derived(value=warmup, reasons=(reason,))
