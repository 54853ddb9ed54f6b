"""What Ray says of its machines, what is asked of it, and how actors are followed, by a Ray that plays a script.

`make test-ray` runs the same on a real one.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.clusters.job import ClusterJob, NodeGroup, Submitted
from plait.clusters.machines import NodeKind
from plait.clusters.ray import (
    LOSSES_AT_MOST,
    RayRun,
    actors_request,
    connect_ray,
    group_name,
    log_name,
    ray_nodes,
    ray_state,
    require_ended,
    run_namespace,
    stop_run,
)
from plait.errors import GaveUp, Interrupted, PlaitError, RunFailed
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder

SERVER = {"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9}}
GPUS: Mapping[str, Any] = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}}


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
    smaller = {"Alive": True, "Resources": {**GPUS["Resources"], "CPU": 16.0}}
    assert ray_nodes([smaller, GPUS], 32) == ray_nodes([GPUS], None), "one with too few cores is left out"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: ray_nodes([SERVER], 5), "no node of Ray has more than 4 cores; ask for fewer"),
        (lambda: ray_nodes([SERVER, GPUS], 65), "no node of Ray with GPUs has more than 64 cores; ask for fewer"),
        (lambda: ray_nodes([{"Alive": True, "Resources": {"GPU": 1.0}}], None), "does not know the GPUs of a node"),
        (lambda: actors_request(job(3), None, {"max_nodes": "2"}), "less than the 3 nodes to begin with"),
        (lambda: actors_request(job(1), None, {"max_nodes": "2"}), "begin with --nodes 2"),
        (lambda: actors_request(job(2), 4, {"max_nodes": "3"}), "--with max_nodes needs --with cpus=N"),
    ],
)
def test_what_ray_does_not_have_is_one_sentence(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(PlaitError, match=says):
        ask()


def test_a_whole_node_has_one_actor_and_a_part_of_one_several() -> None:
    whole, parts = actors_request(job(2), 4, {}), actors_request(job(2), 4, {"cpus": "2"})
    assert whole.strategy == "STRICT_SPREAD" and whole.bundle == {"CPU": 4} and whole.cpus is None
    assert not whole.fits([SERVER]) and whole.fits([SERVER, SERVER])
    assert parts.bundle == {"CPU": 2} and parts.fits([SERVER]) and parts.words == "2 actors with 2 CPUs each"
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


class GetTimeoutError(RayError):
    pass


End = Exception | tuple[int, str]
LOST = RayActorError("The actor died unexpectedly before finishing this task.")
DONE: End = (0, "")
LATER: tuple[int, End] = (-1, DONE)
"""What follows does not happen within the next seconds, but after the next actor is made."""


class ScriptedRay:
    """Actors whose agents end in the order of the script, soon one after another: the rank, and its exit code with its
    last line."""

    def __init__(self, script: Sequence[tuple[int, End]]) -> None:
        self.script = [*script]
        self.exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)
        self.util = SimpleNamespace(
            placement_group=self._reserved,
            remove_placement_group=lambda group: self.happened.append("freed"),
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **where: where),
        )
        self.happened: list[str] = []
        self.namespaces: set[str] = set()
        self.secrets: list[tuple[Path, int]] = []
        self._ends: dict[str, End] = {}

    def _reserved(self, bundles: Sequence[object], strategy: str, name: str) -> SimpleNamespace:
        self.namespaces.add(name.removeprefix("own-"))
        return SimpleNamespace(wait=lambda timeout: True)

    def remote(self, actor: type) -> SimpleNamespace:
        return SimpleNamespace(options=self._chosen)

    def _chosen(self, *, namespace: str, **more: object) -> SimpleNamespace:
        self.namespaces.add(namespace)
        return SimpleNamespace(remote=self._made)

    def _made(self, name: str) -> SimpleNamespace:
        self.happened.append(f"made {name}")
        if self.script[0] == LATER:
            del self.script[0]
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
        del self.script[:1]
        if isinstance(end, Exception):
            raise end
        return end

    def wait(self, works: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        if works == ["place"]:
            return ["place"], []
        rank, end = self.script[0]
        ended = next((work for work in works if work.startswith(f"node {rank} ")), None)
        if ended is None:
            return [], [*works]
        self._ends.setdefault(ended, end)
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
        assert ray.namespaces == {run_namespace(WorkingFolder(folder), "own")}
    return ray, screen.lines, None


def test_a_run_ends_with_node_0_and_its_lines_are_shown(tmp_path: Path) -> None:
    ray, lines, error = followed(tmp_path, [(0, DONE), (1, DONE)])
    assert error is None and lines == ["node 0 begins"]
    assert ray.happened[:4] == ["made node 0", "made node 1", "node 0 works", "node 1 works"]
    assert (tmp_path / log_name("own", 1)).read_text() == "node 1 begins\n"


def test_a_lost_member_is_made_again_alone(tmp_path: Path) -> None:
    ray, lines, error = followed(tmp_path, [(1, LOST), LATER, (0, DONE), (1, DONE)])
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
    ray, _, error = followed(tmp_path, [(0, DONE), (1, DONE)], max_nodes="3", cpus="1")
    assert error is None and "node 2 joins" in ray.happened


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([(1, (143, "plait: stopped by SIGTERM")), (0, (143, "plait: stopped by SIGTERM"))], "the run is stopped and"),
        ([(1, (1, "plait: node 0 has ended")), (0, (1, "plait: the loss is not finite"))], "node 0: the loss is not"),
        ([(1, LOST), (0, DONE)], None),
    ],
)
def test_a_node_that_ends_just_before_node_0_is_not_brought_back(
    script: Sequence[tuple[int, End]], says: str | None, tmp_path: Path
) -> None:
    ray, lines, error = followed(tmp_path, script)
    assert lines == ["node 0 begins"] and ray.happened.count("made node 1") == 1
    assert error is None if says is None else says in str(error), error


def test_a_secret_that_cannot_be_made_leaves_nothing_reserved(tmp_path: Path) -> None:
    (tmp_path / ".plait").write_text("a file in the place of the folder")
    ray, own = ScriptedRay([]), job(2)
    with pytest.raises(NotADirectoryError):
        RayRun(ray, own, actors_request(own, None, {}), tmp_path, Recording()).finish()
    assert ray.happened == ["freed"]


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        ([(1, (2, "plait: clocks differ by 3 minutes")), LATER], PlaitError, "node 1: clocks differ by 3 minutes"),
        ([(0, (2, "plait: a.toml has no table"))], PlaitError, "node 0: a.toml has no table"),
        ([(0, (1, "plait: rank 1 was killed"))], RunFailed, "node 0: rank 1 was killed"),
        ([(0, (143, "plait: stopped by SIGTERM"))], Interrupted, "the run is stopped and saved"),
        ([*[(1, LOST)] * (LOSSES_AT_MOST + 1), LATER], GaveUp, "so the run is given up"),
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


# A run on a Ray that others share, from another terminal.


def record_of(folder: Path) -> Submitted:
    namespace = run_namespace(WorkingFolder(folder), "own")
    return Submitted(name="own", label="own", scheduler="ray", job="10.0.0.1:6379", namespace=namespace)


class SharedRay:
    """A Ray with named actors, each with what it answers to stop(), and placement groups by their names."""

    def __init__(self, actors: Mapping[tuple[str, str], Exception | None], groups: Mapping[str, str] = {}) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [{"namespace": where, "name": name} for where, name in actors],
            placement_group_table=lambda: {
                str(number): {"name": name, "state": state} for number, (name, state) in enumerate(groups.items())
            },
        )
        self.stopped: list[tuple[str, str]] = []
        self._actors = actors

    def get_actor(self, name: str, namespace: str) -> SimpleNamespace:
        if isinstance(self._actors[namespace, name], ValueError):
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return SimpleNamespace(stop=SimpleNamespace(remote=lambda: (namespace, name)))

    def get(self, reference: tuple[str, str], timeout: float) -> None:
        answer = self._actors[reference]
        if answer is not None:
            raise answer
        self.stopped.append(reference)


def test_a_run_of_the_same_name_in_another_folder_is_another_run(tmp_path: Path) -> None:
    here, there = record_of(tmp_path / "a"), record_of(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert here.namespace != there.namespace and record_of(tmp_path / "link") == here
    ray = SharedRay({(there.namespace, "own-0-1"): None}, {group_name("own", there.namespace): "PENDING"})
    require_ended(ray, here)
    with pytest.raises(PlaitError, match=r"own has no node 0 on Ray to be stopped \(ended\)"):
        stop_run(ray, here)
    assert not ray.stopped
    stop_run(ray, there)
    assert ray.stopped == [(there.namespace, "own-0-1")]


@pytest.mark.parametrize(
    ("actors", "group", "state"),
    [
        ((), "PENDING", "waits until Ray has room for it"),
        ((), "RESCHEDULING", "waits until Ray has room for it"),
        ((), "CREATED", "its actors are about to start"),
        (("own-0-1", "own-1-2"), "CREATED", "2 actors at work"),
    ],
)
def test_a_second_command_is_refused_until_the_first_has_ended(
    actors: Sequence[str], group: str, state: str, tmp_path: Path
) -> None:
    own = record_of(tmp_path)
    ray = SharedRay({(own.namespace, name): None for name in actors}, {group_name("own", own.namespace): group})
    assert ray_state(ray, own) == state
    with pytest.raises(PlaitError, match=rf"own is on Ray already \({state}\); end it first: plait stop own"):
        require_ended(ray, own)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (GetTimeoutError("Get timed out"), "has not answered within 30 s: Ray has not started it yet"),
        (LOST, "node 0 of own ended before it could be stopped"),
        (ValueError("it died after it was listed"), "own has no node 0 on Ray to be stopped (1 actor at work)"),
    ],
)
def test_a_node_0_that_cannot_be_stopped_is_one_sentence(answer: Exception, says: str, tmp_path: Path) -> None:
    own = record_of(tmp_path)
    with pytest.raises(PlaitError) as caught:
        stop_run(SharedRay({(own.namespace, "own-0-1"): answer, (own.namespace, "own-1-2"): None}), own)
    assert says in str(caught.value)


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.40.0
    Python: 3.10.1
This process on node 10.0.0.7 was started with:
    Ray: 2.60.0
    Python: 3.12.3
"""


