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
    fp8_share: float = 0.95
    """Of the device's fp8 rate: casts, scales and the products that stay in bf16."""
    flash_share: float = 0.60
    """Share of the 16-bit peak that a fused attention kernel reaches forward, heads 128 wide, long sequence."""
    flash_lag: float = 0.0
    """How far the attention kernel lags on devices faster than an A100: 0 not at all, 1 no faster than there."""
    stream_bytes: float = 30.0
    """Memory traffic of a layer's forward pass per token and unit of width: norms, residuals, dropout, casts."""
    inner_bytes: float = 6.0
    """The same per token and unit of the feedforward's width: activation and gate."""
    score_bytes: float = 13.0
    """Traffic per attention score of the forward pass where attention is not fused."""
    routed_bytes: float = 16.0
    """The same per token, expert that it goes to and unit of width: sorting tokens by expert and back."""
    expert_share: float = 1.0
    """Of the linear layers' rate, what products of many experts at once reach."""
    logit_bytes: float = 20.0
    """Traffic per logit, forward and backward: the loss in float32."""
    layer_kernels: float = 22.0
    """Kernels that the host launches for one layer's forward pass; the backward pass launches twice as many."""
    sparse_kernels: float = 60.0
    """Launches' worth of host time that a layer of experts costs beside them: routing, and waiting for its counts."""
    launch_s: float = 6e-6
    """Host time to launch one kernel."""
    gap_s: float = 3e-6
    """Time on the device between one kernel's last work and the next one's first."""
    micro_s: float = 1e-3
    """Host time that each micro-batch costs beside its kernels."""
    step_s: float = 10e-3
    """Time that each step costs whatever its size: the optimizer's launches, the norm, the data, the log."""
    straggling: float = 0.0
    """What everyone loses to the slowest, for each doubling of the nodes."""
    hides_tensor: float = 0.0
    """Share of the tensor axis' communication that runs under arithmetic."""
    hides_context: float = 0.7
    hides_pipeline: float = 0.0
    hides_gradients: float = 0.0
    """Share of the backward pass that gradient sums may run under."""
    hides_updates: float = 0.0
    """Share of the forward pass that gathers of updated parameters may run under."""
    sums_whole: bool = False
    """Whether gradients are summed to everyone although each rank keeps a shard of them: twice the traffic."""
    hides_parameters: float = 0.9
    """Share of the arithmetic that gathers of sharded parameters may run under."""
    hides_experts: float = 0.0
    """Share of the tokens' way to experts on other nodes that runs under arithmetic."""
    selective_products: float = 0.0
    """Share of the forward products that selective recomputation repeats beside what attention keeps."""
    layer_pieces: float = 1.0
    """Messages that one layer's parameters, or gradients, are sent in over the data axes."""
    selective_kept: float = 0.65
    """Share of a layer's activations that selective recomputation keeps, attention's scores aside."""
    offloaded: float = 0.0
    """Share of the optimizer's state and of what recomputed layers keep that waits in the host's memory."""
    layers_ahead: float = 2.0
    """Layers whose sharded parameters lie gathered at once."""
    stream_held_bytes: float = 8.0
    """Kept for the backward pass per token and unit of width by norms and products' inputs (10 with dropout)."""
    bucket_bytes: float = 0.0
    """Flat copies of gradients and parameters on their way, where the optimizer is sharded."""
    gradient_bytes: int = 4
    """Bytes of one gradient as it is summed over ranks and kept."""
    gradients_held_bytes: int = 0
    """Bytes that a parameter's gradients take where they are held more than once; 0: as `gradient_bytes`."""
    update_bytes: float = 30.0
    """Memory traffic of the optimizer per parameter that a rank updates."""
    state_bytes: int = 12
    """Bytes of optimizer state per parameter: float32 master weight and two moments."""
    logit_copies_bytes: float = 10.0
    """Memory held per logit at the loss: 16-bit, float32 copy and its gradient; little where the loss is fused."""
    fixed_bytes: float = 1.0e9
    """Memory that no tensor of the model explains: communication buffers, workspaces."""


# plait's own: no measurement of it went in yet but what its code does (loss in pieces, sums under the backward
# pass).
PLAIT = Stack(name="plait", hides_gradients=0.7, hides_updates=0.7, logit_copies_bytes=0.3)

