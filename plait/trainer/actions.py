"""The operations that the training loop calls on one rank, assembled from their parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from plait.errors import RunFailed
from plait.launch.values.job import DETAIL, RankContext
from plait.model.weights import training_flops_per_token
from plait.report.metrics import EvalReport
from plait.trainer.assemble import Assembly
from plait.trainer.balance.actions import Rebalancer
from plait.trainer.checkpointing.background import CheckpointSaver
from plait.trainer.checkpointing.copies import StateCopies
from plait.trainer.choices import ChoiceEvaluation
from plait.trainer.loop import Agreement, LoopActions
from plait.trainer.optimizer.optim import learning_rate
from plait.trainer.recording.live import LiveTimeline
from plait.trainer.samples import TrainingSampler
from plait.trainer.state import TrainState, past_skipped


def loop_actions(
    context: RankContext,
    assembly: Assembly,
    saver: CheckpointSaver,
    copies: StateCopies,
    prune: Callable[[], None],
    balance: Rebalancer,
    choices: ChoiceEvaluation | None,
    sampler: TrainingSampler | None,
    timeline: LiveTimeline,
    skipped_steps: Collection[int] = (),
) -> LoopActions:
    """The operations that the loop calls on one rank; `skipped_steps` take the batch after their own."""
    plan, world = assembly.plan, assembly.sums
    flops_per_token = training_flops_per_token(plan.job.shape, plan.job.sequence, "full")

    def tell(kind: str, **values: Any) -> None:
        if context.rank == 0:
            context.send(kind, **values)

    def begin_save(state: TrainState) -> None:
        if warning := copies.prepare():
            tell("note", text=warning)
        saver.begin(state)

    def agree(stop: bool, due: bool, copy_due: bool) -> Agreement:
        copied = copy_due and copies.are_made and context.rank == 0
        own = [stop, due, saver.status, copied, *copies.news(), timeline.requested()]
        flags = [int(one) for one in world.largest(torch.tensor([int(one) for one in own]))]
        saver.agree(flags[2])
        cost_s = copies.agreed(flags[4], flags[5], tell)
        timeline.agreed(flags[6])
        return Agreement(stop=bool(flags[0]), save=bool(flags[1]), copy=bool(flags[3]), copy_cost_s=cost_s)

    return LoopActions(
        step=lambda state: assembly.step(past_skipped(state, skipped_steps, plan.job.batch_sequences)),
        evaluate=lambda state: evaluate_held_out(assembly, state.step, choices),
        sample=lambda state: sampler.sample(assembly, state.step) if sampler else None,
        save=saver.save_now,
        begin_save=begin_save,
        save_ended=saver.ended,
        finish_save=saver.finish,
        copy=copies.copy_state,
        prune=prune,
        agree=agree,
        rebalance_if_due=balance.rebalance_if_due,
        stop_requested=context.stop_requested,
        learning_rate=lambda step: learning_rate(plan.job.optimizer, step, plan.job.steps),
        detail=lambda sentence: tell(DETAIL, text=sentence),
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
