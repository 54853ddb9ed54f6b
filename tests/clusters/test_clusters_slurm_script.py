"""The sbatch script run by bash, with Slurm's programs played by small ones: what of a run's end queues it again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from plait.clusters.job import ClusterJob, NodeGroup
from plait.clusters.slurm import sbatch_script

SRUN = '#!/bin/sh\necho "$*" >>srun.calls\ncase "$*" in *true) exit;; esac\n{deed}\nexit {code}\n'
AGAIN = "touch .plait/web-17-1.again"


def end_of(folder: Path, nodes: int, *, code: int, deed: str = ":") -> tuple[int, bool]:
    """The script's exit code, and whether it asked to be queued again, as srun returns `code` after `deed`."""
    programs = folder / "bin"
    programs.mkdir()
    (folder / ".plait").mkdir()
    for name, text in {
        "srun": SRUN.format(deed=deed, code=code),
        "scontrol": '#!/bin/sh\necho "$*" >>scontrol.calls\necho NodeAddr=10.0.0.1 x\n',
        "sleep": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = ClusterJob(name="web", run="web", target=("a.toml",), groups=(NodeGroup(nodes=nodes, gpus=0),))
    variables = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "1"}
    path = f"{programs}:{os.environ['PATH']}"
    script = sbatch_script(job, {"python": "python3"})
    ended = subprocess.run(["bash"], input=script, text=True, cwd=folder, env={**variables, "PATH": path}, check=False)
    calls = folder / "scontrol.calls"
    return ended.returncode, calls.exists() and "requeue 17" in calls.read_text()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("code", "again"), [(75, True), (0, False), (2, False), (1, False), (137, False)])
def test_only_what_is_saved_and_not_done_is_queued_again(tmp_path: Path, nodes: int, code: int, again: bool) -> None:
    assert end_of(tmp_path, nodes, code=code) == (code, again)


def test_a_node_lost_earlier_does_not_keep_a_saved_run_from_being_queued_again(tmp_path: Path) -> None:
    """srun returns the highest code of all nodes, and node 0 leaves its own word beside the secret."""
    assert end_of(tmp_path, 2, code=137, deed=AGAIN) == (75, True)
    assert not (tmp_path / ".plait" / "web-17-1.again").exists()


def test_a_run_that_gave_up_is_not_queued_again(tmp_path: Path) -> None:
    assert end_of(tmp_path, 2, code=93) == (93, False)


def test_slurm_leaves_a_run_alone_that_survives_a_lost_node() -> None:
    """Where another node can queue the job again if node 0 is lost: not in containers, nor with several node lists."""

    def script(*nodes: int, image: str = "") -> str:
        groups = tuple(NodeGroup(nodes=count, gpus=0, partition=f"p{count}") for count in nodes)
        job = ClusterJob(name="web", run="web", target=("a.toml",), groups=groups)
        return sbatch_script(job, {"image": image} if image else {})

    assert script(2).count("--no-kill") == 2 and "#SBATCH --no-kill" in script(2)
    assert "--no-kill" not in script(1) + script(1, 2) + script(2, image="apptainer:a.sif")


def test_an_agent_that_ends_early_ends_no_other(tmp_path: Path) -> None:
    """A run may leave a node out, and go on without one that failed: srun waits for the rest however long it takes."""
    end_of(tmp_path, 2, code=0)
    started = (tmp_path / "srun.calls").read_text().splitlines()[-1]
    assert "--wait=0" in started and "--kill-on-bad-exit=0" in started
