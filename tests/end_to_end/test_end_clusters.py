"""`plait submit --dry-run` as typed, and what stands in its manifests run as the pods would run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.clusters.kubernetes import INPUT_FOLDER, WORK_FOLDER
from plait.hosts.handshake import new_secret
from tests.clusters.strict import documents, pod_specs
from tests.end_to_end.command import Place, ended
from tests.end_to_end.conftest import RunWarm

EVEN = ("layout.shares=[4, 3]", 'balance.every="never"')
KINDS = ("jobset", "trainjob", "job")
LEADER = "127.36.0.1"
"""A loopback address of its own: the port that the manifests name is free there."""


def test_a_dry_run_needs_no_scheduler_and_prints_the_script_alone(
    place: Place, tmp_path: Path, run_warm: RunWarm
) -> None:
    words = ("submit", "tiny.toml", *EVEN, "--on", "slurm", "--cluster", "4x(1xserver)", "--nodes", "2")
    shown = run_warm(place, *words, "--dry-run", PATH="/nowhere")
    assert shown.code == 0 and shown.out.startswith("#!/bin/bash\n") and "efficiency" in shown.err
    kept = run_warm(place, *words, "--out", str(tmp_path / "files"), PATH="/nowhere")
    assert kept.code == 0 and not kept.err and "written  " in kept.out
    assert (tmp_path / "files" / "tiny.sbatch").read_text() == shown.out
    refused = run_warm(place, *words, PATH="/nowhere")
    assert refused.code == 2 and "sbatch is not on this machine" in refused.sentence()


def container_of(text: str) -> Mapping[str, Any]:
    """The container that each pod of a job runs: a TrainJob's trainer replaces that of its runtime."""
    values = {value["kind"]: value for value in documents(text)}
    if "TrainJob" in values:
        [pod] = pod_specs(values["TrainingRuntime"])
        trainer = values["TrainJob"]["spec"]["trainer"]
        return {**pod["containers"][0], "command": trainer["command"], "env": trainer["env"]}
    [pod] = pod_specs(values["JobSet"] if "JobSet" in values else values["Job"])
    return pod["containers"][0]


def environment_of(container: Mapping[str, Any], rank: int, secret_file: Path, leader: str) -> dict[str, str]:
    """What kubelet makes of a container's variables; the name of node 0's pod stands for an address."""
    found = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            found[variable["name"]] = str(rank)
        elif variable["name"] == "PLAIT_SECRET_FILE":
            assert variable["value"] == "/etc/plait-join/secret"
            found[variable["name"]] = str(secret_file)
        else:
            found[variable["name"]] = variable["value"]
    assert found["PLAIT_LEADER"] in ("pods-node-0-0.pods", "pods-0.pods")
    return {**found, "PLAIT_LEADER": leader}


@pytest.mark.slow
def test_the_manifests_own_command_and_environment_train(
    place: Place, reference: Callable[[int], str], run_warm: RunWarm, tmp_path: Path
) -> None:
    """Two processes in the folder that stands for the volume give the bits of a run on one machine; the manifests of
    all kinds have the same container, so that one kind's processes stand for all."""
    volume, secret = Place(tmp_path / "work"), new_secret().text
    words = ("tiny.toml", "run.name=pods", *EVEN, "--on", "kubernetes", "--cluster", "2x(1xserver)", "--nodes", "2")
    mounted = tmp_path / "secret"
    mounted.write_text(f"{secret}\n")
    mounted.chmod(0o600)
    found = []
    for kind in KINDS:
        shown = run_warm(volume, "submit", *words, "--kind", kind, "--with", "image=plait:cpu", "--dry-run")
        assert shown.code == 0 and secret not in shown.out, shown
        [inputs] = [value["data"] for value in documents(shown.out) if value["kind"] == "ConfigMap"]
        container = container_of(shown.out)
        environments = [environment_of(container, rank, mounted, LEADER) for rank in (1, 0)]
        found.append((inputs, container["command"], container["workingDir"], environments))
    assert found[0] == found[1] == found[2]
    (tmp_path / "input").mkdir()
    for name, text in inputs.items():
        (tmp_path / "input" / name).write_text(text)
    assert container["workingDir"] == WORK_FOLDER and container["command"][:4] == ["python3", "-P", "-m", "plait"]
    command = [word.replace(INPUT_FOLDER, str(tmp_path / "input")) for word in container["command"][1:]]
    pods = [start_pod(volume, command, environment) for environment in environments]
    other, leader = (ended(pod) for pod in pods)
    assert (leader.code, other.code) == (0, 0), (leader, other)
    assert volume.numbers("pods") == place.numbers(reference(2))
    assert volume.manifest("pods") == place.manifest(reference(2))
    assert secret not in leader.out + other.out and mounted.exists()
    assert not [path for path in volume.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def start_pod(volume: Place, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A pod's process, which begins whenever it likes."""
    assert sys.executable
    return volume.start(*command[3:], module=command[:3], environment=environment)
