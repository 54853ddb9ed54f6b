"""What software makes of the machine: which kernels it has, what it hides behind arithmetic, what it costs the host."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The habits of one training program; every share lies between 0 and 1.

    The constants of named stacks are physical readings where a source is named, else fitted over whole families of
    published runs at once, never on one row (see benchmarks/published).
    """

    name: str
    speed: float = 1.0
    """How fast the software is against this model's expectation: the one scalar that a measurement sets."""
    product_share: float = 1.0
    """Of the rate that the largest single products reach on a device, what a long run with real data holds."""
    fp8_share: float = 0.80
    """Of the device's fp8 rate: casts, scales and the products that stay in bf16."""
    flash_forward: float = 0.60
    """Share of the 16-bit peak that a fused attention kernel reaches, heads of width 128 and a long sequence."""
    flash_backward: float = 0.50
    stream_bytes: float = 30.0
    """Memory traffic of a layer's forward pass per token and unit of width: norms, residuals, dropout, casts."""
    inner_bytes: float = 6.0
    """The same per token and unit of the feedforward's width: activation and gate."""
    score_bytes: float = 13.0
    """Traffic per attention score of the forward pass where attention is not fused."""
    logit_bytes: float = 20.0
    """Traffic per logit, forward and backward: the loss in float32."""
    layer_kernels: float = 22.0
    """Kernels that the host launches for one layer's forward pass; the backward pass launches twice as many."""
    launch_s: float = 6e-6
    """Host time to launch one kernel."""
    micro_s: float = 1e-3
    """Host time that each micro-batch costs beside its kernels."""
    step_s: float = 10e-3
    """Time that each step costs whatever its size: the optimizer's launches, the norm, the data, the log."""
    hides_tensor: float = 0.0
    """Share of the tensor axis' communication that runs under arithmetic."""
    hides_context: float = 0.7
    hides_pipeline: float = 0.0
    hides_gradients: float = 0.0
    """Share of the backward pass that gradient sums may run under."""
    hides_parameters: float = 0.9
    """Share of the arithmetic that gathers of sharded parameters may run under."""
    hides_experts: float = 0.0
    selective_products: float = 0.0
    """Share of the forward products that selective recomputation repeats beside what attention keeps."""
    gradient_bytes: int = 4
    """Bytes of one gradient as it is summed over ranks and kept."""
    update_bytes: float = 30.0
    """Memory traffic of the optimizer per parameter that a rank updates."""
    state_bytes: int = 12
    """Bytes of optimizer state per parameter: float32 master weight and two moments."""
    logit_copies_bytes: float = 10.0
    """Memory held per logit at the loss: 16-bit logits, float32 copy and its gradient; little where the loss is fused."""
    fixed_bytes: float = 1.0e9
    """Memory that no tensor of the model explains: communication buffers, workspaces."""
    reading: str = "allocated"


PLAIT = Stack(name="plait", hides_gradients=0.7, logit_copies_bytes=0.3)

MEGATRON_2021 = Stack(
    name="megatron 2021", stream_bytes=40.0, layer_kernels=30.0, gradient_bytes=2, logit_copies_bytes=14.0
)
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed")
MEGATRON = Stack(name="megatron", hides_tensor=0.6, hides_pipeline=0.5, hides_gradients=0.8, hides_experts=0.3)
COMPOSER = Stack(name="composer fsdp", layer_kernels=30.0)
TORCHTITAN = Stack(name="torchtitan", selective_products=0.5, hides_tensor=0.3)
INTERNEVO = Stack(name="internevo", hides_gradients=0.7)
MAXTEXT = Stack(name="maxtext", hides_gradients=0.8, launch_s=0.5e-6)
FSDP = replace(COMPOSER, name="fsdp")
