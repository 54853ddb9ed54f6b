"""The loop against plain actions that write down what it asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, nan

import pytest
import torch

from plait.errors import RunFailed
from plait.report.metrics import EvalReport, StepReport
from plait.report.samples_file import SampleReport
from plait.trainer.checkpointing.background import SaveEnd
from plait.trainer.loop import Agreement, LoopActions, LoopIntervals, Observer, run_loop
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars
from plait.units import Every

PACE = LoopIntervals(steps=10, report_every_steps=1, evaluate_every_steps=0, checkpoint_every=Every(0, "steps"))
NEVER = 10**9


@dataclass
class Diary:
    """A model whose step k has 100 tokens with a loss of k each, and a sink; both write into one list."""

    stop_at: int = NEVER
    peer_stops_at: int = NEVER
    changes_at: int = NEVER
    loses: Mapping[int, float] = field(default_factory=dict)
    """Steps whose loss is another one."""
    eval_loss: float = 1.0
    save_fails: Mapping[int, str] = field(default_factory=dict)
    going_on: SaveEnd | None = None
    entries: list[str] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    now: int = 0
    copy_takes_s: float = 0.0
    copy_cost_s: float = 0.0

    def actions(self) -> LoopActions:
        return LoopActions(
            step=self.take_step,
            evaluate=self.evaluate,
            sample=lambda state: SampleReport(step=state.step, prompt="", text=""),
            save=self.save,
            begin_save=self.begin_save,
            save_ended=self.save_ended,
            finish_save=self.save_ended,
            prune=lambda: self.entries.append("prune"),
            copy=self.copy,
            agree=self.agree,
            rebalance_if_due=self.reckon,
            stop_requested=lambda: self.now >= self.stop_at,
            learning_rate=lambda step: 0.5**step,
            data_wait_s=lambda: 0.25,
            mfu=lambda rate: None,
        )

    def agree(self, stop: bool, save: bool, copy: bool) -> Agreement:
        cost_s, self.copy_cost_s = self.copy_cost_s, 0.0
        return Agreement(stop=stop or self.now >= self.peer_stops_at, save=save, copy=copy, copy_cost_s=cost_s)

    def copy(self, state: TrainState) -> str:
        self.entries.append(f"copy {state.step} after {state.tokens} tokens")
        self.copy_cost_s = self.copy_takes_s
        return ""

    def save(self, state: TrainState) -> SaveEnd:
        self.entries.append(f"save {state.step} after {state.tokens} tokens")
        return SaveEnd(step=state.step, cost_s=0.0, blocked_s=0.0, failure=self.save_fails.get(state.step, ""))

    def begin_save(self, state: TrainState) -> None:
        self.going_on = self.save(state)

    def save_ended(self) -> SaveEnd | None:
        """A save that was begun has ended when it is next asked for."""
        end, self.going_on = self.going_on, None
        return end

    def take_step(self, state: TrainState) -> tuple[TrainState, Scalars]:
        self.now = state.step + 1
        loss = self.loses.get(self.now, float(self.now))
        scalars = Scalars(totals=torch.tensor([100.0 * loss, 100.0]), norm=torch.tensor(2.0 * self.now))
        return replace(state, step=self.now, position=state.position + 4), scalars

    def evaluate(self, state: TrainState) -> EvalReport | None:
        return EvalReport(step=state.step, eval_loss=self.eval_loss, eval_nats_per_byte=0.5)

    def reckon(self, state: TrainState) -> list[str]:
        return [f"from step {state.step + 1} on"] if state.step == self.changes_at else []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.entries.append(f"step {report.step}")

    def evaluation(self, report: EvalReport) -> None:
        self.entries.append(f"evaluation {report.step}")

    def sample(self, report: SampleReport) -> None:
        self.entries.append(f"sample {report.step}")

    def note(self, text: str) -> None:
        self.entries.append(text)

    def close(self) -> None:
        raise AssertionError("the loop did not open this sink")


def run(diary: Diary, pace: LoopIntervals, state: TrainState | None = None) -> tuple[TrainState, str]:
    return run_loop(state or TrainState(), pace, diary.actions(), diary)


def test_samples_come_before_the_first_step_at_their_interval_and_at_the_end() -> None:
    diary = Diary()
    run(diary, replace(PACE, sample_every_steps=4, evaluate_every_steps=4))
    assert [entry for entry in diary.entries if "sample" in entry] == [f"sample {step}" for step in (0, 4, 8, 10)]
    assert diary.entries.index("step 4") < diary.entries.index("evaluation 4") < diary.entries.index("sample 4")
    assert diary.entries.index("sample 4") < diary.entries.index("step 5")
    resumed = Diary()
    run(resumed, replace(PACE, sample_every_steps=4), TrainState(step=4))
    assert [entry for entry in resumed.entries if "sample" in entry] == ["sample 8", "sample 10"]


def test_every_step_is_told_once_with_its_own_numbers_however_late_they_are_fetched() -> None:
    one, four = Diary(), Diary()
    assert run(one, PACE)[1] == run(four, replace(PACE, report_every_steps=4))[1] == "done"
    assert [report.step for report in one.reports] == list(range(1, 11))
    for mine, late in zip(one.reports, four.reports, strict=True):
        assert (mine.loss, mine.grad_norm, mine.lr, mine.tokens) == (late.loss, late.grad_norm, late.lr, late.tokens)
        assert mine.loss == mine.step and mine.grad_norm == 2 * mine.step and mine.tokens == 100 * mine.step
        assert mine.lr == 0.5 ** (mine.step - 1) and mine.data_wait_s == 0.25 and late.step_s > 0


def test_the_end_is_evaluated_and_saved_after_its_lines_were_told() -> None:
    diary = Diary()
    state, _ = run(diary, PACE)
    assert diary.entries[-3:] == ["evaluation 10", "save 10 after 1000 tokens", "prune"]
    assert len(diary.entries) == 13 and state == TrainState(step=10, position=40, tokens=1000)


def test_saves_and_evaluations_come_when_due_and_once_at_the_end() -> None:
    diary = Diary()
    run(diary, replace(PACE, report_every_steps=100, evaluate_every_steps=5, checkpoint_every=Every(4, "steps")))
    told = [entry for entry in diary.entries if not entry.startswith("step")]
    assert told == [
        "save 4 after 400 tokens", "evaluation 5", "prune", "save 8 after 800 tokens", "evaluation 10", "prune",
        "save 10 after 1000 tokens", "prune",
    ]  # fmt: skip
    for position, entry in enumerate(diary.entries):  # what is on the disk has all its lines on the disk before
        if entry.startswith("save"):
            assert f"step {entry.split()[1]}" in diary.entries[:position]


def test_a_clock_can_say_when_to_save() -> None:
    diary = Diary()
    run(diary, replace(PACE, checkpoint_every=Every(1e-9, "seconds")))
    assert sum(entry.startswith("save") for entry in diary.entries) == 10


def test_a_stop_saves_where_it_is_also_when_only_a_peer_was_asked() -> None:
    for diary in (Diary(stop_at=3), Diary(peer_stops_at=3)):
        state, ended = run(diary, replace(PACE, report_every_steps=100))
        assert ended == "stopped" and state.step == 3
        assert diary.entries == ["step 1", "step 2", "step 3", "save 3 after 300 tokens"]


def test_a_stop_in_the_last_step_is_an_end() -> None:
    diary = Diary(stop_at=10)
    assert run(diary, PACE)[1] == "done"
    assert diary.entries[-2:] == ["save 10 after 1000 tokens", "prune"]


def test_going_on_counts_on_and_a_finished_run_does_nothing() -> None:
    diary = Diary()
    state, ended = run(diary, PACE, TrainState(step=8, position=32, tokens=777))
    assert ended == "done" and state == TrainState(step=10, position=40, tokens=977)
    assert [report.tokens for report in diary.reports] == [877, 977]
    idle = Diary()
    assert run(idle, PACE, state) == (state, "done") and not idle.entries


@pytest.mark.parametrize("asked", ["balance_every_steps", "watch_every_steps"])
def test_the_load_is_looked_at_after_each_fetch_which_balance_asks_for_as_well(asked: str) -> None:
    diary = Diary(changes_at=4)
    run(diary, replace(PACE, report_every_steps=100, **{asked: 4}))
    assert diary.entries[:6] == ["step 1", "step 2", "step 3", "step 4", "from step 5 on", "step 5"]


def bad_from(first: int, last: int = 99, loss: float = nan) -> dict[int, float]:
    return dict.fromkeys(range(first, last + 1), loss)


@pytest.mark.parametrize("report_every", [1, 4])
@pytest.mark.parametrize("loss", [nan, inf])
def test_ten_steps_without_a_finite_loss_end_the_run_and_leave_the_last_good_checkpoint(
    report_every: int, loss: float
) -> None:
    diary = Diary(loses=bad_from(15, loss=loss))
    pace = replace(PACE, steps=60, report_every_steps=report_every, checkpoint_every=Every(4, "steps"))
    with pytest.raises(RunFailed, match=rf"since step 15 \(loss {loss}\), so it was ended after step 24; .* step-12;"):
        run(diary, pace)
    assert [entry for entry in diary.entries if entry.startswith("save")][-1] == "save 12 after 1200 tokens"
    assert diary.reports[-1].step == 24  # its line is there to look at


def test_a_single_bad_step_is_left_behind_and_its_checkpoint_comes_a_step_later() -> None:
    diary = Diary(loses=bad_from(4, 4) | bad_from(6, 7))
    assert run(diary, replace(PACE, checkpoint_every=Every(4, "steps")))[1] == "done"
    assert [entry.split()[1] for entry in diary.entries if entry.startswith("save")] == ["5", "9", "10"]


@pytest.mark.parametrize("diary", [Diary(loses=bad_from(10)), Diary(loses=bad_from(3), stop_at=5)])
def test_a_run_does_not_end_well_without_a_finite_loss(diary: Diary) -> None:
    with pytest.raises(RunFailed, match=r"there is no checkpoint yet; choose a lower optimizer\.lr"):
        run(diary, PACE)
    assert not any(entry.startswith("save") for entry in diary.entries)


def test_a_checkpoint_that_leads_to_bad_steps_is_not_called_good() -> None:
    diary = Diary(loses=bad_from(5))
    with pytest.raises(RunFailed, match="the newest checkpoint, step-4, already leads to it"):
        run(diary, replace(PACE, steps=60, checkpoint_every=Every(4, "steps")))


def test_old_checkpoints_stay_until_the_newest_one_gave_a_finite_loss() -> None:
    diary = Diary(loses=bad_from(9, 11))
    run(diary, replace(PACE, steps=14, checkpoint_every=Every(4, "steps")))
    told = [entry.partition(" after")[0] for entry in diary.entries if not entry.startswith("evaluation")]
    assert told[4:6] == ["save 4", "step 5"] and told[6] == "prune"
    kept = told[told.index("save 8") :]
    assert kept == ["save 8", "step 9", "step 10", "step 11", "step 12", "prune", "save 12", "step 13", "prune",
                    "step 14", "save 14", "prune"]  # fmt: skip


def test_a_divergence_leaves_the_checkpoint_before_the_one_that_leads_to_it() -> None:
    diary = Diary(loses=bad_from(9))
    with pytest.raises(RunFailed, match="step-8, already leads to it: delete it to use step-4, the last good one"):
        run(diary, replace(PACE, steps=60, checkpoint_every=Every(4, "steps")))
    assert "prune" not in diary.entries[diary.entries.index("save 8 after 800 tokens") :]


def test_the_last_checkpoint_replaces_older_ones_only_if_its_held_out_loss_is_finite() -> None:
    diary = Diary(eval_loss=nan)
    run(diary, PACE)
    assert "prune" not in diary.entries


def test_gradients_that_are_never_finite_end_a_run_that_no_longer_learns() -> None:
    diary = Diary()
    actions = diary.actions()

    def take_step(state: TrainState) -> tuple[TrainState, Scalars]:
        after, scalars = diary.take_step(state)
        return after, replace(scalars, norm=torch.tensor(nan))

    with pytest.raises(RunFailed, match=r"since step 1 \(gradient norm nan\), so it was ended after step 10"):
        run_loop(TrainState(), replace(PACE, steps=60), replace(actions, step=take_step), diary)


def test_a_state_is_copied_after_its_lines_were_told_and_a_save_is_a_copy_too() -> None:
    diary = Diary()
    run(diary, replace(PACE, copy_every=Every(3, "steps"), checkpoint_every=Every(5, "steps"), report_every_steps=10))
    made = [entry for entry in diary.entries if entry.startswith(("copy", "save"))]
    assert made == [
        "copy 3 after 300 tokens",
        "save 5 after 500 tokens",
        "copy 8 after 800 tokens",
        "save 10 after 1000 tokens",
    ]
    assert diary.entries.index("step 3") < diary.entries.index("copy 3 after 300 tokens")


def test_copies_come_as_often_as_their_cost_allows() -> None:
    diary, details = Diary(copy_takes_s=1e9), list[str]()
    pace = replace(PACE, copy_every=Every(1, "steps", cost_share=0.02))
    run_loop(TrainState(), pace, replace(diary.actions(), detail=details.append), diary)
    assert [entry.split()[1] for entry in diary.entries if entry.startswith("copy")] == ["2"]
    assert len(details) == 1 and details[0].startswith("a copy of the state in memory took")
    assert not any("a copy of the state" in entry for entry in diary.entries), "only --verbose shows it"


def test_a_state_without_a_finite_loss_is_not_copied() -> None:
    diary = Diary(loses={4: nan})
    run(diary, replace(PACE, steps=6, copy_every=Every(2, "steps")))
    assert [entry.split()[1] for entry in diary.entries if entry.startswith("copy")] == ["2", "5"]


def watching(entries: list[str]) -> Observer:
    return Observer(
        before_step=lambda state: entries.append(f"before {state.step + 1}"),
        after_step=lambda state: entries.append(f"after {state.step}"),
        at_phase=entries.append,
        at_report=lambda report, use: entries.append(f"report {report.step}, {use.experts} experts"),
        at_save=lambda end: entries.append(f"saved {end.step}{end.failure}"),
    )


def test_observers_see_each_step_and_phase_and_save_in_the_order_of_their_list() -> None:
    diary = Diary(save_fails={2: ": no room"})
    other: list[str] = []
    pace = replace(PACE, steps=3, report_every_steps=2, checkpoint_every=Every(2, "steps"))
    run_loop(TrainState(), pace, diary.actions(), diary, observers=[watching(diary.entries), watching(other)])
    agreement = "the agreement after the step"
    assert other == [
        "before 1", "after 1", agreement, "before 2", "after 2", agreement, "report 1, 0 experts",
        "report 2, 0 experts", "balancing", "saving", "saving", "before 3", "after 3", agreement, "saved 2: no room",
        "report 3, 0 experts", "balancing", "evaluation", "saving", "saving", "saved 3", "saving",
    ]  # fmt: skip
    told = [entry for entry in diary.entries if not entry.startswith("warning")]
    assert told[6:10] == ["step 1", "report 1, 0 experts", "step 2", "report 2, 0 experts"], "after the sink"
    assert told.index("saving", 11) < told.index("save 2 after 200 tokens") < told.index("before 3")


def test_an_observer_changes_nothing() -> None:
    seen, alone = Diary(), Diary()
    pace = replace(PACE, evaluate_every_steps=3, checkpoint_every=Every(4, "steps"), copy_every=Every(3, "steps"))
    ends = [
        run_loop(TrainState(), pace, seen.actions(), seen, observers=[watching([])]),
        run_loop(TrainState(), pace, alone.actions(), alone),
    ]
    assert ends[0] == ends[1] and seen.entries == alone.entries
