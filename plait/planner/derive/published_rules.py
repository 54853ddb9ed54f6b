"""Published rules of thumb for what a recipe leaves open, each a pure function with its source.

Sources: Goyal et al. 2017 (arXiv 1706.02677: the learning rate follows the batch, warm-up), Hoffmann et al. 2022
(2203.15556: 20 tokens a parameter), Muennighoff et al. 2023 (2305.16264: what repeated text is worth, and parameters
beyond those that a text can train), Malladi et al. 2022 (2205.10287: for Adam the learning rate follows the square
root of the batch), Bi et al. 2024 (DeepSeek LLM, 2401.02954, section 3.1: batch and learning rate from the training
FLOPs), Brown et al. 2020 (2005.14165, appendix B: betas, weight decay, clipping), Hägele et al. 2024 (2405.18392:
decay over the last 20 %).

Rules for tuning a model that is trained already: Touvron et al. 2023 (Llama 2, 2307.09288, section 3.1: all weights at
2e-5, decay 0.1, 64 examples a step), Taori et al. 2023 (Alpaca: three epochs, a warm-up of 3 %), Schulman and Thinking
Machines 2025 ("LoRA Without Regret": all linear layers, alpha 32, about ten times the rate of full fine-tuning at any
rank, smaller batches, a weight stores about two bits and a token to learn is about one), Biderman et al. 2024 ("LoRA
Learns Less and Forgets Less", 2405.09673: all linear layers, ranks from 16 to 256, alpha twice the rank at 16),
Dettmers et al. 2023 (QLoRA, 2305.14314: 2e-4 and no weight decay for LoRA), Kalajdzievski 2023 (rsLoRA, 2312.03732:
alpha over the rank's root). Of pairs of answers: Rafailov et al. 2023 (DPO, 2305.18290, appendix B: a rate of 1e-6 for
all weights, beta 0.1, 64 pairs a step, a warm-up of 150 steps), Lambert et al. 2024 (Tulu 3, 2411.15124: one epoch, a
tenth of the run as warm-up, no weight decay), Hong et al. 2024 (ORPO, 2403.07691: 8e-6 for all weights, lambda 0.1),
Meng et al. 2024 (SimPO, 2405.14734: 3e-7 to 1e-6 for all weights, beta 2, gamma half of it, one epoch). None of them
asks how many devices there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, exp, floor, log2, sqrt

from plait.model.adapter_shape import AdapterVariant
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import active_parameter_count, trained_parameter_count
from plait.recipe.finetune import FinetuneMethod, FinetuneObjective, FinetuneSection

TOKENS_PER_PARAMETER = 20
LOSS_EXPONENT, LOSS_OF_PARAMETERS, LOSS_OF_TOKENS = 0.3527, 521.0, 1488.0
"""How the loss falls with parameters and tokens (Muennighoff et al. 2023, appendix A: 521 / N^0.3527 +
1488 / D^0.3527). The two are balanced at about 20 tokens a parameter."""
REPEATS_DECAY, EXCESS_DECAY = 15.39, 5.31
"""Repeats of a text, and parameters beyond those that the text can train (in multiples of these), after which one more
is worth 1/e of the first (the same source: R*_D and R*_N)."""
EXPECTED_MFU = 0.45
"""Share of the arithmetic peak that a first guess expects, before the step is measured."""


def compute_optimal_parameters(*, flops: float, unique_tokens: int) -> float:
    """Parameters that learn most from `flops` of training (6 a parameter and token) on a text: 20 tokens each while the
    text is fresh, by the law of repeated text where it is not; never more than useful_parameters."""
    most, tokens = useful_parameters(unique_tokens), useful_tokens(unique_tokens)
    largest = min(most, 2 * sqrt(flops / (6 * TOKENS_PER_PARAMETER)))  # fresh text takes half of that
    candidates = [largest * 1.05**-power for power in range(100)]

    def loss(parameters: float) -> float:
        return reducible_loss(parameters, min(flops / (6 * parameters), tokens), unique_tokens)

    return min(candidates, key=loss)


def useful_tokens(unique_tokens: int) -> float:
    """Tokens of training after which a text teaches next to nothing new and is only memorised: R*_D repeats of it."""
    return (1 + REPEATS_DECAY) * unique_tokens


def useful_parameters(unique_tokens: int) -> float:
    """Parameters beyond which a text trains none: those with 20 tokens each, and three times R*_N as many in excess,
    whose worth is 95 % of any number's."""
    return (1 + 3 * EXCESS_DECAY) * unique_tokens / TOKENS_PER_PARAMETER


