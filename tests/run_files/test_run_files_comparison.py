"""Two runs compared: honest about noise and about what cannot be compared, and right about what can explain what."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest

import plait
from plait.data.index import read_index
from plait.errors import PlaitError
from plait.layout import Layout
from plait.planner.plan import OptimizerPlan
from plait.planner.plan_file import write_plan
from plait.run_files.comparing import compare_folders, t_95
from plait.run_files.comparison import RunComparison, SeedNoise, comparison_lines, effect_of
from plait.run_folder import RunFolder, find_run
from plait.working_folder import CURRENT_FOLDER, WorkingFolder
from tests.plans import changed
from tests.report.test_report_metrics import step_report
from tests.run_files.written_runs import usual_recipe_and_plan, write_metrics, written_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return CURRENT_FOLDER


def compared(first: str, second: str) -> RunComparison:
    return compare_folders(find_run(first), find_run(second), CURRENT_FOLDER)


def text_of(first: str, second: str) -> str:
    return "\n".join(comparison_lines(compared(first, second)))


def optimizer_with(**values: object) -> OptimizerPlan:
    return replace(usual_recipe_and_plan()[1].job.optimizer, **values)


def with_lr(here: WorkingFolder, name: str, lr: float, held_out: float, seed: int = 1) -> RunFolder:
    settings = {"optimizer.lr": lr, "run.seed": seed}
    return written_run(here, name, held_out=held_out, settings=settings, optimizer=optimizer_with(lr=lr))


def test_without_other_seeds_the_noise_is_said_to_be_unknown(here: WorkingFolder) -> None:
    with_lr(here, "low", 1e-3, 1.52)
    with_lr(here, "high", 3e-3, 1.48)
    found, text = compared("low", "high"), text_of("low", "high")
    assert found.loss and found.loss.losses == (1.52, 1.48) and found.loss.seeds is None and found.better == "high"
    assert "loss     1.5200 and 1.4800 nats per byte held out, after 102K tokens" in text
    assert "high is lower by 0.04 (2.6%)" in text
    assert "unknown, since no run here differs from one of these only by seed" in text
    assert "plait train runs/low/recipe.toml run.name=low-seed2 run.seed=2" in text
    assert "'train.budget=100 steps'" in text and "optimizer.lr=0.001" in text, "a budget of time would be another run"
    assert "explained by optimizer.lr, the only differing setting that changes the result of training" in text
    assert [one.key for one in found.recipe] == ["optimizer.lr"]
    assert [(one.key, one.first, one.second) for one in found.plan] == [("job.optimizer.lr", 1e-3, 3e-3)]


def test_runs_that_differ_by_their_seed_alone_tell_the_noise(here: WorkingFolder) -> None:
    low, high = {1: 1.520, 2: 1.524, 3: 1.516}, {1: 1.480, 2: 1.486, 3: 1.474}
    for seed in low:
        with_lr(here, f"low{seed}", 1e-3, low[seed], seed)
        with_lr(here, f"high{seed}", 3e-3, high[seed], seed)
    with_lr(here, "other", 5e-3, 1.0)
    written_run(here, "unfinished", steps_done=40, settings={"optimizer.lr": 1e-3, "run.seed": 9})
    (with_lr(here, "damaged", 1e-3, 0.1, 7).path / "metrics.jsonl").write_text("{}\n")
    found = compared("low1", "high2")
    assert found.loss and (seeds := found.loss.seeds)
    pooled = math.sqrt((2 * stdev(low.values()) ** 2 + 2 * stdev(high.values()) ** 2) / 4)
    assert seeds.runs == (3, 3) and seeds.means == pytest.approx((1.52, 1.48))
    assert seeds.deviation == pytest.approx(pooled) and seeds.margin == pytest.approx(2.776 * pooled * math.sqrt(2 / 3))
    assert seeds.is_beyond and found.better == "high2"
    text = text_of("low1", "high2")
    assert "on average over seeds high2 is lower by 0.04 (2.6%)" in text
    assert "of seeds (3 seeds of low1, 3 of high2)" in text and "is beyond their noise" in text
    assert "their seeds differ, too" in text


def test_a_difference_within_the_noise_has_no_winner(here: WorkingFolder) -> None:
    for seed, (low, high) in {1: (1.50, 1.49), 2: (1.54, 1.53)}.items():
        with_lr(here, f"low{seed}", 1e-3, low, seed)
        with_lr(here, f"high{seed}", 3e-3, high, seed)
    found, text = compared("low1", "high1"), text_of("low1", "high1")
    assert found.better is None and "no difference beyond the noise of seeds" in text and "explained by opt" not in text
    assert "is within their noise" in text and "more seeds would narrow that" in text


def test_a_claim_of_beyond_the_noise_is_wrong_one_time_in_twenty() -> None:
    """Pairs of recipes that are equally good, judged as the command judges them."""
    draw, wrong = np.random.default_rng(1), 0
    for _ in range(4000):
        first, second = draw.normal(2, 0.1, 3), draw.normal(2, 0.1, 2)
        squares = ((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum()
        margin = t_95(3) * math.sqrt(squares / 3) * math.sqrt(1 / 3 + 1 / 2)
        noise = SeedNoise(runs=(3, 2), means=(first.mean(), second.mean()), deviation=0.1, margin=margin)
        wrong += noise.is_beyond
    assert 0.04 < wrong / 4000 < 0.06
    assert [round(t_95(freedom), 2) for freedom in (1, 10, 11, 30, 1000)] == [12.71, 2.23, 2.20, 2.04, 1.96]


def test_runs_that_differ_by_their_seed_are_noise_themselves(here: WorkingFolder) -> None:
    for seed, held_out in enumerate((1.50, 1.54, 1.52), 1):
        with_lr(here, f"run{seed}", 1e-3, held_out, seed)
    found, text = compared("run1", "run2"), text_of("run1", "run2")
    assert found.better is None and found.loss and found.loss.differ_by_seed_alone
    assert "the two differ only by seed: this difference is the noise of seeds; 3 seeds differ by 0.02" in text


def test_the_same_run_twice_has_no_difference(here: WorkingFolder) -> None:
    written_run(here, "first")
    found, text = compared("first", "first"), text_of("first", "first")
    assert (found.better, found.recipe, found.plan, found.versions) == (None, (), (), ())
    assert "about equally fast" in text and "no difference as asked" in text


def test_several_differences_cannot_be_told_apart(here: WorkingFolder) -> None:
    written_run(here, "one", held_out=1.5, settings={"optimizer.lr": 1e-3})
    written_run(here, "two", held_out=1.4, settings={"optimizer.lr": 2e-3, "train.budget": "90 steps"}, steps=90)
    assert "may come from train.budget, optimizer.lr: two runs cannot tell which" in text_of("one", "two")


def test_a_layout_explains_speed_and_not_loss(here: WorkingFolder) -> None:
    layout = Layout(replicate=2)
    written_run(here, "one", step_s=0.08)
    written_run(here, "two", step_s=0.05, settings={"layout.replicate": 2}, layout=layout)
    found, text = compared("one", "two"), text_of("one", "two")
    assert found.speed and found.speed.tokens_per_s == pytest.approx((12800, 20480))
    assert "two is 60% faster" in text and "explained by placement.layout.replicate" in text
    assert found.explaining("loss") == [] and "only rounding, from layout or kernels, remains" in text
    assert [one.key for one in found.explaining("speed")] == ["placement.layout.replicate"]


def test_speed_without_a_cause_is_said_to_have_none(here: WorkingFolder) -> None:
    written_run(here, "one", step_s=0.2)
    written_run(here, "two", step_s=0.05)
    text = text_of("one", "two")
    assert "two is 4 times as fast" in text
    assert "nothing that affects speed differs: other programs or the machine's noise may be the cause" in text


def test_unfinished_runs_are_compared_at_the_same_tokens(here: WorkingFolder) -> None:
    one = written_run(here, "one", steps_done=80, held_out=None)
    two = written_run(here, "two", steps_done=40, held_out=None)
    write_metrics(one, [5.0] * 36 + [4.0] * 4 + [1.0] * 40, None)
    write_metrics(two, [5.0] * 36 + [3.0] * 4, None)
    found, text = compared("one", "two"), text_of("one", "two")
    assert found.loss and found.loss.losses == (4.0, 3.0) and found.loss.tokens == (40 * 1024, 40 * 1024)
    assert "over the last tenth of the tokens that both have seen" in text and "do not trust a small difference" in text


def test_a_run_without_steps(here: WorkingFolder) -> None:
    written_run(here, "one")
    written_run(here, "two", steps_done=0, held_out=None)
    found, text = compared("one", "two"), text_of("one", "two")
    assert found.loss is None and "two has no step yet" in text and "speed    not known for both" in text


def test_pairs_and_tokens_are_not_compared(here: WorkingFolder) -> None:
    written_run(here, "one")
    folder = written_run(here, "two")
    folder.metrics.write_text(step_report(1, pair_accuracy=0.5, reward_margin=0.1).to_line())
    assert (
        "their losses measure different things: two learned from pairs of answers" in compared("one", "two").why_no_loss
    )


def test_other_versions_are_listed(here: WorkingFolder) -> None:
    fingerprint = usual_recipe_and_plan()[1].machines.fingerprint
    newer = {**fingerprint, "versions": {**fingerprint["versions"], "torch": "2.14.0"}}
    written_run(here, "one")
    written_run(here, "two", fingerprint=newer)
    [found] = compared("one", "two").versions
    assert (found.key, found.second) == ("torch", "2.14.0")
    assert "nothing that affects speed differs except the versions of torch" in text_of("one", "two")


PLAY = "".join(
    f"KING. Line {number} of the play, {number * 7919 % 1000} and {number % 13}.\n" for number in range(3000)
)


def prepared_run(here: WorkingFolder, name: str, text: str, vocabulary: int, held_out: float) -> RunFolder:
    """A run of a text that was really prepared."""
    Path(f"{name}.txt").write_text(text)
    recipe = {"data": {"files": f"{name}.txt"}, "model": {"vocabulary": vocabulary}}
    facts = plait.prepare_data(recipe)
    digest = read_index(Path(facts.folder)).content_hash()
    settings = {"data.files": f"{name}.txt"}
    return written_run(here, name, held_out=held_out, settings=settings, corpus=str(facts.folder), corpus_hash=digest)


def test_the_same_text_by_other_tokenizers_is_compared_per_byte(here: WorkingFolder) -> None:
    one = prepared_run(here, "one", PLAY, 300, 1.5)
    prepared_run(here, "two", PLAY, 400, 1.4)
    found = compared("one", "two")
    assert found.text == "same text" and found.loss and found.loss.unit == "nats per byte" and found.better == "two"
    assert "tokenized differently: losses are compared per byte" in text_of("one", "two")
    write_metrics(one, [3.0] * 100, None)
    assert "tokenizers differ, and not both have a held-out loss" in compared("one", "two").why_no_loss


def test_losses_of_different_texts_are_refused_in_a_sentence(here: WorkingFolder) -> None:
    prepared_run(here, "one", PLAY, 300, 1.5)
    prepared_run(here, "two", PLAY.replace("KING", "QUEEN"), 300, 1.4)
    found = compared("one", "two")
    assert found.text == "other text" and found.loss is None and found.better is None
    assert found.why_no_loss == (
        "their losses cannot be compared: they are of different texts; measure both on one text: plait eval two "
        "--heldout-of one"
    )
    assert found.speed is not None, "speeds can be compared all the same"


def test_where_prepared_data_are_gone_the_text_is_unknown(here: WorkingFolder) -> None:
    written_run(here, "one")
    written_run(here, "two", corpus_hash="0" * 64)
    assert compared("one", "two").text == "unknown"
    assert "prepared data are gone" in compared("one", "two").why_no_loss


@pytest.mark.parametrize("file", ["plan.json", "recipe.toml", "metrics.jsonl"])
def test_a_damaged_run_is_a_sentence(here: WorkingFolder, file: str) -> None:
    written_run(here, "one")
    (written_run(here, "two").path / file).write_text("{")
    if file == "metrics.jsonl":
        (here.runs / "two" / file).write_text("{}\n")
    with pytest.raises(PlaitError, match=f"runs/two/{file}"):
        compared("one", "two")
    with pytest.raises(PlaitError, match='there is no run "three"'):
        plait.compare_runs("one", "three")


def test_a_half_written_run_is_a_sentence(here: WorkingFolder) -> None:
    written_run(here, "one")
    (written_run(here, "two").path / "plan.json").unlink()
    with pytest.raises(
        PlaitError, match=r"runs/two holds no run that has begun \(plan.json or recipe.toml is missing\)"
    ):
        plait.compare_runs("one", "two")


def test_the_comparison_as_json(here: WorkingFolder) -> None:
    with_lr(here, "low", 1e-3, 1.52)
    with_lr(here, "high", 3e-3, 1.48)
    values = json.loads(json.dumps(plait.compare_runs("low", "high").to_dict(), allow_nan=False))
    assert values["better"] == "high" and values["loss"]["seeds"] is None
    assert values["loss_explained_by"] == ["job.optimizer.lr"] and values["speed_explained_by"] == []


def test_every_key_of_a_plan_has_its_effect() -> None:
    assert effect_of("job.optimizer.lr") == effect_of("job.steps") == "loss"
    assert effect_of("job.shape.layers") == effect_of("arithmetic.precision") == "loss and speed"
    assert effect_of("placement.threads") == effect_of("arithmetic.compile") == "speed"
    assert effect_of("cadence.checkpoint_keep") == "neither"


def test_a_run_that_went_on_to_a_larger_budget_is_not_one_of_the_seeds(here: WorkingFolder) -> None:
    """It was trained for fewer steps first, by another schedule."""
    for seed in (1, 2):
        with_lr(here, f"low{seed}", 1e-3, 1.5 + seed / 100, seed)
    grown = with_lr(here, "grown", 1e-3, 1.9, 3)
    write_plan(changed(grown.saved_plan(), steps=50), grown.path / "plan-1.json")
    with_lr(here, "high", 3e-3, 1.4)
    found = compared("low1", "high")
    assert found.loss and found.loss.seeds and found.loss.seeds.runs == (2, 1)
    assert not compared("low1", "grown").loss.differ_by_seed_alone  # pyright: ignore[reportOptionalMemberAccess]
