"""The arithmetic of a plan: timed as whole steps where products promise enough, kept for the run's life."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from plait.commands.planning.make_plan import make_plan, replan
from plait.commands.probe import probe_request_for, with_fastest_library
from plait.data.preparation.synthetic import write_synthetic
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError
from plait.launch.values.job import Job, JobResult, Message
from plait.machines.machine import Machine
from plait.machines.measured import Arithmetic
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import HostShare, Plan
from plait.planner.plan_file import read_plan
from plait.probing.survey import MachineSurvey
from plait.recipe.schema import RunConfig
from plait.workers import PRODUCTS_ENTRY, TIMING_ENTRY, OnMessage
from plait.working_folder import CURRENT_FOLDER
from tests.commands.product_answers import FLOAT32, ROUNDED, product_message, rates_of
from tests.matrix import few_fast
from tests.planner.machines import LAPTOP, SERVER, recipe

FAST: Mapping[Arithmetic, float] = {"onednn": 2.3, "bf16": 4.6}
NAMED = ("model.size=1M", "train.sequence=64", "train.batch_tokens=4096", "layout.replicate=2")


class Processor:
    """Workers of one machine: their products have these gains; a step in bf16 takes its share of a second, and one
    worker alone four times as long."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(
        self, machine: Machine, gains: Mapping[Arithmetic, float] = FAST, bf16_s: float = 0.5, error: float = FLOAT32
    ) -> None:
        self.site = MachineSurvey(machine=machine, peak_flops=4e11)
        self.rates = rates_of(machine, gains, error)
        self.bf16_s = bf16_s
        self.timed: list[Plan] = []
        self.asked = 0
        """How often products were measured."""
        self.slowed: dict[int, float] = {}
        """How much longer the steps of the n-th job take, for another program's sake."""

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        if job.entry == PRODUCTS_ENTRY:
            self.asked += 1
            on_message(product_message(job, self.rates))
        else:
            assert job.entry == TIMING_ENTRY
            plan = read_plan(Path(json.loads(job.argument)["folder"]) / "plan.json")
            self.timed.append(plan)
            step_s = (self.bf16_s if plan.arithmetic.precision == "bf16" else 1.0) * (
                4.0 if plan.world_size == 1 else 1.0
            )
            step_s *= self.slowed.get(len(self.timed), 1.0)
            on_message(Message(rank=0, kind="measured", values={"step_s": step_s}))
        return JobResult(stopped_by="finished", wall_s=1.0)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    return open_corpus(write_synthetic(tmp_path / "corpus", vocabulary=256, sequence=64, seed=1))


def asked(folder: Path, *overrides: str, budget: str = "5 minutes") -> RunConfig:
    return recipe(folder, *NAMED, f"train.budget={budget}", *overrides)


def planned(config: RunConfig, corpus: Corpus, workers: Processor) -> Plan:
    """The plan made again, as by --replan."""
    return make_plan(config, corpus, workers.site, workers, fresh=True, say=lambda _: None)


def next_plan(config: RunConfig, corpus: Corpus, workers: Processor) -> Plan:
    """The plan of a later start, which finds what earlier ones have kept."""
    return make_plan(config, corpus, workers.site, workers, fresh=False, say=lambda _: None)


@pytest.mark.parametrize(
    ("bf16_s", "precision"),
    few_fast([(0.5, "bf16"), (0.79, "bf16"), (0.82, "float32"), (2.0, "float32")], (0.79, "bf16"), (0.82, "float32")),
)
def test_bf16_is_taken_where_a_whole_step_gains_a_quarter(
    tmp_path: Path, corpus: Corpus, bf16_s: float, precision: str
) -> None:
    plan = planned(asked(tmp_path), corpus, Processor(LAPTOP, bf16_s=bf16_s))
    assert plan.arithmetic.precision == precision and plan.arithmetic.matmul_backend == "onednn"
    assert [reason for reason in plan.reasons if "as timed here" in reason and precision in reason]
    assert plan.step_s == (bf16_s if precision == "bf16" else 1.0), "the forecast is that of the chosen precision"