class ConnectingRay:
    """A Ray that is connected already, or whose init() ends so."""

    def __init__(self, connected: str = "", end: Exception | None = None) -> None:
        self._connected, self._end = connected, end

    def is_initialized(self) -> bool:
        return bool(self._connected)

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address=self._connected)

    def init(self, address: str, **more: object) -> None:
        if self._end is not None:
            raise self._end
        self._connected = address


def test_a_process_stays_with_the_ray_that_it_is_connected_to() -> None:
    ray = ConnectingRay("127.0.0.1:6379")
    for address in (None, "auto", "127.0.0.1:6379", "localhost:6379"):
        connect_ray(ray, address)
    for address in ("127.0.0.1:6380", "192.0.2.1:6379", "no-such-host.invalid:6379"):
        with pytest.raises(PlaitError, match=f"connected to the Ray at 127.0.0.1:6379, not at {address}"):
            connect_ray(ray, address)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (
            RuntimeError(MISMATCH),
            "started with Ray 2.40.0 on Python 3.10.1, and plait runs with Ray 2.60.0 on Python 3.12",
        ),
        (
            ConnectionError("Could not find any running Ray instance. Please specify"),
            "no cluster of Ray answers (Could n",
        ),
    ],
)
def test_why_there_is_no_connection_is_one_sentence(end: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(PlaitError) as caught:
        connect_ray(ConnectingRay(end=end), None)
    assert says in str(caught.value)
