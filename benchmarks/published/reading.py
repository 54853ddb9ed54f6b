"""Reads the tables of published runs into cases that the planner's model can price."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.published.cells import (
    Row,
    count,
    is_sparse,
    is_tpu,
    number,
    published_cluster,
    published_precision,
    published_recompute,
    published_sharding,
)
from benchmarks.published.memory_fit import fits
from benchmarks.published.shapes import published_shape
from benchmarks.published.stacks import published_stack
from plait.machines.cluster import Cluster
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import AttentionKernel, Workload
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import estimate_step_time

Kind = Literal["dense", "moe_tpu"]
Knobs = Mapping[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published row, ready to be priced."""

    id: str
    source: str
    """The id up to its last hyphen."""
    kind: Kind
    workload: Workload
    cluster: Cluster
    knobs: Knobs
    profile: SoftwareProfile
    step_s: float | None
    """Measured seconds of a step, where the row has them."""
    memory_bytes: float | None
    reading: str
    """What kind of memory reading it is."""
    ran_out: bool
    """Published as out of memory, without a time."""
    guessed: bool
    """Whether a blank cell had to be filled."""
    multi_node: bool
    job: tuple[str, ...]
    """What must be equal for rows to be layouts of the same job."""


READINGS = {"simu": "allocated", "kor22": "allocated", "kor22mem": "allocated", "titan": "reserved", "bloom": "device"}
"""Kinds of memory readings by source: "allocated" is the allocator's highest sum (SimuMax's tables; Korthikanti's
figures by formula), "reserved" what the allocator holds (torchtitan's log), "device" what the device's tool shows."""
JOB = ("model", "hardware", "n_devices", "seq", "global_batch_seqs", "precision")


def read_rows(*paths: Path) -> list[Row]:
    """The rows of the given tables."""
    rows: list[Row] = []
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return rows


def case_of(row: Row) -> Case:
    """A row as a case; blank cells are filled by the rules of `fill_knobs` and `published_shape`."""
    shape, guessed = published_shape(row)
    source = row["id"].rpartition("-")[0]
    profile = published_stack(row)
    if "gpt oss" in row["model"].lower() and profile.name == "nemo":
        # Its sinks kept NVIDIA's fused attention from using the window until the containers of mid-2026.
        shape["other_layers"] = replace(shape["other_layers"], window=0, local_layers=0)
    cluster = published_cluster(row)
    sequence = count(row, "seq") or USUAL_SEQUENCE
    devices = count(row, "n_devices") or USUAL_DEVICES
    batch = count(row, "global_batch_seqs") or filled_batch(row, sequence, devices)
    workload = Workload(
        **shape,
        sequence=sequence,
        batch_sequences=batch,
        precision=published_precision(row),
        attention=published_attention(row, profile),
    )
    knobs, filled = fill_knobs(row, workload, cluster, profile)
    memory_gb = number(row, "mem_gb_per_gpu")
    return Case(
        id=row["id"],
        source=source,
        kind="moe_tpu" if is_tpu(row) or is_sparse(row) else "dense",
        workload=workload,
        cluster=cluster,
        knobs=knobs,
        profile=profile,
        step_s=measured_step_s(row, workload, devices),
        memory_bytes=memory_gb * 2**30 if memory_gb else None,
        reading=READINGS.get(source, "device"),
        ran_out="OUT-OF-MEMORY" in row["notes"] and not number(row, "step_time_s"),
        guessed=guessed or filled or not (count(row, "seq") and count(row, "global_batch_seqs")),
        multi_node=devices > (count(row, "gpus_per_node") or 8),
        job=(source, *(row[column] for column in JOB)),
    )


USUAL_SEQUENCE = 4096
USUAL_DEVICES = 64
"""Where the row does not tell."""


def filled_batch(row: Row, sequence: int, devices: int) -> int:
    """Sequences of a step where the row leaves them open: the tokens that its time and rate, or its notes, come to;
    else four micro-batches for each device."""
    step, rate = number(row, "step_time_s"), number(row, "tokens_per_s_per_gpu")
    said = re.search(r"total[ _](?:weights|tokens per step) (\d+)", row["notes"])
    tokens = step * rate * devices if step and rate else float(said[1]) if said else None
    return max(round(tokens / sequence), 1) if tokens else 4 * devices * (count(row, "micro_batch") or 1)


def measured_step_s(row: Row, workload: Workload, devices: int) -> float | None:
    """The published time of a step, or the one that follows from tokens per second."""
    if step := number(row, "step_time_s"):
        return step
    rate = number(row, "tokens_per_s_per_gpu")
    return workload.batch_tokens / (rate * devices) if rate else None


