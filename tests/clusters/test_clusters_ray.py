"""What Ray says of its machines, what is asked of it, and how actors are followed, by a Ray that plays a script.

`make test-ray` runs the same on a real one.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.clusters.job import ClusterJob, NodeGroup
from plait.clusters.machines import NodeKind
from plait.clusters.ray import LOSSES_AT_MOST, RayRun, actors_request, log_name, ray_nodes
from plait.errors import GaveUp, Interrupted, PlaitError, RunFailed
from plait.screen.screen import SilentScreen

SERVER = {"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9}}
GPUS = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}}


class Recording(SilentScreen):
    def __init__(self) -> None:
        self.lines = list[str]()

    def print(self, text: str) -> None:
        self.lines.append(text)


def job(nodes: int, gpus: int = 0) -> ClusterJob:
    return ClusterJob(name="own", run="own", target=("own.py",), groups=(NodeGroup(nodes=nodes, gpus=gpus),))


def test_what_ray_says_becomes_nodes() -> None:
    server = NodeKind(device="server processor", per_node=1, cores=4)
    assert ray_nodes([SERVER, {**SERVER, "Alive": False}], None) == [server]
    assert ray_nodes([SERVER, SERVER], 2) == [NodeKind(device="server processor", per_node=1, cores=2)] * 4
    assert ray_nodes([SERVER, GPUS], None) == [NodeKind(device="H100 SXM", per_node=8, cores=64)]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: ray_nodes([SERVER], 5), "no node of Ray has more than 4 cores; ask for fewer"),
        (lambda: ray_nodes([{"Alive": True, "Resources": {"GPU": 1.0}}], None), "does not know the GPUs of a node"),
        (lambda: actors_request(job(3), None, {"max_nodes": "2"}), "less than the 3 nodes to begin with"),
        (lambda: actors_request(job(1), None, {"max_nodes": "2"}), "begin with --nodes 2"),
    ],
)
def test_what_ray_does_not_have_is_one_sentence(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(PlaitError, match=says):
        ask()


def test_a_whole_node_has_one_actor_and_a_part_of_one_several() -> None:
    whole, parts = actors_request(job(2), 4, {}), actors_request(job(2), 4, {"cpus": "2"})
    assert whole.strategy == "STRICT_SPREAD" and whole.bundle == {"CPU": 4} and whole.cpus is None
    assert not whole.fits([SERVER]) and whole.fits([SERVER, SERVER])
    assert parts.bundle == {"CPU": 2} and parts.fits([SERVER]) and parts.words == "2 actors with 2 CPU each"
    assert actors_request(job(2, gpus=8), 64, {}).fits([GPUS, GPUS])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--on ray needs Ray's own library; install it: "),
        (("--time", "1 hour", "--cluster", "2x(1xserver)"), "Ray ends no job at a time limit"),
        (("--with", "max_nodes=4", "--cluster", "2x(1xserver)"), "takes in no further nodes"),
        (("--cluster", "1x(1xserver)+1x(1xdesktop)"), "the actors of a job are equal"),
    ],
)
def test_a_refused_submission_is_one_sentence(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import plait\n")
    found = CliRunner().invoke(app, ["submit", "own.py", "--on", "ray", "--nodes", "2", *words])
    assert isinstance(found.exception, PlaitError) and says in str(found.exception), found.output


# A run of actors from its beginning to its end.


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


End = Exception | tuple[int, str]
LOST = RayActorError("The actor died unexpectedly before finishing this task.")
DONE: End = (0, "")


class ScriptedRay:
    """Actors whose agents end in the order of the script: the rank, and its exit code with its last line."""

    def __init__(self, script: Sequence[tuple[int, End]]) -> None:
        self.script: Iterator[tuple[int, End]] = iter(script)
        self.exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)
        self.util = SimpleNamespace(
            placement_group=lambda bundles, strategy, name: SimpleNamespace(wait=lambda timeout: True),
            remove_placement_group=lambda group: self.happened.append("freed"),
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **where: where),
        )
        self.happened: list[str] = []
        self.secrets: list[tuple[Path, int]] = []
        self._ends: dict[str, End] = {}

    def remote(self, actor: type) -> SimpleNamespace:
        return SimpleNamespace(options=lambda **more: SimpleNamespace(remote=self._made))

    def _made(self, name: str) -> SimpleNamespace:
        self.happened.append(f"made {name}")
        return SimpleNamespace(
            place=SimpleNamespace(remote=lambda: "place"),
            work=SimpleNamespace(remote=lambda *words: self._started(name, *words)),
            stop=SimpleNamespace(remote=lambda: self.happened.append(f"stopped {name}")),
        )

    def _started(self, name: str, arguments: Sequence[str], variables: Mapping[str, str], folder: str, log: str) -> str:
        secret = Path(variables["PLAIT_SECRET_FILE"])
        self.secrets.append((secret, stat.S_IMODE(secret.stat().st_mode)))
        with Path(log).open("a") as file:
            file.write(f"{name} begins\n")
        self.happened.append(f"{name} {'joins' if 'join' in arguments else 'works'}")
        return f"{name} #{len(self.happened)}"

    def get(self, reference: str) -> Any:
        if reference == "place":
            return "10.0.0.1", 24717
        end = self._ends.pop(reference)
        if isinstance(end, Exception):
            raise end
        return end

    def wait(self, works: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        if works == ["place"]:
            return ["place"], []
        rank, end = next(self.script)
        ended = next(work for work in works if work.startswith(f"node {rank} "))
        self._ends[ended] = end
        return [ended], [work for work in works if work != ended]

    def kill(self, actor: object) -> None:
        self.happened.append("killed")


def followed(
    folder: Path, script: Sequence[tuple[int, End]], nodes: int = 2, **options: str
) -> tuple[ScriptedRay, list[str], BaseException | None]:
    """What Ray saw, what a person saw, and how it ended."""
    ray, screen, own = ScriptedRay(script), Recording(), job(nodes)
    run = RayRun(ray, own, actors_request(own, None, options), folder, screen)
    try:
        run.finish()
    except (PlaitError, Interrupted) as error:
        return ray, screen.lines, error
    finally:
        assert ray.happened[-1] == "freed" and not list(folder.glob(".plait/*"))
        assert {mode for _, mode in ray.secrets} == {0o600}
    return ray, screen.lines, None


def test_a_run_ends_with_node_0_and_its_lines_are_shown(tmp_path: Path) -> None:
    ray, lines, error = followed(tmp_path, [(0, DONE), (1, DONE)])
    assert error is None and lines == ["node 0 begins"]
    assert ray.happened[:4] == ["made node 0", "made node 1", "node 0 works", "node 1 works"]
    assert (tmp_path / log_name("own", 1)).read_text() == "node 1 begins\n"


def test_a_lost_member_is_made_again_alone(tmp_path: Path) -> None:
    ray, lines, error = followed(tmp_path, [(1, LOST), (0, DONE), (1, DONE)])
    assert error is None
    assert ray.happened[4:7] == ["killed", "made node 1", "node 1 works"]
    assert lines[-1].startswith("again    node 1 was lost; it starts again")


@pytest.mark.parametrize(
    "end", [LOST, (-9, ""), (75, "plait: b was lost, and the hosts that are left cannot carry the run")]
)
def test_without_node_0_or_where_it_needs_a_lost_node_all_start_again(end: End, tmp_path: Path) -> None:
    ray, lines, error = followed(tmp_path, [(0, end), (0, DONE), (1, DONE)])
    assert error is None
    assert ray.happened[4:10] == ["killed"] * 2 + ["made node 0", "made node 1", "node 0 works", "node 1 works"]
    assert "node 0 begins" in lines[0] and any("all nodes start again" in line for line in lines)


def test_more_nodes_join_in_its_course(tmp_path: Path) -> None:
    ray, _, error = followed(tmp_path, [(0, DONE), (1, DONE)], max_nodes="3")
    assert error is None and "node 2 joins" in ray.happened


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        ([(1, (2, "plait: clocks differ by 3 minutes"))], PlaitError, "node 1: clocks differ by 3 minutes"),
        ([(0, (2, "plait: a.toml has no table"))], PlaitError, "node 0: a.toml has no table"),
        ([(0, (1, "plait: rank 1 was killed"))], RunFailed, "node 0: rank 1 was killed"),
        ([(0, (143, "plait: stopped by SIGTERM"))], Interrupted, "the run is stopped and saved"),
        ([(1, LOST)] * (LOSSES_AT_MOST + 1), GaveUp, "so the run is given up"),
        (
            [(0, RayActorError("an error raised in its creation task\nModuleNotFoundError: No module named 'plait'"))],
            PlaitError,
            "install the same version of it on all nodes",
        ),
    ],
)
def test_how_a_run_ends_is_one_sentence(
    script: Sequence[tuple[int, End]], kind: type[BaseException], says: str, tmp_path: Path
) -> None:
    _, _, error = followed(tmp_path, script)
    assert type(error) is kind and says in str(error), error
