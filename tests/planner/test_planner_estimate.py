"""Are the bytes per device those of published formulas and readings?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.published.memory_fit import cannot_fit, fits
from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job, Message
from plait.machines.cluster import read_cluster
from plait.model import attention
from plait.model.masked_attention import attend_masked
from plait.model.sizes import explicit_shape
from plait.planner.memory.activations import (
    BLOCK_NUMBER_BYTES,
    HOST_UNFUSED_SCORES,
    UNFUSED_SCORES,
    block_bytes,
    kept_logsumexps,
    layer_activations,
    scores_held,
)
from plait.planner.memory.estimate import estimate_memory
from plait.planner.memory.traced_peak import MEMORY_ITEMS, traced_peak
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.program_profiles import MEGATRON, MEGATRON_2021, SAILOR
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Orthogonalization, Workload, workload_of
from plait.planner.step_time.step_time import estimate_step_time
from plait.report.memory import LiveTensorPeak
from tests.entry_tables import entries_of
from tests.matrix import few_fast
from tests.planner.cost_inputs import inputs
from tests.trainer.tiny import make_tiny

GPT_22B = Workload(
    layers=48,
    width=6144,
    heads=64,
    kv_heads=64,
    head_width=96,
    ffn=24576,
    gated=False,
    vocabulary=51200,
    tied=True,
    sequence=2048,
    batch_sequences=4,
    precision="fp16",
    attention="unfused",
)
A100 = read_cluster("8xA100-80GB")


def test_activations_of_a_layer_are_the_published_formula():
    # Korthikanti et al. 2022, equations 1, 2 and 4: sbh (34 + 5as/h), then 10 + 24/t + 5as/(ht), then all of it over t.
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    rows = [{"micro_sequences": b}, {"micro_sequences": b, "tensor": t}]
    rows.append({"micro_sequences": b, "tensor": t, "sequence_parallel": 1})
    found = layer_activations(GPT_22B, Candidates.from_rows(rows), MEGATRON_2021)
    scores = 5 * a * s / h
    expected = [34 + scores, 10 + 24 / t + scores / t, (34 + scores) / t]
    np.testing.assert_allclose(found / (s * b * h), expected)


def test_scores_that_are_kept_take_bytes_by_precision():
    table = Candidates.from_rows([{}])
    each = GPT_22B.heads * GPT_22B.sequence**2
    halves, floats = (replace(GPT_22B, precision=precision) for precision in ("bf16", "float32"))
    narrow, wide = (scores_held(work, table, MEGATRON_2021)[0] / each for work in (halves, floats))
    assert (narrow, wide) == (5, 9)
    assert scores_held(floats, table, SAILOR)[0] / each == 4  # without dropout the softmax alone
    fused = [scores_held(replace(work, attention="flash"), table, MEGATRON_2021)[0] for work in (halves, floats)]
    assert fused[0] == fused[1]


@pytest.mark.parametrize(
    ("way", "low", "high"),
    [
        ({"sequence_parallel": 1}, 0.58, 0.67),
        ({"recompute": "selective"}, 0.49, 0.63),
        ({"sequence_parallel": 1, "recompute": "selective"}, 0.16, 0.21),
        ({"recompute": "full", "sequence_parallel": 1}, 0.01, 0.13),
    ],
)
def test_what_each_way_saves_is_what_was_published(way, low, high):
    # Korthikanti et al. 2022, figure 7: shares of what tensor parallelism alone keeps, for models of 22B to 1T.
    table = Candidates.from_rows([{"tensor": 8, "micro_sequences": 4}, {"tensor": 8, "micro_sequences": 4, **way}])
    kept = estimate_memory(GPT_22B, table, MEGATRON_2021).activations
    assert low <= kept[1] / kept[0] <= high


def test_states_follow_what_is_sharded():
    work = replace(GPT_22B, attention="flash")
    ways = ("nothing", "optimizer", "gradients", "parameters")
    table = Candidates.from_rows([{"shard": 64, "shard_what": what, "tensor": 1} for what in ways])
    needed = estimate_memory(work, table, MEGATRON)
    total = work.parameters
    expected = [18 * total, 6 * total + 12 * total / 64, 2 * total + 16 * total / 64, 16 * total / 64]
    np.testing.assert_allclose(needed.parameters + needed.gradients + needed.optimizer, expected, rtol=1e-6)
    assert (needed.gathered > 0).tolist() == [False, False, False, True]


def test_plait_keeps_weights_gathered_where_gradients_are_split_and_in_pipelines():
    work = replace(GPT_22B, precision="bf16", attention="flash", batch_sequences=512)
    ways = [{"shard_what": what} for what in ("gradients", "parameters")] + [{"pipeline": 2}]
    table = Candidates.from_rows([{"shard": 64, "shard_what": "parameters", "tensor": 1, **way} for way in ways])
    profile = replace(PLAIT_PROFILE, lasting_weights="once a step")
    needed = estimate_memory(work, table, profile)
    states, layers = 16 * work.parameters / 64, work.parameters - work.embedding_parameters
    assert needed.parameters[0] + needed.gradients[0] + needed.optimizer[0] == pytest.approx(states, rel=1e-6)
    two_of_48 = 2 / 48
    assert needed.gathered[0] - needed.gathered[1] == pytest.approx(2 * layers * (1 - two_of_48), rel=1e-2)
    assert needed.gathered[2] > 2 * layers / 2, "a pipeline's stage whole"
    master = estimate_memory(work, Candidates.from_rows([{"shard": 64, "shard_what": "master-weights"}]), profile)
    assert master.gradients[0] == pytest.approx(4 * work.parameters) and master.gathered[0] == needed.gathered[0]
    assert master.parameters[0] == needed.parameters[0] and master.optimizer[0] == needed.optimizer[0]


def test_the_items_are_all_that_is_allocated():
    needed = estimate_memory(
        GPT_22B, Candidates.from_rows([{"tensor": 8, "pipeline": 4, "micro_sequences": 1}]), PLAIT_PROFILE
    )
    names = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "fixed")
    np.testing.assert_allclose(sum(getattr(needed, name) for name in names), needed.allocated)


def test_more_tokens_hold_no_more_logits_than_a_piece_of_the_loss():
    table = Candidates.from_rows([{"micro_sequences": sequences} for sequences in (1, 4, 8)])
    few, some, many = estimate_memory(GPT_22B, table, PLAIT_PROFILE).logits
    one = GPT_22B.sequence * GPT_22B.vocabulary
    assert one < 2**27 < 4 * one
    assert some == many == few + PLAIT_PROFILE.logit_copies_bytes * (2**27 - one)


def test_capped_scores_are_computed_in_blocks_and_their_slopes_are_held():
    shape = explicit_shape(layers=12, width=1024, heads=16, vocabulary=32768, sequence=2048)
    capped = replace(shape, attention_cap=50.0, logit_cap=30.0)
    plain, blocked = (workload_of(one, sequence=2048, batch_sequences=4) for one in (shape, capped))
    assert workload_of(replace(shape, attention_sinks=True), sequence=2048, batch_sequences=4).attention == "blocked"
    before, after = (
        estimate_memory(one, Candidates.from_rows([{"micro_sequences": 1}]), PLAIT_PROFILE) for one in (plain, blocked)
    )
    logsumexps = 4 * 2048 * 16 * 12  # which blocks do not keep
    assert after.activations[0] == before.activations[0] + 16 * 2**24 - logsumexps
    assert after.logits[0] == before.logits[0] + 8 * 2048 * 32768
    times = [
        estimate_step_time(inputs(one, A100, Candidates.from_rows([{}]), PLAIT_PROFILE)) for one in (plain, blocked)
    ]
    assert times[0].scores[0] < times[1].scores[0] and times[0].products[0] == times[1].products[0]


def test_a_block_has_the_scores_of_one_query_a_row_at_least():
    shape = explicit_shape(layers=12, width=1024, heads=16, vocabulary=32768, sequence=2048)
    capped = workload_of(replace(shape, attention_cap=50.0), sequence=2048, batch_sequences=1024)
    table = Candidates.from_rows([{"micro_sequences": 1}, {"micro_sequences": 1024}, {"micro_sequences": 1}])
    assert block_bytes(capped, table, 2**24).tolist() == [16 * 2**24, 16 * 1024 * 16 * 2048, 16 * 2**24]
    assert block_bytes(capped, table, 2**30)[0] == 16 * 16 * 2048**2
    over_two = Candidates.from_rows([{"micro_sequences": 1}, {"micro_sequences": 1, "context": 2}])
    assert kept_logsumexps(capped, over_two).tolist() == [0, 4 * 1024 * 16]


@pytest.mark.parametrize("capped", ["capped", "plain"])
def test_scores_of_a_block_take_the_bytes_that_are_counted(capped: str) -> None:
    """Measured: two sizes of blocks, so that all else cancels out."""
    q, k, v = (torch.randn(1, 256, heads, 4, requires_grad=True) for heads in (8, 2, 2))
    sinks, positions = torch.zeros(8, requires_grad=True), torch.arange(256)[None]
    peaks = []
    for scores in (2**16, 2**17):
        with LiveTensorPeak(torch.device("cpu"), [q, k, v]) as peak:
            attend_masked(q, k, v, positions, 0, scores, 5.0 if capped == "capped" else 0.0, sinks).sum().backward()
        peaks.append(peak.bytes)
    needed = (peaks[1] - peaks[0]) / 2**16
    assert needed == pytest.approx(BLOCK_NUMBER_BYTES - (0 if capped == "capped" else 4), rel=0.05)


def test_blocks_are_of_the_size_that_the_planner_knows() -> None:
    assert (UNFUSED_SCORES, HOST_UNFUSED_SCORES) == (attention.UNFUSED_SCORES, attention.HOST_UNFUSED_SCORES)


def test_a_pipeline_keeps_as_many_micro_batches_as_it_has_stages_at_most():
    work = replace(GPT_22B, batch_sequences=64)
    table = Candidates.from_rows([{"pipeline": 8, "schedule": schedule} for schedule in ("1f1b", "gpipe")])
    kept = estimate_memory(work, table, MEGATRON_2021).activations
    assert kept[1] == pytest.approx(kept[0] * 64 / 8)


def test_published_readings_of_the_allocator_are_met():
    # MooreThreads/SimuMax v1.2, measured on eight B200: Llama 3 70B cut to 12 layers, GiB at most allocated.
    llama = Workload(
        layers=12,
        width=8192,
        heads=64,
        kv_heads=8,
        head_width=128,
        ffn=28672,
        gated=True,
        vocabulary=128256,
        tied=False,
        sequence=4096,
        batch_sequences=8,
    )
    knobs = {"shard_what": "optimizer", "sequence_parallel": 1}
    table = Candidates.from_rows([{"tensor": 4, "shard": 2, **knobs}, {"tensor": 8, "shard": 1, **knobs}])
    found = estimate_memory(llama, table, MEGATRON).allocated / 2**30
    np.testing.assert_allclose(found, [39.07, 28.29], rtol=0.05)


def test_what_was_published_as_out_of_memory_is_refused_and_its_neighbour_is_not():
    bloom = replace(GPT_22B, layers=72, width=14336, head_width=224, ffn=57344, vocabulary=250880, batch_sequences=2016)
    knobs = {"tensor": 8, "shard_what": "optimizer", "recompute": "full", "micro_sequences": 1}
    table = Candidates.from_rows([{"shard": 48, **knobs}, {"shard": 8, "pipeline": 6, **knobs}])
    needed = estimate_memory(bloom, table, MEGATRON_2021)
    assert cannot_fit(needed, A100).tolist() == [True, False]
    assert fits(needed, A100).tolist() == [False, True]


def test_states_are_split_over_the_ranks_that_the_program_splits_them_over():
    table = Candidates.from_rows([{"shard": 4, "context": 2, "shard_what": "optimizer"}])
    own, both = (
        estimate_memory(GPT_22B, table, replace(PLAIT_PROFILE, shards_over=over)).optimizer[0]
        for over in ("shard", "shard and context")
    )
    assert PLAIT_PROFILE.shards_over == "shard"
    assert own == pytest.approx(2 * both)


def test_a_processor_keeps_only_the_process_beside_the_tensors():
    table, laptop = Candidates.from_rows([{}]), read_cluster("laptop")
    tiny = replace(GPT_22B, layers=2, width=64, heads=2, kv_heads=2, head_width=32, ffn=256, vocabulary=256)
    here, there = (estimate_memory(tiny, table, PLAIT_PROFILE.for_cluster(cluster)) for cluster in (laptop, A100))
    assert here.reserved[0] < 0.6e9
    assert there.reserved[0] > 2.5e9
    mixed = replace(laptop, islands=(*laptop.islands, *A100.islands))
    assert PLAIT_PROFILE.for_cluster(mixed) == PLAIT_PROFILE


# The fullest process of runs of two steps, 10.8M parameters, 16 × 256 tokens, glibc, Intel Xeon, 2026-11-26
# (benchmarks/memory_forecast.py reads such).
@pytest.mark.parametrize(
    ("way", "tensors_mib", "process_mib"),
    [
        ({"replicate": 2, "micro_sequences": 8}, 568, 894),
        ({"replicate": 2, "micro_sequences": 4}, 372, 749),
        ({"context": 2, "micro_sequences": 8}, 372, 722),
        ({"shard": 2, "shard_what": "optimizer", "micro_sequences": 8}, 548, 902),
        ({"pipeline": 2, "schedule": "gpipe", "micro_sequences": 1}, 506, 861),
        ({"pipeline": 2, "schedule": "1f1b", "micro_sequences": 1}, 136, 438),
    ],
)
def test_a_processor_s_process_is_about_as_large_as_it_was_read(
    way: dict[str, int | str], tensors_mib: float, process_mib: float
):
    shape = explicit_shape(layers=8, width=320, heads=8, vocabulary=2048, sequence=256)
    work = workload_of(shape, sequence=256, batch_sequences=16, precision="float32")
    found = estimate_memory(work, Candidates.from_rows([way]), PLAIT_PROFILE.for_cluster(read_cluster("laptop")))
    assert found.allocated[0] / 2**20 == pytest.approx(tensors_mib, rel=0.01)
    assert found.reserved[0] / 2**20 == pytest.approx(process_mib, rel=0.06)


@pytest.mark.parametrize(("moments", "numbers"), [(2, 3), (1, 2), (0, 1)])
def test_the_optimizer_s_state_is_a_master_weight_and_its_moments(moments: int, numbers: int) -> None:
    table, work = Candidates.from_rows([{}]), replace(GPT_22B, moments=moments)
    alone = replace(PLAIT_PROFILE, weight_bytes=2)
    assert estimate_memory(work, table, alone).optimizer[0] == pytest.approx(4 * numbers * work.parameters)
    beside = estimate_memory(work, table, PLAIT_PROFILE).optimizer[0]  # the weights are the master weights
    assert beside == pytest.approx(4 * moments * work.parameters)


def test_products_in_8_bits_keep_their_inputs_in_8_bits():
    work, table = replace(GPT_22B, attention="flash"), Candidates.from_rows([{"micro_sequences": 4}])
    wide, narrow = (layer_activations(replace(work, precision=p), table, PLAIT_PROFILE)[0] for p in ("bf16", "fp8"))
    inputs = 2 * work.width + work.width + work.ffn  # queries and feedforward, attention's result, second product
    assert wide - narrow == pytest.approx(4 * work.sequence * inputs)


SMALL = (
    "model.layers=8", "model.width=96", "model.heads=4", "train.sequence=64", "train.batch_tokens=1024",
    "data.mask_documents=false",
)  # fmt: skip


ENTRIES = entries_of("tests.planner.memory_entries", preload=("torch._dynamo", "plait.trainer.worker"))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(ENTRIES, threads=1) as one:
        yield one


FORETOLD = [
    ["pipeline=2", "schedule=1f1b", "micro_sequences=2", "vocabulary=2500"],
    ["replicate=2", "micro_sequences=2"],
    ["replicate=2", "micro_sequences=8", "recompute=selective"],
    ["shard=2", "shard_what=optimizer", "micro_sequences=2"],
    ["shard=2", "shard_what=parameters", "micro_sequences=2"],
    ["tensor=2", "micro_sequences=4"],
    ["context=2", "micro_sequences=4"],
    ["pipeline=2", "schedule=interleaved", "virtual_stages=4", "micro_sequences=2"],
    ["pipeline=2", "schedule=zero-bubble", "micro_sequences=1"],
    ["shard=2", "shard_what=optimizer", "micro_sequences=2", "kind=sgd", "lr=0.1"],
    ["replicate=2", "micro_sequences=2", "kind=muon"],
    ["shard=2", "shard_what=optimizer", "micro_sequences=1", "recompute=full", "kind=muon"],
    ["shard=2", "shard_what=parameters", "micro_sequences=1", "recompute=full", "kind=muon"],
    ["tensor=2", "micro_sequences=4", "key_value_rank=24", "query_rank=32"],
    ["replicate=2", "micro_sequences=1", "recompute=full", "vocabulary=2500"],
    ["shard=2", "shard_what=optimizer", "micro_sequences=1", "recompute=full", "vocabulary=2500"],
    ["shard=2", "shard_what=parameters", "micro_sequences=8", "recompute=selective"],
    ["shard=2", "shard_what=parameters", "micro_sequences=1", "recompute=full", "vocabulary=2500"],
    ["tensor=2", "micro_sequences=16", "recompute=full"],
    ["pipeline=2", "schedule=gpipe", "micro_sequences=2"],
    ["pipeline=2", "schedule=1f1b", "micro_sequences=2", "kind=sgd", "lr=0.1", "momentum=0"],
    ["replicate=2", "micro_sequences=8", "key_value_rank=24", "query_rank=32"],
    ["replicate=2", "micro_sequences=4", "key_value_rank=24", "value_head_width=36", "recompute=selective"],
    ["tensor=2", "micro_sequences=8", "key_value_rank=24", "recompute=full"],
    ["context=2", "micro_sequences=4", "key_value_rank=24", "query_rank=32"],
    ["shard=2", "shard_what=parameters", "micro_sequences=2", "key_value_rank=24", "query_rank=32"],
    ["pipeline=2", "schedule=zero-bubble", "micro_sequences=1", "key_value_rank=24", "query_rank=32"],
    ["pipeline=2", "schedule=1f1b", "micro_sequences=2", "vocabulary=2500", "auxiliary_heads=[2,5]"],
    ["pipeline=2", "schedule=gpipe", "micro_sequences=2", "auxiliary_heads=[2]", "predict_ahead=2"],
    ["replicate=2", "micro_sequences=2", "predict_ahead=1"],
    ["shard=2", "shard_what=gradients", "micro_sequences=2"],
    ["shard=2", "shard_what=parameters", "micro_sequences=2", "vocabulary=2500", "tied=false"],
    ["shard=2", "shard_what=master-weights", "micro_sequences=4"],
    ["shard=2", "shard_what=master-weights", "micro_sequences=2", "vocabulary=2500"],
]
"""Settings of layouts, optimizers and models of two workers."""
FORETOLD_FAST = ("shard=2 shard_what=parameters micro_sequences=2", "float32")


def foretold() -> list[tuple[str, str]]:
    """Each in one of the two precisions, in turn."""
    layouts = list(map(" ".join, FORETOLD))
    offset = layouts.index(FORETOLD_FAST[0])
    return [(layout, ("float32", "bf16")[(place - offset) % 2]) for place, layout in enumerate(layouts)]


@pytest.mark.parametrize(
    ("layout", "precision"),
    few_fast(foretold(), FORETOLD_FAST),
)
def test_ranks_on_processors_hold_what_was_foretold(layout: str, precision: Any, server: ForkServer, tmp_path: Path):
    elsewhere = {"vocabulary": "model", "kind": "optimizer", "lr": "optimizer", "momentum": "optimizer"}
    elsewhere |= dict.fromkeys(("auxiliary_heads", "predict_ahead", "tied"), "model")
    elsewhere |= dict.fromkeys(("key_value_rank", "query_rank", "value_head_width"), "model")
    keys = [f"{elsewhere.get(one.partition('=')[0], 'layout')}.{one}" for one in layout.split()]
    _, plan = make_tiny(tmp_path, *SMALL, "layout.replicate=1", "model.vocabulary=300", *keys, precision=precision)
    held: dict[int, int] = {}

    def hear(message: Message) -> None:
        held[message.values["rank"]] = message.values["bytes"]

    server.run(Job(entry="watched_step", argument=str(tmp_path), world_size=2, threads=1), on_message=hear)
    moments = plan.job.optimizer.moments
    work = workload_of(plan.job.shape, sequence=64, batch_sequences=16, precision=precision, moments=moments)
    if plan.job.optimizer.kind == "muon":
        number_bytes = 2 if plan.arithmetic.orthogonalization_precision == "bf16" else 4
        work = replace(work, orthogonalization=Orthogonalization(number_bytes=number_bytes))
    knobs: dict[str, Any] = {
        "schedule": plan.placement.layout.schedule,
        "virtual": plan.placement.layout.virtual_stages,
    }
    knobs["shard_what"] = plan.placement.layout.shard_what
    row = {
        **plan.placement.layout.degrees,
        **knobs,
        "recompute": plan.placement.layout.recompute,
        "sequence_parallel": 1,
    }
    row["micro_sequences"] = plan.placement.micro_sequences
    few = Candidates.from_rows([row], layer_split=plan.placement.layout.stage_layers or "balanced")
    for rank in range(2):
        told = traced_peak(work, few, rank=rank if plan.placement.layout.pipeline > 1 else 0)
        assert sum(told[item][0] for item in MEMORY_ITEMS) == pytest.approx(held[rank], rel=0.05), rank


def test_shards_are_counted_as_they_lie():
    ways = [{"shard": 4, "shard_what": what, "micro_sequences": 1} for what in ("optimizer", "parameters")]
    told = traced_peak(replace(GPT_22B, precision="float32"), Candidates.from_rows(ways, layer_split="balanced"))
    whole = 4 * GPT_22B.parameters
    np.testing.assert_allclose(told["parameters"], [whole, whole / 4])
    np.testing.assert_allclose(told["optimizer"], whole / 2)
    # Flat gradients, and what three others send of the own quarter.
    assert told["gradients"][0] >= whole * (1 + 3 / 4)
    assert told["gathered"][0] == 0 < told["gathered"][1] < whole / 4


def test_backward_passes_in_two_halves_make_a_tables_gradient_once():
    rows = [{"pipeline": 4, "micro_sequences": 1, "schedule": way} for way in ("1f1b", "zero-bubble")]
    work = replace(GPT_22B, precision="float32", tied=False)
    whole, split = traced_peak(work, Candidates.from_rows(rows, layer_split="balanced"), rank=3)["gradients"]
    assert split == whole


def test_more_micro_batches_than_a_pipeline_holds_take_no_more():
    rows = [{"pipeline": 4, "micro_sequences": 1, "schedule": way} for way in ("1f1b", "interleaved", "zero-bubble")]
    work = replace(GPT_22B, precision="float32", tied=False)  # else more tokens touch more rows of the embedding
    few, many = (
        traced_peak(replace(work, batch_sequences=count), Candidates.from_rows(rows, layer_split="balanced"))
        for count in (32, 256)
    )
    for item in MEMORY_ITEMS:
        np.testing.assert_allclose(few[item], many[item])