def reducible_loss(parameters: float, tokens: float, unique_tokens: int) -> float:
    """What training can still take from the loss, by the law of repeated text (Muennighoff et al. 2023, equation 5)."""
    fresh = min(tokens, unique_tokens)
    trained = min(parameters, fresh / TOKENS_PER_PARAMETER)
    worth = _worth(parameters, trained, EXCESS_DECAY), _worth(tokens, fresh, REPEATS_DECAY)
    return LOSS_OF_PARAMETERS / worth[0] ** LOSS_EXPONENT + LOSS_OF_TOKENS / worth[1] ** LOSS_EXPONENT


SCALING_LAWS: Mapping[str, tuple[float, float, float, float, float]] = {
    "Hoffmann 2022": (1.69, 406.4, 0.34, 410.7, 0.28),
    "Besiroglu 2024": (1.8172, 482.01, 0.3478, 2085.43, 0.3658),
    "Muennighoff 2023": (1.87, LOSS_OF_PARAMETERS, LOSS_EXPONENT, LOSS_OF_TOKENS, LOSS_EXPONENT),
}
"""Published fits of the loss on web text in nats a token, E + A / N^a + B / D^b: (E, A, a, B, b). The second refits the
runs of the first (2404.10102)."""


def predicted_losses(parameters: float, tokens: float, unique_tokens: int) -> dict[str, float]:
    """The loss that each published fit expects of a training, repeated text and excess parameters counted for what they
    are worth."""
    fresh = min(tokens, unique_tokens)
    trained = min(parameters, fresh / TOKENS_PER_PARAMETER)
    n, d = _worth(parameters, trained, EXCESS_DECAY), _worth(tokens, fresh, REPEATS_DECAY)
    return {name: e + a / n**x + b / d**y for name, (e, a, x, b, y) in SCALING_LAWS.items()}


def _worth(amount: float, full: float, decay: float) -> float:
    """How much an amount is worth of which `full` counts whole and each multiple beyond it less and less."""
    return full * (1 + decay * (1 - exp(-(amount / full - 1) / decay)))


def training_flops_of_weights(shape: ModelShape) -> int:
    """FLOPs of training for a token: 6 for each weight that it meets, and 4 for a frozen one, whose gradient is not
    computed."""
    if shape.mixture is not None:  # which has no frozen weights
        return 6 * active_parameter_count(shape)
    return 4 * parameter_count(shape) + 2 * trained_parameter_count(shape)


def parameters_for_tokens(tokens: float) -> float:
    """Parameters that learn most from this many tokens of training, whatever it costs."""
    return tokens / TOKENS_PER_PARAMETER


LEAST_STEPS_OF_A_RUN = 1000
"""Measured, see docs/log.md: a short run learns more from many small steps than the fit of large runs would give it."""


def usual_batch_tokens(flops: float) -> float:
    """Tokens of a step from the whole run's training FLOPs (Bi et al. 2024: 0.2920 C^0.3271)."""
    return 0.2920 * flops**0.3271


def short_run_batch_tokens(tokens: float) -> float:
    """The largest batch of a run over this many tokens that leaves it its least number of steps; 1,024 tokens or
    more."""
    return max(1024.0, tokens / LEAST_STEPS_OF_A_RUN)


def divisible_batch(sequences: float) -> int:
    """A batch of about this many sequences that many numbers of devices divide: the nearest multiple of the largest
    power of two in its half (1,024 for 912, 768 for 800), whatever the devices are; below four the nearest number."""
    unit = 2 ** max(0, floor(log2(max(sequences, 1))) - 1)
    return max(1, floor(sequences / unit + 0.5) * unit)


LARGEST_LR = 1e-2
"""Bound of the peak learning rate at the usual batch: the fit below starts at 1e17 FLOPs and grows without bound below
that. Runs of 1e12 FLOPs learned more at it than at 4e-3, the bound before, and less at 2e-2 (docs/log.md)."""


def peak_lr(flops: float) -> float:
    """The peak learning rate from the whole run's training FLOPs (Bi et al. 2024: 0.3118 C^-0.1250), at most
    LARGEST_LR."""
    return min(LARGEST_LR, 0.3118 * flops**-0.1250)


def muon_lr_over_adamw(flops: float) -> float:
    """Muon's peak learning rate over AdamW's. Its updates have the size of AdamW's (Liu et al. 2025), so that large
    runs take the same rate; runs of 1e12 to 2e13 FLOPs learned most at twice the rate (docs/log.md). Between 1e15 and
    1e18 FLOPs, where neither was measured, it falls from 2 to 1."""
    return min(2.0, max(1.0, 2 * (flops / 1e15) ** -0.1003))


