"""plait plans, proves and runs the training of language models on whatever machines there are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.api import evaluate, join_run, load_recipe, sample, train_recipe
    from plait.errors import PlaitError, RunFailed

__all__ = ["PlaitError", "RunFailed", "evaluate", "join_run", "load_recipe", "sample", "train_recipe"]

_HOMES = {"PlaitError": "plait.errors", "RunFailed": "plait.errors"}


def __getattr__(name: str) -> Any:
    """Public names are handed on when they are first asked for, so that importing plait costs nothing.

    None of them is the name of a folder in here: importing `plait.train` would put the folder in the place of the name.
    """
    if name not in __all__:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "plait.api")), name)
