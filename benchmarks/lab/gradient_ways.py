"""How two hosts should bring their gradients together: `python -m benchmarks.lab.gradient_ways --rate 100e6` (root).

One process on each of two pretended hosts keeps a model for each way and takes one step of each in turn, beginning with
another one every round, so that whatever disturbs the machine disturbs all of them. Arithmetic is waiting here: each
layer's forward and backward pass takes the time that is asked for, whatever else the machine does, around passes of a
few tokens that leave real gradients; buckets, messages, clipping and updates are the real ones. Prints the median of
the slower host's times and its ratio to the first way in the same round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.hosts import Lab
from benchmarks.lab.leftovers import scratch_of, sweep
from plait.data.loader import Micro
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, parameter_count
from plait.parallel import gradient_buckets
from plait.parallel.apply import STAGES, ParallelStage, parallelize
from plait.parallel.communicator import ONE_PROCESS
from plait.parallel.mesh import make_mesh, world_communicator
from plait.parallel.reduction import Transfer
from plait.parallel.replicate import replicate
from plait.parallel.sharded_model import LossOf, ShardedModel
from plait.partition.execution import RunArithmetic
from plait.planner.plan import Cadence, Machines, OptimizerPlan, Placement, Plan, TrainingJob
from plait.trainer.optimizer.optim import make_optimizer
from plait.trainer.step import make_forward, make_loss, run_micros_in_turn, take_step
from plait.units import Amount, Every

HOSTS = 2
PORT = 29410
WARM_UP = 1
SHAPE = ModelShape(
    layers=8, width=320, heads=8, kv_heads=8, head_width=40, ffn=864, vocabulary=2048, sequence=256, tied=True
)
"""The lab's model of 11 M parameters."""
FORWARD_S, BACKWARD_S = 0.45, 0.90
"""Of a step of 8 × 256 tokens on one core of the lab's; the head counts as one more layer."""
TOKENS = 16
"""That are really computed of each micro-batch."""

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What is measured: a layout of two, its buckets, its numbers and into how many micro-batches a step falls."""

    layout: Layout
    bucket_mib: float = 8.0
    transfer: Transfer = "float32"
    micros: int = 1
    last_mib: float = 1.0
    """Buckets become smaller towards the end, but not smaller than this."""

    def __str__(self) -> str:
        axis = "copies" if self.layout.replicate > 1 else f"split {self.layout.shard_what}"
        if self.layout.world_size == 1:
            axis = "no sum"
        micros = f", {self.micros} micro-batches" if self.micros > 1 else ""
        last = f" down to {self.last_mib:g}" if self.last_mib < self.bucket_mib else ""
        return f"{axis}, {self.bucket_mib:g}{last} MiB, {self.transfer}{micros}"


ALONE_WAY = Way(layout=Layout())
COPIES, SPLIT = Layout(replicate=HOSTS), Layout(shard=HOSTS)
SETS = {
    "sizes": [ALONE_WAY, Way(layout=COPIES), *(Way(layout=SPLIT, bucket_mib=size) for size in (8, 4, 2, 1))],
    "ends": [ALONE_WAY, *(Way(layout=layout, last_mib=last) for layout in (COPIES, SPLIT) for last in (8.0, 1.0))],
    "rounded": [
        ALONE_WAY,
        *(Way(layout=layout, transfer=kind) for layout in (COPIES, SPLIT) for kind in ("float32", "bf16")),
        Way(layout=Layout(shard=HOSTS, shard_what="parameters")),
    ],
}


def rank_main(rank: int, chosen: str, rounds: int) -> None:
    """One host's process; rank 0 prints each way's [seconds of every round] as JSON."""
    torch.set_num_threads(1)
    address = f"tcp://10.77.0.1:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=HOSTS)
    steps = {str(way): _step_of(way) for way in SETS[chosen]} | {"torch DDP": _ddp_step()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(WARM_UP + rounds):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            took = _timed(*steps[name])
            if number >= WARM_UP:
                seconds[name].append(took)
    if rank == 0:
        print(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _timed(step: Step, settle: Callable[[], object]) -> float:
    """From the end of one update to the end of the next, on the slower host: with the gather that follows the first."""
    step()
    began = time.perf_counter()
    step()
    took = torch.tensor([time.perf_counter() - began])
    settle()
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _step_of(way: Way) -> tuple[Step, Callable[[], object]]:
    plan, mesh = _plan(way), None
    gradient_buckets.LAST_BYTES = round(way.last_mib * 2**20)
    stages: tuple[ParallelStage, ...] = ()
    if way.layout.world_size > 1:
        mesh = make_mesh(way.layout, "cpu")
        last = partial(replicate, bucket_bytes=round(way.bucket_mib * 2**20))
        stages = (*STAGES[:-1], replace(STAGES[-1], apply=last))
    with torch.device("meta" if stages else "cpu"):
        model = GPT(SHAPE)
    sharded = parallelize(model, mesh, plan.execution, stages)
    _slow_down(sharded.chunks[0], way.micros)
    _random_weights(sharded)
    optimizer = make_optimizer(sharded.units, plan.job.optimizer)
    forward, loss_of = make_forward(_no_cast), make_loss(_no_cast, sharded.vocabulary)
    run = partial(run_micros_in_turn, sharded=sharded, forward=forward, loss_of=loss_of)
    sums, micros = (world_communicator() if stages else ONE_PROCESS), _micros(way.micros)
    step = partial(take_step, micros, sharded=sharded, run_micros=run, sums=sums, optimizer=optimizer, clip=1.0)
    return step, sharded.gradients.settle


def _ddp_step() -> tuple[Step, Callable[[], object]]:
    """The same model and optimizer under torch's own reducer."""
    model = GPT(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    _slow_down(model, 1)
    summed, optimizer = DistributedDataParallel(_WithLoss(model)), torch.optim.AdamW(model.parameters(), fused=True)
    (micro,) = _micros(1)

    def step() -> None:
        optimizer.zero_grad()
        summed(micro).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, lambda: None


class _WithLoss(torch.nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self.loss_of: LossOf = make_loss(_no_cast, ShardedModel(chunks=(model,), gradients=None).vocabulary)  # type: ignore[arg-type]

    def forward(self, micro: Micro) -> torch.Tensor:
        return self.loss_of(self.model(micro.inputs, None, None), self.model, micro)


_no_cast = torch.enable_grad


def _random_weights(sharded: ShardedModel) -> None:
    with torch.no_grad():
        for held in sharded.weights:
            held.tensor.normal_(std=0.02)


def _slow_down(model: GPT, micros: int) -> None:
    """Wait before each layer's passes, and before the final norm's for those of the head."""
    assert model.norm is not None
    modules = [*model.layers.values(), model.norm]
    for module in modules:
        module.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S / micros / len(modules)))
        module.register_full_backward_pre_hook(lambda *_: time.sleep(BACKWARD_S / micros / len(modules)))


