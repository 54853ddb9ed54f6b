"""An attacker who plays host 0, on real sockets, and changes files between a job's check and its ranks' start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from plait.data.shards import open_corpus
from plait.errors import PlaitError
from plait.hosts.connection import Heartbeat, HostConnection
from plait.hosts.handshake import new_secret
from plait.hosts.joining import JoinListener
from plait.hosts.protocol import EventReport, StartOrder
from plait.launch.values.job import HostRanks, Job
from plait.planner.plan_file import plan_text, read_plan
from plait.recipe.load import recipe_text
from tests.commands.neighbour import KINDS, Neighbour, put
from tests.launch.processes import wait_until
from tests.trainer.tiny import make_tiny

ROOT = Path(__file__).parents[2]
RACES = 25


class Attacker:
    """Host 0 with prepared data of its own, and a joined host that has data of another run."""

    def __init__(self, folder: Path, joined: Path) -> None:
        config, plan = make_tiny(folder)
        self.data = next(path for path in (folder / "cache" / "data").iterdir() if path.is_dir())
        self.recipe = recipe_text(config)
        self.received = joined / ".plait" / "received" / "data" / "x"
        self.honest = plan_text(replace(plan, job=replace(plan.job, corpus=str(self.received)))).encode()
        self.evil = plan_text(
            replace(plan, job=replace(plan.job, corpus=str(joined / ".plait" / "data" / "private")))
        ).encode()
        self.run = joined / "runs" / "x"

    def names(self) -> list[str]:
        """The files of its prepared data, the index last."""
        names = sorted(path.name for path in self.data.iterdir() if path.is_file())
        return sorted(names, key=lambda name: name == "index.json")

    def offer(self, *names: str) -> dict[str, Any]:
        """What host 0 asks before it sends these files."""
        files = [(name, (self.data / name).read_bytes()) for name in names]
        entries = [{"name": name, "nbytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files]
        return {"root": "cache", "path": "data/x", "files": entries}

    def order(self, entry: str) -> Job:
        """One rank of a job of the run that the joined host has a folder for."""
        part = HostRanks(first_rank=0, ranks=1)
        return Job(entry=entry, argument=str(self.run), world_size=1, threads=1, part=part)


class Peer:
    """The link to a host that joined, which is asked as host 0 asks it."""

    name = "victim"

    def __init__(self, link: HostConnection) -> None:
        self.link = link

    def attack(self, kind: str, values: dict[str, Any], blob: bytes = b"") -> Any:
        question = make_dataclass("Question", list(values))(**values)
        return self.link.ask(KINDS[kind], question, blob, host=self.name)

    def start(self, number: int, job: Job) -> None:
        self.link.send(StartOrder(number=number, job=job, rendezvous=None))

    def events_until(self, key: str, value: Any = True) -> list[dict[str, Any]]:
        """What is heard of the job, up to the event that says so."""
        found: list[dict[str, Any]] = []

        def has_come() -> bool:
            found.extend(dict(one.event) for one in self.link.read() if isinstance(one, EventReport))
            assert self.link.lost is None, self.link.lost
            return any(event.get(key) == value for event in found)

        wait_until(has_come, within_s=30)
        return found


@contextmanager
def joined(folder: Path) -> Iterator[Peer]:
    """A process that joins the run of this test and works in a folder."""
    secret = new_secret()
    listener = JoinListener(
        address="127.0.0.1", port=0, secret=secret, heartbeat=Heartbeat(period_s=0.3, lost_after_s=10)
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.commands.joined_process", f"127.0.0.1:{listener.port}"],
        cwd=folder,
        env={**os.environ, "PLAIT_SECRET": secret.text, "PYTHONPATH": str(ROOT)},
    )
    try:
        arrival = listener.next(60)
        assert arrival is not None
        yield Peer(arrival.link)
        arrival.link.close()
    finally:
        listener.close("the test is over")
        process.kill()
        process.wait()


@pytest.fixture
def attacker(tmp_path: Path) -> Attacker:
    (tmp_path / "victim").mkdir()
    (tmp_path / "attacker").mkdir()
    return Attacker(tmp_path / "attacker", tmp_path / "victim")


def send_all(attacker: Attacker, peer: Any) -> None:
    """All that an honest job needs."""
    peer.attack("open", {"kind": "run", "name": "x", "recipe": attacker.recipe})
    peer.attack("take", attacker.offer(*attacker.names()))
    for name in attacker.names():
        peer.attack("block", {"name": name, "offset": 0}, (attacker.data / name).read_bytes())
    put(peer, "recipe.toml", attacker.recipe.encode())
    put(peer, "plan.json", attacker.honest)


def test_a_plan_cannot_be_changed_once_its_job_was_checked(attacker: Attacker, tmp_path: Path) -> None:
    with joined(tmp_path / "victim") as peer:
        send_all(attacker, peer)
        peer.start(1, attacker.order("tell_data_later"))
        peer.events_until("message", "waits")
        for kind, values in [
            ("take", attacker.offer("index.json")),
            ("block", {"name": "index.json", "offset": 0}),
            ("open", {"kind": "job", "name": "x", "recipe": attacker.recipe}),
            ("see", {"nonces": []}),
            ("release", {}),
        ]:
            with pytest.raises(PlaitError, match="the files of a job change while it runs"):
                peer.attack(kind, values, attacker.evil if kind == "block" else b"")
        assert "plan.json" in peer.attack("list", {}).values.names  # what changes nothing is still answered
        (attacker.run / "logs" / "go").touch()
        told = [event for event in peer.events_until("over") if event.get("message") == "data"]
        assert told[0]["values"]["path"] == str(attacker.received)
        put(peer, "plan.json", attacker.evil)  # between jobs it may come, and is checked
        peer.start(2, attacker.order("tell_data"))
        assert "is not a folder of this run" in peer.events_until("over")[-1]["reason"]


@pytest.mark.slow
def test_no_race_lets_a_rank_read_another_plan(attacker: Attacker, tmp_path: Path) -> None:
    with joined(tmp_path / "victim") as peer:
        send_all(attacker, peer)
        for number in range(1, RACES + 1):
            put(peer, "plan.json", attacker.honest)
            peer.start(number, attacker.order("tell_data"))
            try:  # whichever is first: the other is refused, or comes before the check
                put(peer, "plan.json", attacker.evil)
            except PlaitError as error:
                assert "while it runs" in str(error)
            read = [event["values"]["path"] for event in peer.events_until("over") if event.get("message") == "data"]
            assert read in ([], [str(attacker.received)])


def is_admitted(attacker: Attacker, host: Neighbour) -> bool:
    try:
        with host.depot.running(attacker.order("tell_data")):
            return True
    except PlaitError:
        return False


def test_prepared_data_are_used_only_when_all_that_was_offered_is_there(attacker: Attacker, tmp_path: Path) -> None:
    host, names = Neighbour(tmp_path / "victim"), attacker.names()
    host.attack("open", {"kind": "run", "name": "x", "recipe": attacker.recipe})
    put(host, "plan.json", attacker.honest)
    host.attack("take", attacker.offer(*names))
    for name in names:
        assert not is_admitted(attacker, host)
        host.attack("block", {"name": name, "offset": 0}, (attacker.data / name).read_bytes())
    assert is_admitted(attacker, host) and len(open_corpus(attacker.received).entries) > 0
    # Whoever offers something else for them has to send it first.
    changed = attacker.offer(*names)
    changed["files"][0]["sha256"] = "0" * 64
    host.attack("take", changed)
    assert not is_admitted(attacker, host)
    host.attack("take", attacker.offer(*names))
    assert is_admitted(attacker, host)
    host.depot.close()


def test_files_of_another_run_are_not_used_by_an_index_that_names_them(attacker: Attacker, tmp_path: Path) -> None:
    host, names = Neighbour(tmp_path / "victim"), attacker.names()
    attacker.received.mkdir(parents=True)
    for name in names:  # of an earlier run, whose host 0 was another one
        (attacker.received / name).write_bytes((attacker.data / name).read_bytes())
    host.attack("open", {"kind": "run", "name": "x", "recipe": attacker.recipe})
    put(host, "plan.json", attacker.honest)
    with pytest.raises(PlaitError, match="the data offered lack files of"):
        host.attack("take", attacker.offer("index.json"))
    assert not is_admitted(attacker, host)
    host.depot.close()


def test_a_plan_that_names_a_model_on_the_joined_host_is_not_carried_out(attacker: Attacker, tmp_path: Path) -> None:
    """Its weights would go into the run, and so to host 0."""
    host = Neighbour(tmp_path / "victim")
    send_all(attacker, host)
    assert is_admitted(attacker, host)
    (tmp_path / "attacker" / "evil.json").write_bytes(attacker.honest)
    plan = replace(
        read_plan(tmp_path / "attacker" / "evil.json"),
        job=replace(
            read_plan(tmp_path / "attacker" / "evil.json").job, base=str(tmp_path / "victim" / "models" / "own")
        ),
    )
    put(host, "plan.json", plan_text(plan).encode())
    assert not is_admitted(attacker, host)
    host.depot.close()
