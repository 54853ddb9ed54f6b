"""From recipe, corpus and machine to a plan: pure, resolved, and refused with a reason where it cannot work."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import pytest

from plait.commands.planning.plan_report import make_plan_report
from plait.errors import PlaitError
from plait.layout import Layout, equal_share
from plait.machines.cluster import read_cluster
from plait.model.names import is_hidden_matrix
from plait.model.shape import parameter_count, weight_sizes
from plait.planner.calibration.factors import MEASURED_STEP_ERROR, Calibration, calibration_text, without_calibration
from plait.planner.derive.intervals import with_new_intervals, with_raised_budget
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.derive.resources import Resources, on_paper
from plait.planner.plan import Placement, Plan
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.resolve.named import refuse_unfit_names
from plait.planner.resolve.resolve import draft, settle, updated_forecast, with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.planner.search.validity import layout_of_candidate
from plait.units import Amount, Every, format_duration
from tests.matrix import few_fast
from tests.planner.machines import (
    EIGHT_H100,
    LAPTOP,
    ONE_H100,
    PEAK_FLOPS,
    PLAYS,
    SERVER,
    STORIES,
    WEB,
    corpus,
    drafted,
    planned,
    recipe,
)
from tests.plans import changed

STEPS = ("train.budget=100 steps",)
ADAMW = ("optimizer.kind=adamw",)
TINY = ("model.layers=2", "model.width=32", "model.heads=2", "train.sequence=16", "train.batch_tokens=112")


def refused(tmp_path: Path, *overrides: str, machine=LAPTOP, facts=PLAYS) -> str:
    with pytest.raises(PlaitError) as caught:
        planned(recipe(tmp_path, *overrides), facts, machine)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "machine", few_fast([LAPTOP, SERVER, ONE_H100, EIGHT_H100], LAPTOP), ids=lambda machine: machine.name
)
def test_the_same_question_has_the_same_answer_without_any_auto(machine, tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=20 minutes")
    one, two = (planned(config, STORIES, machine, why_this_layout="searched") for _ in range(2))
    assert one == two
    assert "auto" not in json.dumps(asdict(one))
    assert one.job.shape.layers >= 2 and one.job.shape.heads % 2 == 0 and one.job.sequence % 16 == 0
    assert all(reason and "\n" not in reason for reason in one.reasons)


def test_what_is_said_is_done_and_has_no_reason(tmp_path: Path) -> None:
    asked = ("optimizer.lr=0.01", "optimizer.warmup_steps=7", "layout.replicate=2", "layout.micro_sequences=2")
    more = ("optimizer.schedule=wsd", "optimizer.clip=never", "optimizer.betas=[0.8, 0.9]", "train.precision=bf16")
    plan = planned(recipe(tmp_path, *STEPS, *TINY, *ADAMW, *asked, *more), PLAYS, LAPTOP)
    assert (plan.job.shape.layers, plan.job.shape.width, plan.job.shape.heads, plan.job.sequence) == (2, 32, 2, 16)
    assert (plan.job.steps, plan.job.batch_sequences, plan.placement.micro_sequences) == (100, 7, 2)
    assert (plan.placement.layout.replicate, plan.placement.threads, plan.arithmetic.precision) == (2, 4, "bf16")
    optimizer = plan.job.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.schedule, optimizer.clip) == (0.01, 7, "wsd", None)
    assert optimizer.betas == (0.8, 0.9)
    told = " ".join(plan.reasons)
    assert not any(word in told for word in ("learning rate", "warm-up", "precision", "budget", "sequence "))


def test_sgd_has_published_numbers_and_the_plan_counts_its_one_moment(tmp_path: Path) -> None:
    sgd = ("optimizer.kind=sgd", "optimizer.lr=0.1")
    config = recipe(tmp_path, *STEPS, *TINY, *sgd)
    one, two = planned(config, PLAYS, LAPTOP), planned(recipe(tmp_path, *STEPS, *TINY, *ADAMW), PLAYS, LAPTOP)
    optimizer = one.job.optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    assert (optimizer.moments, two.job.optimizer.moments) == (1, 2)
    assert any(reason.startswith("SGD with momentum 0.9, weight decay 0.0001") for reason in one.reasons)
    assert not any("published rules" in reason for reason in one.reasons)
    none = planned(recipe(tmp_path, *STEPS, *TINY, *sgd, "optimizer.momentum=0"), PLAYS, LAPTOP)
    sizes = [plan.forecast.tensor_bytes for plan in (two, one, none) if plan.forecast]
    assert sizes[0] - sizes[1] == pytest.approx(sizes[1] - sizes[2]) and sizes[1] > sizes[2]


def test_muon_has_twice_adamws_rate_in_a_short_run_and_one_moment_for_matrices(tmp_path: Path) -> None:
    muon = ("optimizer.kind=muon",)
    one, two = (planned(recipe(tmp_path, *STEPS, *TINY, *more), PLAYS, LAPTOP) for more in (muon, ADAMW))
    optimizer, shape = one.job.optimizer, one.job.shape
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay) == ("muon", 0.95, 0.1)
    assert optimizer.lr == optimizer.adamw_lr == pytest.approx(2 * two.job.optimizer.lr, rel=5e-3)
    assert any("Muon for the layers' matrices" in reason and "at the same" in reason for reason in one.reasons)
    assert any("Muon orthogonalizes in float32" in reason for reason in one.reasons)
    assert one.forecast and two.forecast
    matrices = sum(prod(sizes) for name, sizes in weight_sizes(shape).items() if is_hidden_matrix(name))
    assert two.forecast.tensor_bytes - one.forecast.tensor_bytes == pytest.approx(4 * matrices)
    own, adamws = one.forecast.one_device_step_s, two.forecast.one_device_step_s
    assert own and adamws and own > adamws
    named = planned(recipe(tmp_path, *STEPS, *TINY, *muon, "optimizer.adamw_lr=0.003"), PLAYS, LAPTOP)
    assert named.job.optimizer.adamw_lr == 0.003 and any("rate of 0.003" in reason for reason in named.reasons)


def test_muon_orthogonalizes_in_bf16_on_gpus_and_names_who_computes_for_copies(tmp_path: Path) -> None:
    found = {
        precision: planned(
            recipe(tmp_path, *STEPS, "optimizer.kind=muon", f"train.precision={precision}"), WEB, ONE_H100
        )
        for precision in ("bf16", "float32")
    }
    assert [plan.arithmetic.orthogonalized_in for plan in found.values()] == ["bf16", "bf16"]
    assert any("Muon orthogonalizes in bf16, whose products are" in reason for reason in found["float32"].reasons)
    assert planned(recipe(tmp_path, *STEPS, *ADAMW), WEB, ONE_H100).arithmetic.orthogonalized_in == "float32"
    copies = planned(recipe(tmp_path, *STEPS, *TINY, "optimizer.kind=muon", "layout.replicate=2"), PLAYS, LAPTOP)
    path = tmp_path / "plan.json"
    write_plan(copies, path)
    assert read_plan(path) == copies and copies.placement.copies_compute in ("one for all", "each for itself")


def test_a_time_budget_becomes_as_many_steps_as_were_measured_to_fit(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.budget=10 minutes", "report.evaluate=never", "model.size=1M")
    fast, slow = (planned(config, PLAYS, LAPTOP, whole_s) for whole_s in (2.0, 8.0))
    for plan in (fast, slow):
        assert plan.step_s is not None
        assert 0.9 * 600 < plan.job.steps * plan.step_s <= 600
    assert fast.job.steps > 2 * slow.job.steps
    assert replace(fast.job.shape) == slow.job.shape and fast.job.batch_sequences == slow.job.batch_sequences


def test_evaluations_that_were_asked_for_are_in_the_time_budget(tmp_path: Path) -> None:
    asked = ("train.budget=10 minutes", "report.evaluate=10 steps", "model.size=1M")
    plan = planned(recipe(tmp_path, *asked), PLAYS, LAPTOP, 2.0)
    assert plan.step_s is not None and plan.cadence.evaluate_every_steps == 10
    evaluation_s = plan.step_s * PLAYS.heldout_tokens / plan.batch_tokens / 3
    evaluations = plan.job.steps / 10 + 1
    assert evaluations * evaluation_s > 60, "else this test shows nothing"
    assert plan.job.steps * plan.step_s + evaluations * evaluation_s == pytest.approx(600, rel=0.02)


@pytest.mark.parametrize("text", [STORIES, WEB])
def test_a_budget_of_tokens_takes_the_model_that_they_are_enough_for(tmp_path: Path, text: CorpusFacts) -> None:
    plan = planned(recipe(tmp_path, "train.budget=200M tokens"), text, SERVER)
    assert 12 < 200e6 / parameter_count(plan.job.shape) < 30
    assert any("(20 tokens a parameter)" in reason for reason in plan.reasons)


@pytest.mark.parametrize(("budget", "steps"), [("100 steps", 100), ("11200 tokens", 100), ("1 tokens", 1)])
def test_other_budgets_need_no_measurement(tmp_path: Path, budget: str, steps: int) -> None:
    plan = planned(recipe(tmp_path, f"train.budget={budget}", *TINY, "layout.replicate=1"), PLAYS, LAPTOP)
    assert plan.job.steps == steps and plan.step_s is None


def test_a_longer_budget_takes_a_larger_model(tmp_path: Path) -> None:
    sizes = [
        planned(recipe(tmp_path, f"train.budget={budget}"), STORIES, LAPTOP).job.shape.width
        for budget in ("1 minute", "30 minutes", "20 hours")
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_a_step_that_reads_the_text_over_and_over_is_a_slip(tmp_path: Path) -> None:
    small = corpus(40_000, 1)
    named = ("model.size=1M", "train.sequence=64", "train.budget=3 steps")
    fits, beyond, slip = (recipe(tmp_path, *named, f"train.batch_tokens={n}") for n in (40_000, 100_000, 10**9))
    told = [drafted(one, small, LAPTOP).plan.warnings for one in (fits, beyond)]
    often = "train.batch_tokens = 100000 reads all 40,000 tokens of the text 2.5 times in each step"
    assert often in told[1] and not told[0]
    with pytest.raises(PlaitError, match=r"40,000 tokens of the text 25,000 times in each step; choose at most 40000"):
        refuse_unfit_names(slip, small)


def test_the_fastest_split_is_taken_and_said(tmp_path: Path) -> None:
    config = recipe(tmp_path, *STEPS, *TINY, "model.layers=1")
    outline = drafted(config, PLAYS, LAPTOP)
    found = [(split.workers, split.placement.threads) for split in outline.layouts]
    assert found == [(1, 8), (2, 4), (4, 2)], "8: outdone"
    times = {1: 0.5, 2: 0.2, 4: 0.3}
    plan = settle(config, outline, [replace(s, step_s=times[s.workers]) for s in outline.layouts])
    assert (plan.placement.layout.replicate, plan.placement.threads, plan.step_s) == (2, 4, 0.2)
    assert any(reason.startswith("2 workers: fastest step of those timed") for reason in plan.reasons)


def test_a_split_that_memory_or_the_batch_does_not_allow_is_not_tried(tmp_path: Path) -> None:
    for gib, workers in ((1, [1]), (2, [1, 2]), (16, [1, 2, 4, 8])):
        machine = replace(LAPTOP, memory_bytes=gib * 2**30)
        outline = drafted(recipe(tmp_path, *STEPS, *ADAMW, "model.size=11M"), PLAYS, machine)
        assert [split.workers for split in outline.layouts] == workers
    one_sequence = ("train.sequence=16", "train.batch_tokens=16", "model.size=1M")
    outline = drafted(recipe(tmp_path, *STEPS, *ADAMW, *one_sequence), PLAYS, LAPTOP)
    assert [split.workers for split in outline.layouts] == [1]


def test_another_split_changes_who_does_the_work_and_nothing_of_the_work(tmp_path: Path) -> None:
    config = recipe(tmp_path, *STEPS, *TINY, *ADAMW, "layout.replicate=2")
    plan = planned(config, PLAYS, LAPTOP)
    four = WorkerLayout(
        placement=Placement(layout=Layout(replicate=4), threads=2, micro_sequences=1),
        complexity=0,
        forecast=plan.forecast,
        notes=(),
        step_s=0.5,
    )
    other = with_layout(plan, four)
    assert (
        other.placement.layout.replicate,
        other.placement.threads,
        other.placement.micro_sequences,
        other.step_s,
    ) == (4, 2, 1, 0.5)
    same = changed(
        other,
        layout=plan.placement.layout,
        threads=plan.placement.threads,
        micro_sequences=plan.placement.micro_sequences,
        step_s=plan.step_s,
    )
    assert replace(same, forecast=plan.forecast) == plan


def test_a_forecast_takes_in_what_a_step_took_that_was_timed_and_still_knows_what_formulas_said(tmp_path: Path) -> None:
    config = recipe(tmp_path, *STEPS, "model.size=11M", "layout.replicate=2")
    outline = drafted(config, PLAYS, LAPTOP)
    [split] = outline.layouts
    said = split.forecast
    assert said is not None and said.items is not None and said.one_device_step_s is not None
    untimed = settle(config, outline, [split]).forecast
    assert untimed == said
    step_s = 0.4 * said.step_s
    told = settle(config, outline, [replace(split, step_s=step_s)]).forecast
    assert told is not None and told.items is not None and told.one_device_step_s is not None
    assert told.step_s == pytest.approx(step_s) and told.items.step_s == pytest.approx(step_s)
    assert told.items.messages_s > 0 and told.items.messages_s == pytest.approx(0.4 * said.items.messages_s)
    assert said.items.messages_s < 0.05 * said.step_s, "else messages may be what the formulas got wrong"
    assert told.one_device_step_s == pytest.approx(0.4 * said.one_device_step_s), "the formulas are off there, too"
    talking = replace(said, items=replace(said.items, messages_s=said.step_s))
    late = updated_forecast(talking, talking.calibration, 4 * said.step_s)
    assert late.step_s == pytest.approx(4 * said.step_s) and late.one_device_step_s == said.one_device_step_s
    assert told.calibration.timed == pytest.approx(0.4) and told.error == MEASURED_STEP_ERROR < said.error
    back = without_calibration(told.items, told.calibration)
    assert back.step_s == pytest.approx(said.step_s), "lessons are over what formulas said"
    assert calibration_text(told.calibration, told.items, told.basis) == (
        f"the step time is based on steps timed on this machine; the formulas said {format_duration(said.step_s)}"
    )


def test_a_forecast_that_knows_a_timed_step_stays_to_the_bit_until_runs_teach_more(tmp_path: Path) -> None:
    """A kept plan asks each time it is used; without care one time in five a rounding error made it another."""
    said = planned(recipe(tmp_path, *STEPS, "model.size=11M", "layout.replicate=2"), PLAYS, LAPTOP).forecast
    assert said is not None
    runs = replace(said.calibration, compute=1.39, messages=1.41, runs=1)
    for parts in range(20, 120):
        clocked = said.step_s * parts / 70
        told = updated_forecast(said, runs, clocked)
        assert updated_forecast(told, runs, clocked) == told
        more = updated_forecast(told, replace(runs, compute=1.5, runs=2), clocked)
        assert more != told and more.step_s == pytest.approx(clocked) and more.calibration.runs == 2


def test_a_forecast_by_a_probes_times_stays_as_it_is_where_steps_were_timed(tmp_path: Path) -> None:
    """It has computing and messages one by one; a whole step does not tell which of them came otherwise."""
    plan = planned(recipe(tmp_path, *STEPS, *TINY, "layout.replicate=2"), PLAYS, LAPTOP)
    assert plan.forecast is not None
    probed = replace(plan.forecast, basis="clock")
    assert updated_forecast(probed, probed.calibration, 2 * probed.step_s) == probed
    runs = Calibration(ground=probed.calibration.ground, compute=1.2, messages=1.2, runs=5)
    assert updated_forecast(probed, runs, None).step_s == pytest.approx(1.2 * probed.step_s)


def test_a_begun_run_keeps_what_it_computes_on_another_machine_and_with_another_budget(tmp_path: Path) -> None:
    begun = planned(recipe(tmp_path, "train.budget=4 minutes"), STORIES, LAPTOP)
    config = recipe(tmp_path, "train.budget=20 hours", "layout.pipeline=2")
    there = Resources(machine=SERVER, peak_flops=PEAK_FLOPS[SERVER])
    again, on = (draft(config, STORIES, there, recipe_hash="cafe", begun=one).plan for one in (None, begun))
    assert again.job.shape.layers != begun.job.shape.layers, "else this test shows nothing"
    assert (on.job.shape, on.job.batch_sequences, on.arithmetic.precision) == (
        begun.job.shape,
        begun.job.batch_sequences,
        begun.arithmetic.precision,
    )
    assert sum(on.placement.layout.stage_layers) == begun.job.shape.layers


def test_a_simpler_split_is_taken_where_it_is_about_as_fast(tmp_path: Path) -> None:
    config = recipe(tmp_path, *STEPS, *TINY, "model.layers=1")
    outline = drafted(config, PLAYS, LAPTOP)
    for slower, workers in ((1.04, 1), (1.06, 2)):
        times = {1: 0.2 * slower, 2: 0.2, 4: 0.3}
        plan = settle(config, outline, [replace(s, step_s=times[s.workers]) for s in outline.layouts])
        assert plan.world_size == workers
    assert any(reason.startswith("2 workers: fastest") for reason in plan.reasons)


def test_the_planner_chooses_what_runs_on_gpus(tmp_path: Path) -> None:
    config = recipe(tmp_path, *STEPS, "model.size=7B", "train.sequence=4096")
    large = planned(config, WEB, EIGHT_H100, why_this_layout="searched")
    assert large.placement.layout.shard > 1, "16 bytes a parameter do not fit one device"
    assert large.forecast is not None and large.forecast.bytes_per_device < 80 * 2**30
    assert any("within" in reason or "fastest" in reason for reason in large.reasons)
    unknown = replace(EIGHT_H100, name="Graphics of Tomorrow")
    plan = planned(recipe(tmp_path, *STEPS), STORIES, unknown)
    assert plan.forecast is None and plan.world_size == 8
    assert any("not in plait's catalogue" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("model.size=100K",), ["a vocabulary of 4096 has about 100K parameters", "choose model.size ="]),
        (("model.vocabulary=100",), ["the tokenizer has 4096 entries", "model.vocabulary = 100", "choose at least"]),
        (("train.sequence=2000000",), ["train.sequence = 2000000 is longer than the data allow", "1499999"]),
        (("train.sequence=64", "train.batch_tokens=63"), ["train.batch_tokens = 63", "choose at least 64"]),
        (("layout.replicate=8", *TINY), ["8 workers cannot share 7 sequences"]),
        (("model.heads=8", "model.kv_heads=3"), ["kv_heads = 3 does not divide 8 heads", "choose one of 1, 2, 4, 8"]),
        (("model.size=7B",), ["fits no layout of this machine", "GiB", "model.size"]),
        (("report.evaluate=5 minutes",), ["[report]", "must count steps"]),
        (("layout.stage_layers=[4, 2]",), ["cut a pipeline; set layout.pipeline above 1, too"]),
    ],
)
def test_what_cannot_work_is_refused_with_its_mend(
    tmp_path: Path, overrides: tuple[str, ...], parts: list[str]
) -> None:
    sentence = refused(tmp_path, *STEPS, *overrides)
    assert all(part in sentence for part in parts), sentence


def test_gpus_take_one_worker_each(tmp_path: Path) -> None:
    large = recipe(tmp_path, *STEPS, "model.size=350M", "train.batch_tokens=524288")
    assert planned(large, STORIES, EIGHT_H100).placement.layout.data_parallel_degree == 8
    assert planned(recipe(tmp_path, *STEPS), STORIES, EIGHT_H100).placement.layout.world_size == 1, (
        "seven would only wait"
    )
    sentence = refused(tmp_path, *STEPS, "layout.replicate=3", machine=EIGHT_H100, facts=STORIES)
    assert "needs 3 GPUs, and this machine has 8" in sentence and "run.devices" in sentence
    sentence = refused(tmp_path, *STEPS, "model.size=30B", machine=ONE_H100, facts=STORIES)
    assert "fits no layout of this machine" in sentence and "devices" in sentence


def test_short_documents_are_masked_and_long_ones_joined(tmp_path: Path) -> None:
    def documents(facts, *overrides: str) -> str:
        return planned(recipe(tmp_path, *STEPS, *TINY, *overrides), facts, LAPTOP).job.documents

    assert documents(corpus(100_000, 2_000)) == "mask" and documents(corpus(100_000, 3)) == "join"
    assert documents(corpus(100_000, 3), "data.mask_documents=true") == "mask"
    assert documents(corpus(100_000, 2_000), "data.mask_documents=false") == "join"


def test_text_shorter_than_the_usual_sequence_gives_a_shorter_one(tmp_path: Path) -> None:
    plan = planned(recipe(tmp_path, *STEPS, "model.size=1M"), corpus(200, 1), LAPTOP)
    assert plan.job.sequence == 192 == plan.job.shape.sequence


def test_a_budget_may_grow(tmp_path: Path) -> None:
    def config(budget: str):
        return recipe(tmp_path, f"train.budget={budget}", *TINY, "layout.replicate=1")

    plan = planned(config("100 steps"), PLAYS, LAPTOP)
    assert with_raised_budget(config("150 steps"), plan) == replace(
        plan, job=replace(plan.job, steps=150, budget=Amount(150, "steps"))
    )
    assert with_raised_budget(config("100 steps"), plan) == plan
    assert with_raised_budget(config("22400 tokens"), plan).job.steps == 200
    for smaller in ("99 steps", "1000 tokens"):
        with pytest.raises(PlaitError, match=r"train.budget = .* is less than the 100 steps .* may only grow"):
            with_raised_budget(config(smaller), plan)
    longer = with_raised_budget(config("2000 steps"), plan)
    with pytest.raises(PlaitError, match=r"= 1,999 steps is less than the 2,000 steps that this run has"):
        with_raised_budget(config("1999 steps"), longer)
    with pytest.raises(PlaitError, match=r"= 1,000 tokens \(9 steps\) is less than the 100 steps that"):
        with_raised_budget(config("1000 tokens"), plan)
    with pytest.raises(PlaitError, match=r"this run counts in steps; raise train.budget in steps too"):
        with_raised_budget(config("10 minutes"), plan)


def test_a_time_budget_grows_by_its_own_measure(tmp_path: Path) -> None:
    short = recipe(tmp_path, "train.budget=10 minutes", *TINY)
    plan = planned(short, PLAYS, LAPTOP)
    long = recipe(tmp_path, "train.budget=20 minutes", *TINY)
    assert with_raised_budget(long, plan).job.steps == pytest.approx(2 * plan.job.steps, abs=1)
    with pytest.raises(PlaitError, match=r"= 10 min is less than the 20 min that this run has; .* may only grow"):
        with_raised_budget(short, with_raised_budget(long, plan))


def test_reports_and_checkpoints_follow_the_recipe_as_it_is_now(tmp_path: Path) -> None:
    plan = planned(recipe(tmp_path, *STEPS, *TINY, "layout.replicate=1"), PLAYS, LAPTOP)
    new = recipe(
        tmp_path, *STEPS, *TINY, "checkpoint.every=7 steps", "checkpoint.keep=5", "report.every=3 steps",
        "report.evaluate=20 steps",
    )  # fmt: skip
    changed = with_new_intervals(new, plan)
    assert (changed.cadence.checkpoint_every, changed.cadence.checkpoint_keep) == (Every(7, "steps"), 5)
    assert (changed.cadence.report_every_steps, changed.cadence.evaluate_every_steps) == (3, 20)
    assert with_new_intervals(recipe(tmp_path, *STEPS, *TINY), changed).cadence.checkpoint_every == Every(7, "steps")


def test_shares_of_a_step_lie_end_to_end_and_differ_by_one_at_most() -> None:
    for sequences in range(1, 30):
        for ranks in range(1, 9):
            shares = [equal_share(sequences, ranks, index) for index in range(ranks)]
            ends = [first + count for first, count in shares]
            assert [first for first, _ in shares] == [0, *ends[:-1]] and ends[-1] == sequences
            assert max(count for _, count in shares) - min(count for _, count in shares) <= 1


def example(tmp_path: Path) -> Plan:
    return planned(recipe(tmp_path, "train.budget=10 minutes"), STORIES, LAPTOP)


def test_plan_json_reads_back_the_same(tmp_path: Path) -> None:
    plan = example(tmp_path)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.glob("*plan*")] == ["plan.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', '{"format": 99}', "not json"])
def test_what_is_no_plan_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlaitError, match=r"plan.json.*start the run under a new run.name$"):
        read_plan(tmp_path / "plan.json")


def test_the_rate_beside_muon_is_warned_of_by_its_name(tmp_path: Path) -> None:
    config = recipe(tmp_path, *STEPS, *TINY, "optimizer.kind=muon", "optimizer.adamw_lr=50")
    [warning] = planned(config, PLAYS, LAPTOP).warnings
    assert warning.startswith("optimizer.adamw_lr = 50 is ")


def test_named_stages_decide_how_many_a_worker_has(tmp_path: Path) -> None:
    asked = (*STEPS, "model.layers=4", "model.width=64", "model.heads=2", "layout.pipeline=2")
    plan = planned(recipe(tmp_path, *asked, "layout.stage_layers=[1, 1, 1, 1]"), PLAYS, LAPTOP)
    assert plan.placement.layout.virtual_stages == 2 and plan.placement.layout.schedule == "interleaved"
    both = (*asked, "layout.stage_layers=[1, 3]", "layout.virtual_stages=2")
    assert "names 2 stages, and layout.virtual_stages = 2 on 2 pipeline workers are 4" in refused(tmp_path, *both)


def test_a_key_for_a_strand_that_is_not_there_is_said_to_change_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r'layout.schedule = "gpipe" is the order of work in a pipeline, and'):
        planned(recipe(tmp_path, *STEPS, "layout.replicate=2", "layout.schedule=gpipe"), PLAYS, LAPTOP)
    told = planned(recipe(tmp_path, *STEPS, *TINY, "layout.schedule=gpipe"), PLAYS, LAPTOP).reasons
    assert "layout.schedule changes nothing: layout.pipeline is 1" in told
    told = planned(recipe(tmp_path, *STEPS, *TINY, "layout.virtual_stages=2"), PLAYS, LAPTOP).reasons
    assert "layout.virtual_stages changes nothing: layout.pipeline is 1" in told
    config = recipe(tmp_path, *STEPS, "layout.shard=2", "layout.shard_what=parameters")
    quiet = planned(config, PLAYS, LAPTOP, why_this_layout="searched").reasons
    assert not any("changes nothing" in reason for reason in quiet)


@pytest.mark.parametrize("named", [("layout.shard=8",), ("layout.pipeline=4", "layout.shard=2")])
def test_named_degrees_run_as_they_are_priced_and_as_plait_plan_answers(named: tuple[str, ...], tmp_path: Path) -> None:
    model = ("model.size=13B", "model.vocabulary=50257", "train.sequence=4096", "train.batch_tokens=262144")
    config = recipe(tmp_path, *STEPS, *model, *named)
    plan = planned(config, WEB, EIGHT_H100)
    found = make_plan_report(config, on_paper(read_cluster("8xH100")), top=0).search
    cut = found.stage_layers(found.chosen) if plan.placement.layout.pipeline > 1 else ()
    assert plan.placement.layout == layout_of_candidate(found.candidates, found.chosen, cut)
    if plan.placement.layout.pipeline == 1:
        assert plan.placement.layout.shard_what == "parameters", "whole parameters and gradients of 13B do not fit"


@pytest.mark.parametrize(("lr", "warned"), [("auto", False), ("0.01", False), ("0.5", True), ("1e10", True)])
def test_a_learning_rate_far_above_the_published_rules_is_warned_of(tmp_path: Path, lr: str, warned: bool) -> None:
    found = planned(recipe(tmp_path, *STEPS, *TINY, f"optimizer.lr={lr}"), PLAYS, LAPTOP).warnings
    assert len(found) == warned
    assert all(
        "optimizer.lr = " in reason and "times what published rules give" in reason and "probably diverge" in reason
        for reason in found
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("layout.tensor=3",), "layout.tensor = 3 does not divide 2 heads"),
        (("layout.replicate=8",), "8 workers cannot share 7 sequences a step"),
        (("model.auxiliary_heads=[7]",), "names 7, and a model of 2 layers"),
    ],
)
def test_names_that_do_not_fit_each_other_are_refused_without_a_machine(
    tmp_path: Path, overrides: tuple[str, ...], told: str
) -> None:
    config = recipe(tmp_path, *STEPS, *TINY, *overrides)
    with pytest.raises(PlaitError, match=told):
        refuse_unfit_names(config, PLAYS)


@pytest.mark.parametrize("overrides", [TINY, ("layout.tensor=3",), (*TINY[:3], "layout.replicate=8")])
def test_what_is_not_named_is_refused_by_nobody_yet(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    refuse_unfit_names(recipe(tmp_path, *STEPS, *overrides), PLAYS)