def _micros(count: int) -> list[Micro]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    pairs = torch.randint(0, SHAPE.vocabulary, (count, 2, 1, TOKENS), generator=generator)
    return [Micro(inputs=inputs, targets=targets, positions=None, lengths=None) for inputs, targets in pairs]


def _plan(way: Way) -> Plan:
    every = Every(1, "steps")
    adam = OptimizerPlan(lr=1e-3, warmup_steps=0, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, schedule="constant")
    return Plan(
        placement=Placement(layout=way.layout, threads=1, micro_sequences=1),
        machines=Machines(device="cpu", peak_flops=None, fingerprint={}),
        arithmetic=RunArithmetic(precision="float32", compile="off", gradient_transfer=way.transfer),
        job=TrainingJob(
            shape=SHAPE,
            sequence=SHAPE.sequence,
            batch_sequences=HOSTS * way.micros,
            budget=Amount(1, "steps"),
            steps=1,
            optimizer=adam,
            corpus="",
            corpus_hash="",
            documents="join",
        ),
        cadence=Cadence(checkpoint_every=every, checkpoint_keep=1, report_every_steps=1, evaluate_every_steps=0),
        step_s=None,
        forecast=None,
        recipe_hash="",
        reasons=(),
    )  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build two hosts, run the ranks on them, print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="unshaped", help="bits a second of each cable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", choices=list(SETS), default="sizes")
    parser.add_argument("--rank", type=int)
    flags = parser.parse_args(arguments)
    if flags.rank is not None:
        return rank_main(flags.rank, flags.ways, flags.rounds)
    sweep()
    work = Path(".plait/lab")
    work.mkdir(parents=True, exist_ok=True)
    rate = "unshaped" if flags.rate == "unshaped" else float(flags.rate)
    with Lab([1.0] * HOSTS, rate, work=work.resolve(), files="shared") as lab:
        command = [sys.executable, "-m", "benchmarks.lab.gradient_ways", *sys.argv[1:]]
        logs = [scratch_of(lab.name) / f"rank-{host.index}" for host in lab.hosts]
        network = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        running = [
            lab.start(host, [*command, "--rank", str(host.index)], log=log, environment=network)
            for host, log in zip(lab.hosts, logs, strict=True)
        ]
        if any(process.wait() for process in running):
            sys.exit("\n".join(log.read_text()[-2000:] for log in logs))
        told = json.loads(logs[0].read_text().splitlines()[-1])
    sent_mb = parameter_count(SHAPE) * 4 * 2 * (HOSTS - 1) / HOSTS / 1e6
    print(f"{flags.rate} bits a second; copies in float32 send {sent_mb:.0f} MB each\n")
    print("| way | s | ÷ first |\n| --- | --- | --- |")
    first = next(iter(told.values()))
    for name, seconds in told.items():
        print(f"| {name} | {median(seconds):.3f} | {median(a / b for a, b in zip(seconds, first, strict=True)):.2f} |")


if __name__ == "__main__":
    main()
