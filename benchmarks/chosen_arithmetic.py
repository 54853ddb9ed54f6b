"""What plait's own measurements and rules choose of a processor's arithmetics for a benchmark's work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from benchmarks.processes import Mode
from benchmarks.workload import Workload
from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job
from plait.machines.measured import ProductRates
from plait.model.shape import ModelShape
from plait.planner.derive.arithmetic import ProcessorArithmetic, bf16_refusal, choose_backends, choose_precision
from plait.probing.request import ProbedModel
from plait.workers import ENTRIES, PRODUCTS_ENTRY, ForkedWorkers, ask_rank_0


def shape_of(workload: Workload) -> ModelShape:
    """The workload's model as plait describes it."""
    return ModelShape(
        layers=workload.layers, width=workload.width, heads=workload.heads, kv_heads=workload.heads,
        head_width=workload.width // workload.heads, ffn=4 * workload.width, vocabulary=workload.vocabulary,
        sequence=workload.sequence, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True,
        norm_eps=workload.norm_epsilon,
    )  # fmt: skip


def chosen_backend(workload: Workload, mode: Mode) -> ProcessorArithmetic:
    """The library that plait takes for float32 products, with what it measured on the mode's ranks."""
    model = ProbedModel(
        shape=shape_of(workload), sequence=workload.sequence, sequences=max(1, 512 // workload.sequence)
    )
    job = Job(entry=PRODUCTS_ENTRY, argument=json.dumps(asdict(model)), world_size=mode.ranks, threads=mode.threads)
    with ForkServer(ENTRIES) as server:
        answer = ask_rank_0(ForkedWorkers(server), job, "products")
    return choose_backends("auto", "float32", [ProductRates.from_values(values) for values in answer["ranks"]])


def chosen_precision(
    found: ProcessorArithmetic, float32_s: Sequence[float], bf16_s: Sequence[float]
) -> tuple[str, str]:
    """The precision that plait takes by itself after it timed these steps in turns, with its reason."""
    if refusal := bf16_refusal(found.bf16_gain):
        return "float32", refusal
    gain = median(single / half for single, half in zip(float32_s, bf16_s, strict=True))
    choice = choose_precision(gain)
    return choice.precision, choice.reason
