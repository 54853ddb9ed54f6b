"""What the probe is for: its parts, put together, take as long as a real step of plait's own model."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext

import pytest
import torch

from plait.data.loader import Micro
from plait.machines.measured import MeasuredDevice
from plait.model.gpt import GPT
from plait.model.sizes import named_shape
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.sharded_model import unsharded
from plait.probing.arithmetic import PROBED_OPTIMIZER, arithmetic_runs, timed_pieces
from plait.probing.request import model_probe_request
from plait.probing.timing import ProcessorClock, SingleRank, TimingSetup, time_in_rounds
from plait.trainer.assemble import make_runners
from plait.trainer.first_weights import initialize_weights
from plait.trainer.optimizer.optim import make_optimizer
from plait.trainer.step import take_step
from tests.probing.step_items import step_items_s

SEQUENCE = 256
ALLOWED = 0.2
"""On a machine that others use; on a quiet one it is a few percent."""


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sequences", "micros"), [("1M", 8, 2), ("3M", 8, 1), ("5M", 4, 1)])
def test_a_steps_parts_add_up_to_the_step(one_thread: None, size: str, sequences: int, micros: int) -> None:
    shape = named_shape(size, vocabulary=2048, sequence=SEQUENCE)
    asked = {"sequence": SEQUENCE, "sequences": sequences}
    request = model_probe_request(shape, device="cpu", precision="float32", threads=1, **asked)
    device = torch.device("cpu")
    bench = TimingSetup(device=device, clock=ProcessorClock(share=1.0), lockstep=SingleRank())
    figures = time_in_rounds(arithmetic_runs(request, device), bench, seconds=6)
    measured = MeasuredDevice(
        host="here",
        name="a processor",
        workers=1,
        threads=1,
        memory_bytes=1,
        timed=timed_pieces(figures, request.models),
        beside={},
        granted=1.0,
        rates=(1.0,),
    )
    expected_s = sum(step_items_s(measured, shape, n_microbatches=micros, **asked).values())
    step_s = real_step_s(shape, sequences, micros)
    assert expected_s == pytest.approx(step_s, rel=ALLOWED)


def real_step_s(shape, sequences: int, micros: int) -> float:
    """Processor seconds of a step as plait takes it in one process."""
    sharded = unsharded(GPT(shape))
    initialize_weights(sharded.weights, shape, 1)
    run_micros, _ = make_runners(sharded, nullcontext)
    optimizer = make_optimizer(sharded.units, PROBED_OPTIMIZER)
    given = [micro(shape.vocabulary, sequences) for _ in range(micros)]
    times = []
    for _ in range(9):
        began = time.process_time()
        take_step(given, sharded=sharded, run_micros=run_micros, sums=ONE_PROCESS, optimizer=optimizer, clip=1.0)
        times.append(time.process_time() - began)
    return statistics.median(times[2:])


def micro(vocabulary: int, sequences: int) -> Micro:
    tokens = torch.randint(0, vocabulary, (sequences, SEQUENCE))
    return Micro(
        inputs=tokens,
        targets=tokens.roll(-1, 1),
        positions=torch.arange(SEQUENCE).expand(sequences, -1),
        lengths=(SEQUENCE,) * sequences,
    )
