"""The process of one rank: it reads the run's folder, joins the process group, assembles its model and data, and
trains."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from plait.errors import RunFailed
from plait.model.matmul import select_matmul_library, select_matmul_precision
from plait.model.weights import training_flops_per_token
from plait.parallel.mesh import make_mesh, open_store, use_gpu, world_sums
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import read_saved_recipe
from plait.report.metrics import EvalReport
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.balance.actions import Rebalancer, watch_every_steps
from plait.trainer.balance.meter import Meter, attach_meter, clock_of
from plait.trainer.balance.move_layers import move_layers
from plait.trainer.checkpointing.background import CheckpointSaver, SaveEnd, saver_of
from plait.trainer.checkpointing.persist import prune_old, restore, verify_together
from plait.trainer.choices import ChoiceEvaluation, load_choices
from plait.trainer.loop import LoopActions, LoopIntervals
from plait.trainer.optim import learning_rate
from plait.trainer.rank_sinks import sinks_of_rank
from plait.trainer.state import TrainState
from plait.trainer.watching.watched_actions import FirstStep, WorkerContext, run_guarded, watched

PEER_TIMEOUT = timedelta(minutes=10)


def main(context: WorkerContext, argument: str) -> None:
    """Entry point of every rank of `plait train`.

    `argument` is JSON: the run's folder, the checkpoint to resume from, the number of this start ("generation"),
    "skipped" and "guard" (see `run_guarded`), and "parts": "here" if rank 0 finds this rank's part of a checkpoint in
    that folder, "sent" if it must be sent there.
    """
    requested = json.loads(argument)
    folder = Path(requested["folder"])
    plan = read_plan(folder / "plan.json")
    config = read_saved_recipe(folder / "recipe.toml")
    with process_group_for(context, plan):
        world = world_sums()
        mesh = make_mesh(plan.layout, plan.device)
        torch.manual_seed(config.run.seed + context.rank)
        build = partial(assemble, config, sums=world, mesh=mesh)
        # A run that goes on has all its weights in the checkpoint.
        assembly = build(plan, initialize=not requested["resume"])
        assembly, meter = attach_meter(assembly, clock_of(assembly.device), context.progress)
        state, whole = TrainState(), set[int]()
        if requested["resume"]:
            path = folder / "checkpoints" / requested["resume"]
            state = restore(assembly, path, verify_together(path, world, context.local_rank), world)
            whole.add(state.step)
        sink = sinks_of_rank(context.rank, context.send, folder, state.step)
        memory = FirstStep(assembly, world, context)
        try:
            _verify_data(context, assembly)

            def restage(stage_layers: tuple[int, ...]) -> Meter:
                moved = move_layers(assembly, build, stage_layers)
                new, own = attach_meter(moved, clock_of(assembly.device), context.progress)
                assembly.replace_by(new)
                _verify_data(context, assembly)
                gc.collect()  # modules and their hooks know each other, and would keep the old stage
                return own

            tell = partial(context.send, "times")
            balance = Rebalancer(assembly, meter, folder / "shares.jsonl", world, tell, restage)
            saver = saver_of(assembly, folder, requested["parts"], requested["generation"], context.send)
            prune = partial(prune_old, folder / "checkpoints", plan.checkpoint_keep, world, whole, saver.fence)
            choices = load_choices(assembly, Path(plan.choices) if plan.choices else None, world)
            actions = _actions(context, assembly, saver, whole, prune, balance, memory, choices)
            shown = watched(actions, context.progress)
            run_guarded(state, _pace(plan), shown, sink, requested, context, assembly)
        finally:
            sink.close()
            assembly.loader.close()


@contextmanager
def process_group_for(context: WorkerContext, plan: Plan) -> Iterator[None]:
    """Join the process group of all ranks, with the plan's threads and device, and leave it at the end of the block.

    After a failure the rank stays in it until its process ends: leaving may wait for peers that wait for this rank's
    messages, and nobody would hear of the failure meanwhile.
    """
    torch.set_num_threads(plan.threads_of(context.rank))
    # Moments of embedding rows that stay without a gradient decay into denormal numbers, which CPUs compute slowly.
    torch.set_flush_denormal(True)
    backend = "gloo"
    select_matmul_library(plan.matmul_backend_of(context.rank) if plan.device == "cpu" else "default")
    if plan.device == "cuda":
        use_gpu(plan.gpu_of(context.local_rank))
        select_deterministic_kernels(plan)
        select_matmul_precision(plan.execution.matmul_precision)
        backend = "cpu:gloo,cuda:nccl"
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.world_size, timeout=PEER_TIMEOUT
    )
    yield
    dist.destroy_process_group()


def select_deterministic_kernels(plan: Plan) -> None:
    """Allow GPUs only deterministic kernels where the plan says so; attention's backward has none, and warns. A CPU's
    are deterministic already at a fixed number of threads."""
    torch.use_deterministic_algorithms(plan.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _verify_data(context: WorkerContext, assembly: Assembly) -> None:
    if context.local_rank == 0:  # each host may have a copy of its own
        assembly.loader.verify_in_background()


def _pace(plan: Plan) -> LoopIntervals:
    return LoopIntervals(
        steps=plan.steps,
        report_every_steps=plan.report_every_steps,
        evaluate_every_steps=plan.evaluate_every_steps,
        checkpoint_every=plan.checkpoint_every,
        balance_every_steps=plan.balance_every_steps,
        watch_every_steps=watch_every_steps(plan),
    )


def _actions(
    context: WorkerContext,
    assembly: Assembly,
    saver: CheckpointSaver,
    whole: set[int],
    prune: Callable[[], None],
    balance: Rebalancer,
    memory: FirstStep,
    choices: ChoiceEvaluation | None,
) -> LoopActions:
    plan, world = assembly.plan, assembly.sums
    flops_per_token = training_flops_per_token(plan.shape, plan.sequence, "full")

    def told(end: SaveEnd | None) -> SaveEnd | None:
        if end is not None and not end.failure:
            whole.add(end.step)
            memory.report_peaks()
            if context.rank == 0:
                context.send("saved", step=end.step, seconds=end.blocked_s)
        return end

    def agree(stop: bool, due: bool) -> tuple[bool, bool]:
        flags = world.largest(torch.tensor([int(stop), int(due), saver.status]))
        saver.agree(int(flags[2]))
        return bool(flags[0]), bool(flags[1])

    return LoopActions(
        step=lambda state: balance.step(memory.watched, state),
        evaluate=lambda state: evaluate_held_out(assembly, state.step, choices),
        save=lambda state: told(saver.save_now(state)),
        begin_save=saver.begin,
        save_ended=lambda: told(saver.ended()),
        finish_save=lambda: told(saver.finish()),
        prune=prune,
        agree=agree,
        rebalance_if_due=balance.rebalance_if_due,
        stop_requested=context.stop_requested,
        learning_rate=lambda step: learning_rate(plan.optimizer, step, plan.steps),
        data_wait_s=lambda: assembly.loader.wait_s,
        mfu=lambda rate: rate * flops_per_token / plan.peak_flops if plan.peak_flops else None,
    )


def evaluate_held_out(assembly: Assembly, step: int, choices: ChoiceEvaluation | None = None) -> EvalReport | None:
    """The exact held-out loss and the scores of choices, or None where nothing was held out. Every rank must call it.
    Raises RunFailed where no held-out token can be predicted."""
    if not assembly.corpus.heldout_tokens:
        return None
    total, tokens = assembly.evaluate().tolist()
    if not tokens:
        raise RunFailed("the held-out part holds no token to predict; give a larger data.holdout, or 0")
    scores = choices.scores(assembly) if choices else None
    return EvalReport(
        step=step,
        eval_loss=total / tokens,
        eval_nats_per_byte=total / max(1, assembly.corpus.heldout_bytes),
        choices_accuracy=scores.choices_accuracy if scores else None,
        choices_accuracy_per_byte=scores.choices_accuracy_per_byte if scores else None,
    )
