"""A described run on machines: whether it fits, how long a step takes, and a breakdown of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal

from plait.errors import PlaitError
from plait.foreign_configs.habits import KEEPS_16_BITS, held_besides, knows_optimizer, loading_bytes, profile_of
from plait.foreign_configs.models import model_numbers, workload_numbers
from plait.foreign_configs.run_description import RunDescription
from plait.machines.cluster import Cluster
from plait.model.adapter_shape import AdapterTarget
from plait.planner.memory.estimate import ALLOCATOR_RESERVE, estimate_memory
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import layer_parameters
from plait.planner.problem.workload import Workload
from plait.planner.search.cost_breakdown import MEMORY_NAMES, TIME_NAMES
from plait.planner.search.model_error import memory_error
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import estimate_step_time
from plait.units import counted

NF4_BYTES = {"litgpt": 0.5625, "transformers": 0.5625, "axolotl": 0.5157}
"""Bytes per weight in 4 bits with its scales: one float32 scale for 64 weights (bitsandbytes' NF4), or an eighth of
that if scales are quantized again."""
INT8_BYTES = 1.02
DEQUANTIZED_TRAFFIC = 7.0
"""Bytes of memory traffic to dequantize one weight to 16 bits, per pass over it."""
LEAST_MARGIN = 0.08
"""Share of the needed memory that must stay free before a run is said to fit: the median error of forecasts for other
programs (benchmarks/foreign_configs.py)."""
MOST_SEQUENCES = 1 << 24
FitVerdict = Literal["fits", "too close to say", "does not fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """A run's needs on the machines that it uses."""

    run: RunDescription
    workload: Workload
    cluster: Cluster
    """The devices that the run uses."""
    profile: SoftwareProfile
    layout: Mapping[str, int | str]
    """Degrees, micro-batch and recomputation, named as in `Candidates`."""
    memory: Mapping[str, float]
    """Bytes on the fullest device by item."""
    allocated_bytes: float
    """The peak that the framework's allocator reports."""
    time: Mapping[str, float]
    """Seconds of a step by item."""
    assumed: tuple[str, ...]

    @property
    def needed_bytes(self) -> float:
        """Memory as the device's own tool shows it."""
        return fsum(self.memory.values())

    @property
    def device_bytes(self) -> float:
        """Memory of one device."""
        return self.cluster.islands[0].device.memory_bytes

    @property
    def verdict(self) -> FitVerdict:
        """Whether the run fits, given the forecast's error."""
        margin = 1 + max(LEAST_MARGIN, memory_error(self.workload, self.cluster))
        if self.needed_bytes * margin <= self.device_bytes:
            return "fits"
        return "does not fit" if self.needed_bytes > self.device_bytes else "too close to say"

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return fsum(self.time.values())

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run; None if unknown."""
        run, batch = self.run, self.workload.batch_sequences
        if run.steps:
            return run.steps
        if run.tokens:
            return -(-run.tokens // self.workload.batch_tokens)
        if run.samples:
            return max(round(run.samples * (run.epochs or 1.0) / batch), 1)
        return None

    @property
    def accumulation(self) -> int:
        """Micro-batches per data-parallel rank and step."""
        ranks = int(self.layout["replicate"]) * int(self.layout["shard"])
        return self.workload.batch_sequences // (ranks * int(self.layout["micro_sequences"]))


def forecast(run: RunDescription, machines: Cluster) -> RunForecast:
    """Price a run; raises PlaitError for values that the description lacks and for runs that cannot be laid out."""
    assumed = list(run.assumed)
    used = used_devices(run, machines)
    if run.devices is None and used.n_devices > 1:
        assumed.append(f"all {used.n_devices} devices are used; give devices=NUMBER for fewer")
    if not knows_optimizer(run.optimizer):
        assumed.append(f"the optimizer {run.optimizer} has AdamW's state; give optimizer=NAME for another")
    layout = _layout(run, used)
    micro, batch = _batch(run, layout)
    layout = {**layout, "micro_sequences": micro}
    workload = _workload(run, batch)
    if run.layout.pipeline * run.virtual > workload.layers:
        raise PlaitError(
            f"{run.layout.pipeline * run.virtual} pipeline stages are more than the model's {workload.layers} layers"
        )
    candidates = Candidates.from_rows([layout])
    own = profile_of(run, workload, candidates)
    # For processors, the profile would otherwise follow plait's own step.
    profile = replace(own.for_cluster(used), memory_model="by share")
    memory, allocated = _memory(run, workload, candidates, profile)
    return RunForecast(
        run=run,
        workload=workload,
        cluster=used,
        profile=profile,
        layout=layout,
        memory=memory,
        allocated_bytes=allocated,
        time=_time(run, workload, candidates, profile, used),
        assumed=tuple(dict.fromkeys(assumed)),
    )


def used_devices(run: RunDescription, machines: Cluster) -> Cluster:
    """The part of the machines that the run uses; raises PlaitError for too few devices, or several kinds."""
    first = machines.islands[0]
    if any(island.device != first.device or island.speed != first.speed for island in machines.islands):
        raise PlaitError(
            f"{machines.name} has devices of several kinds, but this program treats all alike; name one kind with "
            "--cluster"
        )
    if run.devices is None or run.devices == machines.n_devices:
        return machines
    if run.devices > machines.n_devices:
        raise PlaitError(
            f"the configuration is for {counted(run.devices, 'device')}, and {machines.name} has "
            f"{machines.n_devices}; name machines with that many with --cluster, or give devices={machines.n_devices}"
        )
    per_node = min(first.per_node, run.per_node or first.per_node, run.devices)
    if run.devices % per_node:
        raise PlaitError(f"{run.devices} devices do not divide into nodes of {per_node}; give devices=NUMBER")
    island = replace(first, per_node=per_node, nodes=run.devices // per_node)
    name = f"{run.devices} of {machines.name}"
    return Cluster(name=name, islands=(island,), between=machines.between)


def _layout(run: RunDescription, used: Cluster) -> dict[str, int | str]:
    tensor, pipeline, context = run.layout.tensor, run.layout.pipeline, run.layout.context
    taken = tensor * pipeline * context
    if used.n_devices % taken:
        raise PlaitError(
            f"tensor {tensor} × pipeline {pipeline} × context {context} = {taken} does not divide "
            f"{counted(used.n_devices, 'device')}; name machines with a multiple of {taken} with --cluster"
        )
    ranks, expert = used.n_devices // taken, run.layout.expert
    if used.n_devices // pipeline % expert:
        raise PlaitError(
            f"experts on {expert} ranks do not divide {counted(used.n_devices // pipeline, 'device')} of a stage; "
            "change one of them"
        )
    shard = ranks if run.shards_over == "all data ranks" else run.layout.shard
    if ranks % shard:
        raise PlaitError(f"shards over {shard} ranks do not divide {ranks} data-parallel ranks; change one of them")
    sharded = run.sharded if ranks > 1 else "nothing"
    if sharded == "nothing":
        shard = 1
    return {
        "pipeline": pipeline,
        "virtual": run.virtual,
        "replicate": ranks // shard,
        "shard": shard,
        "shard_what": sharded,
        "context": context,
        "tensor": tensor,
        "sequence_parallel": int(run.sequence_parallel and tensor > 1),
        "expert": expert,
        "recompute": run.recompute,
        "schedule": "interleaved" if run.virtual > 1 else "1f1b",
    }


def _batch(run: RunDescription, layout: Mapping[str, int | str]) -> tuple[int, int]:
    """Sequences of a micro-batch and of a step."""
    ranks = int(layout["replicate"]) * int(layout["shard"])
    micro, batch = run.micro_sequences, run.batch_sequences
    if micro is None and batch is not None:
        micro = max(batch // ranks // (run.accumulation or 1), 1)
    if micro is None:
        raise PlaitError("the configuration does not give the micro-batch; give micro_sequences=NUMBER (per device)")
    if max(micro, run.accumulation or 1, batch or 1) > MOST_SEQUENCES:
        raise PlaitError(f"a batch may have at most {MOST_SEQUENCES:,} sequences; write fewer")
    if batch is None:
        return micro, micro * (run.accumulation or 1) * ranks
    each = micro * ranks
    if run.accumulation and each * run.accumulation != batch:
        raise PlaitError(
            f"a batch of {batch} contradicts {micro} sequences × {run.accumulation} accumulated × {ranks} ranks = "
            f"{each * run.accumulation}; remove one of the three, or give devices=NUMBER"
        )
    if batch % each:
        if run.program == "litgpt" and batch > each:  # it rounds down
            return micro, batch // each * each
        raise PlaitError(
            f"a batch of {batch} sequences does not divide into micro-batches of {micro} on {counted(ranks, 'rank')}; "
            "give batch_sequences=NUMBER or micro_sequences=NUMBER"
        )
    return micro, batch


def _workload(run: RunDescription, batch: int) -> Workload:
    if run.sequence is None:
        raise PlaitError("the configuration does not say how long sequences are; give sequence=NUMBER of tokens")
    if run.model is None and "layers" not in run.shape:
        raise PlaitError(
            "the configuration does not say which model is trained; give model=NAME (a hub id such as "
            "meta-llama/Llama-3.1-8B) or model=PATH with its config.json"
        )
    named = {} if run.model is None or "layers" in run.shape else model_numbers(run.model)
    numbers = workload_numbers({**named, **run.shape})
    ungated = not numbers["gated"]
    targets: tuple[AdapterTarget, ...] = tuple(
        one for one in run.adapter_targets if not (ungated and one == "feedforward.gate")
    )
    return Workload(
        **numbers,
        sequence=run.sequence,
        batch_sequences=batch,
        precision=run.precision,
        attention=run.attention,
        adapter_rank=run.adapter_rank,
        adapter_targets=targets,
    )


def _memory(
    run: RunDescription, workload: Workload, candidates: Candidates, profile: SoftwareProfile
) -> tuple[dict[str, float], float]:
    if run.program in KEEPS_16_BITS and workload.precision == "fp8":
        workload = replace(workload, precision="bf16")
    workload, candidates = _sharded_over_context(run, workload, candidates)
    found = estimate_memory(workload, candidates, profile)
    items = {name: float(getattr(found, name)[0]) for name in MEMORY_NAMES if name != "reserve"}
    items = {name: value + held_besides(run, workload, candidates).get(name, 0.0) for name, value in items.items()}
    weights = _sharded_weights(run, candidates, profile) * items["optimizer"]
    items |= {"parameters": items["parameters"] + weights, "optimizer": items["optimizer"] - weights}
    if run.adapter_rank:
        wider = _frozen_bytes(run) - workload.element_bytes
        items["parameters"] += _frozen_weights(workload, candidates) * wider
        if run.quantized_bits:
            items["gathered"] += 2.0 * workload.width * workload.ffn  # one layer's largest matrix in 16 bits
    if run.offloads_optimizer:
        items["optimizer"] = 0.0
    if run.offloads_parameters:
        items["parameters"] = 0.0
    allocated = fsum(items.values())
    if (loading := loading_bytes(run, workload, candidates)) > allocated:
        items = {**dict.fromkeys(items, 0.0), "parameters": loading}
        allocated = loading
    reserve = (ALLOCATOR_RESERVE - 1) * allocated + profile.outside_bytes
    return {**items, "reserve": reserve}, allocated


def _sharded_weights(run: RunDescription, candidates: Candidates, profile: SoftwareProfile) -> float:
    """Share of the optimizer's bytes for sharded weights, which stay on the device if the optimizer state is
    offloaded."""
    if run.adapter_rank or not candidates.is_fully_sharded[0] or profile.weight_bytes == 4:
        return 0.0
    return (4.0 if run.weights == "float32" else 2.0) / profile.state_bytes


def _sharded_over_context(
    run: RunDescription, workload: Workload, candidates: Candidates
) -> tuple[Workload, Candidates]:
    """Candidates shard only over an axis of at least two. If parameters are sharded over context-parallel ranks alone,
    this is the equivalent with shorter sequences instead of split ones, which needs the same memory."""
    context = int(candidates.context[0])
    if run.sharded != "parameters" or int(candidates.shard[0]) > 1 or context == 1:
        return workload, candidates
    row = {**candidates.row(0), "shard": context, "context": 1, "shard_what": "parameters"}
    short = replace(workload, sequence=workload.sequence // context, batch_sequences=workload.batch_sequences * context)
    return short, Candidates.from_rows([row])


def _frozen_weights(workload: Workload, candidates: Candidates) -> float:
    """Frozen weights of the layers on one rank."""
    common, experts = layer_parameters(workload, candidates)
    ranks = float(candidates.shard[0]) if candidates.is_fully_sharded[0] else 1.0
    return workload.layers * float(common[0] + experts[0]) / ranks / float(candidates.pipeline[0])


def _frozen_bytes(run: RunDescription) -> float:
    if run.quantized_bits:
        return INT8_BYTES if run.quantized_bits == 8 else NF4_BYTES[run.program]
    return 4.0 if run.weights == "float32" else 2.0


def _time(
    run: RunDescription, workload: Workload, candidates: Candidates, profile: SoftwareProfile, used: Cluster
) -> dict[str, float]:
    priced = estimate_step_time(CostInputs(workload=workload, cluster=used, candidates=candidates, profile=profile))
    items = {name: float(getattr(priced, name)[0]) for name in TIME_NAMES}
    items["bubble"] += float(priced.step_s[0]) - fsum(items.values())  # stragglers, if a profile has them
    if run.quantized_bits:
        ranks = float(candidates.data_parallel_degree[0]) * float(candidates.micro_sequences[0])
        passes = (3 if run.recompute == "full" else 2) * workload.batch_sequences / ranks
        weights = workload.layers * float(sum(one[0] for one in layer_parameters(workload, candidates)))
        rate = used.islands[0].device.memory_bytes_per_s
        items["dequantize"] = passes * weights * DEQUANTIZED_TRAFFIC / rate
    return items
