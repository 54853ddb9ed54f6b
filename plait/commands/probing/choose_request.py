"""What a probe measures: the work of a recipe's model, or of usual ones."""

from __future__ import annotations

from dataclasses import replace

from plait.cluster.machine_cluster import cluster_of_machine
from plait.cluster.probe.request import (
    MAX_CPU_MICROBATCH_TOKENS,
    ProbeRequest,
    model_probe_request,
    typical_probe_request,
)
from plait.commands.planning.arithmetic import arithmetic_to_probe
from plait.commands.planning.measuring import MachineSurvey, resources_of
from plait.commands.planning.workers import WorkerPool
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.commands.probing.measurements import ProbeWorkers
from plait.planner.derive.compile_mode import compile_of
from plait.planner.derive.resources import on_paper
from plait.planner.resolve.request import request_of
from plait.recipe.schema import RunConfig
from plait.working_folder import WorkingFolder


def probe_request_for(
    config: RunConfig | None, survey: MachineSurvey, probe_workers: ProbeWorkers, working: WorkingFolder
) -> ProbeRequest:
    """What a recipe's model needs measured, or usual models without one."""
    device, gpus = survey.machine.device, survey.machine.gpus
    if config is None:
        with_float32 = "float32" if "bf16" in survey.machine.without else None
        usual = typical_probe_request(device, probe_workers.threads, with_float32)
        compile = "off" if device == "cpu" or survey.machine.uncompiled else "blocks"
        return replace(usual, gpus=gpus, compile=compile)
    cluster = cluster_of_machine(survey.machine, survey.peak_flops if device == "cpu" else None)
    corpus, _ = corpus_facts_or_usual(config, working)
    request = request_of(config, corpus, on_paper(cluster))
    job, sequence = request.job, request.job.sequence
    sequences = config.layout.micro_sequences
    if sequences == "auto":
        most = max(1, MAX_CPU_MICROBATCH_TOKENS // sequence) if device == "cpu" else job.batch_sequences
        sequences = min(most, job.batch_sequences)
    requested = model_probe_request(
        job.shape,
        sequence=sequence,
        sequences=sequences,
        device=device,
        precision="bf16" if request.arithmetic.precision == "bf16" else "float32",
        threads=probe_workers.threads,
    )
    return replace(requested, gpus=gpus, compile=compile_of(config, [survey.machine], []))


def with_fastest_library(
    requested: ProbeRequest, config: RunConfig | None, survey: MachineSurvey, workers: WorkerPool
) -> tuple[ProbeRequest, MachineSurvey]:
    """The request, and the survey with its peak, by the library of products that a run would take here: a probe must
    time the arithmetic that its plans forecast. GPUs have none to choose."""
    resources = resources_of(survey, workers)
    named = config.train.matmul_backend if config else "auto"
    found = arithmetic_to_probe(named, requested.precision, requested.models[-1], resources, workers)
    if found is None:
        return requested, survey
    requested = replace(requested, matmul_backend=found.backend, host_backends=found.host_backends)
    return requested, replace(survey, peak_flops=resources.with_arithmetic(found).peak_flops)
