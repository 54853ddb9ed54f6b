"""Planted faults are named by kind and parameter, and sound programs are proven: the whole matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_cases import FIRST_FAULTS, SECOND_FAULTS, FaultyCase, changed
from forked_rank import check_in_forks
from program_texts import CLASSIFIER, LOOP
from sound_cases import ACCUM_HALVES, FIRST_SOUND, PLAIN, SECOND_SOUND, SoundCase

from plait.checking.findings import CheckReport

pytestmark = pytest.mark.slow


def checked(text: str, folder: Path, workers: int, *arguments: str) -> CheckReport:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    return check_in_forks(program, workers, *arguments)


@pytest.mark.parametrize("case", [*FIRST_FAULTS, *SECOND_FAULTS], ids=lambda case: case.name)
def test_a_fault_is_named(case: FaultyCase, tmp_path: Path) -> None:
    pytest.importorskip(case.needs or "torch")
    report = checked(case.text, tmp_path, 2)
    named = [one for one in report.findings if one.kind == case.kind]
    assert named, report
    assert case.parameter in ("", named[0].parameter), report
    assert named[0].is_fault is not case.is_note
    assert report.outcome == ("proven" if case.is_note else "differs"), report
    assert [one.kind for one in report.faults] == [case.kind] * (not case.is_note), report


@pytest.mark.parametrize("case", [*FIRST_SOUND, *SECOND_SOUND], ids=lambda case: case.name)
def test_a_sound_program_is_proven(case: SoundCase, tmp_path: Path) -> None:
    pytest.importorskip(case.needs or "torch")
    report = checked(case.text, tmp_path, case.workers, *case.arguments)
    assert report.outcome == "proven", report


_EACH = 'F.cross_entropy(logits, y, reduction="none").sum()'


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        ("0.1 * F.cross_entropy(logits, y)", []),
        ("0.1 / world_size * F.cross_entropy(logits, y)", ["world_size"]),
        (f"0.3 * {_EACH} / 8", []),
        (f"{_EACH} * (0.3 / 8)", []),
        (f"{_EACH} * world_size / 1000", []),
        (f"{_EACH} / 1000", []),
        (f"{_EACH} / 8 / world_size", ["world_size"]),
        (_EACH, ["world_size"]),
    ],
)
def test_a_factor_of_the_loss_is_the_program_s_own_only_if_it_does_not_follow_the_ranks(
    loss: str, kinds: list[str], tmp_path: Path
) -> None:
    report = checked(changed(CLASSIFIER, [("F.cross_entropy(logits, y)", loss)]), tmp_path, 2)
    assert [one.kind for one in report.faults] == kinds, report
    assert report.outcome == ("differs" if kinds else "proven"), report


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        ("0.5 * F.cross_entropy(model(a), b) / 2", []),
        ("2 * F.cross_entropy(model(a), b) / 2", []),
        ("F.cross_entropy(model(a), b) / 2 / 2", ["accumulation"]),
        ("F.cross_entropy(model(a), b)", ["accumulation"]),
    ],
)
def test_a_factor_as_large_as_the_micro_batches_needs_a_division_that_is_missing_or_twice_there(
    loss: str, kinds: list[str], tmp_path: Path
) -> None:
    halves = ACCUM_HALVES.replace("F.cross_entropy(model(a), b) / 2", loss)
    report = checked(changed(CLASSIFIER, [(PLAIN, halves)]), tmp_path, 2)
    assert [one.kind for one in report.faults] == kinds, report


def test_an_optimizer_of_the_program_s_own_is_not_judged_by_torch_s_rule(tmp_path: Path) -> None:
    own = "class AdamW(torch.optim.SGD):\n    pass\n\n\ndef main():\n"
    changes = [("def main():\n", own), ("torch.optim.SGD(model.parameters()", "AdamW(model.parameters()")]
    report = checked(changed(CLASSIFIER, changes), tmp_path, 2)
    assert report.outcome == "proven", report
    assert any("the program's own.AdamW was not recomputed" in one for one in report.reasons), report


def test_an_order_that_cannot_be_known_is_said(tmp_path: Path) -> None:
    report = checked(LOOP, tmp_path, 2)
    assert any("without a DataLoader" in one for one in report.reasons), report


def test_a_rank_that_steps_less_often_is_a_fault(tmp_path: Path) -> None:
    report = checked(
        changed(LOOP, [("    optimizer.step()\n", "    if rank == 0 or step < 6:\n        optimizer.step()\n")]),
        tmp_path,
        2,
    )
    assert "uneven_steps" in [one.kind for one in report.faults], report
    assert any("8 on rank 0, 6 on rank 1" in one.what for one in report.faults), report


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    saves = (
        "import glob, os\nfor at in ('one', 'two'):\n    torch.save(at, f'{at}/kept.pt')\n"
        "found = glob.glob(os.environ['WANDB_DIR'] + f'/saved-by-rank-{rank}/**/kept.pt', recursive=True)\n"
        "assert len(found) == 2, found\n"
    )
    end = "dist.destroy_process_group()"
    report = checked(changed(LOOP, [(end, saves + end)]), tmp_path, 2)
    assert report.outcome == "proven", report


def test_a_program_that_loads_its_optimizer_is_proven(tmp_path: Path) -> None:
    optimizer = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
    loads = (
        "    state = optimizer.state_dict()\n    for index, p in enumerate(net.parameters()):\n"
        "        ones = {'exp_avg': torch.ones_like(p), 'exp_avg_sq': torch.ones_like(p)}\n"
        "        state['state'][index] = {'step': torch.tensor(3.0), **ones}\n"
        "    optimizer.load_state_dict(state)\n    for epoch in range(2):\n"
    )
    changes = [
        (optimizer, "torch.optim.AdamW(model.parameters(), lr=0.01)"),
        ("    for epoch in range(2):\n", loads),
    ]
    report = checked(changed(CLASSIFIER, changes), tmp_path, 2)
    assert report.outcome == "proven", report
    assert any("had state before its first step" in one for one in report.reasons)
