"""A rank of a contender of the benchmark of experts: benchmarks.expert_contender KIND --work WORK --rendezvous FILE.

KIND is "dense"; "mixture E K", of E experts, K for a token; "transformers IMPLEMENTATION E K", their Mixtral of the
same weights; "expert E K", one of two ranks that hold half of the experts each; or "floor E K", what such a rank
computes, alone: E / 2 experts, the same rows. Tokens of the last two go to all experts alike, whatever a router says,
as in published speeds of mixtures.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.strand_model import decay_groups
from benchmarks.strands_contender import assembled, plan_for
from benchmarks.strands_work import Batches, TakeStep, Work, join, serve
from plait.interop.config_out import config_of_shape
from plait.interop.families import MODEL_FAMILIES
from plait.interop.write_weights import write_weights, written_tensors
from plait.model.gpt import mixtures_of
from plait.model.init import first_value
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape
from plait.trainer.assemble import Assembly
from plait.trainer.state import TrainState

RANKS = 2


def main() -> None:
    work, flags = join()
    kind, *words = flags.kind.split()
    if kind == "transformers":
        serve(_transformers(work, words[0], mixture_of(work, *map(int, words[1:]))))
    serve(_plait(work, kind, *map(int, words)))


def mixture_of(work: Work, experts: int, chosen: int) -> ModelShape:
    """The work's model with experts, of which a token meets as much as in the dense one: a Mixtral."""
    mixture = MixtureShape(experts=experts, experts_per_token=chosen, expert_ffn=work.ffn // chosen)
    return replace(work.shape, mixture=mixture)


def _plait(work: Work, kind: str, experts: int = 0, chosen: int = 0) -> TakeStep:
    layout: dict[str, object] = {"replicate": RANKS, "expert": RANKS} if kind == "expert" else {}
    if kind == "floor":  # each rank by itself, with its half of the sequences and of the experts
        dist.destroy_process_group()
        work, experts = replace(work, sequences=work.sequences // RANKS), experts // RANKS
    plan = plan_for(work, json.dumps(layout))
    shape = work.shape if kind == "dense" else mixture_of(work, experts, chosen)
    assembly = assembled(work, replace(plan, job=replace(plan.job, shape=shape)))
    if kind in ("expert", "floor"):
        _share_out_evenly(assembly, experts, chosen)
    state = TrainState()

    def take_step(step: int) -> float:
        nonlocal state
        state, scalars = assembly.step(state)
        loss, tokens = scalars.totals.tolist()
        return loss / tokens

    return take_step


def _share_out_evenly(assembly: Assembly, experts: int, chosen: int) -> None:
    def choose(choice_ne: Tensor, best_nk: Tensor, numbers_n: Tensor) -> Tensor:
        return (numbers_n.unsqueeze(1) * chosen + torch.arange(chosen)) % experts

    for chunk in assembly.model.chunks:
        for mixture in mixtures_of(chunk).values():
            mixture.router.choose = choose


def _transformers(work: Work, implementation: str, shape: ModelShape) -> TakeStep:
    model = _same_model(shape, work.seed, implementation)
    groups = decay_groups(list(model.named_parameters()), work.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=work.learning_rate, betas=work.betas, fused=True)
    batches = Batches(work)

    def take_step(step: int) -> float:
        inputs, targets = batches(step)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take_step


def _same_model(shape: ModelShape, seed: int, implementation: str) -> nn.Module:
    """transformers' model with plait's first weights, by way of the files that both know."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoModelForCausalLM

    def read(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        part = first_value(name, shape, seed)
        for dim, (first, length) in enumerate(zip(offset, extent, strict=True)):
            part = part.narrow(dim, first, length)
        return part

    with tempfile.TemporaryDirectory() as folder:
        values = config_of_shape(shape, "float32", preferred="mixtral")
        (Path(folder) / "config.json").write_text(json.dumps(values))
        write_weights(Path(folder), written_tensors(shape, MODEL_FAMILIES["mixtral"]), "F32", read)
        load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32, attn_implementation="sdpa")
        model = load(folder, experts_implementation=implementation)
    assert isinstance(model, nn.Module)
    return model.train()


if __name__ == "__main__":
    main()
