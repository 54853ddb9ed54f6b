"""From a recipe, a text and machines to the job: what a run computes and in which arithmetic, whatever its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.devices import DEVICE_TRAITS
from plait.errors import PlaitError
from plait.machines.machine import Machine
from plait.partition.execution import Compile, MatmulBackend, MatmulPrecision, Precision, RunArithmetic
from plait.planner.derive import published_rules
from plait.planner.derive.arithmetic import LEAST_STEP_GAIN
from plait.planner.derive.derived import Derived
from plait.planner.derive.hyperparameters import documents_mode, finetuning_batch, optimizer_plan
from plait.planner.derive.intervals import steps_in_budget
from plait.planner.derive.model_size import (
    GUESSED_PEAK_FLOPS,
    CorpusFacts,
    TrainingRate,
    batch_sequences,
    derive_run_size,
)
from plait.planner.derive.resources import Resources
from plait.planner.plan import OptimizerKind, Plan, TrainingJob
from plait.planner.problem.expert_loads import assumed_load, balanced_by
from plait.planner.problem.workload import Orthogonalization, Workload, workload_of
from plait.planner.step_time.device_rates import peak_flops
from plait.recipe.finetune import FinetuneObjective
from plait.recipe.schema import RunConfig
from plait.units import counted

READINGS_PER_STEP_AT_MOST = 100
"""How often a step may read the text: small examples are learned from in the batches of large ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedJob:
    """A recipe's job for a text, at the rate at which the machines are expected to train it."""

    job: TrainingJob
    """Its steps are 0 where the budget is a time."""
    rate: TrainingRate
    reasons: tuple[str, ...]
    """For the size and the batch."""
    training_reasons: tuple[str, ...]
    """For the optimizer and the documents; a plan names them after those for its layout."""
    warnings: tuple[str, ...]

    def holds_at(self, rate: TrainingRate) -> bool:
        """Whether the job would be the same at another rate: only a budget of time depends on how fast it is."""
        return rate == self.rate or (self.job.budget.unit != "seconds" and rate.size == self.rate.size)


def size_job(config: RunConfig, corpus: CorpusFacts, rate: TrainingRate) -> SizedJob:
    """What a recipe trains, each choice with its reason; raises PlaitError for what cannot work."""
    size = derive_run_size(config, corpus, rate)
    scale, doubts = size.value, tuple[str, ...]()
    sequence, method = scale.shape.sequence, config.finetune.method
    if method != "auto" and config.train.batch_tokens == "auto":
        batch = finetuning_batch(method, config.finetune.objective, sequence, corpus)
    else:
        batch, doubts = batch_sequences(config, scale), batch_doubts(config, corpus)
    optimizer = optimizer_plan(config, scale.flops, scale.shape, batch.value * sequence, corpus.base)
    documents = documents_mode(config, corpus, sequence)
    job = TrainingJob(
        shape=scale.shape,
        sequence=sequence,
        batch_sequences=batch.value,
        budget=scale.budget,
        steps=steps_in_budget(scale.budget, batch.value * sequence, step_s=None),
        optimizer=optimizer.value,
        base=corpus.base.folder if corpus.base else "",
        base_fingerprint=corpus.base.fingerprint if corpus.base else "",
        corpus=corpus.folder,
        corpus_hash=corpus.content_hash,
        documents=documents.value,
        choices=config.report.choices or "",
        most_tokens=scale.most_tokens,
    )
    return SizedJob(
        job=job,
        rate=rate,
        reasons=(*size.reasons, *batch.reasons),
        training_reasons=(*optimizer.reasons, *documents.reasons),
        warnings=(*doubts, *optimizer.warnings),
    )


def run_arithmetic(config: RunConfig, kind: OptimizerKind, resources: Resources) -> Derived[RunArithmetic]:
    """The arithmetic that suits these machines and this optimizer, layers not compiled yet (compile_of); raises
    PlaitError for what the machines do not have."""
    precision = precision_of(config, resources)
    products = matmul_precision_of(precision.value, resources)
    matrices = orthogonalized_in(kind, precision.value, resources)
    measured = resources.arithmetic.reasons if resources.arithmetic else ()
    arithmetic = RunArithmetic(
        precision=precision.value,
        compile="off",
        gradient_transfer=config.train.gradient_transfer,
        stage_transfer=config.train.stage_transfer,
        deterministic=config.train.deterministic or resources.machine.device == "cpu",
        matmul_precision=products.value,
        matmul_backend=matmul_backend_of(config, resources),
        orthogonalized_in=matrices.value,
    )
    return Derived(
        value=_as_measured(arithmetic, resources),
        reasons=(*precision.reasons, *measured, *products.reasons, *matrices.reasons),
    )


def rate_before_pricing(resources: Resources) -> TrainingRate:
    """How fast these machines may train before any layout was priced: a usual share of the arithmetic peak."""
    peak = resources.peak_flops or GUESSED_PEAK_FLOPS * resources.machine.devices
    return TrainingRate(flops_per_s=published_rules.EXPECTED_MFU * peak, source="assumed")


