"""What a meter says of a rank's steps, by the real clock and by one that a test moves."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from plait.layout import Layout
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.sharded_model import LocalGradients
from plait.trainer.assemble import assemble
from plait.trainer.balance.actions import watch_every_steps
from plait.trainer.balance.meter import Meter, MeteredGradients, StepTimes, attach_meter, clock_of, measures_waits
from plait.trainer.state import TrainState
from tests.plans import changed
from tests.trainer.tiny import make_tiny


class Hand:
    """A clock that stands still until somebody moves it."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class SlowSums(LocalGradients):
    """Waits for others for so long, by the hand's clock."""

    def __init__(self, hand: Hand, seconds: float) -> None:
        super().__init__([])
        self._hand, self._seconds = hand, seconds

    def close(self) -> None:
        self._hand.now += self._seconds


class Works(nn.Module):
    """A layer that takes so long, by the hand's clock."""

    def __init__(self, hand: Hand, seconds: float) -> None:
        super().__init__()
        self._hand, self._seconds = hand, seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self._hand.now += self._seconds
        return values


def test_forward_and_backward_are_computing_and_the_sums_are_waiting() -> None:
    hand = Hand()
    meter = Meter(hand)
    gradients = MeteredGradients(SlowSums(hand, 3.0), meter)
    for seconds in (5.0, 7.0):
        hand.now += 100.0  # between two steps
        gradients.open()
        hand.now += seconds
        gradients.arm(0)
        gradients.close()
        meter.record_data_wait(0.5)
    assert meter.steps == 2
    assert meter.read() == [StepTimes(compute_s=s, wait_s=3.0, data_s=0.5) for s in (5.0, 7.0)]
    assert meter.read() == [] and meter.steps == 0


def test_waits_for_weights_in_a_forward_are_no_computing_and_evaluations_are_no_steps() -> None:
    hand = Hand()
    meter, module = Meter(hand), nn.Identity()
    wait_s = 2.0
    meter.time_between_hooks(
        module, nn.Module.register_forward_pre_hook, lambda one, hook: one.register_forward_hook(hook)
    )

    def slow(*_: object) -> None:
        hand.now += wait_s

    module.register_forward_pre_hook(slow)
    module(torch.zeros(1))
    meter.begin_compute()
    hand.now += 4.0
    module(torch.zeros(1))
    meter.end_compute()
    meter.end_step()
    module(torch.zeros(1))
    assert meter.read() == [StepTimes(compute_s=4.0, wait_s=2.0, data_s=0.0)]


class Transfer:
    """A message from another stage that arrives after so long, by the hand's clock."""

    def __init__(self, hand: Hand, seconds: float) -> None:
        self._hand, self._seconds = hand, seconds

    def wait(self) -> None:
        self._hand.now += self._seconds


def test_waits_for_another_stage_are_no_computing_and_not_for_another_part() -> None:
    hand = Hand()
    meter = Meter(hand)
    meter.wait(Transfer(hand, 50.0))  # type: ignore[arg-type]  # in an evaluation
    meter.begin_compute()
    hand.now += 4.0
    meter.wait(Transfer(hand, 3.0))  # type: ignore[arg-type]
    meter.end_compute()
    hand.now += 1.0
    meter.end_step()
    assert meter.read() == [StepTimes(compute_s=4.0, wait_s=1.0, data_s=0.0, inside_s=3.0)]


def test_split_parameters_are_judged_by_the_forward_of_layers() -> None:
    hand = Hand()
    meter, layer = Meter(hand, layer_forwards=3), Works(hand, 2.0)
    meter.time_between_hooks(layer, nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook)
    meter.begin_compute()
    layer(torch.zeros(1))
    hand.now += 10.0
    meter.end_compute()
    meter.end_step()
    assert meter.read() == [StepTimes(compute_s=6.0, wait_s=6.0, data_s=0.0)]


def test_a_real_step_is_measured_and_stays_the_same(tmp_path: Path) -> None:
    config, plan = make_tiny(tmp_path)
    results = []
    for measuring in (False, True):
        assembly, meter = assemble(config, plan, sums=ONE_PROCESS, stages=()), None
        if measuring:
            assembly, meter = attach_meter(assembly, clock_of(assembly.device))
        began = time.perf_counter()
        _, scalars = assembly.step(TrainState())
        whole_s = time.perf_counter() - began
        results.append(scalars.totals)
        assembly.loader.close()
        if meter is not None:
            meter.record_data_wait(assembly.loader.wait_s)
            [times] = meter.read()
            assert times.compute_s > 0 and times.wait_s >= 0 and times.data_s == assembly.loader.wait_s
            assert times.compute_s + times.wait_s + times.data_s <= whole_s
    assert torch.equal(*results)


def test_compiled_layers_are_watched_only_where_shares_follow_what_is_found(tmp_path: Path) -> None:
    _, plan = make_tiny(tmp_path)
    split = replace(
        plan,
        placement=replace(plan.placement, layout=Layout(shard=2)),
        arithmetic=replace(plan.arithmetic, compile="blocks"),
        cadence=replace(plan.cadence, balance_every_steps=0),
    )
    assert not measures_waits(split) and measures_waits(changed(split, compile="off"))
    assert measures_waits(changed(split, balance_every_steps=50)) and measures_waits(
        changed(split, layout=Layout(replicate=2))
    )


def test_several_workers_are_watched_often_enough_to_name_one_within_twenty_steps(tmp_path: Path) -> None:
    _, plan = make_tiny(tmp_path)
    two = replace(
        plan,
        placement=replace(plan.placement, layout=Layout(replicate=2)),
        cadence=replace(plan.cadence, balance_every_steps=0),
    )
    assert watch_every_steps(two) == 4 and watch_every_steps(changed(two, device="cuda")) == 6
    assert watch_every_steps(replace(plan, placement=replace(plan.placement, layout=Layout()))) == 0
    assert watch_every_steps(changed(two, layout=Layout(shard=2), compile="blocks")) == 0
