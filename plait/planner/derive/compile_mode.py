"""Whether layers are compiled, and why."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import PlaitError
from plait.machines.machine import Machine
from plait.partition.execution import Compile
from plait.planner.derive.derived import Derived
from plait.planner.plan import WARNING
from plait.recipe.schema import RunConfig


def compile_of(config: RunConfig, machines: Sequence[Machine]) -> Derived[Compile]:
    """What the recipe names, else compiled on GPUs where that can work on all hosts; raises PlaitError where it cannot
    and is asked for. `machines` are those of the hosts, the leader's first."""
    named = config.train.compile
    if machines[0].device == "cpu":
        if named == "on":
            raise PlaitError(
                'train.compile = "on" is for GPUs, and this run is on the processor; write "auto" or "off"'
            )
        return Derived(value="off")
    where, reason = _where_not_compiled(machines)
    if named == "on" and reason:
        raise PlaitError(f'layers cannot be compiled {where}: {reason}; or write train.compile = "auto"')
    if named == "off":
        return Derived(value="off", reasons=('layers are not compiled: train.compile = "off"',))
    if reason:
        place = "" if where == "here" else f"{where}, "
        slower = f"{WARNING}layers are not compiled, and steps take longer: {place}{reason}"
        return Derived(value="off", reasons=(slower,))
    return Derived(value="blocks")


def _where_not_compiled(machines: Sequence[Machine]) -> tuple[str, str]:
    """The first host on which layers cannot be compiled, in words, and the reason; the reason is empty where they can
    be on all."""
    for host, machine in enumerate(machines):
        if machine.uncompiled:
            return "here" if host == 0 else f"on host {host}", machine.uncompiled
    return "here", ""
