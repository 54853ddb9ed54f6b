"""Profiles of other programs: of those that ran the published rows (benchmarks/published), and of those whose
configurations `plait check FILE` reads. Above each stands where its constants are from."""

from __future__ import annotations

from dataclasses import replace

from plait.planner.problem.other_programs import PLAIT_ITSELF, OtherProgram
from plait.planner.problem.software_profile import SoftwareProfile

# Fitted on the even half of vTrain's single-node and multi-node sweeps and BLOOM's prequel at once (the three
# weighted alike), then rounded; again once BLOOM's launches were known to block. The times leave no room for an
# update of the weights. Megatron's runs of 2021, left out of that fit, came nearer by it as well. By hand, after
# looking at all rows of these sources: hides_gradients = 0 (it ranked vTrain's layouts best), bucket_bytes (level of
# BLOOM's memory readings).
MEGATRON_DEEPSPEED = SoftwareProfile(
    name="megatron-deepspeed",
    stream_bytes=30.0,
    inner_bytes=1.0,
    score_bytes=13.0,
    logit_bytes=16.0,
    layer_kernels=30.0,
    launch_s=25e-6,
    gap_s=2.5e-6,
    micro_s=2e-3,
    step_s=6e-3,
    hides_tensor=0.35,
    hides_pipeline=0.85,
    update_bytes=0.0,
    gradient_bytes=2,
    stream_held_bytes=10.0,
    logit_copies_bytes=14.0,
    other=OtherProgram(all_reduces_shards=True, straggler_share=0.025, bucket_bytes=6.5e9),
)
# BLOOM's runs on 20 nodes and more hung unless each launch waited for its kernel: "all CUDA operations become
# synchronous" (its chronicle, "dealing with JZ hanging"), which every table of topologies after that was measured with.
MEGATRON_DEEPSPEED_BLOCKING = replace(
    MEGATRON_DEEPSPEED, name="megatron-deepspeed, blocking launches", launch_mode="blocking"
)
# Its bf16 optimizer keeps gradients in both precisions and flat copies; level by hand from BLOOM's rows of
# 2022-02-28.
MEGATRON_DEEPSPEED_BF16 = replace(
    MEGATRON_DEEPSPEED_BLOCKING,
    name="megatron-deepspeed bf16",
    other=replace(MEGATRON_DEEPSPEED_BLOCKING.other, gradients_held_bytes=8),
)
# Sailor's runs (SOSP 2025; github.com/eth-easl/sailor): the same in float32, with layers of its own (opt_model.py,
# gpt_neo_model.py). Read and counted in its code; the times of its runs were known, but none was used.
# - Numbers, and so gradients, have 4 bytes. Beside DeepSpeed neither the stream is divided among a tensor group nor do
#   its sums overlap (arguments.py). Sends and receives of stages block (p2p.py).
# - Norms and residuals pass 10 times over the stream; biases, copies and the activation 4 times over the feedforward.
# - Megatron's fused softmax takes no float32: mask and softmax read and write each score, 17 bytes with the mask's. The
#   mask is filled in place on a view, for which autograd zeroes and copies the gradient: 65 bytes a score backward.
#   Nothing is dropped out there, and norms' and products' inputs alone are kept of the stream.
# - launch_s: a layer's profile on four GH200 has 3.2 ms for one sequence, more than its arithmetic needs.
SAILOR = replace(
    MEGATRON_DEEPSPEED,
    name="sailor",
    stream_held_bytes=8.0,
    stream_bytes=20.0,
    inner_bytes=8.0,
    score_bytes=8.5,
    launch_s=31e-6,
    hides_tensor=0.0,
    hides_pipeline=0.0,
    update_bytes=28.0,
    gradient_bytes=4,
    other=replace(
        MEGATRON_DEEPSPEED.other,
        scores_backward=65 / 17,
        drops_scores=False,
        divides_stream=False,
        sends_one_at_a_time=True,
        bucket_bytes=0.0,
    ),
)
# The same kernels without DeepSpeed; shares from a fit on all rows of Megatron-LM's tables of 2020 and 2021,
# Korthikanti 2022, MT-NLG and NeMo-Megatron (too few rows to halve).
MEGATRON_2021 = replace(
    MEGATRON_DEEPSPEED,
    name="megatron 2021",
    product_share=0.88,
    launch_s=10e-6,
    hides_tensor=0.25,
    hides_pipeline=0.8,
    other=PLAIT_ITSELF,
)
# Fitted on the even half of dgxc and NVIDIA's performance summary (dense rows with SimuMax's first, then those with
# experts), then rounded; stream_bytes and inner_bytes were last set by hand to level the dense rows of both halves.
MEGATRON = SoftwareProfile(
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
    hides_experts=0.0,
    sparse_kernels=475.0,
    routed_bytes=23.0,
    expert_share=0.77,
)
# NVIDIA's recipes sum gradients in 16 bits; hides_pipeline fitted on the even half of their rows on 2026-11-24, when
# hops inside a node and between nodes were told apart.
NEMO = replace(MEGATRON, name="nemo", gradient_bytes=2, hides_pipeline=0.94)
# Containers from 26.06 on run layers of experts as graphs on racks; fitted on the even half of those rows.
NEMO_2026 = replace(NEMO, name="nemo 2026", hides_experts=0.5, sparse_kernels=15.0, routed_bytes=20.0, expert_share=1.0)
# Tokens beyond a fixed count for each expert are dropped, so the host need not wait to learn the counts. Added
# after seeing the errors of these eight rows.
NEMO_DROPPING = replace(NEMO, name="nemo dropping tokens", sparse_kernels=60.0)
# Fitted on the even half of llm-foundry's tables (A100 and H100, attention kernels of 2023); product_share again, here
# and of the next two, on 2026-11-24, when what messages take from products beside them became a term of its own.
# logit_copies_bytes is set by hand so that no micro-batch that ran counts as impossible.
COMPOSER = SoftwareProfile(
    name="composer fsdp",
    layer_kernels=30.0,
    flash_share=0.41,
    flash_lag=0.44,
    product_share=0.92,
    fp8_share=0.85,
    stream_bytes=40.0,
    inner_bytes=6.8,
    logit_bytes=23.0,
    update_bytes=60.0,
    logit_copies_bytes=5.0,
)
# Fitted on the even half of torchtitan's tables.
TORCHTITAN = SoftwareProfile(
    name="torchtitan",
    product_share=0.82,
    fp8_share=0.93,
    flash_share=0.48,
    flash_lag=0.45,
    stream_bytes=15.0,
    hides_tensor=0.32,
    selective_kept=0.4,
    other=OtherProgram(selective_products=0.65),
)
# Fitted on the even half of InternEvo's three tables; it broadcasts updated parameters tensor by tensor.
INTERNEVO = SoftwareProfile(
    name="internevo",
    product_share=0.83,
    flash_share=0.54,
    stream_bytes=27.0,
    hides_gradients=0.4,
    gradient_bytes=2,
    other=OtherProgram(layer_pieces=10.0),
)
# Compiled as a whole, so the host does not count. Fitted on all rows of v6e, v7x and v5p recipes and dgxc's
# MaxText: sources of five to fifteen rows are too few to halve. What waits in the host's memory is not published;
# `offloaded`, selective_kept, layers_ahead and logit_copies_bytes are set so that recipes that ran count as
# possible.
MAXTEXT = SoftwareProfile(
    name="maxtext",
    product_share=0.94,
    fp8_share=1.0,
    flash_share=0.43,
    stream_bytes=46.0,
    inner_bytes=11.5,
    logit_bytes=25.0,
    routed_bytes=68.0,
    expert_share=0.7,
    selective_kept=0.15,
    other=OtherProgram(selective_products=0.34, offloaded=0.9),
    gradient_bytes=2,
    layers_ahead=0.7,
    logit_copies_bytes=2.0,
    hides_gradients=0.8,
    launch_s=0.5e-6,
    sparse_kernels=0.0,
    update_bytes=17.0,
)
FSDP = replace(COMPOSER, name="fsdp")
# The programs of `plait check FILE`; constants by benchmarks/published/foreign_configs.csv, by hand with all its rows
# known. torchtitan of the end of 2024: 13 bytes of a logit level its tables (bf16, float32, softmax, their gradients);
# of 2025, whose loss is compiled, 5 by the two H200 rows. Without torch.compile operations are not fused.
TORCHTITAN_2024 = replace(TORCHTITAN, name="torchtitan 2024", logit_copies_bytes=13.0, fixed_bytes=0.5e9)
TORCHTITAN_2025 = replace(TORCHTITAN, name="torchtitan", logit_copies_bytes=5.0, fixed_bytes=0.5e9)
TORCHTITAN_EAGER = replace(TORCHTITAN_2024, name="torchtitan, eager", stream_bytes=60.0, logit_copies_bytes=15.0)
# transformers' Trainer and what is built on it (TRL, Axolotl), litgpt's loop through Lightning Fabric, and a program
# of its own with DeepSpeed's engine: eager torch. transformers copies logits to float32 and shifts them: 16 bytes.
# What lies outside of the allocator is a context and NCCL's buffers.
HUGGING_FACE = replace(FSDP, name="transformers", logit_copies_bytes=16.0, fixed_bytes=2e8, outside_bytes=1.5e9)
LITGPT_PROFILE = replace(FSDP, name="litgpt", logit_copies_bytes=12.0, fixed_bytes=5e7, outside_bytes=1.0e9)
DEEPSPEED_ENGINE = replace(FSDP, name="deepspeed", gradient_bytes=2, logit_copies_bytes=10.0)