def test_bf16_is_timed_with_the_layout_that_was_fastest(tmp_path: Path, corpus: Corpus) -> None:
    workers = Processor(LAPTOP)
    config = recipe(tmp_path, "model.size=1M", "train.sequence=64", "train.batch_tokens=4096", "train.budget=5 minutes")
    plan = planned(config, corpus, workers)
    first = next(index for index, one in enumerate(workers.timed) if one.arithmetic.precision == "bf16")
    assert len({one.world_size for one in workers.timed[:first]}) > 1 and plan.arithmetic.precision == "bf16"
    assert workers.timed[first].world_size == workers.timed[first + 2].world_size > 1
    assert plan.step_s == 0.5 and plan.world_size > 1


@pytest.mark.parametrize("spoilt", few_fast([{2: 3.0}, {3: 3.0}, {2: 0.3}, {3: 0.3}], {2: 0.3}))
def test_a_disturbed_round_does_not_decide(tmp_path: Path, corpus: Corpus, spoilt: dict[int, float]) -> None:
    for bf16_s, precision in ((0.7, "bf16"), (0.9, "float32")):
        workers = Processor(LAPTOP, bf16_s=bf16_s)
        workers.slowed = spoilt
        assert planned(asked(tmp_path), corpus, workers).arithmetic.precision == precision


def test_nothing_is_timed_for_bf16_where_its_products_promise_too_little_or_the_run_is_short(
    tmp_path: Path, corpus: Corpus
) -> None:
    emulated, quick = Processor(LAPTOP, {"onednn": 2.0, "bf16": 0.5}), Processor(LAPTOP)
    slow = planned(asked(tmp_path), corpus, emulated)
    assert "precision float32: bf16 products are 4.0 times slower than its own on this processor" in slow.reasons
    short = planned(asked(tmp_path, budget="9 steps"), corpus, quick)
    assert "precision float32: the run is too short to time steps in bf16 as well" in short.reasons
    assert {plan.arithmetic.precision for plan in (*emulated.timed, *quick.timed)} <= {"float32"}


@pytest.mark.parametrize(("gain", "library"), [(2.3, "onednn"), (0.7, "default")])
def test_a_probe_times_the_library_that_a_run_would_take(
    tmp_path: Path, corpus: Corpus, gain: float, library: str
) -> None:
    workers, config = Processor(LAPTOP, {"onednn": gain}), asked(tmp_path)
    extent = FixedWorkers(workers=2, threads=1)
    for recipe_or_none in (config, None):
        plain = probe_request_for(recipe_or_none, workers.site, extent, CURRENT_FOLDER)
        requested, survey = with_fastest_library(plain, recipe_or_none, workers.site, workers)
        assert requested == replace(plain, matmul_backend=library)
        assert survey.peak_flops == pytest.approx(4e11 * max(1, gain)), (
            "shares of the peak are shares of this library's"
        )


def test_a_named_precision_is_obeyed_with_its_price(tmp_path: Path, corpus: Corpus) -> None:
    config = asked(tmp_path, "train.precision=bf16")
    plan = planned(config, corpus, Processor(LAPTOP, {"onednn": 1.0, "bf16": 0.4}))
    assert plan.arithmetic.precision == "bf16" and plan.arithmetic.matmul_error == ROUNDED
    price = "precision bf16, whose products take 2.5 times as long as float32's on this processor"
    assert price in plan.reasons


def test_a_begun_run_keeps_its_arithmetic_and_on_another_processor_its_precision(
    tmp_path: Path, corpus: Corpus
) -> None:
    config, said = asked(tmp_path), list[str]()
    begun = planned(config, corpus, Processor(LAPTOP))
    assert (begun.arithmetic.matmul_backend, begun.arithmetic.precision) == ("onednn", "bf16")

    other_day = Processor(LAPTOP, {"onednn": 0.9, "bf16": 0.9})
    again = replan(config, begun, corpus, other_day.site, other_day, said.append)
    assert (again.arithmetic.matmul_backend, again.arithmetic.precision) == ("onednn", "bf16") and not said

    elsewhere = Processor(SERVER, {"onednn": 0.5, "bf16": 0.5})
    moved = replan(config, begun, corpus, elsewhere.site, elsewhere, said.append)
    assert (moved.arithmetic.matmul_backend, moved.arithmetic.precision) == ("default", "bf16")
    assert any("matrix products by MKL: oneDNN is 2.0 times slower" in line for line in said)
    assert any("bf16, whose products take 2.0 times as long" in line for line in said)


