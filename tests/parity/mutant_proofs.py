"""What a mutant is asked, in a process of its own (tests/warm_process.py).

Most are proofs of one step's gradients, whose ranks are forks of that process, and cases worked by hand.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.commands.verifying.gradient_check import CheckScope, check_gradients
from plait.commands.verifying.small_model import requested_layout, requested_shares, shrunk_plan
from plait.launch.values.copies import CopiesByStep
from plait.launch.values.job import Job, JobResult, RankContext
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape, Quantization
from plait.model.shape import linear_layers
from plait.planner.plan import Plan
from plait.proof import Verdict
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.workers import ENTRIES, OnMessage
from plait.working_folder import CURRENT_FOLDER

RECIPE = """
[data]
files = "nothing.txt"

[model]
layers = 4
width = 64
heads = 4
kv_heads = 2
bias = "qkv"

[train]
sequence = 32
"""


class ForksOfThisProcess:
    """A worker pool without a server, for a process that has torch and no threads."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [self._started(job, rank, f"{folder}/rendezvous") for rank in range(job.world_size)]
            codes = [os.waitpid(one, 0)[1] for one in ranks]
        assert not any(codes), f"ranks ended with {codes}"
        return JobResult(stopped_by="finished", wall_s=0.0)

    def copied_steps(self, lineage: int) -> Sequence[int]:
        return ()

    def copies(self, lineage: int) -> CopiesByStep:
        return {}

    def _started(self, job: Job, rank: int, rendezvous: str) -> int:
        entry = ENTRIES.load(job.entry, job.needs)
        if process := os.fork():
            return process
        context = RankContext(
            rank=rank,
            world_size=job.world_size,
            local_rank=rank,
            local_world_size=job.world_size,
            threads=job.threads,
            rendezvous=rendezvous,
            channel=lambda kind, values: None,
            stop=lambda: False,
        )
        try:
            entry(context, job.argument)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stderr.flush()
        os._exit(0)


def verdict_of_recipe(asked: list[str]) -> dict[str, Any]:
    """The proof that `plait verify` makes of the recipe."""
    config = _config(asked)
    return _proven(config, shrunk_plan(config, *requested_layout(config), requested_shares(config)))


def verdict_of_muon(asked: list[str]) -> dict[str, Any]:
    """The proof of the recipe with Muon, whose updates come after the gradients."""
    config = _config([*asked, "optimizer.kind=muon"])
    plan = shrunk_plan(config, *requested_layout(config), requested_shares(config))
    return _proven(config, plan, "all")


def verdict_of_adapter(degrees: dict[str, Any], quantization: Quantization = "none") -> dict[str, Any]:
    """The proof of the recipe's model with an adapter."""
    config = _config(())
    shape, _ = requested_layout(config)
    adapter = AdapterShape(rank=4, alpha=8.0, targets=linear_layers(shape), quantization=quantization)
    shape = replace(shape, adapter=adapter)
    return _proven(config, shrunk_plan(config, shape, Layout(**degrees)))


def verdict_of_pairs(name: str, scope: CheckScope) -> dict[str, Any]:
    from tests.parity.pairs_layout import CONFIG, plan_of

    return _proven(CONFIG, plan_of(name), scope)


def error_of_pairs() -> float:
    from tests.parity.pairs_case import largest_error, losses_and_gradients

    return largest_error(losses_and_gradients(Path.cwd()))


def error_of_packing() -> float:
    from tests.parity.packed_case import largest_error, losses_and_gradients

    return largest_error(losses_and_gradients(Path.cwd()))


def error_of_objectives() -> float:
    from tests.parity.objectives_case import all_errors

    return max(all_errors())


def _config(asked: Sequence[str]) -> RunConfig:
    Path("small.toml").write_text(RECIPE)
    return load_recipe(Path("small.toml"), asked)


def _proven(config: RunConfig, plan: Plan, scope: CheckScope = "gradients") -> dict[str, Any]:
    verdict: Verdict = check_gradients(config, plan, ForksOfThisProcess(), scope=scope)
    return json.loads(verdict.to_json())
