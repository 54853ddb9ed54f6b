"""What the ranks of these tests do; each reads plan.json and recipe.toml in a folder and leaves its results there."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from plait.checkpoint.host_bytes import HostCopies
from plait.data.loader import Micro
from plait.errors import RunFailed
from plait.launch.values.job import RankContext
from plait.layout import Layout
from plait.model.matmul import selected_matmul_library
from plait.parallel.mesh import make_mesh, world_communicator
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.recipe.load import load_recipe
from plait.report.memory import LiveTensorPeak
from plait.trainer.assemble import Assembly, assemble, make_runners
from plait.trainer.auxiliary.losses import AuxiliaryLosses
from plait.trainer.balance.meter import attach_meter, clock_of
from plait.trainer.checkpointing.background import CheckpointSaver, SaveEnd, saver_of
from plait.trainer.checkpointing.persist import held_state, restore, verify_together
from plait.trainer.experts.loads import ExpertLoads
from plait.trainer.loss_scale import DeviceLossScale
from plait.trainer.samples import load_sampler
from plait.trainer.state import TrainState
from plait.trainer.step import make_forward, make_loss
from plait.trainer.worker import process_group_for
from tests.plans import changed
from tests.trainer.saved import save

Asked = dict[str, Any]


def take_steps(context: RankContext, argument: str) -> None:
    """For each case: so many steps with these shares; leaves weights, gradients and scalars of every rank."""
    folder, cases = Path(json.loads(argument)["folder"]), json.loads(argument)["cases"]
    with assembled(context, folder, cases) as assemblies:
        for number, (assembly, case) in enumerate(zip(assemblies, cases, strict=True)):
            if case.get("mutant") == "mean of means":
                assembly = replace(assembly, run_micros=MeanOfMeans(assembly))
            results = steps_taken(assembly, case["steps"])
            save_file(results, folder / f"case-{number}-rank-{context.rank}.safetensors")


def take_mixed_steps(context: RankContext, argument: str) -> None:
    """As take_steps; then each rank says by which library it multiplied."""
    take_steps(context, argument)
    context.send("library", library=selected_matmul_library())


def meet_a_bad_gradient(context: RankContext, argument: str) -> None:
    """The second of three steps has a gradient that is not finite, on rank 1 alone."""
    folder = Path(argument)
    with assembled(context, folder, [{}]) as (assembly,):
        state, weights = TrainState(), {name: p.detach() for name, p in assembly.model.named_parameters()}
        taken: list[dict[str, Tensor]] = []
        norms: list[float] = []
        for bad in (False, True, False):
            poison = None
            if bad and context.rank == 1:
                first = next(assembly.model.chunks[0].parameters())
                poison = first.register_hook(lambda grad: grad * float("nan"))
            state, scalars = assembly.step(state)
            if poison:
                poison.remove()
            norms.append(float(scalars.norm))
            taken.append({name: weight.clone() for name, weight in weights.items()})
        counts = [int(moments["step"]) for moments in assembly.optimizer.state.values()]
        context.send("norms", finite=[torch.isfinite(torch.tensor(norm)).item() for norm in norms], counts=counts)
        for number, tensors in enumerate(taken):
            save_file(tensors, folder / f"after-{number}-rank-{context.rank}.safetensors")


def fail_among_others(context: RankContext, argument: str) -> None:
    """Rank 1 fails while the others wait for its message; whoever leaves the group says so."""
    plan = read_plan(Path(argument) / "plan.json")
    leave = dist.destroy_process_group

    def leave_aloud() -> None:
        context.send("left")
        leave()

    with pytest.MonkeyPatch.context() as patch, process_group_for(context, plan):
        patch.setattr(dist, "destroy_process_group", leave_aloud)
        if context.rank == 1:
            raise RunFailed("rank 1 has lost its data")
        dist.recv(torch.zeros(1), src=1)


def lose(context: RankContext, argument: str) -> None:
    """For each case its losses, step by step and held out, and who took how many sequences at the end."""
    asked = json.loads(argument)
    folder, told = Path(asked["folder"]), []
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        for case in asked["cases"]:
            here = replace(
                plan,
                placement=replace(
                    plan.placement, layout=Layout(**case["layout"]), shares=tuple(case["shares"].get("0", ()))
                ),
            )
            assembly = assemble(
                config, here, sums=world_communicator(), mesh=make_mesh(here.placement.layout, here.machines.device)
            )
            told.append(_lost(assembly, case["shares"], asked["steps"]))
    context.send("lost", cases=told)


def _lost(assembly: Assembly, shares: Mapping[str, list[int]], steps: int) -> dict[str, Any]:
    state, losses = TrainState(), []
    for step in range(steps):
        if step and str(step) in shares:
            assembly.set_sequences_per_replica(tuple(shares[str(step)]))
        state, scalars = assembly.step(state)
        losses.append(float(scalars.totals[0] / scalars.totals[1]))
    total, tokens = assembly.evaluate().tolist()
    micros = assembly.loader.micros(state.position)
    assembly.loader.close()
    rows = sum(int((micro.targets >= 0).any(dim=1).sum()) for micro in micros)
    return {"losses": [*losses, total / tokens], "heldout": tokens, "sequences": rows, "micros": len(micros)}


def restore_and_save(context: RankContext, argument: str) -> None:
    """Go on from a checkpoint for so many steps, then save another one."""
    asked = json.loads(argument)
    folder = Path(asked["folder"])
    with assembled(context, folder, [{}]) as (assembly,):
        world, state = world_communicator(), TrainState()
        torch.manual_seed(context.rank)
        if asked["old"]:
            torch.manual_seed(1000)  # what a resume must not go on from
            path = Path(asked["old"])
            state = restore(assembly, path, verify_together(path, world, context.local_rank), world)
        for _ in range(asked["steps"]):
            state, scalars = assembly.step(state)
            torch.rand(3)  # as a step with dropout would draw
            state = replace(state, tokens=state.tokens + int(scalars.totals[1]))
        Path(asked["new"]).mkdir(exist_ok=True)
        if asked.get("poisoned") == context.rank:
            next(unit for unit in assembly.model.units if unit.owned).parameter.data.view(-1)[0] = float("inf")
        save(assembly, state, Path(asked["new"]))


def save_meanwhile(context: RankContext, argument: str) -> None:
    """Save in the background after each of two steps while the next goes on, in a folder where a rank may be unable to
    write the first; tells how each save ended. Where ranks are "apart", each has a folder of its own, nobody fetches
    their parts, and that rank can write neither. "late": as on a device whose copies are there only once
    they are waited for."""
    asked = json.loads(argument)
    folder, new = Path(asked["folder"]), Path(asked["new"])
    apart = asked["apart"] and context.rank > 0
    if asked["apart"]:
        new = new / f"host-{context.rank}"
        new.mkdir()
    with assembled(context, folder, [{}]) as (assembly,):
        torch.manual_seed(context.rank)
        parts, host = "sent" if apart else "here", late_copies() if asked["late"] else None
        saver = saver_of(assembly, new, parts, asked["generation"], context.send, host=host)
        ends, end, state, waited_s = list[SaveEnd](), None, TrainState(), 0.0
        (new / "checkpoints").mkdir(exist_ok=True)
        for step in range(3):
            state, scalars = assembly.step(state)
            torch.rand(3)
            state = replace(state, tokens=state.tokens + int(scalars.totals[1]))
            began_s = time.monotonic()
            while step and (end := _agreed_end(saver, assembly)) is None:
                time.sleep(0.01)
            waited_s = max(waited_s, time.monotonic() - began_s)
            ends += [end] if end is not None else []
            if step < 2:
                limit = 1 if asked["fails"] == context.rank and (step == 0 or apart) else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                saver.begin(state)
        told = [[end.step, end.failure] for end in ends]
        context.send("ends", ends=told, now=asked["now"], waited_s=waited_s)
        if asked["now"]:
            saver.save_now(state)


def late_copies() -> HostCopies:
    """Copies as a device's stream makes them: of the numbers as they are now, readable only after a wait."""

    def begin(room: Tensor, tensor: Tensor) -> Callable[[], object]:
        as_they_are = tensor.clone()
        room.view(-1).view(torch.uint8).fill_(0xAB)
        return lambda: room.copy_(as_they_are)

    return HostCopies(has_streams=lambda device: True, begin=begin)


