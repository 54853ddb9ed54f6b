"""The process of one rank: it reads the run's folder, joins the process group, assembles its model and data, and
trains."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist

from plait.accelerator import is_compiled
from plait.checkpoint.transfer import WritePart, write_rank
from plait.devices import DEVICE_TRAITS
from plait.errors import RunFailed
from plait.launch.values.job import NOTE, RankContext
from plait.machines.gpus import ThisHost
from plait.machines.tpus import find_tpu_chips
from plait.model.matmul import select_matmul_library, select_matmul_precision
from plait.parallel.mesh import PEER_TIMEOUT, make_mesh, open_store, use_gpu, world_communicator
from plait.parallel.tpu_slice import join_slice
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.planner.settings import run_settings
from plait.recipe.load import flat_values, read_saved_recipe
from plait.report.rank_times_file import RankTimesFile
from plait.trainer.actions import loop_actions
from plait.trainer.assemble import Assembly, assemble, preference_loss_of
from plait.trainer.balance.actions import Rebalancer, plan_at, watch_every_steps
from plait.trainer.balance.meter import Meter, attach_meter, clock_of
from plait.trainer.balance.move_layers import BuildAssembly, move_layers
from plait.trainer.checkpointing.background import SaverReports, saver_of
from plait.trainer.checkpointing.copies import StateCopies
from plait.trainer.checkpointing.persist import prune_old, restore, verify_together
from plait.trainer.choices import load_choices
from plait.trainer.divergence import BadStep, NumberGuard
from plait.trainer.loop import LoopIntervals, Observer, run_loop
from plait.trainer.observers import collect_all, rank_observers
from plait.trainer.pair_reference import KeptReference
from plait.trainer.rank_sinks import sinks_of_rank
from plait.trainer.recording.live import LiveTimeline
from plait.trainer.samples import load_sampler
from plait.trainer.state import TrainState
from plait.trainer.step_graph import CudaRecorder, StepGraphs
from plait.units import parse_every

ObserveMore = Callable[[Assembly, Path], Sequence[Observer]]
"""Makes further observers of a rank, given its assembly and the run's folder."""


def main(
    context: RankContext,
    argument: str,
    observe: ObserveMore = lambda assembly, folder: (),
    write_part: WritePart = write_rank,
) -> None:
    """Entry point of every rank of `plait train`; `observe` adds observers, which are called before all others, and
    `write_part` writes its part of each checkpoint.

    `argument` is JSON: the run's folder, the checkpoint to resume from, or the step ("from_copies", else 0) whose
    copies in memory it resumes from, the number of this start ("generation") and that at which the "lineage" of its
    copies began, the "skipped" steps, which take the batch after their own, the fields of a NumberGuard ("guard"), and
    "parts": "here" if rank 0 finds this rank's part of a checkpoint in that folder, "sent" if it must be sent there.
    """
    requested = json.loads(argument)
    folder = Path(requested["folder"])
    plan = read_plan(folder / "plan.json")
    config = read_saved_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        world = world_communicator()
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        torch.manual_seed(config.run.seed + context.rank)
        build = partial(assemble, config, sums=world, mesh=mesh)
        reference = KeptReference(plan, world, loss=preference_loss_of(config), overlong=config.data.overlong)
        begun = plan_at(plan, requested["from_copies"], folder / "shares.jsonl", world)
        assembly = _assembled(build, begun, reference, context, requested["resume"] or requested["from_copies"])
        assembly, meter = _watched(assembly, context)
        first = context.rank - context.local_rank
        host_ranks = range(first, first + context.local_world_size)
        copies = StateCopies(assembly, context.memory, host_ranks, requested["lineage"])
        state, whole = TrainState(), set[int]()
        if requested["from_copies"]:
            found = _from_copies(context, copies, requested["from_copies"])
            if found is None:
                return
            state = found
        elif requested["resume"]:
            path = folder / "checkpoints" / requested["resume"]
            state = restore(assembly, path, verify_together(path, world, context.local_rank), world)
            whole.add(state.step)
        settings = run_settings(flat_values(config), plan)
        sink = sinks_of_rank(context.rank, context.send, folder, state.step, config.report.to, settings)
        if plan.cadence.copy_every.value and (sentence := copies.begin()):
            sink.note(sentence)
        rank_times = RankTimesFile(folder / "rank-times.jsonl", context.world_size)
        try:
            _verify_data(context, assembly)

            def restage(stage_layers: tuple[int, ...]) -> Meter:
                moved = move_layers(assembly, build, stage_layers)
                reference.give(moved)
                new, own = attach_meter(moved, clock_of(assembly.device), context.progress)
                assembly.replace_by(new)
                copies.layers_moved()
                _verify_data(context, assembly)
                collect_all()  # modules and their hooks know each other, and would keep the old stage
                return own

            tell = partial(context.send, "times")
            balance = Rebalancer(assembly, meter, folder / "shares.jsonl", world, tell, restage, rank_times.add)
            parts, generation = requested["parts"], requested["generation"]
            saver = saver_of(
                assembly,
                folder,
                parts,
                generation,
                context.send,
                copies,
                reports=SaverReports(
                    say=lambda line: context.send(NOTE, text=line),
                    progress=context.progress,
                    stop_requested=context.stop_requested,
                ),
                memory=context.memory,
                local_rank=context.local_rank,
                write_part=write_part,
            )
            keep, keep_s = plan.cadence.checkpoint_keep, plan.cadence.checkpoint_keep_s
            prune = partial(prune_old, folder / "checkpoints", keep, keep_s, world, whole, saver.fence)
            choices = load_choices(assembly, Path(plan.job.choices) if plan.job.choices else None, world)
            # Text grows by a token at a time, and so would the programs that are compiled.
            every = sample_every_steps(config.report.samples, plan.job.steps)
            sample_every = 0 if is_compiled(assembly.device) else every
            sampler = (
                load_sampler(assembly, config.report.prompt, config.run.seed, config.data.overlong, world)
                if sample_every
                else None
            )
            skipped = frozenset(requested["skipped"])
            timeline = LiveTimeline(assembly, folder)
            actions = loop_actions(
                context, assembly, saver, copies, prune, balance, choices, sampler, timeline, skipped
            )
            usual = rank_observers(context, assembly, balance, sink, whole)
            observers = (*observe(assembly, folder), *usual, timeline.observer)
            _, end = run_loop(
                state, _pace(plan, sample_every), actions, sink, NumberGuard(**requested["guard"]), observers
            )
            if isinstance(end, BadStep) and context.rank == 0:
                context.send("bad step", **asdict(end))
        finally:
            sink.close()
            rank_times.close()
            assembly.loader.close()
            gc.unfreeze()  # a later job of this process frees what this one leaves


