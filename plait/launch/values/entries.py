"""The functions that ranks may be started with: a table by name, which the process that starts ranks provides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

from plait.errors import PlaitError
from plait.launch.values.job import RankContext

Entry = Callable[[RankContext, str], None]
"""A rank's function: called with its place among its peers and the job's argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTable:
    """The functions that ranks can run, by name, and the modules that they need.

    Each host has a table of its own, from the plait that is installed there. A job carries the name alone, so that
    no other host can choose what is imported.
    """

    functions: Mapping[str, str]
    """The name of each entry, and its function as "package.module:function"."""
    preload: tuple[str, ...] = ()
    """Modules to import once, in this order; a job starts when its entry's module and those before it are there."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Modules that only some jobs need, by the names in Job.needs."""

    @property
    def packages(self) -> tuple[str, ...]:
        """The top-level packages of all modules in the table."""
        modules = (*self.preload, *self.functions.values())
        return tuple(dict.fromkeys(module.partition(":")[0].partition(".")[0] for module in modules))

    def require(self, name: str) -> None:
        """Raise PlaitError where no entry has this name."""
        self._require(name, self.functions)

    def module_of(self, name: str) -> str:
        """The module of an entry's function; raises PlaitError where no entry has this name."""
        self.require(name)
        return self.functions[name].partition(":")[0]

    def load(self, name: str, needs: Iterable[str] = ()) -> Entry:
        """Import an entry's function, and modules of `optional`; raises PlaitError for a name that the table does not
        have."""
        self.require(name)
        for need in needs:
            self._require(need, self.optional)
            import_module(self.optional[need])
        module, _, function = self.functions[name].partition(":")
        return getattr(import_module(module), function)

    def _require(self, name: str, table: Mapping[str, str]) -> None:
        if name not in table:
            raise PlaitError(
                f"plait has no job named {name!r} on this host; install the same commit of plait on all hosts"
            )
