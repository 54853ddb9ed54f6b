"""Builds everything that the training loop needs from a recipe and a plan; the only module that knows all the
others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.accelerator import has_cuda_kernels, own_device
from plait.data.loader import Loader, Micro, SampleSelection, heldout_micros
from plait.data.samples.opening import all_pairs, training_samples
from plait.data.shards import Corpus, open_corpus
from plait.layout import Layout
from plait.model.attention import MOST_PACKED_WIDTH
from plait.model.gpt import GPT, kept_in, reset_kept_values
from plait.model.linear import HALF_DTYPES
from plait.parallel.apply import STAGES, ParallelStage, parallelize
from plait.parallel.communicator import Communicator
from plait.parallel.sharded_model import Forward, KeptVector, LossOf, ShardedModel
from plait.parallel.watched import WATCH
from plait.parallel.whole_matrices import MatrixExchange, stage_exchange
from plait.partition.boxes import ranks_holding, whole_box
from plait.partition.execution import Compile, Precision
from plait.planner.derive.published_rules import preference_numbers
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.trainer.auxiliary.losses import AuxiliaryLosses
from plait.trainer.experts.loads import ExpertLoads
from plait.trainer.first_weights import fill_first_weights
from plait.trainer.loss_scale import DeviceLossScale
from plait.trainer.optimizer.fused import RunOptimizer
from plait.trainer.optimizer.optim import learning_rate, make_optimizer
from plait.trainer.preference.formulas import PreferenceLoss
from plait.trainer.preference.pair_losses import PairLosses
from plait.trainer.score_passes import ScorePasses, score_passes
from plait.trainer.state import TrainState
from plait.trainer.step import (
    Autocast,
    RunMicros,
    Scalars,
    WeightCasts,
    evaluate_in_turn,
    make_forward,
    make_loss,
    run_micros_in_turn,
    take_step,
)
from plait.trainer.step_graph import StepGraphs

EvaluateMicros = Callable[[Iterable[Micro]], Tensor]
Runners = tuple[RunMicros, EvaluateMicros]


@dataclass(slots=True, kw_only=True)
class Assembly:
    """A rank's model, optimizer and data, put together."""

    plan: Plan
    device: torch.device
    model: ShardedModel
    optimizer: RunOptimizer
    corpus: Corpus
    loader: Loader
    heldout: Callable[[], Iterator[Micro]]
    sums: Communicator
    run_micros: RunMicros
    evaluate_micros: EvaluateMicros
    loads: ExpertLoads
    """The experts' loads; of a model without experts it counts nothing."""
    auxiliary: AuxiliaryLosses
    """The losses beside that of the next token."""
    pairs: PairLosses | None = None
    scale: DeviceLossScale | None = None
    """Of the gradients of a float16 run."""
    graphs: StepGraphs | None = None
    """Replays steps, where they are worth recording."""

    def step(self, state: TrainState) -> tuple[TrainState, Scalars]:
        """Take the update that follows `state`, and return the new state and the step's scalars.

        The returned state's `tokens` are those of `state`: the caller adds them when it reads the scalars.
        """
        plan = self.plan
        with WATCH.work("data"):
            micros = self.loader.micros(state.position)
        self.auxiliary.begin(micros, self.sums)
        if self.loads.counts_first:
            like = torch.zeros(1, dtype=torch.float64, device=self.device)
            with self.auxiliary.also_without_gradients():
                self.loads.count_first(lambda: self.evaluate_micros(micros), self.sums, like)
        self.optimizer.set_lr(learning_rate(plan.job.optimizer, state.step, plan.job.steps))
        # A graph is one event to whoever records a step.
        replays = self.graphs if WATCH.recorder is None else None
        scalars = replays.take(micros, self.update_from) if replays else self.update_from(micros)
        return replace(state, step=state.step + 1, position=state.position + plan.job.batch_sequences), scalars

    def update_from(self, micros: Sequence[Micro]) -> Scalars:
        """One update from a step's micro-batches, at the optimizer's learning rate."""
        return take_step(
            micros,
            sharded=self.model,
            run_micros=self.run_micros,
            sums=self.sums,
            optimizer=self.optimizer,
            clip=self.plan.job.optimizer.clip,
            loads=self.loads,
            auxiliary=self.auxiliary,
            scale=self.scale,
        )

    @property
    def repeats_its_kernels(self) -> bool:
        """Whether each step runs the same kernels without the host's taking part, so that it can be recorded.

        Experts' products are as large as the tokens that chose them. Several GPUs, which wait for each other, layers
        that are recomputed, pairs of answers and objectives beside the next token are left out: nobody measured them.
        """
        layout, job, arithmetic = self.plan.placement.layout, self.plan.job, self.plan.arithmetic
        adapter = job.shape.adapter
        drops = adapter is not None and adapter.dropout > 0  # by tokens' numbers, which a recording does not have
        usual = job.shape.mixture is None and not job.shape.objectives.weights and self.pairs is None and not drops
        alone = layout.world_size == 1 and layout.recompute == "none"
        # In float32, in fp16 on old GPUs and with wide heads, each document is a kernel of its own.
        widest = max(job.shape.at(layer).head_width for layer in range(job.shape.layers))
        packs = arithmetic.precision == "bf16" and widest <= MOST_PACKED_WIDTH
        documents = job.documents == "join" or packs
        return has_cuda_kernels(self.device) and arithmetic.compile == "blocks" and usual and alone and documents

    def evaluate(self) -> Tensor:
        """[sum of losses, counted tokens] over the whole held-out split, with each of its tokens counted once; of pairs
        as RunMicros says. Every rank must call it."""
        return self.sums(self.evaluate_micros(self.heldout()))

    def set_sequences_per_replica(self, sequences: tuple[int, ...]) -> None:
        """From the next step on, data-parallel rank p reads `sequences[p]` sequences; every rank must
        pass the same values."""
        layout = self.plan.placement.layout if self.sums.size > 1 else Layout()
        self.loader.set_selection(
            select_samples(
                replace(self.plan, placement=replace(self.plan.placement, shares=sequences)),
                layout,
                self.sums.index,
                self.device,
            )
        )

    def replace_by(self, other: Assembly) -> None:
        """Take over every field of another assembly of this rank, so that all holders of this object continue with
        the other one's model and data."""
        self.loader.close()
        for field in fields(Assembly):
            setattr(self, field.name, getattr(other, field.name))

    def tensors(self) -> list[Tensor]:
        """The tensors that persist from step to step: weights, optimizer moments and gradient buckets."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = [one.tensor for one in self.kept_vectors()]
        return [*(held.tensor for held in self.model.weights), *moments, *self.model.gradients.buckets, *kept]

    def kept_vectors(self) -> list[KeptVector]:
        """The vectors on this rank that no gradient changes, which checkpoints keep beside weights and moments."""
        layout, shape = self.plan.placement.layout if self.sums.size > 1 else Layout(), self.plan.job.shape
        found: list[KeptVector] = []
        for chunk in self.model.chunks:
            for name, tensor in kept_in(chunk).items():
                box = whole_box(tensor.shape)
                owner = min(ranks_holding(shape, layout, name, box))
                found.append(KeptVector(name=name, tensor=tensor, box=box, owned=owner == self.sums.index))
        return found


def assemble(
    config: RunConfig,
    plan: Plan,
    *,
    sums: Communicator,
    mesh: DeviceMesh | None = None,
    stages: Sequence[ParallelStage] = STAGES,
    initialize: bool = True,
) -> Assembly:
    """Build this rank's part of the run; with `initialize` its weights get their initial values, without it those
    alone that are frozen. Every rank must call it.

    With `stages=()` and `sums=ONE_PROCESS` the result is one plain process without a mesh: the reference that layouts
    are verified against.
    """
    device = own_device(plan.machines.device)
    layout = plan.placement.layout if stages else Layout()
    # Described first, cut next, and only then given memory: a rank never holds more than its part.
    with torch.device("meta" if stages else device):
        model = GPT(plan.job.shape)
    sharded = parallelize(
        model.to(torch.float64 if plan.arithmetic.precision == "float64" else torch.float32),
        mesh,
        plan.execution,
        stages,
    )
    for chunk in sharded.chunks:
        reset_kept_values(chunk)
        chunk.dropout_seed = config.run.seed
    fill_first_weights(sharded, plan, config.run.seed, which="all" if initialize else "frozen")
    corpus, overlong = open_corpus(Path(plan.job.corpus)), config.data.overlong
    samples = select_samples(plan, layout, sums.index, device)
    reader = training_samples(
        corpus, config.run.seed, plan.job.sequence, overlong=overlong, epochs=plan.job.budget.epochs
    )
    loader = Loader(corpus, reader, samples)
    autocast, compile = make_autocast(plan.arithmetic.precision, device), plan.arithmetic.compile if stages else "off"
    counted = plan.job.batch_sequences * (1 if config.finetune.learns_pairs else plan.job.sequence)
    scale = DeviceLossScale(counted, device) if plan.arithmetic.precision == "fp16" else None
    auxiliary = AuxiliaryLosses(sharded, plan.job.shape, autocast, _passes_of(sharded, compile), scale)
    pairs = pair_losses_of(config, sharded, all_pairs(corpus), autocast, compile, scale)
    # Without stages a rank holds all matrices whole.
    exchange = (
        partial(stage_exchange, layout=layout, copies=plan.placement.copies_compute) if stages else MatrixExchange
    )
    run_micros, evaluate_micros = make_runners(
        sharded, autocast, casts=weight_casts(plan), compile=compile, auxiliary=auxiliary, pairs=pairs, scale=scale
    )
    return Assembly(
        plan=plan,
        device=device,
        model=sharded,
        optimizer=make_optimizer(
            sharded.units, plan.job.optimizer, plan.arithmetic.orthogonalization_precision, exchange
        ),
        corpus=corpus,
        loader=loader,
        heldout=lambda: heldout_micros(corpus, loader.selection, overlong),
        sums=sums,
        run_micros=run_micros,
        evaluate_micros=evaluate_micros,
        loads=ExpertLoads(sharded, plan.job.shape, scale),
        auxiliary=auxiliary,
        pairs=pairs,
        scale=scale,
    )


def pair_losses_of(
    config: RunConfig,
    sharded: ShardedModel,
    pairs: int,
    autocast: Autocast,
    compile: Compile,
    scale: DeviceLossScale | None = None,
) -> PairLosses | None:
    """The loss of a recipe that learns from this many pairs; None where it learns from no pairs."""
    loss = preference_loss_of(config)
    return None if loss is None else PairLosses(sharded, pairs, loss, autocast, _passes_of(sharded, compile), scale)


def preference_loss_of(config: RunConfig) -> PreferenceLoss | None:
    """Which loss of pairs a recipe asks for; None where it learns from no pairs."""
    tuning = config.finetune
    if tuning.objective == "sft":
        return None
    beta, margin = preference_numbers(tuning)
    return PreferenceLoss(
        kind=tuning.objective,
        beta=beta,
        label_smoothing=tuning.label_smoothing,
        margin=margin,
        compared_with=tuning.reference if tuning.objective == "dpo" else "none",
    )


def _passes_of(sharded: ShardedModel, compile: Compile) -> ScorePasses:
    return score_passes(compile, sharded.chunks[0].shape.logit_cap)


def select_samples(plan: Plan, layout: Layout, rank: int, device: torch.device) -> SampleSelection:
    """The samples of each step that `rank` reads under `layout`, which is the plan's own or the unsharded Layout()."""
    sequences = plan.sequences_per_replica if layout.data_parallel_degree > 1 else (plan.job.batch_sequences,)
    assert (
        len(sequences) == layout.data_parallel_degree
        and min(sequences) > 0
        and sum(sequences) == plan.job.batch_sequences
    )
    place, part = layout.coordinates(rank), layout.data_parallel_rank(rank)
    return SampleSelection(
        sequence=plan.job.sequence,
        sequences_per_replica=sequences,
        data_parallel_rank=part,
        lockstep_replicas=layout.replicas_in_lockstep(part),
        micro_sequences=plan.placement.micro_sequences,
        micro_limits=plan.placement.micro_limits if layout.data_parallel_degree > 1 else (),
        documents=plan.job.documents,
        device=device,
        context_rank=place["context"],
        context_degree=layout.context,
        predict_ahead=plan.job.shape.objectives.ahead,
    )


