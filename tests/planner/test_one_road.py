"""One road from recipe to plan: whichever entry point asks, the same request, the same search, the same plan."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from plait.commands.planning.plan_report import make_plan_report
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.launch.values.job import Job, JobResult, Message
from plait.machines.cluster import Cluster, cluster_of_machine, read_cluster
from plait.machines.machine import Machine
from plait.machines.requested_workers import PeakNeed
from plait.planner.calibration.factors import Calibration
from plait.planner.derive.resources import FixedWorkers, Resources, on_paper
from plait.planner.plan import Plan
from plait.planner.resolve.request import request_of
from plait.planner.resolve.resolve import draft, settle
from plait.probing.survey import resources_of, survey_machine, survey_machines
from plait.working_folder import CURRENT_FOLDER
from tests.planner.hosts import probed
from tests.planner.machines import EIGHT_H100, LAPTOP, ONE_H100, PEAK_FLOPS, SERVER, recipe, without_reasons

PACKAGE = Path(__file__).parents[2] / "plait"
ELSEWHERE = {"corpus", "corpus_hash", "fingerprint", "recipe_hash", "threads", "reasons"}
"""Fields of a plan that tell of the text and the machine at hand, which a plan on paper does not have."""
RECIPES = (
    ("model.size=3M", "train.budget=4 minutes"),
    ("model.size=1M", "train.budget=300 steps", "optimizer.lr=0.001", "balance.every=never"),
    ("model.size=50M", "layout.shares=auto", "train.sequence=512", "train.batch_tokens=65536", "train.budget=1 hour"),
    ("model.size=125M", "train.sequence=1024"),
    ("model.size=350M", "train.budget=7B tokens", "data.tokenizer=gpt2"),
    ("model.size=11M", "train.sequence=256", "train.batch_tokens=16384", "train.budget=500 steps"),
    ("model.layers=4", "model.width=128", "model.heads=4", "train.sequence=128", "train.budget=1M tokens"),
    ("model.size=25M", "train.precision=bf16", "train.gradient_transfer=bf16", "train.budget=200 steps"),
    ("model.size=5M", "layout.recompute=selective", "layout.micro_sequences=2", "train.budget=100 steps"),
)
MACHINES = {"laptop": LAPTOP, "server": SERVER, "one H100": ONE_H100, "eight H100": EIGHT_H100}
NAMED = {
    "laptop": ("layout.replicate=4",),
    "server": ("layout.pipeline=2", "layout.replicate=2"),
    "one H100": ("layout.replicate=1",),
    "eight H100": ("layout.tensor=2", "layout.shard=4", "layout.shard_what=parameters"),
}
CASES = [
    (machine, asked) for machine in MACHINES for asked in (*RECIPES, (*RECIPES[3], *NAMED[machine]), RECIPES[3] * 1)
]
PAPER = ("8x4090", "2x(8xA100)+400G", "64xMI300X", "macbook+4090@1G", "256xTPUv5p")
LESSON = Calibration(compute=1.25, ground="these machines")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lesson of this machine's own runs."""
    monkeypatch.chdir(tmp_path)


class OneHost:
    """The workers of one machine, which answer what it is and can do."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def host_machines(self, peak: PeakNeed = "measured") -> tuple[()]:
        return ()

    def run(self, job: Job, on_message: Callable[[Message], None]) -> JobResult:
        values = {
            "fingerprint": dict(self.machine.fingerprint()),
            "peak_flops": PEAK_FLOPS[self.machine],
            "peak_doubt": "",
        }
        on_message(Message(rank=0, kind="machine", values=values))
        return JobResult(stopped_by="finished", wall_s=0.0)


@pytest.mark.parametrize(("machine", "overrides"), CASES)
def test_plan_and_train_ask_for_the_same(machine: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """`plait plan` looks at this machine, `plait train` surveys it and whoever joined."""
    workers: Any = OneHost(MACHINES[machine])
    config = recipe(tmp_path, *overrides)
    corpus, _ = corpus_facts_or_usual(config)
    surveyed = survey_machines(config, workers, lambda line: None, "kept")
    by_plan = request_of(config, corpus, resources_of(survey_machine(workers), workers))
    by_train = request_of(config, corpus, resources_of(surveyed, workers))
    assert by_plan == by_train


@pytest.mark.parametrize("overrides", RECIPES[2:5])
@pytest.mark.parametrize("name", PAPER)
def test_on_paper_and_probed_the_same_cluster_gives_the_same_request(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Apart from threads, which a cluster on paper does not have."""
    cluster, config = read_cluster(name), recipe(tmp_path, *overrides)
    corpus, _ = corpus_facts_or_usual(config)
    paper = on_paper(cluster)
    given = FixedWorkers(workers=cluster.n_devices, threads=1)
    probing = Resources(
        machine=paper.machine, peak_flops=paper.peak_flops, fixed_workers=given, probe=lambda need: cluster
    )
    assert request_of(config, corpus, paper) == request_of(config, corpus, probing)


def described(machine: Machine) -> Cluster:
    """The machine as a cluster of its GPUs, or of one worker."""
    return cluster_of_machine(machine, PEAK_FLOPS[machine] if machine.device == "cpu" else None)


@pytest.mark.parametrize("overrides", RECIPES[2:5])
@pytest.mark.parametrize("machine", ["one H100", "eight H100"])
def test_given_the_same_cluster_and_lessons_the_plans_are_equal(
    machine: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    here, config = MACHINES[machine], recipe(tmp_path, *overrides)
    taught = lambda precision, basis: LESSON  # noqa: E731
    there = on_paper(described(here), taught)
    paper = make_plan_report(config, there, top=0).plan
    resources = Resources(machine=here, peak_flops=there.peak_flops, load_calibration=taught)
    run = draft(config, corpus_facts_or_usual(config)[0], resources, recipe_hash="")
    assert comparable(paper) == comparable(settle(config, run, without_reasons(run.layouts)))


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_given_the_same_probe_the_plans_are_equal(speeds: tuple[float, ...], tmp_path: Path) -> None:
    cluster, config = probed(*speeds), recipe(tmp_path, *RECIPES[5])
    paper = on_paper(cluster)
    fixed = FixedWorkers(workers=len(speeds), threads=1)
    joined = replace(paper, cluster=None, fixed_workers=fixed, probe=lambda need: cluster, is_here=True)
    run = draft(config, corpus_facts_or_usual(config)[0], joined, recipe_hash="")
    assert comparable(make_plan_report(config, paper, top=0).plan) == comparable(
        settle(config, run, without_reasons(run.layouts))
    )


def comparable(plan: Plan) -> dict[str, object]:
    """The fields of a plan and of its parts, but for those that tell of the machine at hand."""
    parts = plan.job, plan.placement, plan.arithmetic, plan.machines, plan.cadence
    rest = {"forecast": plan.forecast, "step_s": plan.step_s}
    found = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
    return rest | {name: value for name, value in found.items() if name not in ELSEWHERE}


def test_nothing_keeps_degrees_in_a_mapping() -> None:
    """No dict from axis to degree is made outside the two places that speak to JSON and to words."""
    makers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.DictComp) and ast.unparse(node.generators[0].iter) in ("AXES", "axes")
    }
    assert makers <= {
        "layout.py",
        "planner/problem/candidates.py",
        "planner/resolve/named.py",
        "planner/report/report_json.py",
    }, makers
