"""Settings that may differ from the plan by mistake: recomputation, micro-batches, schedule, precision, attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.planner.diagnosis.layout_price import layout_bytes
from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates
from plait.planner.step_time.cost_inputs import CostInputs
from plait.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A setting that may have differed from the plan, and the cost inputs with it."""

    name: str
    inputs: CostInputs
    look: str


def alternatives(inputs: CostInputs) -> Iterator[Alternative]:
    """Settings that fit in memory; each was once seen to be active by mistake."""
    capacity = min(island.device.memory_bytes for island in inputs.cluster.islands)
    for swap in _swaps(inputs):
        if layout_bytes(swap.inputs) <= capacity:
            yield swap


def _swaps(inputs: CostInputs) -> Iterator[Alternative]:
    row = inputs.candidates.row(0)
    for recompute in RECOMPUTE_MODES:
        if recompute != row["recompute"]:
            yield _by_memory(inputs, f'recompute "{recompute}" in place of "{row["recompute"]}"', recompute=recompute)
    part = inputs.workload.batch_sequences // int(inputs.candidates.data_parallel_degree[0])
    micro = int(row["micro_sequences"])
    for other in dict.fromkeys((1, micro // 2, 2 * micro)):
        if other not in (0, micro) and part % other == 0:
            many = f"{counted(other, 'sequence')} at a time in place of {micro}"
            yield _by_memory(inputs, many, micro_sequences=other)
    if row["schedule"] in ("interleaved", "zero-bubble"):
        plain = inputs.with_candidates(Candidates.from_rows([{**row, "schedule": "1f1b", "virtual": 1}], "balanced"))
        yield Alternative(name=f'schedule "1f1b" in place of "{row["schedule"]}"', inputs=plain, look=SETTINGS_TO_CHECK)
    w = inputs.workload
    if w.precision in ("bf16", "fp16", "fp8"):
        yield Alternative(
            name=f"products in float32 in place of {w.precision}",
            inputs=replace(inputs, workload=replace(w, precision="float32")),
            look=SETTINGS_TO_CHECK,
        )
    if w.attention == "flash":
        unfused = replace(inputs, workload=replace(w, attention="unfused"))
        yield Alternative(
            name="attention in single products, not in one fused kernel", inputs=unfused, look=_bytes(inputs, unfused)
        )


SETTINGS_TO_CHECK = "the run's first lines and its plan.json name it"


def _by_memory(inputs: CostInputs, name: str, **knobs: int | str) -> Alternative:
    candidates = Candidates.from_rows([{**inputs.candidates.row(0), **knobs}], inputs.candidates.layer_split)
    other = inputs.with_candidates(candidates)
    return Alternative(name=name, inputs=other, look=_bytes(inputs, other))


def _bytes(here: CostInputs, there: CostInputs) -> str:
    text, planned = format_bytes(layout_bytes(there)), format_bytes(layout_bytes(here))
    return f"a device would have {text} of memory in use, not {planned}" if text != planned else SETTINGS_TO_CHECK
