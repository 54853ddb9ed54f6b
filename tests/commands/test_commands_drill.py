"""What may be asked of a drill, what a seed draws, and how a report pairs faults with incidents."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from plait.checkpoint.arrival import part_files
from plait.checkpoint.durable import NoRoom
from plait.checkpoint.store import staging_for
from plait.checkpoint.transfer import whole_slice
from plait.commands.drilling.drill import facts_of_recipe
from plait.commands.drilling.faults import (
    DRAWN_KINDS,
    FAILED_SAVE,
    FAULT_FOLDER,
    FULL_DISK,
    SAVE_PHASES,
    STEP_PHASES,
    DrilledPlan,
    DrillRequest,
    Fault,
    drawn_faults,
    faults_by_time,
    most_between_saves,
    parse_fault,
    parse_random,
    require_possible,
    with_moments,
)
from plait.commands.drilling.injector import Injector, damage_checkpoint
from plait.commands.drilling.rank import write_unless_full
from plait.commands.drilling.report import DrillReport, FaultOutcome, InjectedFault, outcome_of
from plait.commands.drilling.running_ranks import RanksOnHost, RunningRanks
from plait.errors import PlaitError
from plait.launch.watching.board import ProgressBoard, SlotWriter
from plait.recipe.load import load_recipe
from plait.report.incidents import BackAtWork, Incident

PLAN = DrilledPlan(ranks=3, steps=60, save_every=10)


def test_faults_are_named_by_rank_and_step_or_by_step_alone() -> None:
    assert parse_fault("kill", "1@20") == Fault(kind="kill", rank=1, step=20)
    assert parse_fault("lose-host", "1@20") == Fault(kind="lose-host", rank=1, step=20)
    assert parse_fault("corrupt", "20") == parse_fault("corrupt", "@20") == Fault(kind="corrupt", step=20)
    for odd in ("1", "@3", "1@", "a@b", "1@2@3", "-1@2", "1@ 2"):
        with pytest.raises(PlaitError, match=r'write it as "1@20"'):
            parse_fault("hang", odd)
    for odd in ("1@20", "", "x", "-3"):
        with pytest.raises(PlaitError, match=r'write it as "20"'):
            parse_fault("fill-disk", odd)


def test_random_takes_a_number_or_a_time() -> None:
    assert [parse_random(text) for text in ("0", "5", "30min", "90 s")] == [(0, 0.0), (5, 0.0), (0, 1800.0), (0, 90.0)]
    for odd in ("", "many", "100000", "-3", "20 steps", "²"):
        with pytest.raises(PlaitError, match=r"--random .*such as 5, or for how long, such as 30min"):
            parse_random(odd)


def test_a_seed_draws_the_same_faults_and_another_seed_others() -> None:
    drawn = [drawn_faults(40, PLAN, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    require_possible(drawn[0], PLAN)
    assert {fault.kind for fault in drawn[0]} == set(DRAWN_KINDS)
    assert [fault.step for fault in drawn[0]] == sorted(fault.step for fault in drawn[0])


def test_phases_are_drawn_and_none_is_left_out() -> None:
    faults = [fault for seed in range(100) for fault in drawn_faults(3, PLAN, seed) if fault.kind in ("kill", "hang")]
    phases = Counter(fault.phase for fault in faults)
    assert phases.keys() == {*STEP_PHASES, *SAVE_PHASES}
    assert min(phases.values()) > mean(phases.values()) / 3
    named = [Fault(kind="kill", rank=1, step=20), Fault(kind="slow", rank=0, step=3)]
    moments = [with_moments(named, PLAN, seed) for seed in (3, 3, 4)]
    assert moments[0] == moments[1] != moments[2]
    assert moments[0][0].phase and not moments[0][1].phase  # slow is slow for two seconds, wherever it begins


def test_no_three_failures_are_drawn_between_two_saves() -> None:
    for seed in range(50):
        between = Counter(fault.step // 10 for fault in drawn_faults(5, PLAN, seed) if fault.restarts)
        assert max(between.values(), default=0) <= 2


def test_faults_by_time_come_about_every_twenty_seconds() -> None:
    faults = faults_by_time(PLAN, 7, seconds=1800)
    times = [0.0, *(fault.at_s or 0.0 for fault in faults)]
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 10 and max(gaps) <= 30 and 18 < mean(gaps) < 22
    assert times[-1] < 1620 and {fault.kind for fault in faults} == set(DRAWN_KINDS)
    assert len(faults_by_time(PLAN, 7, count=3)) == 3


@pytest.mark.slow
def test_without_saves_no_checkpoint_is_damaged_and_no_disk_fills() -> None:
    faults = drawn_faults(200, replace(PLAN, save_every=0), 5)
    assert {fault.kind for fault in faults} == set(DRAWN_KINDS) - {"fill-disk", "corrupt"}
    assert {fault.phase for fault in faults if fault.kind == "kill"} == set(STEP_PHASES)


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ([], "a drill needs a failure"),
        ([Fault(kind="kill", rank=3, step=3)], "the run has ranks 0 to 2"),
        ([Fault(kind="kill", rank=1, step=60)], "the run has 60 steps; choose one from 1 to 59"),
        ([Fault(kind="corrupt", step=45)], "needs two saves after it, .* choose a step up to 40"),
        ([Fault(kind="lose-host", rank=0, step=5)], "host 0 is this command itself"),
    ],
)
def test_what_the_run_cannot_have_is_refused(faults: list[Fault], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        require_possible(faults, PLAN)


@pytest.mark.parametrize(
    ("text", "fault", "sentence"),
    [
        ('[train]\nbudget = "60 steps"', Fault(kind="kill", step=60), "the run has 60 steps"),
        ("[layout]\nreplicate = 2", Fault(kind="kill", rank=2, step=5), "the run has ranks 0 to 1"),
        ('[checkpoint]\nevery = "never"', Fault(kind="corrupt", step=5), "saves at its end alone"),
        (
            '[train]\nbudget = "60 steps"\n[checkpoint]\nevery = "20 steps"',
            Fault(kind="fill-disk", step=30),
            "two saves",
        ),
    ],
)
def test_what_the_recipe_itself_rules_out_is_refused_before_anything_is_trained(
    text: str, fault: Fault, sentence: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(f'[data]\nfiles = "a.txt"\n{text}\n')
    with pytest.raises(PlaitError, match=sentence):
        require_possible([fault], facts_of_recipe(load_recipe(recipe, ()), 0))
    recipe.write_text('[data]\nfiles = "a.txt"\n')
    require_possible([replace(fault, rank=0)], facts_of_recipe(load_recipe(recipe, ()), 0))


def test_a_run_that_saves_at_its_end_alone_has_no_save_that_fails() -> None:
    with pytest.raises(PlaitError, match=r"saves at its end alone; name a shorter checkpoint\.every"):
        require_possible([Fault(kind="fill-disk", step=5)], replace(PLAN, save_every=0))


def test_named_and_drawn_faults_come_in_one_order() -> None:
    named = [Fault(kind="kill", rank=0, step=300), Fault(kind="hang", rank=1, step=10)]
    plan = replace(PLAN, steps=1000)
    faults = DrillRequest(named=named, seconds=60, seed=1).faults(plan, 0.1)
    reached = [fault.step if fault.at_s is None else fault.at_s / 0.1 for fault in faults]
    assert reached == sorted(reached) and len(faults) > 2
    now = DrillRequest(drawn=2, seed=1).faults(replace(plan, kinds=("kill",), steps_done=500), 0.1)
    assert len(now) == 2 and all(fault.kind == "kill" and fault.at_s for fault in now)
    with pytest.raises(PlaitError, match="choose one from 501 to 999"):
        DrillRequest(named=named[:1], seed=1).faults(replace(plan, steps_done=500), 0.1)


# What became of it.


def incident(generation: int, at: float, **more: Any) -> Incident:
    values: dict[str, Any] = {"cause": "killed", "what": "SIGKILL", "rank": 1, "host": None, "device": None}
    values |= {"step": 25, "place": "", "stack": "", "resumed_from": 20, "lost_s": 0.1, "found_after_s": 0.0}
    values |= {"decision": "started again", "sentence": "rank 1 was killed"}
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return Incident(generation=generation, at=moment, **(values | more))


def back(generation: int, seconds: float) -> BackAtWork:
    return BackAtWork(generation=generation, back_after_s=seconds)


KILL = Fault(kind="kill", rank=1, step=25)


def test_a_fault_is_followed_by_the_first_incident_after_it() -> None:
    incidents = [incident(1, 1000.5), incident(2, 1020.25, step=33)]
    found = outcome_of(KILL, InjectedFault(at=1020.0, step=25), incidents, [back(2, 0.5), back(3, 0.75)])
    assert (found.found_after_s, found.back_after_s, found.steps_lost) == (0.25, 1.0, 13)
    alone = outcome_of(KILL, InjectedFault(at=1030.0, step=25), incidents, [])
    assert alone == FaultOutcome(kind="kill", rank=1, step=25)
    unfinished = outcome_of(KILL, InjectedFault(at=1020.0, step=25), incidents, [back(2, 0.5)])
    assert unfinished.found_after_s == 0.25 and unfinished.back_after_s is None


def test_workers_that_die_again_on_their_way_back_are_back_after_the_later_start() -> None:
    incidents = [incident(1, 1000.5), incident(2, 1001.0)]
    assert outcome_of(KILL, InjectedFault(at=1000.0, step=25), incidents, [back(3, 0.75)]).back_after_s == 1.75


def test_each_kind_is_told_as_far_as_it_came() -> None:
    slow, full = Fault(kind="slow", step=3), Fault(kind="fill-disk", step=9)
    followed = [incident(1, 1000.5)], [back(2, 0.5)]
    told = outcome_of(KILL, InjectedFault(at=1000.0, step=25, phase="saving"), *followed)
    assert (told.found_after_s, told.back_after_s, told.steps_lost, told.phase) == (0.5, 1.0, 5, "saving")
    told = outcome_of(slow, InjectedFault(at=10.0, step=3, back_at=12.5), *followed)
    assert (told.found_after_s, told.back_after_s, told.steps_lost) == (None, 2.5, 0)
    told = outcome_of(full, InjectedFault(at=10.0, step=9, found_at=10.5, back_at=11.0), *followed)
    assert (told.found_after_s, told.back_after_s, told.steps_lost) == (0.5, 1.0, 0)
    for injected in (None, InjectedFault(at=10.0, step=9, failure="no save came")):
        told = outcome_of(full, injected, *followed)
        assert told.back_after_s is None
        assert "not carried out" in report(faults=[told], final_equal="bits").lines()[0]


def report(**values: Any) -> DrillReport:
    usual: dict[str, Any] = {"seed": 1, "faults": [], "samples_lost": 0, "samples_repeated": 0, "samples_skipped": 0}
    usual |= {"final_equal": "bits", "useful_share": 0.9, "loss_difference": 0.0}
    return DrillReport(**(usual | values))


def survived(kind: str) -> FaultOutcome:
    return FaultOutcome(kind=kind, rank=1, step=5, found_after_s=0.5, back_after_s=1.0, steps_lost=2)


def test_a_drill_is_well_where_nothing_was_lost_and_the_end_is_the_same() -> None:
    assert report(faults=[survived("kill")]).ok
    assert not report(faults=[replace(survived("kill"), back_after_s=None)]).ok
    assert not report(samples_lost=7).ok and not report(samples_repeated=7).ok
    assert not report(final_equal="no").ok and not report(ended_by="gave up").ok
    near = {"final_equal": "samples", "loss_difference": 1e-6}
    assert not report(faults=[survived("kill")], **near).ok
    assert report(faults=[survived("lose-host")], **near).ok
    assert not report(faults=[survived("lose-host")], **{**near, "loss_difference": 1e-4}).ok
    alone = {"final_equal": "samples", "loss_difference": None, "compared_with": "its own ledger"}
    assert report(faults=[survived("kill")], **alone).ok


def test_the_json_is_the_contract() -> None:
    values = json.loads(report(faults=[survived("corrupt")], loss_difference=None).to_json())
    assert values["ok"] and values.keys() >= {
        "faults",
        "samples_lost",
        "samples_repeated",
        "final_equal",
        "useful_share",
    }
    assert values["faults"][0].keys() >= {"kind", "step", "found_after_s", "back_after_s", "steps_lost"}


# What it does to files and processes.


def test_damage_is_what_the_dice_say_and_says_what_it_did(tmp_path: Path) -> None:
    kinds = Counter[str]()
    for seed in range(60):
        checkpoint = tmp_path / f"{seed}" / "step-10"
        checkpoint.mkdir(parents=True)
        before = {f"{name}": bytes(range(256)) * 20 for name in ("manifest.json", "rank-00000.safetensors")}
        for name, data in before.items():
            (checkpoint / name).write_bytes(data)
        what = damage_checkpoint(checkpoint, random.Random(seed))
        after = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        (hit,) = (name for name, data in before.items() if after.get(name) != data)
        assert f"step-10/{hit}" in what
        kinds[what.split()[0] if hit in after else "deleted"] += 1
        if what.startswith("bit"):
            (place,) = (at for at, (one, other) in enumerate(zip(before[hit], after[hit], strict=True)) if one != other)
            assert f"byte {place} " in what and (before[hit][place] ^ after[hit][place]).bit_count() == 1
    assert kinds.keys() == {"bit", "the", "deleted"}


def test_a_full_disk_takes_no_checkpoint_from_whichever_worker(tmp_path: Path) -> None:
    """Also from one that starts while it is full; with room again the same save goes well."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    tensors = {"model/w": whole_slice(torch.ones(4))}
    full = tmp_path / FAULT_FOLDER / FULL_DISK
    full.parent.mkdir()
    full.touch()
    for rank in (0, 1):
        with pytest.raises(NoRoom, match="the drill has filled the disk; earlier checkpoints"):
            write_unless_full(staging_for(checkpoints, 4), rank, tensors)
    assert not list(checkpoints.iterdir())
    full.unlink()
    write_unless_full(staging_for(checkpoints, 4), 0, tensors)
    assert (staging_for(checkpoints, 4) / part_files(0)[1]).exists()


