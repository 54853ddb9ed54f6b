"""The example texts for schedulers that plait submit does not know, run by bash with those schedulers' programs played
by small ones: each node gets its own number, the same leader and the same secret's file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from plait.clusters.kubernetes import parse_patch
from plait.clusters.slurm import parse_own_lines

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
PLAIT = """#!/bin/sh
echo "$PLAIT_NODE_RANK $PLAIT_LEADER ${PLAIT_SECRET_FILE#$PWD/} $*" >>"$(dirname "$0")/nodes"
"""
ON_HOST = '#!/bin/sh\n[ "$1" = -z ] && shift\nshift\nexec "$@"\n'
MPIRUN = """#!/bin/sh
while [ "$1" != sh ]; do shift; done
OMPI_COMM_WORLD_RANK=0 "$@"; OMPI_COMM_WORLD_RANK=1 "$@"
"""
FLUX = """#!/bin/sh
case "$1" in
  resource) echo 2;;
  exec) echo ann;;
  getattr) echo 17;;
  run) while [ "$1" != sh ]; do shift; done; FLUX_TASK_RANK=0 "$@"; FLUX_TASK_RANK=1 "$@";;
esac
"""
CASES: tuple[tuple[str, str, Mapping[str, str], tuple[str, ...], str], ...] = (
    ("pbs.sh", "pbs_tmrsh", {"PBS_JOBID": "17"}, (), ON_HOST),
    ("lsf.sh", "blaunch", {"LSB_JOBID": "17"}, (), ON_HOST),
    ("flux.sh", "flux", {}, (), FLUX),
    ("mpirun.sh", "mpirun", {}, ("ann,bob",), MPIRUN),
)


@pytest.mark.parametrize(("script", "program", "variables", "arguments", "text"), CASES, ids=lambda one: str(one)[:9])
def test_each_node_knows_its_part(
    script: str, program: str, variables: Mapping[str, str], arguments: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in (("plait", PLAIT), (program, text)):
        (programs / name).write_text(body)
        (programs / name).chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("ann\nann\nbob\nbob\n")
    places = {"PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(hosts), "LSB_DJOB_HOSTFILE": str(hosts)}
    environment = {**places, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments], cwd=tmp_path, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0
    nodes = [line.split(" ", 3) for line in sorted((programs / "nodes").read_text().splitlines())]
    assert [rank for rank, *_ in nodes] == ["0", "1"]
    assert {leader for _, leader, *_ in nodes} == {"ann"}
    [secret] = {secret for _, _, secret, _ in nodes}
    assert secret.startswith(".plait/") and secret.endswith(".secret")
    assert {command for *_, command in nodes} == {"node --nodes 2 -- play.toml"}


def test_the_other_examples_are_read_as_they_are() -> None:
    lines = parse_own_lines((EXAMPLES / "slurm-lines.sh").read_text(), "slurm-lines.sh")
    assert "gpus-per-node" in lines.replaced and lines.shell[0] == "module load cuda/12.8"
    assert {"Pod", "JobSet"} == parse_patch((EXAMPLES / "kubernetes-patch.yaml").read_text(), "patch").keys()


@pytest.mark.parametrize(
    ("tool", "program", "volumes"),
    [
        ("skypilot", "sky", ["volumes apply --yes {folder}/volume.yaml"]),
        (
            "dstack",
            "dstack",
            [
                "apply --yes --file {folder}/fleet.yaml",
                *(f"apply --yes --file {{folder}}/volume.yaml --name play-work-{rank}" for rank in (0, 1)),
            ],
        ),
    ],
)
def test_rented_machines_have_a_volume_before_the_job_is_sent(
    tool: str, program: str, volumes: list[str], tmp_path: Path
) -> None:
    for name in (program, "plait"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/{name}.calls\n')
        (tmp_path / name).chmod(0o755)
    folder = EXAMPLES.parent / tool
    subprocess.run([folder / "submit.sh"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60, check=True)
    calls = [(tmp_path / f"{name}.calls").read_text().splitlines() for name in (program, "plait")]
    assert calls[0] == [line.format(folder=folder) for line in volumes]
    [submit] = calls[1]
    assert submit.startswith(f"submit play.toml --on {tool} --cluster 2x(8xH100) --nodes 2 ")
    assert "--with volume=play-work" in submit
    assert all(yaml.safe_load(file.read_text()) for file in folder.glob("*.yaml"))
