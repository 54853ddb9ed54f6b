"""A node of a job that waits for node 0: when it gives up, and what it then says."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from plait.commands.submitting import node, node_address
from plait.commands.submitting.node import NodePlace, tell_scheduler, work_on_node
from plait.errors import PlaitError, RunFailed
from plait.launch.remote.secret import new_secret
from plait.screen.screen import SilentScreen
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
    monkeypatch.setattr(node_address, "local_addresses", lambda: own)
    monkeypatch.setattr(node_address, "_addresses_of", known.__getitem__)
    screen = Recording()
    assert node_address.own_address("127.0.0.1", screen) == "127.0.0.1"
    assert node_address.own_address("node-2", screen) == "10.0.0.5" and not screen.lines
    del own["fd00::5"]
    assert node_address.own_address("node-1", screen) == "10.0.0.5"
    assert screen.lines[0].startswith("address  10.0.0.5: node-1 means 127.0.1.1 here, by which no other host")
    del own["10.0.0.5"]
    monkeypatch.setattr(node_address.socket.socket, "connect", unreachable)
    with pytest.raises(PlaitError, match=r"this host has no other; have the name mean the address"):
        node_address.own_address("node-1", screen)


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
    tell_scheduler(NodePlace(nodes=2, rank=rank, leader="a", secret_file=tmp_path / "web-17-0.secret"), code)
    assert (tmp_path / "web-17-0.again").exists() == told


def test_a_file_that_a_killed_node_0_left_is_not_waited_on_for_ever(
    tmp_path: Path, target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "LISTENS_AT_LATEST_S", 1.0)
    file = tmp_path / "secret"
    file.write_text(f"{new_secret().text}\n")
    file.chmod(0o600)
    place = NodePlace(nodes=2, rank=1, leader="127.0.0.1", port=free_ports(1)[0], secret_file=file)
    with pytest.raises(RunFailed, match="did not listen at port"):
        work_on_node(target, place, SilentScreen())