def arithmetic_of_plan(plan: Plan, resources: Resources) -> RunArithmetic:
    """The arithmetic of a run that was begun elsewhere, or with another budget, whatever would be chosen today: only
    what processors were measured for may change."""
    return _as_measured(replace(plan.arithmetic, host_backends={}, matmul_flops=None, matmul_error=None), resources)


def _as_measured(arithmetic: RunArithmetic, resources: Resources) -> RunArithmetic:
    """The arithmetic with the library that was found fastest for the processors, and its speed and error."""
    if (measured := resources.arithmetic) is None:
        return arithmetic
    return replace(
        arithmetic,
        matmul_backend=measured.backend,
        host_backends=measured.host_backends,
        matmul_flops=measured.flops,
        matmul_error=measured.error,
    )


def batch_doubts(config: RunConfig, corpus: CorpusFacts) -> tuple[str, ...]:
    """A warning where a recipe's step reads all of the text more than once; raises PlaitError where it does so over and
    over, as a slip of some zeros makes it."""
    requested, there = config.train.batch_tokens, max(1, corpus.train_tokens)
    if requested == "auto" or requested <= there:
        return ()
    often = f"train.batch_tokens = {requested} reads all {counted(there, 'token', ',')} of the text"
    if requested > READINGS_PER_STEP_AT_MOST * there:
        raise PlaitError(
            f"{often} {requested // there:,} times in each step; choose at most {there}, or give more text"
        )
    return (f"{often} {requested / there:.1f} times in each step",)


def precision_of(config: RunConfig, resources: Resources) -> Derived[Precision]:
    """The arithmetic that a recipe names, else the fast one of the devices; raises PlaitError for bf16 or fp16 on
    devices that have none."""
    named, on_cpu = config.train.precision, resources.machine.device == "cpu"
    lacking, lacking_fp16 = ("" if on_cpu else _lacking(resources, name) for name in ("bf16", "fp16"))
    if (named == "bf16" and lacking) or (named == "fp16" and lacking_fp16):
        other = '"fp16" or "float32"' if named == "bf16" and not lacking_fp16 else '"float32"'
        raise PlaitError(f"{lacking_fp16 or lacking} has no {named} arithmetic; write train.precision = {other}")
    if named == "fp16":
        reason = (
            "precision fp16: on processors it is far slower than float32, and for trying out only"
            if on_cpu
            else "precision fp16 with float32 master weights: the loss is scaled by a power of two, and updates whose "
            "gradients exceed fp16's range are skipped; plait has run it on processors only, not yet on a GPU"
        )
        return Derived(value=named, reasons=(reason,))
    if named != "auto":
        return Derived(value=named)
    if resources.machine.device == "cpu":
        if resources.arithmetic:
            return Derived(value=resources.arithmetic.precision)
        reason = "precision float32, unless plait train finds a step much faster in bf16 on the processor"
        return Derived(value="float32", reasons=(reason,))
    if lacking:
        hint = "" if lacking_fp16 else _fp16_hint(resources)
        return Derived(value="float32", reasons=(f"precision float32: {lacking} has no bf16 arithmetic{hint}",))
    reason = "precision bf16 with float32 master weights: these devices' fast arithmetic"
    return Derived(value="bf16", reasons=(reason,))


def matmul_backend_of(config: RunConfig, resources: Resources) -> MatmulBackend:
    """The library of a processor's products: as measured, else as the recipe names it."""
    if resources.arithmetic:
        return resources.arithmetic.backend
    named = config.train.matmul_backend
    return "default" if named == "auto" or resources.machine.device != "cpu" else named


def matmul_precision_of(precision: Precision, resources: Resources) -> Derived[MatmulPrecision]:
    """TF32 for float32 products where all devices are NVIDIA's and have it."""
    devices = resources.known_devices
    if precision != "float32" or resources.machine.device == "cpu" or not devices:
        return Derived(value="float32")
    if lacking := _lacking(resources, "tf32"):
        have = dict.fromkeys(device.name for device in devices if "tf32" in device.peak_flops)
        reason = f"products in float32 on all devices: {lacking} has no TF32, though {' and '.join(have)} would"
        return Derived(value="float32", reasons=(reason,) if have else ())
    if any(device.vendor != "NVIDIA" for device in devices):
        return Derived(value="float32")
    gain = min(device.flops("tf32") / device.flops("float32") for device in devices)
    reason = (
        "products in TF32 (factors rounded to 10 bits of mantissa, all else in float32): "
        f"{gain:.0f} times the peak of float32 products on these devices"
    )
    return Derived(value="tf32", reasons=(reason,))


def orthogonalized_in(kind: OptimizerKind, precision: Precision, resources: Resources) -> Derived[Precision]:
    """In what Muon multiplies: bf16, which its iterations bear (Jordan et al. 2024), where devices are fast at it."""
    if kind != "muon":
        return Derived(value="float32")
    if precision == "bf16":
        return Derived(value="bf16")
    if (gain := _bf16_gain(resources)) < LEAST_STEP_GAIN:
        return Derived(value="float32", reasons=("Muon orthogonalizes in float32, as bf16 is no faster here",))
    reason = f"Muon orthogonalizes in bf16, whose products are {gain:.1f} times as fast here as float32 ones"
    return Derived(value="bf16", reasons=(reason,))


