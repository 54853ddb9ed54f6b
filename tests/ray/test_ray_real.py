"""A real Ray of one node on this machine, and runs that `plait submit --on ray` sends to it.

`make test-ray` installs Ray beside .venv.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import RECIPE, Place, ended, wait_while_running

pytestmark = pytest.mark.ray
SITE = Path(os.environ.get("PLAIT_RAY", ".ray")).absolute()
ON_RAY = ("--on", "ray", "--with", "cpus=1")
STEPS = 120
LONGER = RECIPE.replace('budget = "60 steps"', f'budget = "{STEPS} steps"')
WITHIN_S = 900
"""Ray starts a process for each actor, which starts plait: on two cores beside other work that takes minutes."""


def even(workers: int) -> tuple[str, ...]:
    """One plan, on one machine and on actors: the shares of equal workers, each with one thread."""
    shares = [7 // workers + (rank < 7 % workers) for rank in range(workers)]
    plan = (f"layout.replicate={workers}", f"layout.shares={shares}", "run.threads=1", "run.devices=cpu")
    return (*plan, 'balance.every="never"')


class PlaceOnRay(Place):
    """Commands find Ray behind plait's own packages."""

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder, LONGER)
        self._address = address

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        code = (
            "import sys; from pathlib import Path; "
            f"sys.path.append({str(SITE)!r}); from plait.cli import main; sys.argv[0] = 'plait'; main()"
        )
        return super().start(*arguments, module=("-c", code), environment={"RAY_ADDRESS": self._address}, **more)

    def submit(self, name: str, *words: str) -> subprocess.Popen[str]:
        return self.start("submit", "tiny.toml", f"run.name={name}", *words, *ON_RAY)

    def agent(self, name: str, rank: int) -> int:
        """The process of a node's agent, which an actor has started."""
        log = str(self.folder / f"{name}-ray-{rank}.log")
        actors = [pid for pid in children_of_ray() if log in map(os.path.realpath, Path(f"/proc/{pid}/fd").glob("*"))]
        assert len(actors) == 1, actors
        return actors[0]


