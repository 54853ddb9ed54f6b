"""What a recipe leaves open where a trained model is tuned: batch, learning rate, weight decay and warm-up."""

from __future__ import annotations

from dataclasses import replace

from plait.planner.derive import scaling_rules
from plait.planner.derive.finetuning_rules import (
    EXAMPLES_PER_STEP,
    LORA_LR_OVER_FULL,
    examples_batch_tokens,
    finetuning_lr,
    finetuning_warmup_steps,
)
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.plan import OptimizerPlan
from plait.recipe.finetune import FinetuneMethod
from plait.recipe.schema import RunConfig
from plait.units import counted, format_count


def finetuning_batch(method: FinetuneMethod, sequence: int, corpus: CorpusFacts, why: list[str]) -> int:
    """Sequences of a step: as many as hold the usual number of examples."""
    mean = corpus.tokens_per_document
    tokens = examples_batch_tokens(method, min(mean, sequence))
    sequences = scaling_rules.divisible_batch(tokens / sequence)
    source = "as Llama 2 was tuned" if method == "full" else "LoRA bears large batches less well, Schulman 2025"
    why.append(
        f"batch {sequences * sequence} tokens: about {max(sequences, round(sequences * sequence / mean))} examples of "
        f"{format_count(mean)} tokens, {EXAMPLES_PER_STEP[method]} are usual ({source})"
    )
    return sequences


def finetuning_optimizer(
    method: FinetuneMethod, plan: OptimizerPlan, config: RunConfig, why: list[str]
) -> OptimizerPlan:
    """The optimizer's numbers with the usual learning rate and weight decay of fine-tuning where a recipe leaves them
    open."""
    requested, lr = config.optimizer, finetuning_lr(method)
    if requested.kind == "adamw" and requested.lr == "auto":
        times = f"{LORA_LR_OVER_FULL} times that of full fine-tuning (Schulman 2025, Dettmers 2023)"
        why.append(f"peak learning rate {lr:g}: {'that of Llama 2, tuned whole' if method == 'full' else times}")
        plan = replace(plan, lr=lr)
    if method == "lora" and requested.weight_decay == "auto":
        why.append("no weight decay: adapters are small already (Dettmers 2023)")
        plan = replace(plan, weight_decay=0.0)
    return plan


def finetuning_warmup(config: RunConfig, steps: int, why: list[str]) -> int:
    """Steps over which the learning rate rises."""
    if config.optimizer.warmup_steps != "auto":
        return config.optimizer.warmup_steps
    warmup = finetuning_warmup_steps(steps)
    why.append(f"warm-up {counted(warmup, 'step')}: 3 % of the run, 10 steps or more (Taori 2023)")
    return warmup
