"""What a recipe leaves open where a trained model is tuned: batch, learning rate, weight decay and warm-up."""

from __future__ import annotations

from dataclasses import replace

from plait.planner.derive import scaling_rules
from plait.planner.derive.derived import Derived
from plait.planner.derive.finetuning_rules import (
    EXAMPLES_PER_STEP,
    LORA_LR_OVER_FULL,
    examples_batch_tokens,
    finetuning_lr,
    finetuning_warmup_steps,
)
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.plan import OptimizerPlan
from plait.recipe.finetune import FinetuneMethod, FinetuneObjective
from plait.recipe.schema import RunConfig
from plait.units import counted, format_count


def finetuning_batch(
    method: FinetuneMethod, objective: FinetuneObjective, sequence: int, corpus: CorpusFacts
) -> Derived[int]:
    """Sequences of a step: as many as hold the usual number of examples."""
    mean = corpus.tokens_per_document
    tokens = examples_batch_tokens(method, min(mean, sequence))
    sequences = scaling_rules.divisible_batch(tokens / sequence)
    usual = "as Llama 2 was tuned" if objective == "sft" else "Rafailov 2023"
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
    if objective == "dpo":
        why.append(
            f"DPO with beta {config.finetune.beta:g}: answers are compared with what the model gave before; that takes "
            "one forward pass over all pairs before the first step, and is kept beside the prepared data"
        )
    requested, lr = config.optimizer, finetuning_lr(method, objective)
    if requested.kind == "adamw" and requested.lr == "auto":
        whole = "that of Llama 2, tuned whole" if objective == "sft" else "DPO's for all weights (Rafailov 2023)"
        among = "Schulman 2025, Dettmers 2023" if objective == "sft" else "Rafailov 2023, Schulman 2025"
        times = f"{LORA_LR_OVER_FULL} times that of full fine-tuning ({among})"
        why.append(f"peak learning rate {lr:g}: {whole if method == 'full' else times}")
        plan = replace(plan, lr=lr)
    if requested.weight_decay == "auto" and (method == "lora" or objective == "dpo"):
        small = "adapters are small already (Dettmers 2023)"
        why.append(
            f"no weight decay: {small if method == 'lora' else 'the reference holds the weights (Lambert 2024)'}"
        )
        plan = replace(plan, weight_decay=0.0)
    return Derived(value=plan, reasons=tuple(why))


def finetuning_warmup(config: RunConfig, steps: int) -> Derived[int]:
    """Steps over which the learning rate rises."""
    if config.optimizer.warmup_steps != "auto":
        return Derived(value=config.optimizer.warmup_steps)
    warmup = finetuning_warmup_steps(steps, config.finetune.objective)
    usual = "3 % of the run, 10 steps or more (Taori 2023)"
    pairs = "a tenth of the run, 10 to 150 steps (Lambert 2024, Rafailov 2023)"
    reason = f"warm-up {counted(warmup, 'step')}: {usual if config.finetune.objective == 'sft' else pairs}"
    return Derived(value=warmup, reasons=(reason,))