def _agreed_end(saver: CheckpointSaver, assembly: Assembly) -> SaveEnd | None:
    saver.agree(int(assembly.sums.largest(torch.tensor([saver.status]))[0]))
    return saver.ended()


@contextmanager
def assembled(context: RankContext, folder: Path, cases: Sequence[Asked]) -> Iterator[list[Assembly]]:
    """An assembly for each case, on this rank's place in the mesh."""
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    plan = replace(
        plan, placement=replace(plan.placement, layout=replace(plan.placement.layout, replicate=context.world_size))
    )
    with process_group_for(context, plan):
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        sums = world_communicator()
        made = []
        for case in cases:
            here = changed(plan, **{key: case[key] for key in ("documents", "micro_sequences") if key in case})
            here = changed(here, shares=tuple(case.get("shares", ())))
            made.append(assemble(config, here, sums=sums, mesh=mesh))
        yield made
        for assembly in made:
            assembly.loader.close()


def steps_taken(assembly: Assembly, steps: int) -> dict[str, Tensor]:
    """Take steps and return what came of them: the last gradients, the weights, each step's totals and norm."""
    state, found = TrainState(), {}
    for step in range(steps):
        state, scalars = assembly.step(state)
        found[f"totals-{step}"], found[f"norm-{step}"] = scalars.totals.clone(), scalars.norm.clone()
    for name, parameter in assembly.model.named_parameters():
        assert parameter.grad is not None
        found[f"weight/{name}"] = parameter.detach().clone()
        found[f"grad/{name}"] = parameter.grad.clone()
    return found


