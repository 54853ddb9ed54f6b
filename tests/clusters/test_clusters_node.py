"""A node of a job that waits for node 0: when it gives up, and what it then says."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest

from plait.clusters import node
from plait.clusters.node import (
    NodePlace,
    count_fruitless_starts,
    queued_again,
    requeue_if_leader_lost,
    tell_scheduler,
    work_on_node,
)
from plait.errors import GaveUp, PlaitError, RunFailed, StartAgain, StopSignal
from plait.hosts.handshake import new_secret
from plait.process_exit import exit_code_of
from plait.screen.screen import SilentScreen
from plait.workers import CannotGoOn
from plait.working_folder import WorkingFolder
from tests.slurm.cluster import free_ports


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('[data]\nfiles = "a.txt"\n')
    return ("a.toml",)


def test_a_node_that_comes_too_late_says_so_at_once(tmp_path: Path, target: tuple[str, ...]) -> None:
    """Node 0's file with the secret was there, and is gone: nobody waits any more."""
    file = tmp_path / "secret"
    file.write_text(f"{new_secret().text}\n")
    file.chmod(0o600)
    place = NodePlace(nodes=2, rank=1, leader="127.0.0.1", port=free_ports(1)[0], secret_file=file)
    ends = threading.Timer(1.0, file.unlink)
    ends.start()
    began = time.monotonic()
    with pytest.raises(RunFailed, match="node 0 ended before this node could join it"):
        work_on_node(target, place, SilentScreen())
    assert 0.9 < time.monotonic() - began < 20


class Recording(SilentScreen):
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


def test_a_host_that_takes_its_own_name_for_loopback_leads_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Debian's /etc/hosts and many containers have it; an address that was named, and a real name, stay."""
    own = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "fd00::5": "eth0"}
    known = {"node-1": ["127.0.1.1"], "node-2": ["10.9.9.9", "10.0.0.5"], "127.0.0.1": ["127.0.0.1"]}
    monkeypatch.setattr(node, "local_addresses", lambda: own)
    monkeypatch.setattr(node, "_addresses_of", known.__getitem__)
    screen = Recording()
    assert node.own_address("127.0.0.1", screen) == "127.0.0.1"
    assert node.own_address("node-2", screen) == "10.0.0.5" and not screen.lines
    del own["fd00::5"]
    assert node.own_address("node-1", screen) == "10.0.0.5"
    assert screen.lines[0].startswith("address  10.0.0.5: node-1 means 127.0.1.1 here, by which no other host")
    del own["10.0.0.5"]
    monkeypatch.setattr(node.socket.socket, "connect", unreachable)
    with pytest.raises(PlaitError, match=r"this host has no other; let the name resolve to the address"):
        node.own_address("node-1", screen)


def unreachable(one: object, address: object) -> None:
    raise OSError(101, "Network is unreachable")


def test_a_secret_that_is_none_is_not_tried_again(tmp_path: Path, target: tuple[str, ...]) -> None:
    file = tmp_path / "secret"
    file.write_text("open sesame\n")
    file.chmod(0o600)
    place = NodePlace(nodes=2, rank=1, leader="127.0.0.1", port=free_ports(1)[0], secret_file=file)
    with pytest.raises(PlaitError, match="not of that form"):
        work_on_node(target, place, SilentScreen())


def test_an_error_in_the_recipe_is_node_0s_own_and_leaves_no_secret(tmp_path: Path, target: tuple[str, ...]) -> None:
    file = tmp_path / "kept" / "secret"
    place = NodePlace(nodes=2, rank=0, leader="127.0.0.1", port=free_ports(1)[0], secret_file=file)
    with pytest.raises(PlaitError, match=r"a\.txt"):
        work_on_node(target, place, SilentScreen())
    assert file.parent.is_dir() and not file.exists()


@pytest.mark.parametrize(("rank", "code", "told"), [(0, 75, True), (0, 0, False), (0, 1, False), (1, 75, False)])
def test_node_0_alone_says_that_a_saved_run_is_to_go_on(tmp_path: Path, rank: int, code: int, told: bool) -> None:
    place = NodePlace(nodes=2, rank=rank, leader="a", secret_file=tmp_path / "web-17-0.secret")
    tell_scheduler(("play.py",), place, code)
    assert (tmp_path / "web-17-0.again").exists() == told


def test_a_job_whose_starts_save_no_new_step_is_not_queued_again(tmp_path: Path) -> None:
    """Three in a row; a new step begins the count again, and so does another job."""
    working = WorkingFolder(tmp_path)

    def starts(job: str, steps: Sequence[int]) -> list[bool]:
        went_on = []
        for step in steps:
            try:
                count_fruitless_starts(job, step, working)
                went_on.append(True)
            except GaveUp as error:
                assert error.exit_code == 93 and f"Slurm job {job} in a row saved no step after step {step}" in str(
                    error
                )
                went_on.append(False)
        return went_on

    assert starts("17", [3, 3, 3, 3]) == [True, True, True, False]
    assert starts("18", [0, 0, 4, 4, 4, 9]) == [True] * 6
    assert starts("19", [0, 0, 0]) == [True, True, False]


def test_the_count_reads_the_runs_own_checkpoints(
    tmp_path: Path, target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    place = NodePlace(nodes=2, rank=0, leader="a", secret_file=tmp_path / "web-17-0.secret")
    for again in (True, True, False):
        (tmp_path / "web-17-0.again").unlink(missing_ok=True)
        with nullcontext() if again else pytest.raises(GaveUp, match="saved no step after step 0"):
            tell_scheduler(target, place, 75)
        assert (tmp_path / "web-17-0.again").exists() == again


def test_a_run_that_needs_a_lost_node_asks_its_scheduler_for_another() -> None:
    """Exit code 75 queues the job again; outside Slurm the sentence comes with it."""
    lost, screen = CannotGoOn("n2 was lost, and the hosts that are left cannot carry the run", None), Recording()
    assert exit_code_below_slurm(queued_again(lost, screen, {"SLURM_JOB_ID": "17"})) == 75
    assert screen.lines == [f"requeue  {lost}"]
    with pytest.raises(StartAgain) as elsewhere:
        queued_again(lost, screen, {})
    assert elsewhere.value.exit_code == 75 and str(elsewhere.value) == str(lost)


def exit_code_below_slurm(stopped_by: Literal["finished", StopSignal]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "17")
        return exit_code_of(stopped_by)


SCONTROL = """#!/bin/sh
echo "$*" >>"$0.calls"
case "$*" in
*"hostnames n[1-2]") echo n1; echo n2;;
*hostnames*) echo "$3";;
*"show job"*) echo "JobId=17 JobState=RUNNING NodeList=$(cat "$0.nodes") BatchHost=n1";;
esac
"""
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("rank", "lost_at", "ends_at", "extra", "requeued"),
    [
        (1, 2, None, {}, True),  # Slurm takes node 0 from the job, which goes on: real Slurm 22.05 with --no-kill
        (1, None, 2, {}, False),  # node 0 ends by itself
        (9, 0, None, {}, False),
        (1, 0, None, {"SLURM_HET_SIZE": "2"}, False),
        (1, 0, None, {"SLURM_JOB_ID": ""}, False),
    ],
)
def test_a_job_that_lost_its_node_0_is_queued_again_by_another(
    rank: int,
    lost_at: int | None,
    ends_at: int | None,
    extra: dict[str, str],
    requeued: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    nodes, secret, looks = program.with_suffix(".nodes"), tmp_path / "web-17-0.secret", iter(range(10))
    secret.write_text("a secret")

    def wait(seconds: float) -> None:
        at = next(looks)
        nodes.write_text("n2" if lost_at is not None and at + 1 >= lost_at else "n[1-2]")
        if ends_at is not None and at + 1 >= ends_at:
            secret.unlink()

    nodes.write_text("n2" if lost_at == 0 else "n[1-2]")
    requeue_if_leader_lost(rank, secret, SilentScreen(), environment={**SLURM, **extra}, wait=wait)
    calls = program.with_suffix(".calls")
    assert ("requeue 17" in (calls.read_text() if calls.exists() else "")) == requeued


@pytest.mark.parametrize(("job", "limit"), [("17", "LISTENS_AT_LATEST_S"), (None, "JOIN_AT_LATEST_S")])
def test_a_file_that_a_killed_node_0_left_is_not_waited_on_for_ever(
    job: str | None, limit: str, tmp_path: Path, target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below Slurm node 0 makes the file just before it listens; elsewhere the file may have come with the job."""
    monkeypatch.setattr(node, limit, 1.0)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    file = tmp_path / "secret"
    file.write_text(f"{new_secret().text}\n")
    file.chmod(0o600)
    place = NodePlace(nodes=2, rank=1, leader="127.0.0.1", port=free_ports(1)[0], secret_file=file)
    with pytest.raises(RunFailed, match="did not listen at port"):
        work_on_node(target, place, SilentScreen())


def test_a_secret_that_came_with_the_job_is_used_and_stays(tmp_path: Path, target: tuple[str, ...]) -> None:
    """As one that Kubernetes mounts; node 0 removes only what it made itself."""
    file = tmp_path / "secret"
    file.write_text(f"{new_secret().text}\n")
    file.chmod(0o600)
    place = NodePlace(nodes=2, rank=0, leader="127.0.0.1", port=free_ports(1)[0], secret_file=file)
    with pytest.raises(PlaitError, match=r"a\.txt"):
        work_on_node(target, place, SilentScreen())
    assert file.exists()


def test_node_0_without_a_secret_says_how_to_give_one(target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_SECRET", raising=False)
    with pytest.raises(PlaitError, match=r"no secret to recognize each other; name a file .* --secret-file"):
        work_on_node(target, NodePlace(nodes=2, rank=0, leader="127.0.0.1"), SilentScreen())
