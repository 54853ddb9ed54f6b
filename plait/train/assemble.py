"""From a recipe and a plan to everything the loop needs; the one place that knows everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.data.loader import Loader, Micro, heldout_micros
from plait.data.order import make_order
from plait.data.shards import Corpus, open_corpus
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.parallel.apply import STAGES, Stage, weave
from plait.parallel.mesh import Sums
from plait.parallel.woven import Woven
from plait.plan.plan import Plan, Precision, share
from plait.recipe.schema import RunConfig
from plait.train.optim import learning_rate, make_optimizer, set_learning_rate
from plait.train.state import TrainState
from plait.train.step import RunMicros, Scalars, counted, micro_loss, run_micros_in_turn, take_step

Autocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A rank's model, optimizer and data, put together."""

    plan: Plan
    device: torch.device
    woven: Woven
    optimizer: torch.optim.AdamW
    corpus: Corpus
    loader: Loader
    sums: Sums
    run_micros: RunMicros
    autocast: Autocast

    def step(self, state: TrainState) -> tuple[TrainState, Scalars]:
        """The update after `state`; the number of tokens is added by whoever reads the scalars."""
        plan = self.plan
        micros = self.loader.micros(state.position)
        set_learning_rate(self.optimizer, learning_rate(plan.optimizer, state.step, plan.steps))
        scalars = take_step(
            micros, run_micros=self.run_micros, sums=self.sums, optimizer=self.optimizer, clip=plan.optimizer.clip
        )
        return replace(state, step=state.step + 1, position=state.position + plan.batch_sequences), scalars

    def evaluate(self) -> Tensor:
        """[sum of losses, tokens] over the whole held-out part, each of its tokens once. Every rank must call it."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for micro in self._heldout():
                totals += torch.stack([micro_loss(micro, self.woven, self.autocast).double(), counted(micro)])
        return self.sums(totals)

    def tensors(self) -> list[Tensor]:
        """What stays from step to step: weights, moments, gradient buckets."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.woven.model.parameters(), *moments, *self.woven.gradients.buckets]

    def _heldout(self) -> Iterator[Micro]:
        return heldout_micros(
            self.corpus,
            sequence=self.plan.sequence,
            micro_sequences=self.plan.micro_sequences,
            part=self.sums.index,
            parts=self.sums.size,
            documents=self.plan.documents,
            device=self.device,
        )


def assemble(
    config: RunConfig,
    plan: Plan,
    *,
    sums: Sums,
    mesh: DeviceMesh | None = None,
    stages: Sequence[Stage] = STAGES,
) -> Assembly:
    """Build this rank's part of the run with freshly initialised weights. Every rank must call it.

    With `stages=()` and `sums=ALONE` it is one plain process without a mesh: the reference that layouts are proven by.
    """
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    model = GPT(plan.shape).to(device=device, dtype=torch.float64 if plan.precision == "float64" else torch.float32)
    initialize(model, config.run.seed)
    woven = weave(model, mesh, plan, stages)
    corpus = open_corpus(Path(plan.corpus))
    first, count = share(plan.batch_sequences, sums.size, sums.index)
    loader = Loader(
        corpus,
        make_order(corpus, config.run.seed, plan.sequence),
        batch_sequences=plan.batch_sequences,
        first=first,
        count=count,
        micro_sequences=plan.micro_sequences,
        documents=plan.documents,
        device=device,
    )
    autocast = make_autocast(plan.precision, device)
    return Assembly(
        plan=plan,
        device=device,
        woven=woven,
        optimizer=make_optimizer(model, plan.optimizer),
        corpus=corpus,
        loader=loader,
        sums=sums,
        run_micros=partial(run_micros_in_turn, woven=woven, autocast=autocast),
        autocast=autocast,
    )


def make_autocast(precision: Precision, device: torch.device) -> Autocast:
    """How the forward pass is computed: in bfloat16 from float32 weights, or as the weights are."""
    if precision == "bf16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext
