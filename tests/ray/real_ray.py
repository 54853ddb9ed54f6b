"""A real Ray of one node on this machine, and runs that plait submits to it: make test-ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import Place, ended, wait_while_running

ray = pytest.importorskip("ray", reason='Ray is an extra: pip install "plait[ray]"')
STEPS = 24
RECIPE = f"""
[data]
files = "play.txt"

[model]
layers = 2
width = 64
heads = 4
vocabulary = 300

[train]
sequence = 64
batch_tokens = 768
budget = "{STEPS} steps"
matmul_backend = "default"
precision = "float32"

[layout]
replicate = WORKERS

[run]
name = "play"
devices = "cpu"

[balance]
every = "never"

[checkpoint]
every = "8 steps"

[report]
evaluate = "never"
"""
ON_RAY = ("--on", "ray", "--cluster", "3x(1xserver)")
PATIENCE_S = 600


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    head = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=4", "--num-gpus=0"]
    lean = ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=80000000"]
    subprocess.run([*ray_command, "start", *head, *lean], check=True, timeout=PATIENCE_S)
    yield f"127.0.0.1:{port}"
    subprocess.run([*ray_command, "stop", "--force"], check=False, timeout=PATIENCE_S)


def submitted(folder: Path, address: str, workers: int, **environment: str) -> tuple[Place, subprocess.Popen[str]]:
    place = Place(folder, RECIPE.replace("WORKERS", str(workers)))
    words = ("submit", "tiny.toml", *ON_RAY, "--nodes", str(workers))
    return place, place.start(*words, environment={"RAY_ADDRESS": address, **environment})


@pytest.mark.parametrize("workers", [2, 3])
def test_actors_give_the_bits_of_a_run_without_ray(workers: int, address: str, tmp_path: Path) -> None:
    """The plan is that of the run on Ray; the same processes by plait train have the same losses and checkpoint."""
    place, command = submitted(tmp_path / "ray", address, workers)
    said = ended(command, within_s=PATIENCE_S)
    assert said.code == 0, said
    assert f"step {STEPS}/{STEPS}" in said.out, "what node 0 prints is seen here"
    local = Place(tmp_path / "local", RECIPE.replace("WORKERS", str(workers)))
    alone = local.train("play", "--no-check", f"run.workers={workers}", within_s=PATIENCE_S)
    assert alone.code == 0, alone
    assert place.numbers("play") == local.numbers("play")


def test_a_lost_actor_is_brought_back_and_takes_part_again(address: str, tmp_path: Path) -> None:
    place, command = submitted(tmp_path, address, 2)
    metrics = place.path("play") / "metrics.jsonl"
    wait_while_running(
        lambda: metrics.exists() and metrics.read_text().count('"loss"') >= 3, command, within_s=PATIENCE_S
    )
    [pid] = [agent for agent in agents() if node_rank(agent) == "1"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)  # the actor's process; its agent is signalled by the kernel
    said = ended(command, within_s=PATIENCE_S)
    assert said.code == 0 and "again    node 1 was lost; it is started again, and joins the run" in said.out, said
    assert metrics.read_text().count('"loss"') == STEPS
    assert json.loads((place.path("play") / "receipt.json").read_text())["steps"] == STEPS


def agents() -> list[int]:
    """The agents of all actors on this machine."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and path.name != str(os.getpid()):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"node" in words and b"tiny.toml" in words and b"-c" not in words:
                found.append(int(path.name))
    return found


def node_rank(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((one.partition(b"=")[2].decode() for one in variables if one.startswith(b"PLAIT_NODE_RANK=")), "")
