"""A function as a program of its own: its source, what it needs imported, and a call."""

from __future__ import annotations

import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

from plait.errors import PlaitError


def function_program(function: Callable[[], Any]) -> str:
    """The text of a program that calls the function; raises PlaitError where it needs what only lives here.

    Modules, and functions and classes of modules, that it names are imported there in the same way.
    """
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise PlaitError("plait.run takes a function that was written with def; its source goes to the workers")
    name = function.__name__
    if needed := [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]:
        raise PlaitError(
            f"{name} needs the argument {needed[0]}; give it a default, or write the value into the function"
        )
    if closed := function.__code__.co_freevars:
        raise PlaitError(
            f"{name} is a closure over {', '.join(closed)}, which live only in this process; make them inside of "
            f"{name}, or "
            "put it into a module"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise PlaitError(f"the source of {name} is not to be had; write it into a cell or a file") from None
    if source.lstrip().startswith("@"):
        raise PlaitError(f"{name} is decorated, and its decorator lives only here; take the decorator off")
    imports = [line for used in sorted(set(_global_names(function.__code__))) if (line := _import_of(function, used))]
    return "\n".join([*imports, "", source, "", f"{name}()", ""])


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function and the functions in it look up outside of themselves."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _import_of(function: Callable[[], Any], used: str) -> str | None:
    known: dict[str, Any] = function.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    if used == function.__name__ or (used not in known and used in vars(builtins)):
        return None
    if used not in known:
        raise PlaitError(f"{function.__name__} uses {used}, which is not defined; define or import it inside of it")
    value = known[used]
    if isinstance(value, ModuleType):
        return (
            f"import {value.__name__} as {used}"
            if "." in value.__name__ or value.__name__ != used
            else f"import {used}"
        )
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(module, str) and module not in ("__main__", "builtins") and name.isidentifier():
        return f"from {module} import {name} as {used}"
    raise PlaitError(
        f"{function.__name__} uses {used} of this notebook or program, which the workers do not have; define it "
        f"inside of "
        f"{function.__name__}, or import it from a module"
    )