def children_of_ray() -> Iterator[int]:
    """Processes of actors, by the title that Ray gives them."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::"):
                yield int(path.parent.name)
        except OSError:
            continue


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray in the foreground of one process, with whose end it ends: any other Ray of this machine stays as it is."""
    assert SITE.is_dir(), "make test-ray installs Ray"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lean = ("--num-cpus=4", "--num-gpus=0", "--include-dashboard=false", "--object-store-memory=80000000")
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    with log.open("w") as file:
        # Actors are as important as all else here; Ray's own choice is the lowest priority but four.
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", *lean,
             "--disable-usage-stats"],
            env={**os.environ, "PYTHONPATH": str(SITE), "RAY_worker_niceness": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    wait_while_running(lambda: "Ray runtime started" in log.read_text(), head, within_s=WITHIN_S)
    [line] = [line for line in log.read_text().splitlines() if "--address=" in line]
    yield line.partition("--address=")[2].strip("' ")
    head.send_signal(signal.SIGTERM)
    head.wait(120)


@pytest.mark.parametrize("workers", [2, 3])
def test_actors_give_the_bits_of_a_run_without_ray(workers: int, address: str, tmp_path: Path) -> None:
    place = PlaceOnRay(tmp_path, address)
    assert place.train("here", *even(workers), within_s=WITHIN_S).code == 0
    actors = place.submit("actors", *even(workers), "--nodes", str(workers))
    said = ended(actors, within_s=WITHIN_S)
    assert said.code == 0, said
    assert f"sent     actors: {workers} actors of Ray" in said.out and f"done     {STEPS} steps" in said.out, said
    assert place.sums("actors") == place.sums("here")
    assert_same_end(place, "actors", "here")
    assert place.run("logs", "actors", within_s=WITHIN_S).out in said.out
    assert "job      actors on ray: ended" in place.run("status", "actors", within_s=WITHIN_S).out
    assert not list((place.folder / ".plait").glob("*.secret"))


def assert_same_end(place: Place, name: str, other: str) -> None:
    """The same losses at every step, and the same bytes in the last checkpoint."""
    assert place.numbers(name) == place.numbers(other)
    assert place.manifest(name, STEPS) == place.manifest(other, STEPS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_actor_is_made_again_and_no_bit_changes(rank: int, address: str, tmp_path: Path) -> None:
    """The layout needs both nodes: without one the run is saved, and goes on as soon as both are back."""
    place = PlaceOnRay(tmp_path, address)
    assert place.train("here", *even(2), within_s=WITHIN_S).code == 0
    process = place.submit("lost", *even(2), "--nodes", "2")
    wait_while_running(lambda: bool(place.checkpoints("lost")), process, within_s=WITHIN_S)
    os.kill(place.agent("lost", rank), signal.SIGKILL)
    said = ended(process, within_s=WITHIN_S)
    assert said.code == 0 and f"again    node {rank} was lost" in said.out, said
    assert_same_end(place, "lost", "here")


def test_a_stopped_run_is_saved_and_the_same_command_continues_it(address: str, tmp_path: Path) -> None:
    """Stopped from elsewhere, then by Ctrl-C; the run would go on for longer than any command takes."""
    place = PlaceOnRay(tmp_path, address)
    words = (*even(2), "train.budget=100000 steps", "--nodes", "2")
    process = place.submit("stopped", *words)
    wait_while_running(lambda: bool(place.checkpoints("stopped")), process, within_s=WITHIN_S)
    again = ended(place.submit("stopped", *words), within_s=WITHIN_S)
    assert again.code == 2 and "plait stop stopped" in again.sentence()
    assert_other_folders_run_stays_alone(address, tmp_path / "elsewhere")
    assert "2 actors at work" in place.run("status", "stopped", within_s=WITHIN_S).out and process.poll() is None
    assert place.run("stop", "stopped", within_s=WITHIN_S).code == 0
    said = ended(process, within_s=WITHIN_S)
    assert said.code == 143 and "the same command continues" in said.err, said
    saved = max(place.checkpoints("stopped"))
    process = place.submit("stopped", *words)
    wait_while_running(lambda: max(place.checkpoints("stopped")) > saved, process, within_s=WITHIN_S)
    process.send_signal(signal.SIGINT)
    assert ended(process, within_s=WITHIN_S).code == 130
    steps = [
        line["step"]
        for line in map(json.loads, (place.path("stopped") / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > saved


def assert_other_folders_run_stays_alone(address: str, folder: Path) -> None:
    """A run of the same name in another folder, as another user of this Ray has it, and a command that would end it."""
    place = PlaceOnRay(folder, address)
    said = ended(place.submit("stopped", *even(2), "train.budget=20 steps", "--nodes", "2"), within_s=WITHIN_S)
    assert said.code == 0, said
    over = place.run("stop", "stopped", within_s=WITHIN_S)
    assert over.code == 2 and "stopped has no node 0 on Ray to be stopped (ended)" in over.sentence()


def test_a_second_command_is_refused_while_the_first_waits_for_room(address: str, tmp_path: Path) -> None:
    """Two actors with three cores each do not fit on a machine of four."""
    place = PlaceOnRay(tmp_path, address)
    words = ("submit", "tiny.toml", "run.name=waits", *even(2), "--nodes", "2", "--cluster", "2x(1xserver)")
    words = (*words, "--on", "ray", "--with", "cpus=3")
    first = place.start(*words)
    assert first.stdout is not None
    assert any("waits    Ray has no room yet for 2 actors with 3 CPUs each" in line for line in first.stdout)
    assert "waits on ray: waits until Ray has room for it" in place.run("status", "waits", within_s=WITHIN_S).out
    secrets = {file: file.read_text() for file in (place.folder / ".plait").glob("*.secret")}
    again = place.run(*words, within_s=WITHIN_S)
    assert again.code == 2 and "waits is on Ray already (waits until Ray has room for it)" in again.sentence()
    assert {file: file.read_text() for file in (place.folder / ".plait").glob("*.secret")} == secrets
    stop = place.run("stop", "waits", within_s=WITHIN_S)
    assert stop.code == 2 and "Ctrl-C in the terminal where it was submitted" in stop.sentence()
    first.send_signal(signal.SIGINT)
    assert ended(first, within_s=WITHIN_S).code == 130
    assert not list((place.folder / ".plait").glob("*.secret"))
    assert "waits on ray: ended" in place.run("status", "waits", within_s=WITHIN_S).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "9"), "Ray has 4 nodes; ask for as many or fewer by --nodes"),
        (("--nodes", "2", "--with", "max_nodes=1"), "max_nodes=1 is less than the 2 nodes to begin with"),
        (("--nodes", "2", "--time", "1 hour"), "Ray ends no job at a time limit"),
        (("--nodes", "2", "--with", "address=127.0.0.1:1"), "no cluster of Ray answers (127.0.0.1:1: Connection refu"),
        (("--nodes", "2", "--with", "address=ray://a:1"), "plait submits from a node of Ray"),
    ],
)
def test_what_ray_cannot_do_is_one_sentence(words: tuple[str, ...], says: str, address: str, tmp_path: Path) -> None:
    place = PlaceOnRay(tmp_path, address)
    said = ended(place.submit("no", *even(2), *words), within_s=WITHIN_S)
    assert said.code == 2 and says in said.sentence(), said
