"""What the ranks of the pipeline's tests do; each leaves the gradients of its stages in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from plait.data.loader import Micro
from plait.data.packing import restarting_positions
from plait.launch.values.job import RankContext
from plait.layout import Layout, Recompute, Schedule
from plait.model.attention import Documents
from plait.model.gpt import GPT
from plait.model.init import first_value
from plait.model.shape import ModelShape
from plait.parallel.mesh import make_mesh, open_store
from plait.parallel.pipeline import pipeline
from plait.parallel.recompute import recompute
from plait.parallel.sharded_model import Forward, LocalGradients, ShardedModel, unsharded
from plait.partition.boxes import model_parts_of
from plait.partition.execution import RunArithmetic
from plait.planner.plan import Cadence, Machines, OptimizerPlan, Placement, Plan, TrainingJob
from plait.trainer.assemble import make_autocast
from plait.trainer.step import make_forward
from plait.units import Amount, Every

SEED = 5
ROWS, TOKENS = 3, 8
LLAMA = ModelShape(
    layers=1, width=16, heads=4, kv_heads=2, head_width=4, ffn=24, vocabulary=40, sequence=TOKENS, qk_norm=True
)
GPT2 = replace(
    LLAMA, kv_heads=4, qk_norm=False, tied=True, bias="all", norm="layernorm", activation="gelu", positions="learned"
)
FAMILIES = {"llama": LLAMA, "gpt2": GPT2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline and what goes through it."""

    schedule: Schedule
    stage_layers: tuple[int, ...]
    micros: int
    family: str = "llama"
    documents: bool = False
    recompute: Recompute = "none"
    precision: str = "float64"

    @property
    def shape(self) -> ModelShape:
        return replace(FAMILIES[self.family], layers=sum(self.stage_layers))

    def plan(self, ranks: int) -> Plan:
        """A plan of which the pipeline reads layout, shape and precision."""
        every = Every(1, "steps")
        layout = Layout(
            pipeline=ranks, stage_layers=self.stage_layers, schedule=self.schedule, recompute=self.recompute
        )
        adam = OptimizerPlan(lr=1, warmup_steps=0, weight_decay=0, betas=(0.9, 0.95), clip=None, schedule="constant")
        return Plan(
            placement=Placement(layout=layout, threads=1, micro_sequences=1),
            machines=Machines(device="cpu", peak_flops=None, fingerprint={}),
            arithmetic=RunArithmetic(precision=self.precision, compile="off"),
            job=TrainingJob(
                shape=self.shape,
                sequence=TOKENS,
                batch_sequences=1,
                budget=Amount(1, "steps"),
                steps=1,
                optimizer=adam,
                corpus="",
                corpus_hash="",
                documents="mask",
            ),
            cadence=Cadence(checkpoint_every=every, checkpoint_keep=1, report_every_steps=1, evaluate_every_steps=0),
            step_s=None,
            forecast=None,
            recipe_hash="",
            reasons=(),
        )


def micros_of(case: Case) -> list[Micro]:
    """Random micro-batches, the last one smaller, with many targets that are not counted."""
    generator = torch.Generator().manual_seed(case.micros)
    found = []
    for number in range(case.micros):
        rows = ROWS - 1 if number == case.micros - 1 else ROWS
        inputs, targets = torch.randint(0, LLAMA.vocabulary, (2, rows, TOKENS), generator=generator)
        targets[torch.rand(rows, TOKENS, generator=generator) < 0.3] = -100
        lengths = (TOKENS - 3, 3) * rows if case.documents else None
        positions = None
        if lengths is not None:
            positions = torch.as_tensor(restarting_positions(torch.tensor(lengths).numpy())).view(rows, TOKENS)
        found.append(Micro(inputs=inputs, targets=targets, positions=positions, lengths=lengths))
    return found


def forward_of(case: Case) -> Forward:
    """A micro-batch through a chunk, as the training step sends it."""
    return make_forward(make_autocast("bf16" if case.precision == "bf16" else "float64", torch.device("cpu")))


def loss_of(stream_nd: Tensor, chunk: GPT, micro: Micro) -> Tensor:
    """The summed cross-entropy, as anybody would write it."""
    return F.cross_entropy(chunk.logits(stream_nd).double(), micro.targets.flatten(), reduction="sum")


def with_weights(module: GPT) -> GPT:
    """Real memory and the first values for a model or a part of one."""
    dtype = next(module.parameters()).dtype
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = first_value(name, module.shape, SEED).to(dtype)
            # Biases and norms off their first values, where a wrong gradient might look right.
            parameter.copy_(value + 0.1 * torch.sin(torch.arange(value.numel(), dtype=dtype)).view_as(value))
    return module