def published_attention(row: Row, profile: SoftwareProfile) -> AttentionKernel:
    """Fused where the row says flash or its stack is later than 2022."""
    early = profile.name.startswith(("megatron 2021", "megatron-deepspeed"))
    text = re.sub(r"no flash", "", (row["notes"] + row["recompute"]).lower())
    return "unfused" if early and "flash" not in text else "flash"


def fill_knobs(row: Row, workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> tuple[Knobs, bool]:
    """A row's layout, and whether something was filled in.

    Rules for blanks: an axis that is not named has degree 1 if tensor or pipeline is named; if neither is, both, the
    micro-batch and recomputation are the planner's own choice (`own_choice`). MaxText's rows are then sharded alone,
    all sequences of a rank at once, and cut along the sequence where there are fewer of them than devices. Data ranks
    are what is left of the devices. Sharding: of the optimizer if a pipeline or tensor axis is at work, else of the
    parameters. A micro-batch is at most what one data rank has, and 1 with a pipeline; recomputation what is fastest
    and fits.
    """
    devices = count(row, "n_devices") or USUAL_DEVICES
    tensor, pipeline, context = count(row, "tp"), count(row, "pp"), count(row, "cp") or 1
    open_axes = tensor is None and pipeline is None
    virtual = (count(row, "vp_interleave") or 1) if (pipeline or 1) > 1 else 1
    known: dict[str, int | str] = {
        "tensor": tensor or 1,
        "pipeline": pipeline or 1,
        "context": context,
        "expert": count(row, "ep") or 1,
        "virtual": virtual,
        "schedule": "interleaved" if virtual > 1 else "1f1b",
        "sequence_parallel": int(number(row, "sp") or 0) if row.get("sp") else int((tensor or 1) > 1),
    }
    recompute, micro = published_recompute(row), count(row, "micro_batch")
    filled = open_axes or recompute is None or micro is None or published_sharding(row) is None
    options = [known]
    if open_axes and profile.name == "maxtext":
        options = [dict(known, context=max(devices // workload.batch_sequences, context))]
    elif open_axes:
        options = [
            dict(known, tensor=t, pipeline=p, sequence_parallel=int(t > 1))
            for t in (1, 2, 4, 8)
            for p in (1, 2, 4, 8, 16)
            if devices % (t * p * context) == 0
            and workload.layers >= p
            and (t == 1 or t <= cluster.islands[0].per_node)
        ] or [known]
    rows = [
        dict(option, **_data(row, option, devices), micro_sequences=m, recompute=r)
        for option in options
        for m in ([micro] if micro else _micros(workload, profile, option, devices))
        for r in ([recompute] if recompute else ["none", "selective", "full"])
    ]
    return (own_choice(rows, workload, cluster, profile) if len(rows) > 1 else rows[0]), filled


def _data(row: Row, option: Knobs, devices: int) -> dict[str, int | str]:
    taken = int(option["tensor"]) * int(option["pipeline"]) * int(option["context"])
    ranks = max(devices // taken, 1)
    sharding = published_sharding(row)
    if sharding is None:
        what = "optimizer" if int(option["tensor"]) * int(option["pipeline"]) > 1 else "parameters"
        return {"shard": ranks, "replicate": 1, "shard_what": what if ranks > 1 else "nothing"}
    if sharding.what == "nothing":
        return {"shard": 1, "replicate": ranks, "shard_what": "nothing"}
    size = min(sharding.ranks or ranks, ranks)
    size = size if ranks % size == 0 else ranks
    return {"shard": size, "replicate": ranks // size, "shard_what": sharding.what}


def _micros(workload: Workload, profile: SoftwareProfile, option: Knobs, devices: int) -> list[int]:
    taken = int(option["tensor"]) * int(option["pipeline"]) * int(option["context"])
    each = max(workload.batch_sequences * taken // devices, 1)
    if profile.name == "maxtext":
        return [each]
    limit = 1 if int(option["pipeline"]) > 1 else each
    return [m for m in (1, 2, 4, 8, 16) if m <= limit] or [1]


def own_choice(rows: Sequence[Knobs], workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Knobs:
    """The fastest of these that fits, or the smallest where none does."""
    candidates = Candidates.from_rows(rows)
    needed = estimate_memory(workload, candidates, profile)
    room = fits(needed, cluster)
    if not room.any():
        return rows[int(np.argmin(needed.reserved))]
    inputs = CostInputs(workload=workload, cluster=cluster, candidates=candidates, profile=profile)
    step = np.where(room, estimate_step_time(inputs).step_s, np.inf)
    return rows[int(np.argmin(step))]
