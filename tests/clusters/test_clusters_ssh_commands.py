"""What is typed on a machine by ssh, by this machine's own shell: an agent starts, is found, told to end, and told
apart from others that have its number since a reboot."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.clusters.job import ClusterJob, NodeGroup
from plait.clusters.ssh import (
    SshPlace,
    end_agent_command,
    follow_command,
    running_command,
    ssh_script,
    start_command,
)

JOB = ClusterJob(name="play", run="play", target=("a.toml",), groups=(NodeGroup(nodes=2, gpus=0),))
QUICK = 'echo "secret of ${#PLAIT_SECRET}, GPUs ${CUDA_VISIBLE_DEVICES:-all}"'
UNTIL_TOLD = "trap 'exit 75' TERM\nwhile :; do sleep 0.05; done"


def typed(command: str, stdin: str = "") -> str:
    done = subprocess.run(["sh", "-c", command], input=stdin, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., None]:
    def run(body: str, gpus: int | None = None) -> None:
        agent = tmp_path / "python"
        agent.write_text(f"#!/bin/sh\n{body}\n")
        agent.chmod(0o755)
        request = SshPlace(machines=("a", "b"), leader="10.0.0.1", folder=str(tmp_path), python=str(agent), gpus=gpus)
        assert typed(start_command(JOB, request, 0), "open sesame\n") == ""

    return run


@pytest.mark.parametrize(("gpus", "sees"), [(None, "all"), (2, "0,1")])
def test_an_agent_has_its_secret_and_its_gpus_and_is_followed_to_its_end(
    gpus: int | None, sees: str, start: Callable[..., None], tmp_path: Path
) -> None:
    start(QUICK, gpus)
    assert typed(follow_command("play", str(tmp_path))) == f"secret of 11, GPUs {sees}"
    assert typed(running_command("play", str(tmp_path), 0)) == "ended with exit code 0"
    assert not [path for path in tmp_path.iterdir() if b"sesame" in path.read_bytes()]


def test_an_agent_is_told_to_end_in_any_shell(start: Callable[..., None], tmp_path: Path) -> None:
    start(UNTIL_TOLD)
    assert typed(running_command("play", str(tmp_path), 0)) == "running"
    typed(end_agent_command("play", str(tmp_path), 0))
    deadline = time.monotonic() + 10
    while (said := typed(running_command("play", str(tmp_path), 0))) == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said == "ended with exit code 75"


def test_another_process_with_the_number_of_one_before_a_reboot_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / "play.node-0.pid").write_text(f"{other.pid}\n")
        for since in (None, "17\n"):
            if since is not None:
                (tmp_path / "play.node-0.since").write_text(since)
            assert typed(running_command("play", str(tmp_path), 0)) == "not running"
            typed(end_agent_command("play", str(tmp_path), 0))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_script_brings_the_wheel_from_any_folder_and_its_versions_with_it() -> None:
    """What --dry-run prints needs no file that is not there."""
    request = SshPlace(machines=("ann", "bob"), leader="10.0.0.1", environment="0123")
    script = ssh_script(JOB, request, "my folder/plait-1-py3-none-any.whl", "torch==2.13.0\n", ("a.toml",))
    assert script.count("scp 'my folder/plait-1-py3-none-any.whl' ") == 2
    assert 'python3 -m venv "$HOME"/.plait/environments/0123; ' in script
    assert "\ntorch==2.13.0\n" in script and script.count("'cat >plait-runs/lock.txt'") == 2
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
