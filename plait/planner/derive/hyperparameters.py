"""The numbers of training that a recipe leaves open: AdamW's, the warm-up, and whether documents are masked."""

from __future__ import annotations

from typing import Literal

from plait.planner.derive import scaling_rules
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.plan import WARNING, OptimizerPlan
from plait.recipe.schema import RunConfig
from plait.units import counted, format_count

MOST_TIMES_PUBLISHED_LR = 10
"""A requested learning rate this many times above the published rules is warned of: runs end well at several times."""


def optimizer_plan(config: RunConfig, flops: float, batch_tokens: int, why: list[str]) -> OptimizerPlan:
    """AdamW's numbers for a run of so many training FLOPs, its warm-up still open."""
    requested = config.optimizer
    usual = scaling_rules.usual_batch_tokens(flops)
    published = scaling_rules.lr_for_batch(scaling_rules.peak_lr(flops), batch=batch_tokens, usual_batch=usual)
    lr = requested.lr
    if lr == "auto":
        lr = float(f"{published:.3g}")
        why.append(f"peak learning rate {lr:g}: for {flops:.1e} FLOPs and this batch (DeepSeek LLM 2024, Malladi 2022)")
    elif lr > MOST_TIMES_PUBLISHED_LR * published:
        why.append(
            f"{WARNING}optimizer.lr = {lr:g} is {format_count(lr / published)} times what published rules give for "
            f"this run ({published:.2g}); it will probably diverge"
        )
    clip = 1.0 if requested.clip == "auto" else requested.clip
    return OptimizerPlan(
        lr=lr,
        warmup_steps=0,
        weight_decay=0.1 if requested.weight_decay == "auto" else requested.weight_decay,
        betas=(0.9, 0.95) if requested.betas == "auto" else requested.betas,
        clip=None if clip == "never" else clip,
        schedule="cosine" if requested.schedule == "auto" else requested.schedule,
    )


def warmup_steps(config: RunConfig, steps: int, why: list[str]) -> int:
    """Steps over which the learning rate rises."""
    requested = config.optimizer.warmup_steps
    if requested != "auto":
        return requested
    warmup = scaling_rules.usual_warmup_steps(steps)
    why.append(f"warm-up {counted(warmup, 'step')}: a twentieth of the run, 10 to 2,000 steps (after Goyal 2017)")
    return warmup


def documents_mode(config: RunConfig, corpus: CorpusFacts, sequence: int, why: list[str]) -> Literal["mask", "join"]:
    """Whether attention stays inside documents ("mask") or crosses them within a window ("join")."""
    requested = config.data.mask_documents
    if requested != "auto":
        return "mask" if requested else "join"
    mean = corpus.train_tokens / max(1, corpus.documents)
    short = mean < 8 * sequence
    text = f"documents have {format_count(mean)} tokens on average"
    why.append(
        f"attention stays inside documents: {text}" if short else f"documents are joined: {text}, few windows hold two"
    )
    return "mask" if short else "join"