class NotedGradients:
    """Local sums, with a note of how many backward passes of each chunk came before and after it was armed."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.local = LocalGradients([parameter for _, parameter in sharded.named_parameters()])
        self.buckets: list[Tensor] = []
        self.passes = [0] * len(sharded.chunks)
        self.armed: dict[int, int] = {}
        self.calls: list[str] = []
        for number, chunk in enumerate(sharded.chunks):
            norm = next(iter(chunk.layers.values())).get_parameter("attention_norm.weight")
            norm.register_post_accumulate_grad_hook(lambda _, number=number: self._passed(number))

    def _passed(self, number: int) -> None:
        self.passes[number] += 1

    def open(self) -> None:
        self.calls.append("open")
        self.local.open()

    def arm(self, chunk: int) -> None:
        assert chunk not in self.armed, "armed twice"
        self.armed[chunk] = self.passes[chunk]

    def close(self) -> None:
        self.calls.append("close")

    def publish(self) -> None:
        """Nobody else computes with the weights."""

    def settle(self) -> None:
        """The weights are where they were updated."""


def run_cases(context: RankContext, argument: str) -> None:
    """Each case forward and backward, and forward only, through the pipe."""
    asked = json.loads(argument)
    cases = [Case(**{**case, "stage_layers": tuple(case["stage_layers"])}) for case in asked["cases"]]
    with_group(context)
    mesh = make_mesh(Layout(pipeline=context.world_size), "cpu")
    for number, case in enumerate(cases):
        plan, micros = case.plan(context.world_size).execution, micros_of(case)
        dtype = torch.float64 if case.precision == "float64" else torch.float32
        with torch.device("meta"):
            model = GPT(case.shape).to(dtype)
        sharded = pipeline(unsharded(model), mesh, plan)
        assert sharded.pipe is not None and all(p.is_meta for _, p in sharded.named_parameters())
        assert sharded.reports == (context.rank == context.world_size - 1)
        for chunk in sharded.chunks:
            with_weights(chunk)
        sharded = recompute(sharded, mesh, plan)
        assert sharded.pipe is not None
        gradients = NotedGradients(sharded)
        if number == 0:  # nothing of a step may stay for the next
            sharded.pipe.run(micros[:1], forward=forward_of(case), loss_of=loss_of, gradients=NotedGradients(sharded))
            gradients.passes = [0] * len(sharded.chunks)
        totals = sharded.pipe.run(micros, forward=forward_of(case), loss_of=loss_of, gradients=gradients)
        assert gradients.calls == ["open", "close"]
        assert gradients.passes == [case.micros] * len(sharded.chunks)
        if case.schedule == "zero-bubble":
            assert gradients.armed == {}
        else:
            assert gradients.armed == dict.fromkeys(range(len(sharded.chunks)), case.micros - 1)
        found = {f"grad/{name}": p.grad for name, p in sharded.named_parameters() if p.grad is not None}
        assert len(found) == len(list(sharded.named_parameters()))
        found["totals"] = totals
        found["evaluated"] = sharded.pipe.evaluate(iter(micros), forward=forward_of(case), loss_of=loss_of)
        save_file(found, Path(asked["folder"]) / f"case-{number}-rank-{context.rank}.safetensors")
    dist.destroy_process_group()


PEERS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class PeerStage(nn.Module):
    """One of our parts in torch's clothes: the first takes tokens, the others the stream, the last gives scores."""

    def __init__(self, part: GPT) -> None:
        super().__init__()
        self.part = part

    def forward(self, entering: Tensor, tokens: Tensor) -> Tensor:
        stream_nd = self.part(tokens) if self.part.part.embeds else self.part(tokens, stream_nd=entering)
        return self.part.logits(stream_nd) if self.part.part.ends else stream_nd


def sum_of_losses(scores_nv: Tensor, targets_bt: Tensor) -> Tensor:
    return F.cross_entropy(scores_nv, targets_bt.flatten(), reduction="sum")


def run_peer(context: RankContext, argument: str) -> None:
    """The same stages through torch.distributed.pipelining, which wants micro-batches of one size."""
    asked = json.loads(argument)
    with_group(context)
    for number, each in enumerate(asked["cases"]):
        case = Case(**{**each, "stage_layers": tuple(each["stage_layers"])})
        micros = micros_of(case)[:-1]
        layout = case.plan(context.world_size).placement.layout
        parts = model_parts_of(case.shape, layout, context.rank)
        models = [with_weights(GPT(case.shape, part).double()) for part in parts]
        stages = [
            PipelineStage(
                PeerStage(model), context.rank + index * context.world_size, len(case.stage_layers), torch.device("cpu")
            )
            for index, model in enumerate(models)
        ]
        kind: Any = PEERS[case.schedule]
        single = case.schedule in ("gpipe", "1f1b")
        schedule = kind(stages[0] if single else stages, len(micros), loss_fn=sum_of_losses, scale_grads=False)
        tokens, targets = (torch.cat([getattr(m, name) for m in micros]) for name in ("inputs", "targets"))
        first, last = context.rank == 0, context.rank == context.world_size - 1
        schedule.step(*([tokens] if first else []), target=targets if last else None, tokens=tokens)
        found = {f"grad/{name}": p.grad for model in models for name, p in model.named_parameters()}
        save_file(found, Path(asked["folder"]) / f"case-{number}-rank-{context.rank}.safetensors")
    dist.destroy_process_group()


def plain_gradients(case: Case, micros: Sequence[Micro]) -> dict[str, Tensor]:
    """One process, the whole model, autograd: what every pipeline must give."""
    model = with_weights(GPT(case.shape).double())
    total = torch.zeros((), dtype=torch.float64)
    for micro in micros:
        documents = None if micro.lengths is None else Documents(lengths=micro.lengths)
        total = total + loss_of(model(micro.inputs, micro.positions, documents), model, micro)
    total.backward()
    found = {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    counted = sum(int((micro.targets != -100).sum()) for micro in micros)
    return {**found, "totals": torch.stack([total.detach(), torch.tensor(float(counted), dtype=torch.float64)])}


def with_group(context: RankContext) -> None:
    store = open_store(context.rendezvous, context.rank, context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
