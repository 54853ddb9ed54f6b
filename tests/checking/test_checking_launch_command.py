"""A person's launch command is read as the launcher itself would read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.checking.launch_command import read_launch_command, with_outputs_in
from plait.errors import PlaitError


@pytest.fixture(autouse=True)
def a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "name", "arguments", "workers"),
    [
        ("torchrun train.py", "train.py", (), None),
        ("torchrun --nproc-per-node 4 train.py --lr 1", "train.py", ("--lr", "1"), 4),
        ("torchrun --standalone --nnodes=1 --nproc_per_node=2 train.py", "train.py", (), 2),
        ("torchrun --nproc-per-node gpu train.py", "train.py", (), None),
        ("torchrun --nproc-per-node 2 -m pkg.train --lr 1", "pkg.train", ("--lr", "1"), 2),
        ("python -u train.py --steps 3", "train.py", ("--steps", "3"), None),
        ("python -m pkg.train a", "pkg.train", ("a",), None),
        ("python -m torch.distributed.run --nproc-per-node 3 train.py", "train.py", (), 3),
        ("accelerate launch --num_processes 2 --multi_gpu train.py --x", "train.py", ("--x",), 2),
        ("OMP_NUM_THREADS=1 torchrun train.py", "train.py", (), None),
        ("train.py --lr 2", "train.py", ("--lr", "2"), None),
    ],
)
def test_a_launch_command(line: str, name: str, arguments: tuple[str, ...], workers: int | None) -> None:
    found = read_launch_command(line.split())
    assert (found.name, found.arguments, found.workers) == (name, arguments, workers)


def test_variables_before_a_command_and_precision_reach_the_program() -> None:
    found = read_launch_command(["A=1", "accelerate", "launch", "--mixed_precision", "bf16", "train.py"])
    assert dict(found.environment) == {"A": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "needs the command"),
        ("torchrun", "command names no program"),
        ("torchrun gone.py", "gone.py does not exist"),
        ("torchrun --nnodes 4 train.py", "one machine"),
        ("srun python train.py", "Slurm"),
        ("python -c pass", "write the program to a file"),
        ("accelerate launch --use_deepspeed train.py", "not supported"),
        ("./run.sh", "does not know the launcher ./run.sh"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(line: str, told: str) -> None:
    with pytest.raises(PlaitError, match=told):
        read_launch_command(line.split())


def test_folders_for_outputs_are_replaced(tmp_path: Path) -> None:
    program = read_launch_command(["train.py", "--output_dir", "kept", "--save-dir=also", "--lr", "1"])
    moved, names = with_outputs_in(program, tmp_path)
    assert names == ("--output_dir", "--save-dir")
    assert moved.arguments == ("--output_dir", f"{tmp_path}/output_dir", f"--save-dir={tmp_path}/save_dir", "--lr", "1")