def test_a_worker_is_killed_while_the_disk_is_full(tmp_path: Path) -> None:
    """The kill does not wait for the disk, which has room again once a save has failed."""
    board = ProgressBoard(2)
    os.set_inheritable(board.descriptor, True)
    checkpoint_appears(tmp_path / "checkpoints", 4)
    messages = tmp_path / FAULT_FOLDER
    ranks = RunningRanks(os.getpid(), [RanksOnHost(ranks=range(2), logs=tmp_path)])
    SlotWriter(board.descriptor, 0).step(7)
    faults = [Fault(kind="fill-disk", step=5), Fault(kind="kill", rank=1, step=6)]
    with ExitStack() as running:
        victims = []
        for rank in range(2):
            script = RANK.format(board=board.descriptor, log=str(tmp_path / f"rank-{rank}.log"), rank=rank)
            victims.append(running.enter_context(rank_process(script, board.descriptor)))
        with Injector(faults, ranks, folder=tmp_path, steps=60) as injector:
            assert victims[1].wait(60) == -signal.SIGKILL
            assert (messages / FULL_DISK).exists()
            checkpoint_appears(
                tmp_path / "checkpoints", 6
            )  # found room before the fault, and is no sign that there is some again
            (messages / FAILED_SAVE).touch()
            wait_until(lambda: not (messages / FULL_DISK).exists() and injector.injected[0].found_at is not None)
            assert injector.injected[0].back_at is None
            later_s = time.time()
            checkpoint_appears(tmp_path / "checkpoints", 8)
            wait_until(lambda: injector.injected[0].back_at is not None)
            assert (injector.injected[0].back_at or 0.0) >= later_s
        for victim in victims:
            victim.kill()
    board.close()