def test_a_library_that_rounds_is_refused_by_name_before_a_step_is_taken(tmp_path: Path, corpus: Corpus) -> None:
    config, workers = asked(tmp_path, "train.matmul_backend=onednn"), Processor(LAPTOP, error=ROUNDED)
    with pytest.raises(PlaitError, match=r'less exact.*write "auto" or "default"'):
        planned(config, corpus, workers)
    assert not workers.timed
    assert planned(asked(tmp_path), corpus, Processor(LAPTOP, error=ROUNDED)).arithmetic.matmul_backend == "default"


def test_ranks_multiply_as_their_host_does(tmp_path: Path, corpus: Corpus) -> None:
    plan = planned(asked(tmp_path), corpus, Processor(LAPTOP))
    hosts = tuple(HostShare(name=name, workers=1, threads=1, machine=name) for name in ("here", "there"))
    mixed = replace(
        plan,
        machines=replace(plan.machines, hosts=hosts),
        arithmetic=replace(plan.arithmetic, host_backends={"there": "default"}),
    )
    assert [mixed.matmul_backend_of(rank) for rank in (0, 1)] == ["onednn", "default"]


def test_products_are_measured_once_for_a_processor_and_its_software(tmp_path: Path, corpus: Corpus) -> None:
    """The next plan with the same model finds the rates; another processor, other versions or another size does not."""
    workers = Processor(LAPTOP)
    first = next_plan(asked(tmp_path, "run.name=one"), corpus, workers)
    again = next_plan(asked(tmp_path, "optimizer.lr=0.002"), corpus, workers)
    assert workers.asked == 1 and (again.arithmetic.matmul_flops, again.reasons[0]) == (
        first.arithmetic.matmul_flops,
        first.reasons[0],
    )
    next_plan(asked(tmp_path, "train.batch_tokens=8192"), corpus, workers)
    next_plan(asked(tmp_path, "train.sequence=128"), corpus, workers)
    assert workers.asked == 1, "similar products"
    next_plan(asked(tmp_path, "model.size=11M"), corpus, workers)
    assert workers.asked == 2
    planned(asked(tmp_path, "optimizer.lr=0.002"), corpus, workers)
    assert workers.asked == 3, "--replan measures again"
    for other in (SERVER, replace(LAPTOP, versions=(("torch", "another"),))):
        elsewhere = Processor(other, {"onednn": 0.5, "bf16": 0.5})
        plan = next_plan(asked(tmp_path, "optimizer.lr=0.003"), corpus, elsewhere)
        assert elsewhere.asked == 1 and plan.arithmetic.matmul_backend == "default"


@pytest.mark.parametrize(
    "damage",
    few_fast(
        [
            b"",
            b"{}",
            b'{"format": 1, "rates": [{"workers": -1}]}',
            b"\xff\x00",
            b'{"format": 1, "factors": 5}',
            b'{"format": 1, "peak_flops": -1.0}',
            b'{"format": 1, "factors": [{"name": "step", "sizes": [0], "value": 1.0}]}',
            b"[" * 10_000,
        ],
        b"{}",
    ),
    ids=lambda damage: str(damage[:40]),
)
def test_a_damaged_file_of_timings_is_ignored_with_one_line(tmp_path: Path, corpus: Corpus, damage: bytes) -> None:
    workers, said = Processor(LAPTOP), list[str]()
    planned(asked(tmp_path), corpus, workers)
    (kept,) = (tmp_path / ".plait" / "timings").glob("*.json")
    kept.write_bytes(damage)
    config = asked(tmp_path, "optimizer.lr=0.002")
    plan = make_plan(config, corpus, workers.site, workers, fresh=False, say=said.append)
    assert plan.arithmetic.matmul_backend == "onednn" and workers.asked == 2
    (line,) = said
    assert str(kept.name) in line and "is not used and will be written again" in line


def test_a_virtual_machine_on_another_processor_says_what_changes(tmp_path: Path, corpus: Corpus) -> None:
    """Between two starts only the processor's name is another: its products are measured, the precision stays."""
    config, said = asked(tmp_path), list[str]()
    begun = planned(config, corpus, Processor(LAPTOP))
    moved_to = Processor(replace(LAPTOP, name="another processor"), {"onednn": 0.8, "bf16": 0.4})
    plan = replan(config, begun, corpus, moved_to.site, moved_to, said.append)
    assert moved_to.asked == 1 and (plan.arithmetic.matmul_backend, plan.arithmetic.precision) == ("default", "bf16")
    assert any("oneDNN is 1.2 times slower" in line for line in said)
