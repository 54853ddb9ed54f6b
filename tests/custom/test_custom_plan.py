"""`run.plan` measures each layout of a program and chooses as the planner does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plait.custom.group import alone
from plait.custom.planning.measure import plan_program
from plait.custom.planning.plan import MeasuredLayout, choose_measured
from plait.custom.program import Program
from plait.errors import PlaitError
from plait.launch.values.job import Job, Message
from tests.custom.verify_entries import loss_sum, planted_program, whole_batch
from tests.shared_ranks import RanksOf

MIB = 2.0**20


def measured(alone_s: float, replicate_s: float, optimizer_s: float, parameters_s: float) -> list[MeasuredLayout]:
    """Four layouts, each of which takes less memory than the one before."""
    return [
        MeasuredLayout(layout="replicate", workers=1, step_s=alone_s, bytes_per_worker=90 * MIB),
        MeasuredLayout(layout="replicate", workers=2, step_s=replicate_s, bytes_per_worker=80 * MIB),
        MeasuredLayout(layout="shard optimizer", workers=2, step_s=optimizer_s, bytes_per_worker=60 * MIB),
        MeasuredLayout(layout="shard parameters", workers=2, step_s=parameters_s, bytes_per_worker=40 * MIB),
    ]


@pytest.mark.parametrize(
    ("seconds", "memory_mib", "chosen", "why"),
    [
        ((2.0, 1.1, 1.0, 1.3), 100, "shard optimizer × 2", "is the fastest that fits: 1 s a step"),
        ((2.0, 1.04, 1.0, 1.3), 100, "replicate × 2", "the simplest within 5% of the fastest"),
        ((2.0, 1.0, 1.1, 1.3), 100, "replicate × 2", "2 workers are 2.00 × as fast as one"),
        ((1.02, 1.0, 1.1, 1.3), 100, "one worker", "several workers would take 1 s a step"),
        ((2.0, 1.0, 1.1, 1.3), 50, "shard parameters × 2", "it takes 40 MiB of the 50 MiB"),
    ],
)
def test_the_simplest_of_the_fast_ones_that_fit_is_chosen(
    seconds: tuple[float, float, float, float], memory_mib: float, chosen: str, why: str
) -> None:
    plan = choose_measured(measured(*seconds), memory_mib * MIB)
    assert plan.measured[plan.chosen].name == chosen
    assert why in str(plan)


def test_what_fits_nowhere_is_refused_with_the_leanest() -> None:
    with pytest.raises(PlaitError, match="no layout fits: shard parameters × 2 takes 40 MiB of 10 MiB a worker"):
        choose_measured(measured(1.0, 1.0, 1.0, 1.0), 10 * MIB)


def test_the_plan_as_text() -> None:
    rows = [*measured(2.0, 1.1, 1.0, 1.3)[:3], MeasuredLayout(layout="shard parameters", workers=2, refused="too odd")]
    assert str(choose_measured(rows, 85 * MIB)) == (
        "layout                a step  a worker\n"
        "one worker               2 s    90 MiB  does not fit\n"
        "replicate × 2          1.1 s    80 MiB\n"
        "shard optimizer × 2      1 s    60 MiB  chosen\n"
        "shard parameters × 2                    refused\n"
        "why      shard optimizer × 2 is the fastest that fits: 1 s a step, measured\n"
        "why      2 workers are 2.00 × as fast as one\n"
        "why      it takes 60 MiB of the 85 MiB that a worker may use\n"
        "why      shard parameters × 2 was not measured: too odd"
    )


@pytest.mark.slow
def test_two_workers_measure_every_layout_and_change_nothing() -> None:
    told: dict[int, dict[str, Any]] = {}

    def hear(message: Message) -> None:
        told[message.rank] = dict(message.values)

    server = RanksOf("tests.custom.verify_entries")
    job = Job(entry="plan_planted", argument="clean", world_size=2, threads=1)
    server.run(job, on_message=hear).require_finished()
    assert told[0] == told[1]
    rows = told[0]["rows"]
    names = ["one worker", "replicate × 2", "shard optimizer × 2", "shard parameters × 2"]
    assert [name for name, *_ in rows] == names
    assert all(refused or (0 < step_s < 60 and taken > 0) for _, step_s, taken, refused in rows)
    assert told[0]["same"]


def test_memory_is_that_of_weights_gradients_state_and_what_backward_keeps() -> None:
    """AdamW keeps two numbers a weight beside weight and gradient: four times the weights, and the activations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300, bias=False), nn.Tanh(), nn.Linear(300, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    program = Program(models=(model,), optimizers=(optimizer,), losses=(loss_sum,))
    plan = plan_program(program, alone(), whole_batch())
    weights = 4 * (6 * 300 + 300 * 3)
    assert plan.workers == 1
    kept = plan.measured[0].bytes_per_worker - 4 * weights
    assert 4 * 10 * 300 <= kept <= 4 * 10 * 300 + 2000


def test_an_optimizer_that_cannot_be_made_anew_is_said() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, parameters: Any, *, secret: int) -> None:
            super().__init__(parameters, lr=float(secret))

    program = planted_program("clean")
    odd = Odd(program.models[0].parameters(), secret=1)
    with pytest.raises(PlaitError, match="Odd cannot be made again"):
        plan_program(Program(models=program.models, optimizers=(odd,), losses=program.losses), alone(), whole_batch())
