"""The modules of a user's model that are gathered, or recomputed, as one: the members of its ModuleLists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from plait.custom.layouts.description import LayoutChoices
from plait.custom.program import Program
from plait.errors import PlaitError

LEAST_ALIKE = 2
"""Members of one kind that make a ModuleList or Sequential a row of layers."""


def find_units(model: nn.Module, requested: Literal["auto"] | Sequence[str]) -> dict[str, nn.Module]:
    """The units by name: those asked for, or the outermost members of ModuleLists and of Sequentials of alike modules.

    Raises PlaitError for a name that no module has, and for a unit inside of another one.
    """
    modules = dict(model.named_modules())
    if requested != "auto":
        for name in requested:
            if name not in modules or not name:
                raise PlaitError(f"units: no module is named {name!r}; take names of model.named_modules()")
        _check_apart(sorted(requested))
        return {name: modules[name] for name in requested}
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if _is_row(module) and not any(name == unit or name.startswith(f"{unit}.") for unit in found):
            prefix = f"{name}." if name else ""
            members = {f"{prefix}{child}": one for child, one in module.named_children()}
            found |= {child: one for child, one in members.items() if _is_called(one)}
    return found


def check_shared(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Raise PlaitError where a weight belongs to two units, or to one and to what is outside of all."""
    owner: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.dim():
            continue  # a single number is not gathered
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        other = owner.setdefault(id(parameter), unit)
        if other != unit:
            where = " and ".join(repr(one) if one else "what is outside of all units" for one in (other, unit))
            raise PlaitError(
                f"{name} is shared by {where}, and a unit is gathered by itself; name larger units (units=…), or take "
                'layout="shard optimizer"'
            )


def check_one_dtype(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Raise PlaitError where weights that are gathered together are of several dtypes, which torch's FSDP2 refuses."""
    kinds: dict[str, set[torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            continue
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        kinds.setdefault(unit, set()).add(parameter.dtype)
    for unit, dtypes in kinds.items():
        if len(dtypes) > 1:
            where = repr(unit) if unit else "what is outside of all units"
            raise PlaitError(
                f'layout "shard parameters" gathers weights of one dtype together, and {where} has '
                f'{" and ".join(sorted(map(str, dtypes)))}; take "shard optimizer"'
            )


def units_text(units: dict[str, nn.Module]) -> str:
    """The units in words: "12 units: layers.0 … layers.11"."""
    names = list(units)
    if not names:
        return "no row of layers found (ModuleList): the model is gathered as one; name units=… to gather less at once"
    return f"{len(names)} units: {names[0]}" + (f" … {names[-1]}" if len(names) > 1 else "")


def recompute_units(program: Program, choices: LayoutChoices) -> None:
    """Wrap each unit as the choices say, by torch's hooks: names and values stay. Random numbers are drawn as before.

    Raises PlaitError where no unit is found.
    """
    if choices.recompute == "none":
        return
    from torch.distributed._composable.checkpoint_activation import checkpoint  # most of a second of imports

    for model in program.models:
        units = find_units(model, choices.units)
        if not units:
            raise PlaitError('recompute = "full" finds no row of layers (ModuleList); name units=… or leave it out')
        for unit in units.values():
            checkpoint(unit)


def _is_called(member: nn.Module) -> bool:
    """Whether a member has weights and a call in which they can be gathered: containers of modules have none."""
    return not isinstance(member, nn.ModuleList | nn.ModuleDict) and any(True for _ in member.parameters())


def _is_row(module: nn.Module) -> bool:
    kinds = [type(child) for child in module.children()]
    if isinstance(module, nn.ModuleList):
        return len(kinds) > 0
    alike = max((kinds.count(kind) for kind in kinds if _is_deep(kind, module)), default=0)
    return isinstance(module, nn.Sequential) and alike >= LEAST_ALIKE


def _is_deep(kind: type, module: nn.Module) -> bool:
    """Whether members of this kind have modules of their own: a row of blocks, not of single operations."""
    return any(type(child) is kind and any(True for _ in child.children()) for child in module.children())


def _check_apart(names: Sequence[str]) -> None:
    for name in names:
        for other in names:
            if name.startswith(f"{other}."):
                raise PlaitError(f"units: {name} lies inside of {other}; name one of the two")
