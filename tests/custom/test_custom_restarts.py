"""A program under plait run that loses a worker: what follows, what is said, and the same weights to the bit."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from contextvars import copy_context
from pathlib import Path

import pytest
import torch
from torch import nn

import plait
from plait.commands.programs.restarting import ProgramRestarts
from plait.custom.process.launcher import LAUNCHER, RESUMED, SAVED, Launcher
from plait.custom.saving.folder import write_saved
from plait.errors import GaveUp, PlaitError
from plait.launch.values.failure import FailureFacts, WorkersFailed
from plait.launch.values.job import Message
from tests.custom.test_custom_programs import ENVIRONMENT

PROGRAM = """
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import plait

torch.set_default_dtype(torch.float64)


def loss_sum(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def trained(*words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    data = [(torch.randn(4), number % 2) for number in range(32)]
    run = plait.spread(model, torch.optim.AdamW(model.parameters(), lr=0.05), loss_sum=loss_sum)
    if "--resume" in words:
        run.resume("kept", missing="begin")
        print("from", run.steps)
    for batch in run.batches(data, batch=8, epochs=3):
        run.step(batch)
        if "--save" in words and run.steps % 4 == 0:
            run.save("kept")
        if "--kill" in words and run.steps == 10 and run.rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return run.weights()


found, undisturbed = trained(*sys.argv), trained()
print("equal", all(torch.equal(found[name], undisturbed[name]) for name in undisturbed))
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "my.py").write_text(PROGRAM)
    command = (sys.executable, "-m", "plait", "run", "my.py", "--workers", "2", "--", *arguments)
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_worker_costs_nothing_but_the_steps_since_the_last_save(tmp_path: Path) -> None:
    program = started(tmp_path / "hit", "--save", "--resume", "--kill")
    out, says = program.communicate(timeout=180)
    assert program.returncode == 0, (out, says)
    facts = [line for line in out.splitlines() if not line.startswith("plait:")]
    assert facts == ["from 0", "from 8", "equal True"]
    assert says.count("failure") == 1
    assert "failure  rank 1 was killed by SIGKILL; my.py starts again, to go on from step 8, saved in kept\n" in says


@pytest.mark.slow
def test_a_program_without_a_save_or_a_resume_is_not_begun_anew(tmp_path: Path) -> None:
    """One that saves and does not resume is stopped before a step saves over what is there."""
    unsaved, unread = (
        started(tmp_path / "unsaved", "--resume", "--kill"),
        started(tmp_path / "unread", "--save", "--kill"),
    )
    _, says = unsaved.communicate(timeout=180)
    assert unsaved.returncode == 1 and "failure" not in says, says
    assert 'a program that calls run.resume(FOLDER, missing="begin")' in says
    _, says = unread.communicate(timeout=180)
    assert unread.returncode == 2 and 'call run.resume("kept", missing="begin") before run.batches' in says, says
    assert [path.name for path in (tmp_path / "unread" / "kept").iterdir()] == ["step-8"]


KILLED = WorkersFailed(
    "rank 1 was killed by SIGKILL, often the kernel's out-of-memory killer",
    FailureFacts(cause="killed", rank=1, what="SIGKILL"),
    "if so, take smaller micro-batches",
)


@pytest.fixture
def restarts(tmp_path: Path) -> ProgramRestarts:
    made = ProgramRestarts("my.py", tmp_path)
    made.begins()
    return made


def tell(restarts: ProgramRestarts, kind: str, step: int, rank: int = 0) -> None:
    restarts.on_message(Message(rank=rank, kind=kind, values={"folder": "kept", "step": step}))


def test_without_a_save_the_end_says_what_helps_and_nothing_of_recipes(restarts: ProgramRestarts) -> None:
    tell(restarts, SAVED, 5, rank=1)  # of another host perhaps: it knows nothing of what is saved
    with pytest.raises(WorkersFailed) as raised:
        restarts.after(KILLED)
    assert str(raised.value) == (
        "rank 1 was killed by SIGKILL, often the kernel's out-of-memory killer; if so, take a smaller batch, "
        'accumulate=, layout="shard parameters" or recompute="full"; a program that calls run.resume(FOLDER, '
        'missing="begin") before run.batches, and run.save(FOLDER) every some steps, is started again by itself'
    )


def test_failures_without_a_new_save_come_to_an_end(restarts: ProgramRestarts) -> None:
    tell(restarts, RESUMED, 5)  # by the first start, from what an earlier command saved
    assert restarts.after(KILLED).endswith("my.py starts again, to go on from step 5, saved in kept")
    tell(restarts, SAVED, 10)
    assert restarts.after(KILLED).endswith("to go on from step 10, saved in kept")
    tell(restarts, RESUMED, 10)
    restarts.after(KILLED)
    with pytest.raises(GaveUp, match=r"3 failures without a new run.save.*goes on from step 10, saved in kept"):
        restarts.after(KILLED)


@pytest.mark.parametrize(
    ("cause", "what", "follows"),
    [("host lost", "", "starts again"), ("hung", "stopped", "starts again"), ("ended", "exit code 3", "rank-1.log")],
)
def test_a_lost_host_is_gone_on_without_and_a_program_that_ends_itself_stays_ended(
    restarts: ProgramRestarts, cause: str, what: str, follows: str
) -> None:
    tell(restarts, SAVED, 5)
    error = WorkersFailed("it went so", FailureFacts(cause=cause, rank=1, what=what))  # type: ignore[arg-type]
    if follows == "starts again":
        assert follows in restarts.after(error)
    else:
        with pytest.raises(WorkersFailed, match=follows):
            restarts.after(error)


def test_a_stop_by_a_person_is_no_failure_to_recover_from(restarts: ProgramRestarts) -> None:
    tell(restarts, SAVED, 5)
    stopped = WorkersFailed("rank 1 was killed by SIGKILL", KILLED.facts)
    stopped.stopped_by = "SIGINT"
    with pytest.raises(WorkersFailed):
        restarts.after(stopped)


def summed(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


def trained(folder: Path, *, resumes: bool) -> plait.SpreadRun:
    model = nn.Linear(3, 1)
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=summed)
    if resumes:
        run.resume(folder, missing="begin")
    for batch in run.batches(torch.ones(8, 3), batch=4):
        run.step(batch)
    run.save(folder)
    return run


def under(launcher: Launcher, folder: Path, *, resumes: bool) -> plait.SpreadRun:
    def call() -> plait.SpreadRun:
        LAUNCHER.set(launcher)
        return trained(folder, resumes=resumes)

    return copy_context().run(call)


def test_a_run_tells_its_launcher_what_is_saved(tmp_path: Path) -> None:
    told: list[tuple[str, object, object]] = []
    launcher = Launcher(lambda kind, **values: told.append((kind, values["folder"], values["step"])))
    under(launcher, tmp_path, resumes=True)
    assert under(launcher, tmp_path, resumes=True).steps == 2  # its batches were all taken before
    assert told == [(kind, str(tmp_path), 2) for kind in (SAVED, RESUMED, SAVED)]


def test_a_program_that_was_started_again_resumes_before_it_steps(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r'call run.resume\("kept", missing="begin"\) before run.batches'):
        under(Launcher(None, "kept"), tmp_path, resumes=False)
    assert under(Launcher(None, "kept"), tmp_path, resumes=True).steps == 2


def test_a_resume_may_begin_where_nothing_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=summed)
    assert run.resume(tmp_path / "none", missing="begin") is None
    with pytest.raises(PlaitError, match="holds no saved state"):
        run.resume(tmp_path / "none")
    with pytest.raises(PlaitError, match='choose "error" or "begin"'):
        run.resume(tmp_path / "none", missing="skip")  # type: ignore[arg-type]


def test_runs_that_save_to_one_folder_take_turns(tmp_path: Path) -> None:
    """Here another one is writing there; what is in its way is seen in the kernel's list of locks."""
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    saving = threading.Thread(target=write_saved, args=(tmp_path, 1, {}, {"model": {"w": torch.ones(2)}}), daemon=True)
    saving.start()
    inode = f":{tmp_path.stat().st_ino} "
    while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
        assert saving.is_alive()
    assert list(tmp_path.iterdir()) == []
    os.close(other)
    saving.join()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