def make_runners(
    sharded: ShardedModel,
    autocast: Autocast,
    *,
    casts: WeightCasts = "each micro-batch",
    compile: Compile = "off",
    auxiliary: AuxiliaryLosses | None = None,
    pairs: PairLosses | None = None,
    scale: DeviceLossScale | None = None,
) -> Runners:
    """Functions that run micro-batches through the sharded model in training and in evaluation: one after another, or
    through a pipeline, which casts weights for each. The loss is that of the next token, or of `pairs`."""
    forward = make_forward(autocast, auxiliary)
    plain = make_loss(autocast, sharded.vocabulary, _passes_of(sharded, compile), scale)
    if pairs is None:
        return _runners(sharded, forward, plain, casts)
    run_micros, evaluate_micros = _runners(sharded, forward, pairs.beside(plain), casts)
    return pairs.with_sums(run_micros), pairs.with_sums(evaluate_micros)


def _runners(sharded: ShardedModel, forward: Forward, loss_of: LossOf, casts: WeightCasts) -> Runners:
    pipe = sharded.pipe
    if pipe is None:
        return (
            partial(run_micros_in_turn, sharded=sharded, forward=forward, loss_of=loss_of, casts=casts),
            partial(evaluate_in_turn, sharded=sharded, forward=forward, loss_of=loss_of),
        )
    return (
        lambda micros: (
            pipe.run(micros, forward=forward, loss_of=loss_of, gradients=sharded.gradients) * sharded.reports
        ),
        lambda micros: pipe.evaluate(list(micros), forward=forward, loss_of=loss_of) * sharded.reports,
    )


def evaluate_with(assembly: Assembly, micros: Sequence[Micro], loss_of: LossOf) -> None:
    """Run these micro-batches forward as an evaluation does, with another function in the place of the loss. Every rank
    must call it."""
    forward = make_forward(make_autocast(assembly.plan.arithmetic.precision, assembly.device))
    _, evaluate_micros = _runners(assembly.model, forward, loss_of, "each micro-batch")
    evaluate_micros(micros)


def weight_casts(plan: Plan) -> WeightCasts:
    """How often a plan's steps cast weights: once where the copies are there until the end of backward in any case.

    GPUs cast within compiled layers.
    """
    layout = plan.placement.layout
    held = plan.machines.device == "cpu" and layout.recompute == "none" and not layout.gathers_weights
    return "each step" if held and plan.arithmetic.precision == "bf16" else "each micro-batch"


def make_autocast(precision: Precision, device: torch.device) -> Autocast:
    """The context in which the forward pass runs: autocast to 16 bits over float32 weights, or the weights' own
    precision."""
    dtype = HALF_DTYPES.get(precision)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)