class MeanOfMeans:
    """The usual mistake: each rank takes the mean over its own tokens, and the means are averaged."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def __call__(self, micros: Sequence[Micro]) -> Tensor:
        sharded, sums = self._assembly.model, self._assembly.sums
        forward, loss_of = make_forward(nullcontext), make_loss(nullcontext, sharded.vocabulary)
        own = sum(micro.targets.numel() for micro in micros)
        everybody = float(sums(torch.tensor(float(own))))
        sharded.gradients.open()
        total = 0.0
        for micro in micros:
            if micro is micros[-1]:
                sharded.gradients.arm(0)
            model = sharded.chunks[0]
            loss = loss_of(forward(model, micro, None), model, micro)
            (loss / own * everybody / sums.size).backward()
            total += float(loss)
        sharded.gradients.close()
        return torch.tensor([total, own], dtype=torch.float64)


SLOW_MODULES = ("torch._dynamo", "torch.distributed.tensor", "sympy")
"""The compiler takes more than a second to import, DTensors half a second, most of it for sympy."""


def meet_the_compiler(context: RankContext, argument: str) -> None:
    """Take a step, and say what of torch's slow modules was imported before this rank began, and what is now."""
    before = [name for name in SLOW_MODULES if name in sys.modules]
    folder = Path(argument)
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        assembly = assemble(
            config, plan, sums=world_communicator(), mesh=make_mesh(plan.placement.layout, plan.machines.device)
        )
        assembly, _ = attach_meter(assembly, clock_of(assembly.device))
        with LiveTensorPeak(torch.device("cpu"), assembly.tensors()):  # as in a run's first step
            assembly.step(TrainState())
        assembly.loader.close()
    context.send("met", before=before, after=[name for name in SLOW_MODULES if name in sys.modules])


def count_graphs(context: RankContext, argument: str) -> None:
    """Take steps with compiled layers, and send how many graphs had been compiled by the end of each."""
    from tests.counted_graphs import CountedGraphs  # by torch._dynamo, which the other ranks here must not meet

    graphs, counts = CountedGraphs(), list[int]()
    torch.compiler.set_default_backend(graphs)
    folder, state = Path(argument), TrainState()
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        mesh = make_mesh(plan.placement.layout, plan.machines.device)
        assembly = assemble(config, plan, sums=world_communicator(), mesh=mesh)
        for _ in range(4):
            state, _ = assembly.step(state)
            counts.append(graphs.count)
        assembly.loader.close()
    context.send("counted", graphs=counts)


def sample_and_lose(context: RankContext, argument: str) -> None:
    """For each layout, without samples and with them: what was written before and after so many steps, the losses, and
    the random state at the end."""
    asked = json.loads(argument)
    folder, told = Path(asked["folder"]), []
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        world = world_communicator()
        for layout in asked["layouts"]:
            here = replace(plan, placement=replace(plan.placement, layout=Layout(**layout), shares=()))
            mesh = make_mesh(here.placement.layout, here.machines.device)
            for sampled in (False, True):
                torch.manual_seed(context.rank)
                assembly = assemble(config, here, sums=world, mesh=mesh)
                told.append(sampled_losses(assembly, asked["steps"], sampled=sampled))
    context.send("told", cases=told)


