"""The sbatch script run by bash, with Slurm's programs played by small ones: what of a run's end queues it again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from plait.clusters.job import ClusterJob, NodeGroup
from plait.clusters.slurm import parse_own_lines, sbatch_script
from plait.errors import PlaitError

SRUN = '#!/bin/sh\necho "$*" >>srun.calls\ncase "$*" in *true) exit;; esac\n{deed}\nexit {code}\n'
AGAIN = "touch .plait/web-17-1.again"


def end_of(
    folder: Path, nodes: int, *, code: int, deed: str = ":", start: int = 1, nodes_left: int | None = None
) -> tuple[int, bool]:
    """The script's exit code, and whether it asked to be queued again, as srun returns `code` after `deed`."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (folder / ".plait").mkdir(exist_ok=True)
    for name, text in {
        "srun": SRUN.format(deed=deed, code=code),
        "scontrol": '#!/bin/sh\necho "$*" >>scontrol.calls\necho NodeAddr=10.0.0.1 x\n',
        "sleep": "#!/bin/sh\n",
        "squeue": f"#!/bin/sh\necho {nodes if nodes_left is None else nodes_left}\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = ClusterJob(name="web", run="web", target=("a.toml",), groups=(NodeGroup(nodes=nodes, gpus=0),))
    variables = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": str(start)}
    variables["SLURM_JOB_NUM_NODES"] = str(nodes)
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


def test_only_a_start_that_lost_a_node_costs_later_ones_the_number_of_a_step(tmp_path: Path) -> None:
    """That node may come back, and would cancel the step of its number."""

    def numbers_taken(start: int, **end: int) -> int:
        (tmp_path / "srun.calls").unlink(missing_ok=True)
        end_of(tmp_path, 2, start=start, **end)
        return (tmp_path / "srun.calls").read_text().count("true\n")

    assert numbers_taken(0, code=75) == 0
    assert numbers_taken(1, code=75, nodes_left=1) == 0
    assert numbers_taken(2, code=137) == 1
    assert not list(tmp_path.glob(".plait/*.whole")), "the job is over"
    assert numbers_taken(3, code=75) == 3, "nothing is known of the starts before"


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


OWN = """#!/bin/bash
#SBATCH --mail-type=END
#SBATCH -w n[1-4]
#SBATCH --gres=gpu:h100:8
#SBATCH --array=0-3
# a note
module load cuda/12.8
export PLAIT_LEADER=$(hostname -s)-ib
"""


def test_own_lines_pass_through_and_stand_for_plaits_own() -> None:
    """Typed GPUs, mail, a list of nodes, an array, modules, another network."""
    groups = (NodeGroup(nodes=2, gpus=8),)
    job = ClusterJob(name="web", run="web", target=("a.toml", "run.name=web"), groups=groups)
    lines = sbatch_script(job, {"python": "python3"}, parse_own_lines(OWN, "own.sh")).splitlines()
    assert {"#SBATCH --mail-type=END", "#SBATCH -w n[1-4]", "#SBATCH --gres=gpu:h100:8"} <= set(lines)
    assert not any("--gpus-per-node" in line for line in lines) and "#SBATCH --nodes=2" in lines
    # Before set -u, which modules' functions do not stand, and before node 0 is looked up.
    assert lines.index("module load cuda/12.8") < lines.index("set -u")
    assert any(line.startswith("PLAIT_LEADER=${PLAIT_LEADER:-") for line in lines)
    # Only these lines may name node 0: the submitting shell, whose variables sbatch hands on, may be of another job.
    assert lines.index("unset PLAIT_LEADER PLAIT_NODE_RANK") < lines.index("module load cuda/12.8")
    [start] = [line for line in lines if " node --nodes 2 " in line]
    assert start.endswith('"run.name=web-$SLURM_ARRAY_TASK_ID" "run.seed=$SLURM_ARRAY_TASK_ID"')


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#SBATCH --nodes=9", "own.sh:1: plait submit sets --nodes itself; take the line out and use --nodes"),
        ("#SBATCH -t 5", "sets --time itself"),
        ("#SBATCH --output=x", "sets --output itself; take the line out$"),
        ("#SBATCH", "names no option of sbatch"),
    ],
)
def test_own_lines_may_not_change_what_plait_counts_on(line: str, says: str) -> None:
    with pytest.raises(PlaitError, match=says):
        parse_own_lines(f"{line}\n", "own.sh")


def test_an_agent_is_bound_to_the_cores_that_were_asked_for_and_to_none_of_a_whole_node() -> None:
    job = ClusterJob(name="web", run="web", target=("a.toml",), groups=(NodeGroup(nodes=2, gpus=0),))
    whole, part = (sbatch_script(job, {"python": "python3", **cpus}) for cpus in ({}, {"cpus": "16"}))
    assert "--cpu-bind=none" in whole and "--exclusive" in whole
    own = sbatch_script(job, {"python": "python3"}, parse_own_lines("#SBATCH --cpus-per-task=8\n", "own.sh"))
    assert "--cpu-bind" not in own and '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in own and "--exclusive" not in own
    assert "--cpu-bind" not in part and "--cpus-per-task=16" in part.partition("srun --kill")[2]