def _fp16_hint(resources: Resources) -> str:
    """What to write for fp16 where its products are worth their narrow range: a GTX 10 has slower ones than float32's.
    It is not chosen because no GPU without bf16 has run it yet."""
    gains = [peak_flops(one, "fp16") / peak_flops(one, "float32") for one in resources.known_devices]
    if not gains or min(gains) < LEAST_STEP_GAIN:
        return ""
    return f'; train.precision = "fp16" has {min(gains):.0f} times the peak, but plait has run it on processors only'


def _bf16_gain(resources: Resources) -> float:
    """How many times as fast bf16 products are as a float32 run's own; 0 where that is not known."""
    if resources.machine.device == "cpu":
        return resources.arithmetic.bf16_gain if resources.arithmetic else 0.0
    devices = resources.known_devices
    if not devices or _lacking(resources, "bf16"):
        return 0.0
    own = matmul_precision_of("float32", resources).value
    return min(device.flops("bf16") / device.flops(own) for device in devices)


def _lacking(resources: Resources, precision: str) -> str:
    """The name of the first known device that lacks a precision; empty where none does."""
    if machine := next((one for one in resources.machines if precision in one.without), None):
        return machine.name
    return next((device.name for device in resources.known_devices if precision not in device.peak_flops), "")


def workload_of_job(
    job: TrainingJob, arithmetic: RunArithmetic, resources: Resources, objective: FinetuneObjective = "sft"
) -> Workload:
    """The job as the cost model sees it, with its experts' loads as measured or assumed. What computes in float64 is
    priced as float32: nobody trains so for speed."""
    computes_in = arithmetic.precision
    precision = arithmetic.matmul_precision if computes_in in ("float32", "float64") else computes_in
    sequence, batch, moments = job.shape.sequence, job.batch_sequences, job.optimizer.moments
    whole = workload_of(job.shape, sequence=sequence, batch_sequences=batch, precision=precision, moments=moments)
    if job.optimizer.kind == "muon":
        whole = replace(whole, orthogonalization=_orthogonalization(arithmetic, resources))
    if job.shape.mixture is None:
        return replace(whole, logit_passes=2) if objective != "sft" and whole.head_learns else whole
    if (measured := resources.load_expert_load(job.shape.mixture)) is not None:
        return replace(whole, expert_load=measured, expert_load_from="measured")
    return replace(whole, expert_load=assumed_load(job.shape.mixture), expert_load_from=balanced_by(job.shape.mixture))


def _orthogonalization(arithmetic: RunArithmetic, resources: Resources) -> Orthogonalization:
    faster = arithmetic.orthogonalized_in == "bf16" and arithmetic.precision != "bf16"
    speed = max(1.0, _bf16_gain(resources)) if faster else 1.0
    if arithmetic.precision == "fp16" and resources.known_devices:
        # float32's products are the run's own over this.
        float32 = matmul_precision_of("float32", resources).value
        speed /= max(peak_flops(one, "fp16") / peak_flops(one, float32) for one in resources.known_devices)
    return Orthogonalization(number_bytes=2 if arithmetic.orthogonalized_in == "bf16" else 4, speed=speed)


def compile_of(config: RunConfig, machines: Sequence[Machine]) -> Derived[Compile]:
    """What the recipe names, else compiled on GPUs where that can work on all hosts; raises PlaitError where it cannot
    and is asked for. `machines` are those of the hosts, the leader's first."""
    named = config.train.compile
    if machines[0].device == "cpu":
        if named == "on":
            raise PlaitError(
                'train.compile = "on" is for GPUs, and this run is on the processor; write "auto" or "off"'
            )
        return Derived(value="off")
    if DEVICE_TRAITS[machines[0].device].is_compiled:
        if named == "on":
            raise PlaitError(
                f'train.compile = "on" is for GPUs, and {machines[0].name} compiles all operations anyway; write "auto"'
            )
        return Derived(value="off")
    where, reason = _where_not_compiled(machines)
    if named == "on" and reason:
        raise PlaitError(f'layers cannot be compiled {where}: {reason}; or write train.compile = "auto"')
    if named == "off":
        return Derived(value="off", reasons=('layers are not compiled: train.compile = "off"',))
    if reason:
        place = "" if where == "here" else f"{where}, "
        slower = f"layers are not compiled, and steps take longer: {place}{reason}"
        return Derived(value="off", warnings=(slower,))
    return Derived(value="blocks")


def _where_not_compiled(machines: Sequence[Machine]) -> tuple[str, str]:
    """The first host on which layers cannot be compiled, in words, and the reason; the reason is empty where they can
    be on all."""
    for host, machine in enumerate(machines):
        if machine.uncompiled:
            return "here" if host == 0 else f"on host {host}", machine.uncompiled
    return "here", ""
