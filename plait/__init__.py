"""plait plans, proves and runs the training of language models on whatever machines there are.

    import plait

    print(plait.plan("first.toml"))                        # time, memory and money, before anything runs
    plait.train("first.toml", {"train.budget": "4 minutes"})
    print(plait.sample("first", "KING HENRY."))

`plait new first` writes such a recipe; a dict of its sections does as well. help(plait.train) explains a function, and
docs/guide-python.md has all names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.version import __version__ as __version__

if TYPE_CHECKING:
    from plait.api import (
        check,
        join,
        load_recipe,
        plan,
        prepare_data,
        probe,
        run,
        train,
        verify,
    )
    from plait.api_models import chat, evaluate, export, sample
    from plait.checking.findings import CheckReport as CheckReport
    from plait.clusters.submit import SubmittedJob as SubmittedJob
    from plait.clusters.submit import submit
    from plait.commands.planning.plan_report import PlannedRun as PlannedRun
    from plait.commands.runs import Run as Run
    from plait.commands.runs import compare_runs, runs, write_report
    from plait.custom.collectives import all_reduce, broadcast, rank, size
    from plait.custom.cutting import BatchCut as BatchCut
    from plait.custom.exact_norm.batch_norm import convert_batch_norm
    from plait.custom.muon import Muon as Muon
    from plait.custom.planning.plan import CustomPlan as CustomPlan
    from plait.custom.run import SpreadRun as SpreadRun
    from plait.custom.spread import spread
    from plait.errors import Interrupted as Interrupted
    from plait.errors import PlaitError as PlaitError
    from plait.errors import ProgramFailed as ProgramFailed
    from plait.errors import RunFailed as RunFailed
    from plait.machines.cluster import Cluster as Cluster
    from plait.proof import Verdict as Verdict
    from plait.report.receipt import Receipt as Receipt
    from plait.run_files.comparison import RunComparison as RunComparison
    from plait.run_files.summary import RunSummary as RunSummary

__all__ = [
    "all_reduce",
    "broadcast",
    "chat",
    "check",
    "compare_runs",
    "convert_batch_norm",
    "evaluate",
    "export",
    "join",
    "load_recipe",
    "plan",
    "prepare_data",
    "probe",
    "rank",
    "run",
    "runs",
    "sample",
    "size",
    "spread",
    "submit",
    "train",
    "verify",
    "write_report",
]
"""The functions. Types are public, too, but stay out of this list, by which help(plait) would print their members."""

_TYPES = (
    "BatchCut",
    "CheckReport",
    "Cluster",
    "CustomPlan",
    "Interrupted",
    "Muon",
    "PlaitError",
    "PlannedRun",
    "ProgramFailed",
    "Receipt",
    "Run",
    "RunComparison",
    "RunFailed",
    "RunSummary",
    "SpreadRun",
    "SubmittedJob",
    "Verdict",
)
_HOMES = {
    "BatchCut": "plait.custom.cutting",
    "CheckReport": "plait.checking.findings",
    "Cluster": "plait.machines.cluster",
    "CustomPlan": "plait.custom.planning.plan",
    "Interrupted": "plait.errors",
    "Muon": "plait.custom.muon",
    "PlaitError": "plait.errors",
    "ProgramFailed": "plait.errors",
    "SpreadRun": "plait.custom.run",
    "SubmittedJob": "plait.clusters.submit",
    "all_reduce": "plait.custom.collectives",
    "broadcast": "plait.custom.collectives",
    "rank": "plait.custom.collectives",
    "size": "plait.custom.collectives",
    "convert_batch_norm": "plait.custom.exact_norm.batch_norm",
    "spread": "plait.custom.spread",
    "PlannedRun": "plait.commands.planning.plan_report",
    "Receipt": "plait.report.receipt",
    "Run": "plait.commands.runs",
    "RunComparison": "plait.run_files.comparison",
    "RunFailed": "plait.errors",
    "RunSummary": "plait.run_files.summary",
    "Verdict": "plait.proof",
    "submit": "plait.clusters.submit",
    "chat": "plait.api_models",
    "evaluate": "plait.api_models",
    "export": "plait.api_models",
    "sample": "plait.api_models",
    "compare_runs": "plait.commands.runs",
    "runs": "plait.commands.runs",
    "write_report": "plait.commands.runs",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import plait` itself stays cheap.

    No public name equals the name of a folder in this package: importing that folder would replace the public name.
    """
    if name not in (*__all__, *_TYPES):
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "plait.api")), name)


def __dir__() -> list[str]:
    """The public names and the version: what completion in a notebook offers, without importing any of it."""
    return sorted((*__all__, *_TYPES, "__version__"))
