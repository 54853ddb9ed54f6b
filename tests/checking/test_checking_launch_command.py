"""A person's launch command is read as the launcher itself would read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.checking.launch_command import read_launch_command, with_outputs_in
from plait.errors import PlaitError


@pytest.fixture(autouse=True)
def a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
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
        ("accelerate-launch --num_processes=2 -m pkg.train --x", "pkg.train", ("--x",), 2),
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


CONFIG = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n"


def test_accelerate_s_configuration_is_read_as_accelerate_launch_reads_it(tmp_path: Path) -> None:
    default = tmp_path / "home" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text(CONFIG, encoding="utf-8")
    Path("own.yaml").write_text(CONFIG.replace("4", "3").replace("bf16", "fp16"), encoding="utf-8")
    by_default = read_launch_command(["accelerate", "launch", "train.py"])
    assert (by_default.workers, by_default.environment) == (4, {"ACCELERATE_MIXED_PRECISION": "bf16"})
    named = read_launch_command(["accelerate", "launch", "--config_file", "own.yaml", "train.py"])
    assert (named.workers, named.environment) == (3, {"ACCELERATE_MIXED_PRECISION": "no"})
    assert named.changed == ("accelerate's mixed precision fp16, which needs a GPU, is off",)
    options = read_launch_command(
        ["accelerate", "launch", "--num_processes", "2", "--mixed_precision", "no", "train.py"]
    )
    assert (options.workers, options.environment) == (2, {"ACCELERATE_MIXED_PRECISION": "no"})
    default.write_text(CONFIG.replace("4", "1"), encoding="utf-8")
    assert read_launch_command(["accelerate", "launch", "train.py"]).workers is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CONFIG.replace("MULTI_GPU", "FSDP"), "own.yaml asks for FSDP, .*accelerate launch --multi_gpu train.py"),
        (CONFIG + "num_machines: 2\n", "num_machines 2: plait check runs on one machine"),
        ("a: [", "own.yaml, line 1 is not valid YAML"),
        ("", "own.yaml contains no keys"),
    ],
)
def test_a_configuration_of_accelerate_that_is_not_supported_is_one_sentence(text: str, told: str) -> None:
    Path("own.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(PlaitError, match=told):
        read_launch_command(["accelerate", "launch", "--config_file", "own.yaml", "train.py"])


def test_options_count_more_than_accelerate_s_configuration() -> None:
    Path("own.yaml").write_text(CONFIG.replace("MULTI_GPU", "FSDP"), encoding="utf-8")
    found = read_launch_command(["accelerate", "launch", "--config_file", "own.yaml", "--multi_gpu", "train.py"])
    assert found.workers == 4


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
        ("accelerate launch --config_file gone.yaml train.py", "gone.yaml, accelerate's configuration, does not exist"),
        ("accelerate launch --num_machines 2 train.py", "runs on one machine"),
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