def sampled_losses(assembly: Assembly, steps: int, *, sampled: bool) -> dict[str, Any]:
    """The losses of some steps, and the samples before and after them where there are some."""
    sampler = load_sampler(assembly, None, 1, "refuse", assembly.sums) if sampled else None
    state, losses = TrainState(), []
    samples = [sampler.sample(assembly, 0)] if sampler else []
    for _ in range(steps):
        state, scalars = assembly.step(state)
        losses.append([*scalars.totals.tolist(), float(scalars.norm)])
    samples += [sampler.sample(assembly, state.step)] if sampler else []
    assembly.loader.close()
    texts = [[one.prompt, one.text] for one in samples if one is not None]
    return {"losses": losses, "texts": texts, "random": torch.get_rng_state().tolist()}


def take_scaled_steps(context: RankContext, argument: str) -> None:
    """For each layout: whether steps in float64 whose gradients are scaled leave the bits of steps without a scale."""
    asked = json.loads(argument)
    folder, differ, tensors = Path(asked["folder"]), [], 0
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        for case in asked["cases"]:
            here = _placed(plan, case)
            mesh = make_mesh(here.placement.layout, here.machines.device)
            plain, other = (assemble(config, here, sums=world_communicator(), mesh=mesh) for _ in range(2))
            found = [state_after(one, asked["steps"]) for one in (plain, with_scale(other))]
            differ.append([name for name, value in found[0].items() if not torch.equal(value, found[1][name])])
            tensors = len(found[0])
    context.send("compared", differ=differ, tensors=tensors)


def with_scale(assembly: Assembly) -> Assembly:
    """The same assembly with the scale of a float16 run, whatever it computes in."""
    scale = DeviceLossScale(1000, assembly.device)
    auxiliary = AuxiliaryLosses(assembly.model, assembly.plan.job.shape, nullcontext, scale=scale)
    run_micros, _ = make_runners(assembly.model, nullcontext, auxiliary=auxiliary, scale=scale)
    loads = ExpertLoads(assembly.model, assembly.plan.job.shape, scale)
    return replace(assembly, run_micros=run_micros, auxiliary=auxiliary, loads=loads, scale=scale)


def state_after(assembly: Assembly, steps: int) -> dict[str, Tensor]:
    """What this rank holds after some steps, with each step's sums."""
    state, found = TrainState(), {}
    for step in range(steps):
        state, scalars = assembly.step(state)
        found |= {f"totals-{step}": scalars.totals.clone(), f"norm-{step}": scalars.norm.clone()}
    assembly.model.settle()
    assembly.loader.close()
    return found | {f"{key}/{box.offset}": value.clone() for key, box, value in held_state(assembly)}


def take_float16_steps(context: RankContext, argument: str) -> None:
    """For each case: losses, scales and skipped updates of steps in float16 whose first scale is too large."""
    asked = json.loads(argument)
    folder, told = Path(asked["folder"]), []
    config, plan = load_recipe(folder / "recipe.toml"), read_plan(folder / "plan.json")
    with process_group_for(context, plan):
        for case in asked["cases"]:
            here = _placed(plan, case)
            mesh = make_mesh(here.placement.layout, here.machines.device)
            assembly = assemble(config, here, sums=world_communicator(), mesh=mesh)
            told.append(float16_steps(assembly, asked["first"], asked["steps"]))
    context.send("told", cases=told)


def float16_steps(assembly: Assembly, first: float, steps: int) -> dict[str, list[float]]:
    """Each step's mean loss, scale, and the updates skipped so far, from this first scale on."""
    assert assembly.scale is not None
    assembly.scale.state[0] = first
    state, rows = TrainState(), []
    for _ in range(steps):
        state, scalars = assembly.step(state)
        rows.append([float(scalars.totals[0] / scalars.totals[1]), *scalars.scale.tolist()])
    assembly.loader.close()
    return dict(zip(("losses", "scales", "skipped"), map(list, zip(*rows, strict=True)), strict=True))


def _placed(plan: Plan, case: Asked) -> Plan:
    layout = Layout(**case["layout"])
    return replace(plan, placement=replace(plan.placement, layout=layout, shares=tuple(case.get("shares", ()))))
