"""`plait.spread`: from a person's models and optimizers to a run on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, get_args

from torch import nn
from torch.optim import Optimizer

from plait.arguments import with_known_keywords
from plait.custom.arithmetic.library import ProductLibrary
from plait.custom.cutting import BatchCut
from plait.custom.group import Workers, find_workers
from plait.custom.layouts.choose import RequestedLayout, choose_layout, parallelize_program
from plait.custom.layouts.copies import skeletons_of
from plait.custom.layouts.description import LayoutChoices
from plait.custom.layouts.first_weights import share_first_weights
from plait.custom.likeness import compare_workers
from plait.custom.program import (
    BeforeUpdate,
    LossSum,
    Program,
    ProgramPrecision,
    check_gradient_hooks,
    check_program,
    check_renormed,
)
from plait.custom.run import SpreadRun
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.stepping.fused import fuse_updates
from plait.custom.verifying.remarks import first_remarks
from plait.errors import PlaitError

DEFAULT_BUCKET_MIB = 8.0
RequestedPrecision = Literal["auto", "float32", "bf16", "fp16"]


class SpreadOptions(TypedDict, total=False):
    """The further arguments of `plait.spread`."""

    schedulers: Sequence[Any]
    """Learning-rate schedulers, stepped after each step and saved; ReduceLROnPlateau is saved, and stepped by you."""
    transfer: Literal["float32", "bf16"]
    """In what numbers gradients travel: as they are, or rounded to half the bytes."""
    bucket_mib: float | Literal["auto"]
    """Gradients that travel together, in MiB: 8 if left out. "auto" measures the link; sums of three workers or more
    are the same to the bit only with equal buckets."""
    units: Sequence[str]
    """Names of the modules that are gathered as one where parameters are sharded, in place of ModuleLists' members."""
    recompute: Literal["none", "full"]
    """"full": units keep only their inputs for the backward pass, and run a second time in it."""
    cut: BatchCut
    """How batches of a kind of their own are cut."""
    additive: Literal["yes", "no"]
    """"no": examples depend on each other (a contrastive loss), and losses see those of other workers by `run.gather`;
    then it is not checked that parts of a batch add up to the whole, which `run.verify` proves."""
    before_update: BeforeUpdate
    """Called before each update with the whole gradients of the mean, by name, which it may change in place (masks,
    noise, clipping by value), before `clip`."""


@with_known_keywords(*SpreadOptions.__annotations__)
def spread(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    loss_sum: LossSum | Sequence[LossSum],
    layout: RequestedLayout = "auto",
    clip: float | None = None,
    accumulate: int = 1,
    precision: RequestedPrecision = "auto",
    seed: int = 0,
    **options: Unpack[SpreadOptions],
) -> SpreadRun:
    """Train any module on all workers that this program was started on, with the numbers of one process.

    `loss_sum(model, batch)` returns the sum of the losses of what it counts, and their count; of a loss with several
    denominators several such pairs, each of which is divided by its own global count before all are added up. Of
    several models give tuples, with one loss for each optimizer, or one for all. `clip` is the largest length of the
    whole gradient, `accumulate` the parts in which a worker computes its share. Precision "auto" is the modules' own
    numbers, and float32 products by oneDNN where that is measured to be faster on this processor and as exact;
    "float32" is the same by torch's own library, "bf16" and "fp16" are torch's autocast, "fp16" with a scale of losses
    that all workers share. `seed` gives the order of data and what is random in steps, and seeds torch, numpy and
    random here. Every worker must call it; blocks until all are here. Raises PlaitError in one sentence.
    """
    if precision not in get_args(RequestedPrecision):
        raise PlaitError(f'precision = "{precision}" is unknown; choose "auto", "float32", "bf16" or "fp16"')
    if options.get("additive", "yes") not in ("yes", "no"):
        raise PlaitError(f'additive = "{options.get("additive")}" is unknown; choose "yes" or "no"')
    program = Program(
        models=_tuple(model),
        optimizers=_tuple(optimizer),
        losses=_tuple(loss_sum),
        schedulers=tuple(options.get("schedulers", ())),
        single=not isinstance(model, tuple | list),
        clip=clip,
        accumulate=accumulate,
        precision=_precision(precision),
        seed=seed,
        additive=options.get("additive", "yes"),
        before_update=options.get("before_update"),
    )
    check_program(program)
    workers = find_workers()
    if workers.size > 1 or accumulate > 1:
        check_gradient_hooks(program)
    if workers.size > 1:
        check_renormed(program)
    for one in program.models:
        one.to(workers.device)
    share_first_weights(program, workers)
    kinds = compare_workers(workers)
    chosen, reason = choose_layout(layout, program, workers, kinds.kinds)
    if workers.size > 1:
        workers.say(f'{workers.size} workers, layout "{chosen}": {reason}')
    if chosen == "shard parameters" and workers.size > 1:
        program = replace(program, skeletons=skeletons_of(program))
    choices = _choices(options, program, workers)
    parallel = parallelize_program(program, workers, chosen, choices)
    if fused := fuse_updates(program):
        workers.say(fused)
    for remark in first_remarks(program, workers.size):
        workers.say(remark)
    seed_everything(seed_from("program", seed))
    library = ProductLibrary(program, workers, "measured" if precision == "auto" else "default")
    return SpreadRun(
        program, parallel, workers, chosen, choices=choices, cut=options.get("cut"), kinds=kinds, library=library
    )


def _tuple(given: Any) -> tuple[Any, ...]:
    """One or several, as a tuple; an nn.Sequential is one model."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _precision(requested: RequestedPrecision) -> ProgramPrecision:
    return "float32" if requested == "auto" else requested


def _choices(options: SpreadOptions, program: Program, workers: Workers) -> LayoutChoices:
    transfer, recompute = options.get("transfer", "float32"), options.get("recompute", "none")
    if transfer not in ("float32", "bf16"):
        raise PlaitError(f'transfer = "{transfer}" is unknown; choose "float32" or "bf16"')
    if recompute not in ("none", "full"):
        raise PlaitError(f'recompute = "{recompute}" is unknown; choose "none" or "full"')
    return LayoutChoices(
        transfer=transfer,
        bucket_bytes=_bucket_bytes(options.get("bucket_mib", DEFAULT_BUCKET_MIB), program, workers),
        units=tuple(options["units"]) if "units" in options else "auto",
        recompute=recompute,
    )


def _bucket_bytes(mib: float | Literal["auto"], program: Program, workers: Workers) -> int:
    if (isinstance(mib, str) and mib != "auto") or (not isinstance(mib, str) and not mib > 0):
        raise PlaitError(f'bucket_mib = {mib}; give a positive number of MiB, or "auto"')
    if not isinstance(mib, str):
        return int(mib * 2**20)
    if workers.size == 1:
        return int(DEFAULT_BUCKET_MIB * 2**20)
    from plait.custom.layouts.bucket_size import measured_bucket_bytes

    trained = [program.trained_by(index) for index in range(len(program.losses))]
    return measured_bucket_bytes(workers, sum(p.nbytes for some in trained for p in some.values()))