@contextmanager
def process_group_for(context: RankContext, plan: Plan) -> Iterator[None]:
    """Join the process group of all ranks, with the plan's threads and device, and leave it at the end of the block.

    After a failure the rank stays in it until its process ends: leaving may wait for peers that wait for this rank's
    messages, and nobody would hear of the failure meanwhile.
    """
    torch.set_num_threads(plan.threads_of(context.rank))
    # Moments of embedding rows that stay without a gradient decay into denormal numbers, which CPUs compute slowly.
    torch.set_flush_denormal(True)
    select_matmul_library(plan.matmul_backend_of(context.rank) if plan.machines.device == "cpu" else "default")
    store = open_store(context.rendezvous, context.rank, context.world_size)
    if DEVICE_TRAITS[plan.machines.device].is_compiled:
        join_slice(store, context.rank, context.world_size, context.local_world_size, find_tpu_chips(ThisHost()).name)
    if plan.machines.have_accelerators:
        use_gpu(plan.gpu_of(context.local_rank))
        select_deterministic_kernels(plan)
        select_matmul_precision(plan.execution.arithmetic.matmul_precision)
    dist.init_process_group(
        DEVICE_TRAITS[plan.machines.device].process_groups,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=PEER_TIMEOUT,
    )
    yield
    dist.destroy_process_group()


def select_deterministic_kernels(plan: Plan) -> None:
    """Allow GPUs only deterministic kernels where the plan says so; attention's backward has none, which the guides
    say, and torch need not at each start. A CPU's are deterministic already at a fixed number of threads."""
    torch.use_deterministic_algorithms(plan.arithmetic.deterministic, warn_only=True)
    warnings.filterwarnings("ignore", message=".* defaults to a non-deterministic algorithm", category=UserWarning)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _assembled(
    build: BuildAssembly, plan: Plan, reference: KeptReference, context: RankContext, goes_on_from: str | int
) -> Assembly:
    """This rank's part of the run, with the log-probabilities that pairs are compared with; the first rank of each host
    keeps them."""
    # A run that goes on has all its weights in the checkpoint, or in memory.
    assembly = build(plan, initialize=reference.is_missing or not goes_on_from)
    sentence = reference.give(assembly, context.progress, writes=context.local_rank == 0)
    if sentence and context.rank == 0:
        context.send("note", text=sentence)
    return assembly


def _watched(assembly: Assembly, context: RankContext) -> tuple[Assembly, Meter]:
    """The assembly with a meter around its steps, which are replayed where a GPU waits for its host, and the meter."""
    watched, meter = attach_meter(assembly, clock_of(assembly.device), context.progress)
    if assembly.repeats_its_kernels:
        watched.graphs = StepGraphs(
            assembly.update_from, CudaRecorder(), lambda text: context.send("note", text=text), meter.whole_step
        )
    return watched, meter


def _from_copies(context: RankContext, copies: StateCopies, step: int) -> TrainState | None:
    """The state of this step out of memory; None, and why told by rank 0, where the ranks cannot go on from it."""
    try:
        return copies.restore(step)
    except RunFailed as error:
        if context.rank == 0:
            context.send("copies lost", why=str(error))
        return None


def _verify_data(context: RankContext, assembly: Assembly) -> None:
    if context.local_rank == 0:  # each host may have a copy of its own
        assembly.loader.verify_in_background()


def sample_every_steps(samples: str | int, steps: int) -> int:
    """Steps between samples, from the recipe's interval or their number over the run; 0 for none."""
    return ceil(steps / samples) if isinstance(samples, int) else ceil(parse_every(samples).value)


def _pace(plan: Plan, sample_every: int) -> LoopIntervals:
    return LoopIntervals(
        sample_every_steps=sample_every,
        steps=plan.job.steps,
        report_every_steps=plan.cadence.report_every_steps,
        evaluate_every_steps=plan.cadence.evaluate_every_steps,
        checkpoint_every=plan.cadence.checkpoint_every,
        copy_every=plan.cadence.copy_every,
        balance_every_steps=plan.cadence.balance_every_steps,
        watch_every_steps=watch_every_steps(plan),
    )
