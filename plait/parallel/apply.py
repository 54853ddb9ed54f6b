"""The strands, in the order in which they are woven into a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from plait.model.gpt import GPT
from plait.parallel.compile import compile_layers
from plait.parallel.replicate import replicate
from plait.parallel.woven import LocalGradients, Woven
from plait.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing done to the model, the mesh axis it works along, and why it stands where it does."""

    axis: str
    apply: Callable[[Woven, DeviceMesh, Plan], Woven]
    reason: str


STAGES: tuple[Stage, ...] = (
    Stage("", compile_layers, "before the gradients' hooks: it touches the layers' code, never their parameters"),
    Stage("replicate", replicate, "last: its buckets hold the parameters as all other strands leave them"),
)


def weave(model: GPT, mesh: DeviceMesh | None, plan: Plan, stages: Sequence[Stage] = STAGES) -> Woven:
    """Apply the stages in order; without stages the model stays one process' own. Every rank must call it."""
    woven = Woven(model=model, gradients=LocalGradients(model))
    for stage in stages:
        assert mesh is not None, "a stage needs a mesh"
        woven = stage.apply(woven, mesh, plan)
    return woven
