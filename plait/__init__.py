"""plait plans, proves and runs the training of language models on whatever machines there are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.version import __version__ as __version__

if TYPE_CHECKING:
    from plait.api import evaluate, join_run, load_recipe, sample, train_recipe
    from plait.errors import PlaitError, RunFailed

__all__ = ["PlaitError", "RunFailed", "evaluate", "join_run", "load_recipe", "sample", "train_recipe"]

_HOMES = {"PlaitError": "plait.errors", "RunFailed": "plait.errors"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import plait` itself stays cheap.

    No public name equals the name of a folder in this package: importing that folder would replace the public name.
    """
    if name not in __all__:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "plait.api")), name)


def __dir__() -> list[str]:
    """The public names and the version: what completion in a notebook offers, without importing any of it."""
    return sorted([*__all__, "__doc__", "__version__"])
