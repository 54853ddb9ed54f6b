"""Published rules of thumb for what a recipe leaves open, each a pure function with its source.

Sources: Goyal et al. 2017 (arXiv 1706.02677: the learning rate follows the batch, warm-up), Hoffmann et al. 2022
(2203.15556: 20 tokens a parameter), Muennighoff et al. 2023 (2305.16264: four passes over the data are about as good
as fresh data), Malladi et al. 2022 (2205.10287: for Adam the learning rate follows the square root of the batch),
Bi et al. 2024 (DeepSeek LLM, 2401.02954, section 3.1: batch and learning rate from the training FLOPs), Brown et al.
2020 (2005.14165, appendix B: betas, weight decay, clipping), Hägele et al. 2024 (2405.18392: decay over the last 20 %).
"""

from __future__ import annotations

from math import floor, log2, sqrt

from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import active_parameter_count, trained_parameter_count

TOKENS_PER_PARAMETER = 20
USEFUL_EPOCHS = 4
EXPECTED_MFU = 0.45
"""Share of the arithmetic peak that a first guess expects, before the step is measured."""


def compute_optimal_parameters(*, flops: float, unique_tokens: int) -> float:
    """Parameters that learn most from `flops` of training: 20 tokens each, or fewer when text runs short.

    Training costs 6 FLOPs a parameter and token. Text is good for four passes; FLOPs beyond that go into size.
    """
    by_flops = sqrt(flops / (6 * TOKENS_PER_PARAMETER))
    by_text = flops / (6 * USEFUL_EPOCHS * unique_tokens)
    return max(by_flops, by_text)


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


def peak_lr(flops: float) -> float:
    """AdamW's peak learning rate from the whole run's training FLOPs (Bi et al. 2024: 0.3118 C^-0.1250).

    At most 4e-3: the fit starts at 1e17 FLOPs and grows without bound below that.
    """
    return min(4e-3, 0.3118 * flops**-0.1250)


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
