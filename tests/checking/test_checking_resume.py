"""`plait check --resume` proves a program that resumes, and names what another one forgets."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_cases import changed
from forked_rank import start_forked

from plait.checking.findings import CheckReport
from plait.checking.working_copy import copy_working_folder
from plait.commands.check_resume import check_resume
from plait.commands.python_call import screen_for
from plait.errors import PlaitError

RESUMES = """
import os
import signal
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
torch.manual_seed(50 + rank)
data = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
path, done, stop = f"last-{rank}.pt", 0, []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))


def save():
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**states, "random": torch.get_rng_state(), "done": done}, path)


if os.path.exists(path):
    state = torch.load(path, map_location=f"cuda:{rank}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    done = state["done"]
while done < 12 and not stop:
    x = data[(done * world + rank) * 8 :][:8]
    loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    schedule.step()
    done += 1
    if stop:
        save()
dist.destroy_process_group()
"""
SAVES = "    if stop:\n        save()\n"
HANDLES = "signal.signal(signal.SIGTERM, lambda *_: stop.append(True))\n"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(folder: Path, *changes: tuple[str, str], again: tuple[str, ...] = (), grace_s: float = 30) -> CheckReport:
    (folder / "train.py").write_text(changed(RESUMES, changes), encoding="utf-8")
    report = check_resume(
        ["torchrun", "train.py"], again, silent_s=240, grace_s=grace_s, screen=screen_for("off"), start=start_forked
    )
    assert sorted(one.name for one in folder.iterdir()) == ["train.py"]
    return report


def test_a_program_that_resumes_is_proven(in_folder: Path) -> None:
    report = checked(in_folder)
    assert report.outcome == "proven" and report.findings == (), report
    assert (report.stopped_after, report.resumed_after) == (4, 4)
    assert "stopped after step 4 and started again, it continues as if it had never stopped" in str(report)


@pytest.mark.slow
def test_a_stop_without_a_handler_costs_the_steps_since_the_checkpoint(in_folder: Path) -> None:
    report = checked(in_folder, (HANDLES, ""), (SAVES, "    if done % 2 == 0:\n        save()\n"))
    assert report.outcome == "proven", report
    assert (report.stopped_after, report.resumed_after) == (3, 2)
    assert "after repeating 1 of its steps" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "kind", "text"),
    [
        ('    optimizer.load_state_dict(state["optimizer"])\n', "", "resumed_optimizer", "(step, exp_avg, exp_avg_sq)"),
        ('    schedule.load_state_dict(state["schedule"])\n', "", "resumed_schedule", "LambdaLR is at 0"),
        ('    torch.set_rng_state(state["random"])\n', "", "resumed_random", "draws different random numbers"),
        ('    done = state["done"]\n', "", "resumed_data", "rank 0 gets the batch of step 1 again"),
        ('    done = state["done"]\n', '    done = state["done"] + 1\n', "resumed_data", "a step's batch is skipped"),
        (
            '    model.load_state_dict(state["model"])\n',
            '    model.load_state_dict({k: v.bfloat16() for k, v in state["model"].items()})\n',
            "resumed_weights", "restored weights differ by",
        ),
        (
            '    model.load_state_dict(state["model"])\n',
            '    rank == 0 and model.load_state_dict(state["model"])\n',
            "resumed_weights", "step 4 on rank 0, step 0 on rank 1",
        ),
    ],
    ids=["optimizer", "schedule", "random numbers", "data again", "data skipped", "weights rounded", "one rank"],
)  # fmt: skip
def test_what_is_not_restored_is_named(old: str, new: str, kind: str, text: str, in_folder: Path) -> None:
    report = checked(in_folder, (old, new))
    rate = ["resumed_schedule"] if kind == "resumed_optimizer" else []
    assert [one.kind for one in report.faults] == [kind, *rate], report
    assert text in report.faults[0].what, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([(SAVES, "")], "saves no checkpoint in its first 4 steps"),
        ([("if os.path.exists(path):", 'if "--resume" in sys.argv:')], "give it, as in --resume-with"),
        ([("torch.manual_seed(3)", "torch.seed()")], "differ even without a stop: rank 0 has other losses in step 1"),
        ([("done < 12", "done < 4")], "takes only 4 optimizer steps"),
        ([('    done = state["done"]\n', "    raise ValueError('broken file')\n")], "the second start fails: "),
        ([('f"last-{rank}.pt"', 'f"/nowhere/last-{rank}.pt"')], "saves to /nowhere/last-0.pt, which the check leaves"),
    ],
    ids=["no checkpoint", "an argument is missing", "no seed", "too short", "second start fails", "saves elsewhere"],
)
def test_what_cannot_be_judged_says_why(changes: list[tuple[str, str]], told: str, in_folder: Path) -> None:
    report = checked(in_folder, *changes)
    assert report.exit_code == 2, report
    assert told in report.reasons[0]


@pytest.mark.slow
def test_arguments_of_the_second_start_are_appended(in_folder: Path) -> None:
    report = checked(in_folder, ("if os.path.exists(path):", 'if "--resume" in sys.argv:'), again=("--resume",))
    assert report.outcome == "proven", report


@pytest.mark.slow
def test_a_program_that_goes_on_after_sigterm_is_killed_as_a_scheduler_does(in_folder: Path) -> None:
    goes_on = [
        ("while done < 12 and not stop:", "while True:"),
        (SAVES, "    if done % 2 == 0 and done < 5:\n        save()\n"),
    ]
    endless = [
        *goes_on,
        ("x = data[(done * world + rank) * 8 :][:8]", "x = data[((done * world + rank) * 8) % 392 :][:8]"),
    ]
    report = checked(in_folder, *endless, grace_s=1)
    assert report.outcome == "proven", report
    assert "does not end within 1 s of SIGTERM" in report.reasons[0]


def test_a_folder_s_files_are_copied_and_large_data_is_linked(tmp_path: Path) -> None:
    folder, copy = tmp_path / "own", tmp_path / "copy"
    (folder / ".git").mkdir(parents=True)
    (folder / "runs").mkdir()
    (folder / "runs" / "old.pt").write_text("old", encoding="utf-8")
    (folder / "train.py").write_text("pass", encoding="utf-8")
    for name in ("large.txt", "large.pt"):
        with (folder / name).open("wb") as file:
            file.truncate((64 << 20) + 1)
    copy_working_folder(folder, copy, without=[folder / "runs"])
    assert sorted(one.name for one in copy.iterdir()) == ["large.pt", "large.txt", "train.py"]
    assert (copy / "large.txt").is_symlink() and not (copy / "large.pt").is_symlink()


def test_a_copy_inside_of_the_folder_is_not_copied_again(tmp_path: Path) -> None:
    """As where a check begins in the folder of temporary files; a link that leads nowhere does not end it."""
    (tmp_path / "train.py").write_text("pass", encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")
    copy = tmp_path / "plait-check-1" / "undisturbed" / "working"
    copy.mkdir(parents=True)
    copy_working_folder(tmp_path, copy)
    assert sorted(one.name for one in copy.iterdir()) == ["loop", "train.py"]
    with pytest.raises(PlaitError, match="cannot be copied"):
        copy_working_folder(tmp_path, tmp_path / "train.py" / "copy")


@pytest.mark.parametrize(("workers", "steps"), [(65, 6), (2, 3), (0, 6)])
def test_numbers_that_allow_no_stop_are_refused(workers: int, steps: int, in_folder: Path) -> None:
    (in_folder / "train.py").write_text(RESUMES, encoding="utf-8")
    with pytest.raises(PlaitError, match="choose"):
        check_resume(["python", "train.py"], workers=workers, steps=steps, screen=screen_for("off"))