def checkpoint_appears(checkpoints: Path, step: int) -> None:
    staging = checkpoints / f".step-{step}.staging"
    staging.mkdir(parents=True)
    (staging / "manifest.json").touch()
    staging.rename(checkpoints / f"step-{step}")


def test_a_save_that_fails_counts_as_none_where_kills_are_drawn() -> None:
    kills = [Fault(kind="kill", step=step) for step in (12, 14, 22)]
    full = [Fault(kind="fill-disk", step=15)]
    assert most_between_saves(kills, 10) == 2
    assert most_between_saves([*kills, *full], 10) == 3


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.005)


RANK = """
import sys
from plait.launch.watching.board import SlotWriter
board = {board}
log = open({log!r}, "a")
writer = SlotWriter(board, {rank})
writer.step(7)
writer.phase("saving")
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def rank_process(script: str, board: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has published its step."""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        pass_fds=[board],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield process


def test_a_rank_is_found_by_its_log_and_read_from_outside(tmp_path: Path) -> None:
    board = ProgressBoard(2)
    os.set_inheritable(board.descriptor, True)
    log = tmp_path / "rank-1.log"
    ranks = RunningRanks(os.getpid(), [RanksOnHost(ranks=range(2), logs=tmp_path)])
    script = RANK.format(board=board.descriptor, log=str(log), rank=1)
    for _ in range(2):  # another process takes its place
        with rank_process(script, board.descriptor) as process:
            seen = ranks.published(1)
            assert ranks.pid(1) == process.pid and seen is not None
            assert (seen.step, seen.phase) == (7, "saving") and ranks.pid(0) is None
            process.send_signal(signal.SIGKILL)
        assert ranks.pid(1) is None and ranks.published(1) is None
    board.close()


def test_a_slot_that_nobody_wrote_in_says_nothing() -> None:
    from plait.launch.watching.board import published

    board = ProgressBoard(2)
    assert published(board.descriptor, 1) is None and published(board.descriptor, 100) is None
    writer = SlotWriter(board.descriptor, 0)
    writer.step(3)
    writer.phase("the fetch of data")
    seen = published(board.descriptor, 0)
    assert seen is not None and (seen.step, seen.phase, seen.longest_s) == (3, "the fetch of data", 0.0)
    board.close()
