"""Between two reports the host never waits for the device: counted on tensors without values, from which every way of
reading one fails or is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.data.loader import Micro
from plait.model.gpt import GPT
from plait.model.shape import ModelShape
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.recompute import run_keeping_input
from plait.parallel.sharded_model import ShardedModel, unsharded
from plait.report.metrics import EvalReport, StepReport
from plait.report.samples_file import SampleReport
from plait.trainer.loop import Agreement, LoopActions, LoopIntervals, run_loop
from plait.trainer.optimizer.fused import FusedOptimizer, ParameterGroup
from plait.trainer.score_passes import FusedPasses, InPlacePasses, ScorePasses
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars, make_forward, make_loss, run_micros_in_turn, take_step
from plait.units import Every
from tests.matrix import few_fast

SHAPE = ModelShape(layers=2, width=16, heads=4, kv_heads=2, head_width=8, ffn=32, vocabulary=64, sequence=8)
SHAPES = {
    "llama": SHAPE,
    "gpt2": replace(SHAPE, kv_heads=4, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True),
    "qwen3": replace(SHAPE, qk_norm=True),
}
DEVICE = torch.device("meta")
READS_VALUES = ("nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")


class HostWaits(TorchDispatchMode):
    """Counts operations for which a host must wait until a device has computed, and answers them with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        on_device = any(isinstance(one, Tensor) and one.device == DEVICE for one in args)
        if on_device and name == "_local_scalar_dense":
            self.count += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if on_device and name == "_to_copy" and kwargs.get("device", DEVICE) != DEVICE:
            self.count += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if on_device and name in READS_VALUES:
            self.count += 1
            return torch.zeros((0, args[0].dim()), dtype=torch.long, device=DEVICE)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "read",
    [Tensor.item, Tensor.tolist, Tensor.cpu, float, bool, Tensor.nonzero, lambda x: x if x > 0 else -x],
    ids=["item", "tolist", "cpu", "float", "bool", "nonzero", "if"],
)
def test_every_way_of_reading_a_value_is_counted(read: Callable[[Tensor], Any]) -> None:
    with HostWaits() as waits:
        read(torch.ones((), device=DEVICE) * 2)
    assert waits.count == 1


def micros(shape: ModelShape) -> list[Micro]:
    tokens = torch.zeros((2, shape.sequence), dtype=torch.long, device=DEVICE)
    return [Micro(inputs=tokens, targets=tokens, positions=None, lengths=None) for _ in range(3)]


def take(sharded: ShardedModel, shape: ModelShape, passes: ScorePasses, optimizer: FusedOptimizer) -> Scalars:
    """A step of three micro-batches; the optimizer's own kernel aside, which has no form without values, it is that of
    every run."""

    def run_micros(some: Any) -> Tensor:
        forward, loss_of = make_forward(nullcontext), make_loss(nullcontext, sharded.vocabulary, passes)
        return run_micros_in_turn(some, sharded=sharded, forward=forward, loss_of=loss_of)

    return take_step(
        micros(shape), sharded=sharded, run_micros=run_micros, sums=ONE_PROCESS, optimizer=optimizer, clip=1.0
    )


class PlainDescent(FusedOptimizer):
    """What a fused optimizer does with what `update` hands it, by operations that need no values."""

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], weight_decay: float) -> None:
        assert self.grad_scale is not None and self.found_inf is not None
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient / self.grad_scale * (1 - self.found_inf), alpha=self.lr)


def built(shape: ModelShape) -> tuple[ShardedModel, FusedOptimizer]:
    with DEVICE:
        sharded = unsharded(GPT(shape))
    return sharded, PlainDescent(
        [ParameterGroup(parameters=[unit.parameter for unit in sharded.units], weight_decay=0.0)], lr=0.1
    )


@pytest.mark.parametrize("recompute", few_fast(["none", "full"], "none"))
@pytest.mark.parametrize("family", few_fast(SHAPES, "gpt2"))
@pytest.mark.parametrize("passes", [InPlacePasses(), FusedPasses(lambda function: function)], ids=["in place", "fused"])
def test_no_step_waits_for_the_device(passes: ScorePasses, family: str, recompute: str) -> None:
    sharded, optimizer = built(SHAPES[family])
    if recompute == "full":
        for layer in sharded.chunks[0].layers.values():
            layer.run = run_keeping_input  # pyright: ignore[reportAttributeAccessIssue]
    with HostWaits() as waits:
        for _ in range(2):
            scalars = take(sharded, SHAPES[family], passes, optimizer)
    assert scalars.norm.device == scalars.totals.device == DEVICE
    assert waits.count == 0


class Reports:
    """A sink that counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, report: StepReport) -> None:
        self.steps += 1

    def evaluation(self, report: EvalReport) -> None:
        raise AssertionError("nothing was held out")

    def sample(self, report: SampleReport) -> None:
        raise AssertionError("no samples were asked for")

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def close(self) -> None: ...


def test_the_loop_waits_once_a_report() -> None:
    sharded, optimizer = built(SHAPE)
    passes, reports = InPlacePasses(), Reports()

    def step(state: TrainState) -> tuple[TrainState, Scalars]:
        return replace(state, step=state.step + 1), take(sharded, SHAPE, passes, optimizer)

    actions = LoopActions(
        step=step, evaluate=lambda state: None, save=lambda state: None, prune=lambda: None,
        begin_save=lambda state: None, save_ended=lambda: None, finish_save=lambda: None,
        agree=lambda stop, save, copy: Agreement(stop=stop, save=save, copy=copy), copy=lambda state: "",
        rebalance_if_due=lambda state: [], stop_requested=lambda: False,
        learning_rate=lambda step: 0.1, data_wait_s=lambda: 0.0, mfu=lambda rate: None,
    )  # fmt: skip
    pace = LoopIntervals(steps=6, report_every_steps=2, evaluate_every_steps=0, checkpoint_every=Every(0, "steps"))
    with HostWaits() as waits:
        run_loop(TrainState(), pace, actions, reports)
    assert reports.steps == 6
    assert waits.count == 3, "one fetch of all scalars for each report"