# Fitted on the even half of vTrain's single-node and multi-node sweeps and BLOOM's prequel at once (the three
# weighted alike), then rounded. By hand, after looking at all rows of these sources: hides_gradients = 0 (it ranked
# vTrain's layouts best), straggling (level of the many-node rows), bucket_bytes (level of BLOOM's memory readings).
MEGATRON_DEEPSPEED = Stack(
    name="megatron-deepspeed",
    stream_bytes=36.0,
    inner_bytes=1.0,
    score_bytes=10.0,
    logit_bytes=67.0,
    layer_kernels=30.0,
    launch_s=25e-6,
    micro_s=3e-3,
    step_s=7.5e-3,
    hides_tensor=0.35,
    hides_pipeline=0.85,
    sums_whole=True,
    straggling=0.03,
    update_bytes=14.0,
    gradient_bytes=2,
    stream_held_bytes=10.0,
    bucket_bytes=6.5e9,
    logit_copies_bytes=14.0,
)
# Its bf16 optimizer keeps gradients in both precisions and flat copies; level by hand from BLOOM's rows of
# 2022-02-28.
MEGATRON_DEEPSPEED_BF16 = replace(MEGATRON_DEEPSPEED, name="megatron-deepspeed bf16", gradients_held_bytes=8)
# The same kernels without DeepSpeed; shares from a fit on all rows of Megatron-LM's tables of 2020 and 2021,
# Korthikanti 2022, MT-NLG and NeMo-Megatron (too few rows to halve).
MEGATRON_2021 = replace(
    MEGATRON_DEEPSPEED,
    name="megatron 2021",
    product_share=0.88,
    launch_s=10e-6,
    hides_tensor=0.25,
    hides_pipeline=0.8,
    bucket_bytes=0.0,
    sums_whole=False,
    straggling=0.0,
)
# Fitted on the even half of dgxc and NVIDIA's performance summary (dense rows with SimuMax's first, then those with
# experts), then rounded; stream_bytes and inner_bytes were last set by hand to level the dense rows of both halves.
MEGATRON = Stack(
    name="megatron",
    fp8_share=1.0,
    flash_share=0.65,
    stream_bytes=38.0,
    inner_bytes=3.4,
    logit_bytes=28.0,
    micro_s=4e-3,
    update_bytes=60.0,
    hides_tensor=0.35,
    hides_pipeline=0.9,
    hides_gradients=0.9,
    hides_updates=0.9,
    hides_experts=0.05,
    sparse_kernels=430.0,
    routed_bytes=28.0,
    expert_share=0.85,
)
# NVIDIA's recipes sum gradients in 16 bits.
NEMO = replace(MEGATRON, name="nemo", gradient_bytes=2)
# Containers from 26.06 on run layers of experts as graphs; fitted on the even half of their rows.
NEMO_2026 = replace(
    NEMO, name="nemo 2026", hides_experts=0.5, sparse_kernels=165.0, routed_bytes=15.0, expert_share=1.0
)
# Tokens beyond a fixed count for each expert are dropped, so the host need not wait to learn the counts. Added
# after seeing the errors of these eight rows.
NEMO_DROPPING = replace(NEMO, name="nemo dropping tokens", sparse_kernels=60.0)
# Fitted on the even half of llm-foundry's tables (A100 and H100, attention kernels of 2023). logit_copies_bytes is
# set by hand so that no micro-batch that ran counts as impossible.
COMPOSER = Stack(
    name="composer fsdp",
    layer_kernels=30.0,
    flash_share=0.41,
    flash_lag=0.44,
    product_share=0.88,
    fp8_share=0.85,
    stream_bytes=40.0,
    inner_bytes=6.8,
    logit_bytes=23.0,
    update_bytes=60.0,
    logit_copies_bytes=5.0,
)
# Fitted on the even half of torchtitan's tables.
TORCHTITAN = Stack(
    name="torchtitan",
    product_share=0.8,
    fp8_share=0.93,
    flash_share=0.48,
    flash_lag=0.45,
    stream_bytes=15.0,
    hides_tensor=0.32,
    selective_products=0.65,
    selective_kept=0.4,
)
# Fitted on the even half of InternEvo's three tables; it broadcasts updated parameters tensor by tensor.
INTERNEVO = Stack(
    name="internevo",
    product_share=0.80,
    flash_share=0.54,
    stream_bytes=27.0,
    hides_gradients=0.4,
    layer_pieces=10.0,
    gradient_bytes=2,
)
# Compiled as a whole, so the host does not count. Fitted on all rows of v6e, v7x and v5p recipes and dgxc's
# MaxText: sources of five to fifteen rows are too few to halve. What waits in the host's memory is not published;
# `offloaded`, selective_kept, layers_ahead and logit_copies_bytes are set so that recipes that ran count as
# possible.
MAXTEXT = Stack(
    name="maxtext",
    product_share=0.94,
    fp8_share=1.0,
    flash_share=0.43,
    stream_bytes=46.0,
    inner_bytes=11.5,
    logit_bytes=25.0,
    routed_bytes=68.0,
    expert_share=0.7,
    selective_products=0.34,
    selective_kept=0.15,
    offloaded=0.9,
    gradient_bytes=2,
    layers_ahead=0.7,
    logit_copies_bytes=2.0,
    hides_gradients=0.8,
    launch_s=0.5e-6,
    sparse_kernels=0.0,
    update_bytes=17.0,
)
FSDP = replace(COMPOSER, name="fsdp")
