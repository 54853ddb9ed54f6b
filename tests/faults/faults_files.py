"""A9: killed at any point of a save. A10: damage is always found. A11: a full disk is survived."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.checkpoint import store
from plait.checkpoint.store import clean_staging, newest_good, prune, verify_checkpoint
from plait.commands.drilling.injector import damage_checkpoint
from tests.checkpoint.conftest import save_state
from tests.checkpoint.test_checkpoint_crash import disk_calls, killed_before
from tests.end_to_end.command import Place, flip_bit
from tests.faults.conftest import Drills, Results

DAMAGED, WHOLE = 200, 20
BUDGET = "train.budget=120 steps"


@pytest.fixture
def quick_disk() -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def test_a9_killed_at_every_call_of_a_save_there_is_a_checkpoint_that_verifies(
    quick_disk: Path, results: Results
) -> None:
    found = {}
    for before, start in {"beside an older one": 1, "over the same step": 2}.items():
        (quick_disk / before).mkdir()
        seed = save_state(quick_disk / before / "seed", start)

        def fresh(name: str, seed: Path = seed) -> Path:
            folder = seed.parents[1] / name
            shutil.copytree(seed, folder / seed.name)
            return folder

        def save_and_prune(folder: Path) -> None:
            save_state(folder, 2)
            prune(folder, 1, whole={2})

        reference = fresh("reference")
        points = len(disk_calls(lambda reference=reference: save_and_prune(reference)))
        steps = Counter[int]()
        for call in range(points):
            folder = fresh(f"kill-{call}")
            killed_before(call, lambda folder=folder: save_and_prune(folder))
            good = newest_good(folder)
            assert good is not None and not good.skipped, call
            clean_staging(folder)
            assert all(verify_checkpoint(path) for path in folder.iterdir())
            steps[good.manifest.step] += 1
        found[before] = {"points": points, "resumed from": {f"step {step}": n for step, n in sorted(steps.items())}}
    total = sum(one["points"] for one in found.values())
    results["A9"] = {"points": total, "verified": total, **found}
    assert total >= 100


def test_a9_runs_that_are_killed_while_they_write_go_on(drills: Drills, results: Results, seed: int) -> None:
    """The same in real runs, whose threads write: seeds whose kills are drawn for the time of a save."""
    dice, written = random.Random(f"{seed} writing"), 0
    for _ in range(40):
        if written >= 10:
            break
        drilled = drills.run("a9", BUDGET, "--kill", f"{dice.randrange(2)}@{dice.randint(10, 90)}", "--seed",
                             f"{writing_seed(dice)}")  # fmt: skip
        (fault,) = drilled.report["faults"]
        if fault["found_after_s"] is not None and fault["phase"] in ("saving", "writing a checkpoint"):
            assert drilled.report["final_equal"] == "bits", drilled
            written += 1
    results["A9 real runs"] = {"killed while they saved": written, "equal": written}
    assert written >= 10


def writing_seed(dice: random.Random) -> int:
    """A seed that draws a phase of saving for a single kill."""
    from plait.commands.drilling.faults import SAVE_PHASES, DrilledPlan, Fault, with_moments

    plan = DrilledPlan(ranks=2, steps=120, save_every=10)
    while True:
        seed = dice.randrange(1 << 30)
        if with_moments([Fault(kind="kill", rank=0, step=50)], plan, seed)[0].phase in SAVE_PHASES:
            return seed


def test_a10_damage_is_always_found_before_training(
    place: Place, results: Results, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.train("a10").code == 0
    whole, dice, kinds = place.path("a10") / "checkpoints", random.Random(f"{seed} damage"), Counter[str]()
    newest = place.checkpoints("a10")[-1]
    missed_without_hashes = 0
    for number in range(DAMAGED):
        folder = tmp_path / f"{number}"
        shutil.copytree(whole, folder)
        what = damage_checkpoint(folder / f"step-{newest}", dice)
        found = newest_good(folder)
        assert found is not None and found.manifest.step < newest and len(found.skipped) == 1, what
        file = next(word for word in what.split() if word.startswith(f"step-{newest}/"))
        assert Path(file).name in found.skipped[0], (what, found.skipped)
        kinds["bit" if what.startswith("bit") else "cut" if what.startswith("the last") else "deleted"] += 1
        with monkeypatch.context() as off:
            off.setattr(store, "check_file", lambda *_: None)
            try:
                unseen = newest_good(folder)
                missed_without_hashes += unseen is not None and unseen.manifest.step == newest
            except Exception:
                pass
        shutil.rmtree(folder)
    for _ in range(WHOLE):
        found = newest_good(whole)
        assert found is not None and found.manifest.step == newest and not found.skipped
    results["A10"] = {"damaged": DAMAGED, "found": DAMAGED, "kinds": dict(kinds), "whole ones refused": 0}
    results["A10 control"] = {"missed where files are not hashed": missed_without_hashes, "of": DAMAGED}
    assert missed_without_hashes > DAMAGED // 4


def test_a10_a_run_whose_checkpoints_are_all_damaged_never_begins_afresh(place: Place, results: Results) -> None:
    assert place.train("a10-all").code == 0
    for checkpoint in (place.path("a10-all") / "checkpoints").iterdir():
        flip_bit(next(checkpoint.glob("*.safetensors")))
    refused = place.train("a10-all", "train.budget=120 steps")
    assert refused.code == 2 and "none of the" in refused.sentence()
    results["A10 all damaged"] = {"exit code": refused.code, "sentence": refused.sentence()}


def test_a10_runs_pass_over_a_damaged_checkpoint_by_themselves(drills: Drills, results: Results, seed: int) -> None:
    dice, lost = random.Random(f"{seed} corrupt"), list[int]()
    for _ in range(3):
        step, own = dice.randint(25, 90), dice.randrange(1 << 30)
        drilled = drills.run("a10-drill", BUDGET, "--corrupt", f"{step}", "--seed", f"{own}")
        assert drilled.end.code == 0, drilled
        (fault,) = drilled.report["faults"]
        assert fault["steps_lost"] >= 10, "more than up to the newest checkpoint, as that one was damaged"
        assert "skipped  " in drilled.end.out
        lost.append(fault["steps_lost"])
    results["A10 runs"] = {"damaged": 3, "equal": 3, "steps lost": lost}


def test_a11_a_full_disk_is_survived(drills: Drills, results: Results, seed: int) -> None:
    dice = random.Random(f"{seed} disk")
    faults = []
    for _ in range(3):
        drilled = drills.run("a11", BUDGET, "--fill-disk", f"{dice.randint(10, 70)}", "--seed", "1")
        assert drilled.end.code == 0 and drilled.report["final_equal"] == "bits", drilled
        assert drilled.end.out.count("warning  could not save") == 1 and not drills.incidents("a11")
        faults += drilled.report["faults"]
    healthy = drills.place.train("a11-healthy", BUDGET)
    assert healthy.code == 0 and "could not save" not in healthy.out
    results["A11"] = {
        "full disks": len(faults),
        "equal": len(faults),
        "steps_lost": sum(fault["steps_lost"] for fault in faults),
        "saves again after s, most": max(fault["back_after_s"] for fault in faults),
        "warnings of a healthy run": 0,
    }
