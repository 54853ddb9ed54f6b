"""Published rules for tuning a model that is trained already, each a pure function with its source.

Sources: Touvron et al. 2023 (Llama 2, 2307.09288, section 3.1: all weights at 2e-5, decay 0.1, 64 examples a step),
Taori et al. 2023 (Alpaca: three epochs, a warm-up of 3 %), Schulman and Thinking Machines 2025 ("LoRA Without Regret":
all linear layers, alpha 32, about ten times the rate of full fine-tuning at any rank, smaller batches, a weight stores
about two bits and a token to learn is about one), Biderman et al. 2024 ("LoRA Learns Less and Forgets Less",
2405.09673: all linear layers, ranks from 16 to 256, alpha twice the rank at 16), Dettmers et al. 2023 (QLoRA,
2305.14314: 2e-4 and no weight decay for LoRA), Kalajdzievski 2023 (rsLoRA, 2312.03732: alpha over the rank's root).
Of pairs of answers: Rafailov et al. 2023 (DPO, 2305.18290, appendix B: a rate of 1e-6 for all weights, beta 0.1, 64
pairs a step, a warm-up of 150 steps), Lambert et al. 2024 (Tulu 3, 2411.15124: one epoch, a tenth of the run as
warm-up, no weight decay). None of them asks how many devices there are.
"""

from __future__ import annotations

from math import ceil, log2

from plait.model.adapter_shape import AdapterVariant
from plait.recipe.finetune import FinetuneMethod, FinetuneObjective

FULL_LR: dict[FinetuneObjective, float] = {"sft": 2e-5, "dpo": 1e-6}
LORA_LR_OVER_FULL = 10
EPOCHS: dict[FinetuneObjective, int] = {"sft": 3, "dpo": 1}
EPOCHS_AFTER: dict[FinetuneObjective, str] = {"sft": "Taori 2023", "dpo": "Lambert 2024"}
EXAMPLES_PER_STEP: dict[FinetuneMethod, int] = {"full": 64, "lora": 32}
LEAST_RANK, LARGEST_RANK = 16, 256
BITS_PER_WEIGHT, BITS_PER_TOKEN = 2, 1
WARMUP_SHARE: dict[FinetuneObjective, float] = {"sft": 0.03, "dpo": 0.1}
PAIRS_LONGEST_WARMUP = 150
USUAL_ALPHA: dict[AdapterVariant, float] = {"lora": 32.0, "rslora": 8.0}
"""Of "rslora": the same factor 2 as "lora" at rank 16."""


def finetuning_lr(method: FinetuneMethod, objective: FinetuneObjective = "sft") -> float:
    """AdamW's peak learning rate."""
    return FULL_LR[objective] * (LORA_LR_OVER_FULL if method == "lora" else 1)


def finetuning_warmup_steps(steps: int, objective: FinetuneObjective = "sft") -> int:
    """3 % of the run, 10 steps or more, at most half of it; for pairs a tenth, and never more than 150 steps."""
    warmup = min(steps // 2, max(10, round(WARMUP_SHARE[objective] * steps)))
    return min(warmup, PAIRS_LONGEST_WARMUP) if objective == "dpo" else warmup


def examples_batch_tokens(method: FinetuneMethod, tokens_per_example: float) -> float:
    """Tokens of a step: this many examples, or pairs, of this length, packed."""
    return EXAMPLES_PER_STEP[method] * tokens_per_example


def rank_for_tokens(tokens: float, weights_per_rank: int, largest: int) -> int:
    """The power of two from 16 to 256 whose adapters can store what this many tokens tell; at most `largest`, rounded
    down to a power of two."""
    needed = ceil(tokens * BITS_PER_TOKEN / BITS_PER_WEIGHT / weights_per_rank)
    rank = min(max(LEAST_RANK, 1 << max(0, needed - 1).bit_length()), LARGEST_RANK)
    return min(rank, 1 << int(log2(largest)))
