"""A few programs from beginning to end: proven, a fault named, what cannot be judged, Python and the pytest fixture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from faulty_cases import FIRST_FAULTS, changed
from forked_rank import start_forked
from program_texts import CLASSIFIER, LOOP
from rich.console import Console

from plait.checking.findings import CheckReport
from plait.checking.launch_command import read_launch_command
from plait.checking.launching import run_watched
from plait.commands.check import check, print_what_is_left, report_text
from plait.commands.python_call import screen_for
from plait.errors import PlaitError
from plait.screen.terminal import TerminalScreen


def checked(text: str, folder: Path, *, steps: int = 3, silent_s: float = 240) -> CheckReport:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    screen = screen_for("off")
    return check(["torchrun", str(program)], steps=steps, silent_s=silent_s, screen=screen, start=start_forked)


def test_a_sound_program_is_proven(tmp_path: Path) -> None:
    report = checked(CLASSIFIER, tmp_path)
    assert report.outcome == "proven" and report.exit_code == 0, report
    assert (report.steps, report.parameters, report.findings) == (3, 8, ())
    assert report.largest_error is not None and report.largest_error < 1e-6


def test_how_long_it_takes_is_said_once_after_two_steps(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CLASSIFIER, encoding="utf-8")
    paces: list[tuple[float, float]] = []
    run = run_watched(
        read_launch_command(["torchrun", str(program)]), tmp_path / "run", workers=2, steps=3, silent_s=240,
        limit_s=600, after_s=0, on_pace=lambda *pace: paces.append(pace), start=start_forked,
    )  # fmt: skip
    assert len(paces) == 1
    first_s, step_s = paces[0]
    assert 0 <= step_s < run.wall_s and 0 < first_s < run.wall_s


def test_a_short_check_says_nothing_of_its_time() -> None:
    shown = io.StringIO()
    screen = TerminalScreen(Console(file=shown))
    print_what_is_left(screen, 9.0, 3.0, 1.0)
    print_what_is_left(screen, 95.4, 30.21, 6.512)
    assert shown.getvalue() == (
        "expect   about 1 min 35 s more: 30 s to the first step, 6.5 s for each step after it\n"
    )


def test_a_missing_sum_is_named_with_its_first_parameter_and_line(tmp_path: Path) -> None:
    case = next(one for one in FIRST_FAULTS if one.name == "sum missing for the last layer")
    report = checked(case.text, tmp_path)
    assert report.exit_code == 1
    finding = report.faults[0]
    line = case.text.splitlines().index("    loss.backward()") + 1
    assert (finding.kind, finding.parameter) == ("missing_sum", "2.weight")
    assert finding.where.endswith(f"program.py:{line}")
    assert finding.fix in report_text(report, as_json=False)
    assert json.loads(report_text(report, as_json=True))["findings"][0]["kind"] == "missing_sum"


def test_batch_norm_is_found_after_an_evaluation_that_comes_first(tmp_path: Path) -> None:
    first = "    model.eval()\n    model(data[:8])\n    model.train()\n    for epoch in range(2):\n"
    changes = [
        ('dist.init_process_group("gloo")', 'dist.init_process_group("nccl", "env://")'),
        ("nn.LayerNorm(32)", "nn.BatchNorm1d(32)"),
        ("    for epoch in range(2):\n", first),
    ]
    report = checked(changed(CLASSIFIER, changes), tmp_path)
    assert [one.kind for one in report.faults] == ["batch_norm"], report
    assert 'the backend "nccl" was replaced by "gloo"' in report.changed


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([("optimizer.step()", "[p.data.sub_(p.grad) for p in model.parameters()]")], "no optimizer of torch.optim"),
        (
            [("loss = ((model(x) - y) ** 2).mean()", "loss = ((model(x) - y) ** 2).mean().sqrt()")],
            "not a mean or a sum",
        ),
        ([(" ** 2).mean()", " ** 2).mean() * 0")], "nothing to compare"),
        ([("        p.grad /= world\n", "        p.grad /= 0\n")], "is not finite in step 1"),
        ([("    loss.backward()\n", "    raise RuntimeError('as planned')\n")], "RuntimeError: as planned"),
        ([("        dist.all_reduce(p.grad)\n", "        rank or dist.all_reduce(p.grad)\n")], "is in all_reduce at"),
    ],
    ids=[
        "no optimizer",
        "a root of a mean",
        "no gradients",
        "gradients that are not finite",
        "an error",
        "ranks that wait for each other",
    ],
)
def test_what_cannot_be_judged_says_why(changes: list[tuple[str, str]], told: str, tmp_path: Path) -> None:
    report = checked(changed(LOOP, changes), tmp_path, silent_s=3)
    assert report.exit_code == 2
    assert told in report.reasons[0]


def test_nothing_is_left_in_the_program_s_folder(tmp_path: Path) -> None:
    saved = changed(LOOP, [("dist.destroy_process_group()", "torch.save(model.state_dict(), 'kept.pt')")])
    report = checked(saved, tmp_path)
    assert report.outcome == "proven"
    assert "torch.save wrote to a temporary folder" in report.changed
    assert [one.name for one in tmp_path.iterdir()] == ["program.py"] and not Path("kept.pt").exists()


@pytest.mark.parametrize(("workers", "steps"), [(1, 3), (2, 0), (0, 3)])
def test_numbers_that_prove_nothing_are_refused(workers: int, steps: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOOP, encoding="utf-8")
    with pytest.raises(PlaitError, match="choose"):
        check(["python", str(program)], workers=workers, steps=steps, screen=screen_for("off"))
