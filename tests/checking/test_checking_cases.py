"""Planted faults are named by kind and parameter, and sound programs are proven: the whole matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_cases import FIRST_FAULTS, SECOND_FAULTS, FaultyCase, changed
from forked_rank import start_forked
from program_texts import CLASSIFIER
from sound_cases import FIRST_SOUND, SECOND_SOUND, SoundCase

from plait.checking.findings import CheckReport
from plait.commands.check import check
from plait.commands.python_call import screen_for

pytestmark = pytest.mark.slow


def checked(text: str, folder: Path, workers: int, *arguments: str) -> CheckReport:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    command = ["torchrun", "--nproc-per-node", str(workers), str(program), *arguments]
    return check(command, silent_s=240, screen=screen_for("off"), start=start_forked)


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


@pytest.mark.parametrize(("weight", "kinds"), [("0.1 *", []), ("0.1 / world_size *", ["world_size"])])
def test_a_factor_of_the_loss_is_the_program_s_own_only_if_it_does_not_follow_the_ranks(
    weight: str, kinds: list[str], tmp_path: Path
) -> None:
    loss = "F.cross_entropy(logits, y)"
    report = checked(changed(CLASSIFIER, [(loss, f"{weight} {loss}")]), tmp_path, 2)
    assert [one.kind for one in report.faults] == kinds, report


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
