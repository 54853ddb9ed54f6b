"""One program file under python, plait run, torchrun, srun's variables and two hosts: the same numbers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys

import torch
import torch.nn.functional as F
from torch import nn

import plait

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_sum(model, batch):
    inputs, labels = batch
    if "--fail" in sys.argv and run.rank == 1:
        raise ValueError("no such label")
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


run = plait.spread(model, optimizer, loss_sum=loss_sum)
data = [(torch.randn(4), number % 2) for number in range(32)]
for batch in run.batches(data, batch=8, epochs=2):
    loss = run.step(batch)
    if "--leave" in sys.argv and run.rank == 1 and run.steps == 3:
        break
print(f"workers {run.workers} loss {float(loss):.12f}")
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(PROGRAM)
    return path


def ended(*command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**ENVIRONMENT, **more}, capture_output=True, text=True, timeout=180, check=False
    )


def plait_run(program: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return ended(sys.executable, "-m", "plait", "run", program.name, *more, folder=program.parent)


def loss_of(text: str, workers: int) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith("workers ") and " loss " in line]
    assert line.startswith(f"workers {workers} "), line
    return float(line.split()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    path = tmp_path_factory.mktemp("alone") / "my.py"
    path.write_text(PROGRAM)
    found = ended(sys.executable, path.name, folder=path.parent)
    assert found.returncode == 0, found
    return loss_of(found.stdout, 1)


def test_plait_run_has_the_numbers_of_python(program: Path, alone: float) -> None:
    found = plait_run(program, "--workers", "2")
    assert found.returncode == 0, found
    assert loss_of(found.stdout, 2) == pytest.approx(alone, abs=1e-10)
    assert "workers  2" in found.stderr


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_own_traceback(program: Path) -> None:
    found = plait_run(program, "--workers", "2", "--", "--fail")
    assert found.returncode == 1, found
    line = next(n for n, text in enumerate(PROGRAM.splitlines(), start=1) if "raise ValueError" in text)
    assert f'File "{program}", line {line}, in loss_sum' in found.stderr
    assert found.stderr.count("Traceback") == 1 and "plait/custom/worker.py" not in found.stderr
    assert found.stderr.rstrip().splitlines()[-1].startswith("plait: rank 1 of my.py, line ")
    assert "failed with ValueError: no such label" in found.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_its_loop_earlier_ends_the_others(program: Path) -> None:
    found = plait_run(program, "--workers", "2", "--", "--leave")
    assert found.returncode == 1, found
    assert "left its loop earlier" in found.stderr


@pytest.mark.slow
def test_torchrun_has_the_numbers_of_python(program: Path, alone: float) -> None:
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    )
    found = ended(*torchrun, program.name, folder=program.parent)
    assert found.returncode == 0, found
    losses = {line.split()[-1] for line in found.stdout.splitlines() if line.startswith("workers 2 loss")}
    assert [float(loss) for loss in losses] == [pytest.approx(alone, abs=1e-10)]


@pytest.mark.slow
def test_srun_has_the_numbers_of_python(program: Path, alone: float) -> None:
    """Two tasks with the variables that srun sets."""
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost"}
    processes = [
        subprocess.Popen(
            [sys.executable, program.name],
            cwd=program.parent,
            env={**ENVIRONMENT, **common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [loss_of(text, 2) for text in outputs] == [pytest.approx(alone, abs=1e-10)] * 2


@pytest.mark.slow
def test_two_hosts_run_a_program_that_each_named(program: Path, alone: float, tmp_path: Path) -> None:
    secret, port = tmp_path / "secret", free_port()
    other, wrong = tmp_path / "other", tmp_path / "wrong"
    for folder, text in ((other, PROGRAM), (wrong, PROGRAM + "\nprint(1)\n")):
        folder.mkdir()
        (folder / "theirs.py").write_text(text)
    common = ("--secret-file", str(secret))
    lead = subprocess.Popen(
        [sys.executable, "-m", "plait", "run", "my.py", "--workers", "1", "--hosts", "2", "--address", "127.0.0.1",
         "--port", str(port), *common], cwd=program.parent, env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: listens(port), lead)
    join = (sys.executable, "-m", "plait", "join", f"127.0.0.1:{port}", *common)
    bare = ended(*join, folder=other)
    assert bare.returncode == 2 and "--program PROGRAM.py" in bare.stderr, bare
    unlike = ended(*join, "--program", "theirs.py", folder=wrong)
    assert unlike.returncode == 2 and "copy that file here" in unlike.stderr, unlike
    guest = ended(*join, "--program", "theirs.py", folder=other)
    out, err = lead.communicate(timeout=120)
    assert (lead.returncode, guest.returncode) == (0, 0), (out, err, guest)
    assert loss_of(out, 2) == pytest.approx(alone, abs=1e-10)
    assert "plait join 127.0.0.1" in err and "--program my.py" in err


@pytest.mark.slow
def test_a_module_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    """Its first host alone ends with the weights that one process has."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        (folder / "pkg").mkdir(parents=True)
        (folder / "pkg" / "net.py").write_text("from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n")
        (folder / "pkg" / "train.py").write_text(MODULE)
    port, secret = free_port(), tmp_path / "secret"
    common = ("-m", "pkg.train", "--secret-file", str(secret))
    lead = subprocess.Popen(
        [sys.executable, "-m", "plait", "run", *common, "--workers", "1", "--hosts", "2", "--address", "127.0.0.1",
         "--port", str(port)], cwd=folders[0], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    wait_for(lambda: listens(port), lead)
    join = [sys.executable, "-m", "plait", "join", f"127.0.0.1:{port}", *common]
    guest = subprocess.Popen(join, cwd=folders[1], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for((folders[1] / "waits").exists, lead)  # in a step after the first save
    guest.kill()
    guest.wait()
    out, err = lead.communicate(timeout=120)
    assert lead.returncode == 0 and "equal True" in out, (out, err)
    assert "-m pkg.train" in err and "pkg.train starts again, to go on from step 5, saved in kept\n" in err
    assert "was lost" in err and "workers  2 on 2 hosts: 1 + 1" in err and "workers  1\n" in err


@pytest.mark.slow
def test_a_host_that_comes_back_is_taken_in_after_a_save(tmp_path: Path) -> None:
    """Two hosts, one, two again: each start tells the workers that it has. A third host is not taken in."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "my.py").write_text(COMES_BACK)
    port, secret = free_port(), tmp_path / "secret"
    common = ("--secret-file", str(secret))
    lead = subprocess.Popen(
        [sys.executable, "-m", "plait", "run", "my.py", "--workers", "1", "--hosts", "2", "--address", "127.0.0.1",
         "--port", str(port), *common], cwd=folders[0], env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: listens(port), lead)
    join = [sys.executable, "-m", "plait", "join", f"127.0.0.1:{port}", "--program", "my.py", *common]
    guest = subprocess.Popen(join, cwd=folders[1], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for((folders[0] / "kept").exists, lead)
    third = ended(*join, folder=folders[1])
    assert third.returncode == 2 and "has all its hosts" in third.stderr, third
    guest.kill()
    guest.wait()
    wait_for(lambda: (folders[0] / "starts").read_text().split() == ["2", "1"], lead)
    again = subprocess.Popen(join, cwd=folders[1], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    out, err = lead.communicate(timeout=120)
    assert lead.returncode == again.wait(timeout=30) == 0, (out, err)
    assert (folders[0] / "starts").read_text().split() == ["2", "1", "2"]
    assert re.search(r"hosts    \S+ came; my\.py goes on from step \d+, saved in kept\n", err), err
    assert "equal True" in out


COMES_BACK = """
from pathlib import Path

import torch
from torch import nn

import plait

torch.set_default_dtype(torch.float64)


def loss_sum(model, batch):
    return (model(batch) ** 2).sum(), len(batch)


def begun(**options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return plait.spread(model, torch.optim.SGD(model.parameters(), lr=1e-5), loss_sum=loss_sum, **options)


data = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
run = begun()
run.resume("kept", missing="begin")
if run.rank == 0:
    with open("starts", "a") as starts:
        starts.write(f"{run.workers} ")
enough = None
for batch in run.batches(data, batch=4, epochs=10**6):
    run.step(batch)
    if run.steps % 20 == 0:
        run.save("kept")
        third = plait.broadcast(int(run.rank == 0 and len(Path("starts").read_text().split()) == 3))
        if third and enough is None:
            enough = run.steps + 40
        if run.steps == enough:
            break
alone = begun()
for batch in alone.batches(data, batch=4, epochs=10**6):
    alone.step(batch)
    if alone.steps == run.steps:
        break
print("equal", torch.allclose(run.weights()["weight"], alone.weights()["weight"], rtol=0, atol=1e-12))
"""


MODULE = """
import time
from pathlib import Path

import torch

import plait

from .net import Net


def loss_sum(model, batch):
    return (model(batch) ** 2).sum(), len(batch)


def trained(saves):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(3, 1)
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_sum=loss_sum)
    if saves:
        run.resume("kept", missing="begin")
    for batch in run.batches(torch.randn(64, 3), batch=4):
        run.step(batch)
        if saves and run.steps == 5:
            run.save("kept")
        if saves and run.steps == 7 and run.rank == 1:
            Path("waits").touch()
            time.sleep(60)
    return run.weights()["weight"]


print("equal", torch.allclose(trained(True), trained(False), rtol=0, atol=1e-12))
"""


@pytest.mark.slow
def test_two_runs_of_one_file_at_once_keep_their_words_apart(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "import plait\n"
        "me, other = sys.argv[1:]\n"
        "print('said by', me, flush=True)\n"
        "Path(f'{me}-{plait.rank()}').touch()\n"
        "while not Path(f'{other}-{plait.rank()}').exists():\n"
        "    time.sleep(0.05)\n"
    )
    command = (sys.executable, "-m", "plait", "run", "my.py", "--workers", "2", "--")
    runs = {
        me: subprocess.Popen(
            [*command, me, other], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ) for me, other in (("this", "that"), ("that", "this"))
    }  # fmt: skip
    folders = set[str]()
    for me, run in runs.items():
        out, err = run.communicate(timeout=120)
        folder = err.split()[-1]
        assert (run.returncode, out) == (0, f"said by {me}\n"), (out, err)
        assert (tmp_path / folder / "rank-1.log").read_text() == f"said by {me}\n"
        folders.add(folder)
    assert folders == {".plait/programs/my", ".plait/programs/my-2"}


@pytest.mark.slow
def test_a_function_of_a_notebook_runs_on_workers(tmp_path: Path) -> None:
    path = tmp_path / "caller.py"
    path.write_text(
        "import plait\nimport torch\nfrom torch import nn\n\n\n"
        "def work():\n"
        "    import plait\n"
        "    model = nn.Linear(3, 1)\n"
        "    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1),\n"
        "                       loss_sum=lambda model, batch: (model(batch).sum(), len(batch)))\n"
        "    for batch in run.batches(torch.ones(8, 3), batch=4):\n"
        "        run.step(batch)\n"
        "    print('workers', run.workers, 'steps', run.steps)\n\n\n"
        "if __name__ == '__main__':\n"
        "    plait.run(work, workers=2)\n"
        "    print('back')\n"
    )
    found = ended(sys.executable, path.name, folder=tmp_path)
    assert found.returncode == 0, found
    assert "workers 2 steps 2" in found.stdout and "back" in found.stdout


def wait_for(fact: Callable[[], bool], lead: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not fact():
        assert lead.poll() is None and time.monotonic() < deadline, lead.communicate()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
