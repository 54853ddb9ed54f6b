"""AdamW in one pass over weights, gradients and moments, which reads gradients in bfloat16 and writes the next step's
weights in bfloat16 beside the float32 ones. A module of its own: importing it needs Triton.

In torch's order of operations (ATen/native/cuda/fused_adam_utils.cuh), which versions of torch compute in float64 or in
float32: gpu_experiment.py counts the numbers that differ.
"""

# Triton reads annotations and names as they are written: no `from __future__ import annotations` here.
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 2048


@triton.jit
def adamw(
    weight_at,
    copy_at,
    gradient_at,
    mean_at,
    square_at,
    count_at,
    scale_at,
    skip_at,
    numbers,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    decay: tl.float64,
    BLOCK: tl.constexpr,
    MATH: tl.constexpr,
):
    """`count` is the number of updates, with this one; `scale` divides gradients; `skip` 1.0 leaves all as it is."""
    skip = tl.load(skip_at)
    count = tl.load(count_at).to(tl.float64)
    scale = tl.load(scale_at).to(tl.float64)
    correction1 = (1.0 - tl.exp(tl.log(beta1) * count)).to(tl.float32)
    correction2 = (1.0 - tl.exp(tl.log(beta2) * count)).to(tl.float32)
    size = (lr / correction1.to(tl.float64)).to(tl.float32)
    root2 = tl.sqrt_rn(correction2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = (at < numbers) & (skip == 0.0)
    weight = tl.load(weight_at + at, mask=here, other=0.0)
    gradient = tl.load(gradient_at + at, mask=here, other=0.0).to(tl.float32)
    if MATH == "float64":
        gradient = (gradient.to(tl.float64) / scale).to(tl.float32)
    else:
        gradient = tl.div_rn(gradient, scale.to(tl.float32))
    mean = tl.load(mean_at + at, mask=here, other=0.0)
    square = tl.load(square_at + at, mask=here, other=0.0)
    if MATH == "float64":
        weight = (weight.to(tl.float64) - lr * decay * weight.to(tl.float64)).to(tl.float32)
        mean = (beta1 * mean.to(tl.float64) + (1.0 - beta1) * gradient.to(tl.float64)).to(tl.float32)
        new = (1.0 - beta2) * gradient.to(tl.float64) * gradient.to(tl.float64)
        square = (beta2 * square.to(tl.float64) + new).to(tl.float32)
        denominator = (tl.div_rn(tl.sqrt_rn(square), root2).to(tl.float64) + 1e-8).to(tl.float32)
    else:
        one = tl.full((), 1.0, tl.float32)
        weight = weight - lr.to(tl.float32) * decay.to(tl.float32) * weight
        mean = mean + (one - beta1.to(tl.float32)) * (gradient - mean)
        square = beta2.to(tl.float32) * square + (one - beta2.to(tl.float32)) * gradient * gradient
        denominator = tl.div_rn(tl.sqrt_rn(square), root2) + tl.full((), 1e-8, tl.float32)
    weight = weight - tl.div_rn(size * mean, denominator)
    tl.store(weight_at + at, weight, mask=here)
    tl.store(copy_at + at, weight.to(tl.bfloat16), mask=here)
    tl.store(mean_at + at, mean, mask=here)
    tl.store(square_at + at, square, mask=here)