def lr_for_batch(lr: float, *, batch: float, usual_batch: float) -> float:
    """The learning rate for another batch than the usual one: Adam's follows the square root (Malladi et al. 2022)."""
    return lr * sqrt(batch / usual_batch)


def usual_warmup_steps(steps: int) -> int:
    """A twentieth of the run, between 10 and 2,000 steps (after Goyal et al. 2017 and Bi et al. 2024)."""
    return min(steps // 2, max(10, min(2000, steps // 20)))


def usual_sequence_length(parameters: float) -> int:
    """Tokens of a window by model size, as published runs of that size have it, shorter for the very small."""
    for limit, tokens in ((2e7, 256), (1e8, 512), (1e9, 1024), (4e9, 2048)):
        if parameters < limit:
            return tokens
    return 4096


FULL_LR: dict[FinetuneObjective, float] = {"sft": 2e-5, "dpo": 1e-6, "orpo": 8e-6, "simpo": 5e-7}
FULL_LR_AFTER: dict[FinetuneObjective, str] = {
    "sft": "that of Llama 2, tuned whole",
    "dpo": "DPO's for all weights (Rafailov 2023)",
    "orpo": "ORPO's for all weights (Hong 2024)",
    "simpo": "SimPO's for all weights, of which a larger one breaks answers (Meng 2024)",
}
PAIRS_AFTER: dict[FinetuneObjective, str] = {"dpo": "Rafailov 2023", "orpo": "Hong 2024", "simpo": "Meng 2024"}
USUAL_BETA: dict[FinetuneObjective, float] = {"dpo": 0.1, "orpo": 0.1, "simpo": 2.0}
MARGIN_OVER_BETA = 0.5
"""SimPO's gamma over its beta."""
LORA_LR_OVER_FULL = 10
EPOCHS: dict[FinetuneObjective, int] = {"sft": 3, "dpo": 1, "orpo": 1, "simpo": 1}
EPOCHS_AFTER: dict[FinetuneObjective, str] = {
    "sft": "Taori 2023", "dpo": "Lambert 2024", "orpo": "as for DPO, Lambert 2024", "simpo": "Meng 2024",
}  # fmt: skip
EXAMPLES_PER_STEP: dict[FinetuneMethod, int] = {"full": 64, "lora": 32, "qlora": 32}
LEAST_RANK, LARGEST_RANK = 16, 256
BITS_PER_WEIGHT, BITS_PER_TOKEN = 2, 1
WARMUP_SHARE: dict[FinetuneObjective, float] = {"sft": 0.03, "dpo": 0.1, "orpo": 0.1, "simpo": 0.1}
PAIRS_LONGEST_WARMUP = 150
USUAL_ALPHA: dict[AdapterVariant, float] = {"lora": 32.0, "rslora": 8.0}
"""Alpha by variant; that of "rslora" gives the factor 2 of "lora" at rank 16."""


def finetuning_lr(method: FinetuneMethod, objective: FinetuneObjective = "sft") -> float:
    """AdamW's peak learning rate."""
    return FULL_LR[objective] * (1 if method == "full" else LORA_LR_OVER_FULL)


def preference_numbers(tuning: FinetuneSection) -> tuple[float, float]:
    """The beta and the margin of a recipe that learns from pairs, also where it leaves them open ("auto")."""
    beta = USUAL_BETA[tuning.objective] if tuning.beta == "auto" else tuning.beta
    return beta, beta * MARGIN_OVER_BETA if tuning.margin == "auto" else tuning.margin


def finetuning_warmup_steps(steps: int, objective: FinetuneObjective = "sft") -> int:
    """3 % of the run, 10 steps or more, at most half of it; for pairs a tenth, and never more than 150 steps."""
    warmup = min(steps // 2, max(10, round(WARMUP_SHARE[objective] * steps)))
    return min(warmup, PAIRS_LONGEST_WARMUP) if objective != "sft" else warmup


def examples_batch_tokens(method: FinetuneMethod, tokens_per_example: float) -> float:
    """Tokens of a step: this many examples, or pairs, of this length, packed."""
    return EXAMPLES_PER_STEP[method] * tokens_per_example


def rank_for_tokens(tokens: float, weights_per_rank: int, largest: int) -> int:
    """The power of two from 16 to 256 whose adapters can store what this many tokens tell; at most `largest`, rounded
    down to a power of two."""
    needed = ceil(tokens * BITS_PER_TOKEN / BITS_PER_WEIGHT / weights_per_rank)
    rank = min(max(LEAST_RANK, 1 << max(0, needed - 1).bit_length()), LARGEST_RANK)
    return min(rank, 1 << int(log2(largest)))
