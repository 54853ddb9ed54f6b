"""What the training loop calls on one rank, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from plait.errors import RunFailed
from plait.model.weights import training_flops_per_token
from plait.report.metrics import EvalReport
from plait.trainer.assemble import Assembly
from plait.trainer.balance.actions import Rebalancer
from plait.trainer.checkpointing.background import CheckpointSaver, SaveEnd
from plait.trainer.checkpointing.copy_actions import CopyActions
from plait.trainer.choices import ChoiceEvaluation
from plait.trainer.loop import Agreement, LoopActions
from plait.trainer.optimizer.optim import learning_rate
from plait.trainer.state import TrainState
from plait.trainer.watching.watched_actions import FirstStep, WorkerContext


def loop_actions(
    context: WorkerContext,
    assembly: Assembly,
    saver: CheckpointSaver,
    copying: CopyActions,
    whole: set[int],
    prune: Callable[[], None],
    balance: Rebalancer,
    choices: ChoiceEvaluation | None,
) -> LoopActions:
    """What the loop calls on one rank; `whole` collects the steps of the checkpoints that were saved whole."""
    plan, world = assembly.plan, assembly.sums
    first_step = FirstStep(assembly, world, context)
    flops_per_token = training_flops_per_token(plan.job.shape, plan.job.sequence, "full")

    def told(end: SaveEnd | None) -> SaveEnd | None:
        if end is not None and not end.failure:
            whole.add(end.step)
            first_step.report_peaks()
            if context.rank == 0:
                context.send("saved", step=end.step, seconds=end.blocked_s)
        return end

    def tell(kind: str, **values: Any) -> None:
        if context.rank == 0:
            context.send(kind, **values)

    def begin_save(state: TrainState) -> None:
        if warning := copying.prepare():
            tell("note", text=warning)
        saver.begin(state)

    def agree(stop: bool, due: bool, copy_due: bool) -> Agreement:
        own = [stop, due, saver.status, copy_due and copying.are_made and context.rank == 0, *copying.told()]
        flags = [int(one) for one in world.largest(torch.tensor([int(one) for one in own]))]
        saver.agree(flags[2])
        cost_s = copying.agreed(flags[4], flags[5], tell)
        return Agreement(stop=bool(flags[0]), save=bool(flags[1]), copy=bool(flags[3]), copy_cost_s=cost_s)

    return LoopActions(
        step=lambda state: balance.step(first_step.watched, state),
        evaluate=lambda state: evaluate_held_out(assembly, state.step, choices),
        save=lambda state: told(saver.save_now(state)),
        begin_save=begin_save,
        save_ended=lambda: told(saver.ended()),
        finish_save=lambda: told(saver.finish()),
        copy=copying.copy,
        prune=prune,
        agree=agree,
        rebalance_if_due=balance.rebalance_if_due,
        stop_requested=context.stop_requested,
        learning_rate=lambda step: learning_rate(plan.job.optimizer, step, plan.job.steps),
        data_wait_s=lambda: assembly.loader.wait_s,
        mfu=lambda rate: rate * flops_per_token / plan.machines.peak_flops if plan.machines.peak_flops else None,
    )


def evaluate_held_out(assembly: Assembly, step: int, choices: ChoiceEvaluation | None = None) -> EvalReport | None:
    """The exact held-out loss and the scores of choices, or None where nothing was held out. Every rank must call it.
    Raises RunFailed where no held-out token can be predicted."""
    if not assembly.corpus.heldout_tokens:
        return None
    total, tokens, *of_pairs = assembly.evaluate().tolist()
    if not tokens:
        raise RunFailed("the held-out part holds no token to predict; give a larger data.holdout, or 0")
    scores = choices.scores(assembly) if choices else None
    return EvalReport(
        step=step,
        eval_loss=total / tokens,
        eval_nats_per_byte=None if of_pairs else total / max(1, assembly.corpus.heldout_bytes),
        reward_margin=of_pairs[0] / tokens if of_pairs else None,
        pair_accuracy=of_pairs[1] / tokens if of_pairs else None,
        choices_accuracy=scores.choices_accuracy if scores else None,
        choices_accuracy_per_byte=scores.choices_accuracy_per_byte if scores else None,
    )
