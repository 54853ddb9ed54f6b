"""Ray: the machines of a running cluster, and a job as actors in a placement group, each of which starts an agent.

The command that submits stays to the run's end, as every driver of Ray does, and brings lost actors back. Nodes share
the folder that it is typed in.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from plait.clusters.job import (
    GPUS_VARIABLE,
    SECRET_FILE_VARIABLE,
    SECRET_SUFFIX,
    ClusterJob,
    ClusterSystem,
    Outgoing,
    Submitted,
    keep_record,
    node_arguments,
    place_variables,
)
from plait.clusters.kubernetes import yaml_text
from plait.clusters.machines import SERVER, NodeKind, cluster_of_node_kinds
from plait.clusters.node import newest_saved_step
from plait.clusters.ray_agent import Agent
from plait.clusters.request import Option, SubmitRequest
from plait.clusters.tools import DESCRIBE
from plait.errors import REQUEUE_EXIT, GaveUp, Interrupted, PlaitError, RunFailed, StopSignal, installing
from plait.hosts.joining import choose_secret
from plait.launch.local.signals import SignalMailbox, collected_signals
from plait.launch.network import local_addresses
from plait.machines.catalog import find_device_by_driver_name
from plait.machines.cluster import Cluster
from plait.machines.machine import CORES_VARIABLE
from plait.private_folder import make_private_folder
from plait.recipe.schema import RunConfig
from plait.run_folder import run_folder
from plait.screen.screen import Screen
from plait.units import counted, format_duration
from plait.working_folder import WorkingFolder

_OPTIONS: Mapping[str, Option] = {
    "address": Option("Ray's address; that of RAY_ADDRESS, or of the cluster of this machine, if left out"),
    "cpus": Option("cores of each actor, of which a node may then hold several", r"[1-9]\d{0,4}", "16"),
    "max_nodes": Option("the nodes to grow to, as Ray has room; needs cpus", r"[1-9]\d{0,4}", "8"),
}
LOSSES_AT_MOST = 10
"""Lost actors since the last new step was saved, after which the run is given up."""
ROOM_AT_LATEST_S = 900.0
"""Time in which an autoscaler adds nodes; a cluster that could hold the job, and is busy, is waited for without end."""
_ANSWER_S = 5.0
_STOP_ANSWER_S = 30.0
"""An actor answers at once, also while its agent works; one that waits for Ray does not."""
_LOOK_S = 0.5
_GROUP_LOOK_S = 1
"""A whole number, since Ray cuts fractions off."""
_LOOKS_AT_NODE_0 = 20
"""For 10 s: node 0 notices within that time that another node is gone."""
_SAY_AFTER_S = 10.0
_AFTER_NODE_0_S = 30.0
_ACCELERATOR = "accelerator_type:"
_STOPPED_EXITS = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM)
"""The last one where the agent had not begun yet."""
_CREATION = "creation task"
"""Part of Ray's message where an actor could not be made at all."""
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
"""In Ray's message about two versions: those of the cluster, then those of this process."""
_ENDED = "ended"


def _ray(address: str | None) -> Any:
    """Ray's library, connected to a cluster; raises PlaitError where that cannot be."""
    try:
        ray = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise PlaitError(f"--on ray needs Ray's own library; install it: {installing('plait[ray]')}") from None
    connect_ray(ray, address)
    return ray


def connect_ray(ray: Any, address: str | None) -> None:
    """Connect Ray's library to a cluster, without lines of its own; raises PlaitError where no cluster answers, where
    it has other versions, or where this process is connected to another one already."""
    if ray.is_initialized():
        connected = str(ray.get_runtime_context().gcs_address)
        if address not in (None, "auto") and not _is_same_port(address, connected):
            raise PlaitError(
                f"this process is connected to the Ray at {connected}, not at {address}; call ray.shutdown() first, or "
                "use that one"
            )
        return
    given = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in given:
        raise PlaitError(f"plait submits from a node of Ray, not through {given}; type it there, or by ray job submit")
    _check_that_something_listens(given)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=given, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        versions = [f"Ray {of_ray} on Python {python}" for of_ray, python in _VERSIONS.findall(str(error))]
        if len(versions) == 2:
            raise PlaitError(
                f"the cluster was started with {versions[0]}, and plait runs with {versions[1]} here; Ray needs the "
                "same versions of both: run plait in an environment like the cluster's"
            ) from None
        raise PlaitError(_no_cluster(" ".join(str(error).partition(". ")[0].split()).rstrip("."))) from None
    with suppress(ValueError, TypeError):  # not in the main thread, where Ray sets no handler either; or no Python's
        signal.signal(signal.SIGTERM, before)


def _is_same_port(address: str, other: str) -> bool:
    """Whether two addresses are one port of one machine, which may have several names and addresses."""
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), other.rpartition(":")
    return port == other_port and bool(_machine_addresses(host) & _machine_addresses(other_host))


def _machine_addresses(host: str) -> set[str]:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return {host}
    return found | {*local_addresses()} if any(ip_address(one).is_loopback for one in found) else found


def _check_that_something_listens(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        if address == "auto":
            return
        raise PlaitError(f'"{address}" is not an address of Ray; write HOST:PORT as ray start --head prints it')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, UnicodeError) as error:  # the second for a name that no host can have
        raise PlaitError(_no_cluster(f"{address}: {getattr(error, 'strerror', None) or error}")) from None


def _no_cluster(why: str) -> str:
    return (
        f"no cluster of Ray answers ({why}); start one by ray start --head, or name it by --with address=HOST:PORT or "
        "RAY_ADDRESS"
    )


# The machines.


def _cluster(request: SubmitRequest, options: Mapping[str, str]) -> Cluster:
    return cluster_of_node_kinds(ray_nodes(_ray(options.get("address")).nodes(), _cpus(options)), "Ray")


def _cpus(options: Mapping[str, str]) -> int | None:
    return int(options["cpus"]) if "cpus" in options else None


def ray_nodes(answer: Sequence[Mapping[str, Any]], cpus: int | None) -> list[NodeKind]:
    """The living nodes of ray.nodes(): those with GPUs, or where no node has any, all; only those with `cpus` cores.
    Without GPUs a node that has them several times is several."""
    resources = [one.get("Resources", {}) for one in answer if one.get("Alive")]
    with_gpus = [_gpu_node(one) for one in resources if int(one.get("GPU", 0))]
    kinds = with_gpus or [
        NodeKind(device=SERVER, per_node=1, cores=int(one["CPU"])) for one in resources if one.get("CPU", 0) >= 1
    ]
    if cpus is None:
        return kinds
    most = max((kind.cores for kind in kinds), default=cpus)
    if most < cpus:
        of_ray = "of Ray with GPUs" if with_gpus else "of Ray"
        raise PlaitError(f"--with cpus={cpus}, and no node {of_ray} has more than {most} cores; ask for fewer")
    if with_gpus:
        return [kind for kind in kinds if kind.cores >= cpus]
    return [replace(kind, cores=cpus) for kind in kinds for _ in range(kind.cores // cpus)]


def _gpu_node(resources: Mapping[str, float]) -> NodeKind:
    named = next((key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)), "")
    device = find_device_by_driver_name(named.replace("-", " ")) if named else None
    if device is None:
        raise PlaitError(f'the catalogue does not know the GPUs of a node of Ray ("{named}"); {DESCRIBE}')
    return NodeKind(device=device.name, per_node=int(resources["GPU"]), cores=max(1, int(resources.get("CPU", 1))))


# What Ray is asked for.


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorsRequest:
    """The actors of a job: one for each of its nodes, and more as Ray has room."""

    bundle: Mapping[str, int]
    """What each reserves."""
    nodes: int
    max_nodes: int
    strategy: Literal["SPREAD", "STRICT_SPREAD"]
    """STRICT_SPREAD: no two on one machine, of which each takes all cores."""
    cpus: int | None
    """The cores that each uses; None: all of its machine."""

    def fits(self, nodes: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the nodes of ray.nodes(), all of them free, hold the job."""
        room = [
            min(int(one.get("Resources", {}).get(key, 0) // count) for key, count in self.bundle.items())
            for one in nodes
            if one.get("Alive")
        ]
        return sum(min(1, one) if self.strategy == "STRICT_SPREAD" else one for one in room) >= self.nodes

    @property
    def words(self) -> str:
        """What is reserved, in words."""
        each = " and ".join(counted(count, key) for key, count in self.bundle.items())
        return f"{counted(self.nodes, 'actor')} with {each}" + (" each" if self.nodes > 1 else "")


def actors_request(job: ClusterJob, cores: int | None, options: Mapping[str, str]) -> ActorsRequest:
    """The actors of a job on nodes of `cores` cores (None: not known); raises PlaitError for an unusable number."""
    most, cpus = int(options.get("max_nodes", job.nodes)), _cpus(options)
    if most < job.nodes:
        raise PlaitError(f"--with max_nodes={most} is less than the {job.nodes} nodes to begin with; ask for more")
    if most > job.nodes == 1:
        raise PlaitError("a run on one node takes in no others; begin with --nodes 2, or leave --with max_nodes out")
    if most > job.nodes and cpus is None:
        raise PlaitError(
            "--with max_nodes needs --with cpus=N, the number of cores that each actor uses: two of the further actors "
            "may be on one machine"
        )
    gpus = {"GPU": job.groups[0].gpus} if job.uses_gpus else {}
    return ActorsRequest(
        bundle={"CPU": cpus or cores or 1, **gpus},
        nodes=job.nodes,
        max_nodes=most,
        strategy="SPREAD" if cpus else "STRICT_SPREAD",
        cpus=cpus,
    )


# The job at work.


class RayRun:
    """A job on Ray from its first actor to its end: what node 0 prints is shown, and a lost actor is made again where
    Ray has room for it, and joins the run; without node 0 all start again."""

    def __init__(self, ray: Any, job: ClusterJob, asked: ActorsRequest, folder: Path, screen: Screen) -> None:
        self._ray, self._job, self._asked, self._folder, self._screen = ray, job, asked, folder, screen
        self._namespace = run_namespace(WorkingFolder(folder), job.run)
        self._secret_file = folder / ".plait" / f"{job.name}-ray{SECRET_SUFFIX}"
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._working: dict[Any, int] = {}
        self._leader = ("", 0)
        self._made = 0
        self._replaced: set[int] = set()
        self._losses, self._saved = 0, newest_saved_step(job.target)
        self._shown = 0
        self._stopped_by: StopSignal | None = None

    def finish(self) -> None:
        """Start all agents and stay until the run has ended; raises Interrupted where it was stopped, RunFailed where
        it failed."""
        for rank in range(self._asked.max_nodes):
            self._log(rank).unlink(missing_ok=True)
        self._group = self._ray.util.placement_group(
            [dict(self._asked.bundle)] * self._asked.nodes,
            strategy=self._asked.strategy,
            name=group_name(self._job.name, self._namespace),
        )
        with collected_signals() as stops:
            try:
                self._make_secret()
                self._start_all(stops)
                while 0 in self._working.values():
                    self._look(stops)
                self._let_the_others_end()
            except self._ray.exceptions.RayError as error:
                raise _in_words(error) from None
            finally:
                self._print_new_lines()
                self._kill_all()
                self._ray.util.remove_placement_group(self._group)
                self._secret_file.unlink(missing_ok=True)

    def _make_secret(self) -> None:
        self._secret_file.unlink(missing_ok=True)  # of a command that was killed
        make_private_folder(self._secret_file.parent)
        choose_secret(self._secret_file)

    def _log(self, rank: int) -> Path:
        return self._folder / log_name(self._job.name, rank)

    def _start_all(self, stops: SignalMailbox) -> None:
        while True:
            self._wait_for_room(stops)
            for rank in range(self._asked.max_nodes):
                self._make_actor(rank)
            try:
                place = self._actors[0].place.remote()
                while not self._ray.wait([place], num_returns=1, timeout=_LOOK_S)[
                    0
                ]:  # signals are seen between two looks
                    self._heed(stops)
                self._leader = self._ray.get(place)
                break
            except self._ray.exceptions.RayActorError as error:
                if _CREATION in str(error):
                    raise
                self._note_loss(0, "was lost")
                self._kill_all()
        for rank in self._actors:
            self._start(rank)

    def _wait_for_room(self, stops: SignalMailbox) -> None:
        began, said = time.monotonic(), False
        while not self._group.wait(_GROUP_LOOK_S):
            self._heed(stops)
            waited, could = time.monotonic() - began, self._asked.fits(self._ray.nodes())
            if waited > _SAY_AFTER_S and not said:
                said = True
                why = "other work holds its nodes" if could else "it needs more or larger nodes"
                self._screen.print(f"waits    Ray has no room yet for {self._asked.words}: {why}; Ctrl-C gives up")
            if waited > ROOM_AT_LATEST_S and not could:
                raise PlaitError(
                    f"Ray has had no room for {self._asked.words} for {format_duration(ROOM_AT_LATEST_S)}, not even "
                    "with all nodes free; ask for fewer --nodes or --with cpus=, or add nodes"
                )

    def _make_actor(self, rank: int) -> None:
        strategies = self._ray.util.scheduling_strategies
        self._made += 1
        place = "SPREAD"
        if rank < self._asked.nodes:
            place = strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank
            )
        made = self._ray.remote(Agent).options(
            name=actor_name(self._job.name, rank, self._made),
            namespace=self._namespace,
            num_cpus=self._asked.bundle["CPU"],
            num_gpus=self._asked.bundle.get("GPU", 0),
            max_concurrency=3,  # stop() while work() goes on
            scheduling_strategy=place,
        )
        self._actors[rank] = made.remote(f"node {rank}")

    def _start(self, rank: int) -> None:
        address, port = self._leader
        gpus = self._asked.bundle.get("GPU", 0)
        variables = {
            **place_variables(rank, address, port),
            **({SECRET_FILE_VARIABLE: str(self._secret_file)} if self._asked.nodes > 1 else {}),
            **({GPUS_VARIABLE: str(gpus)} if gpus else {}),
            **({CORES_VARIABLE: str(self._asked.cpus)} if self._asked.cpus else {}),
            "PYTHONUNBUFFERED": "1",
        }
        arguments = node_arguments(self._job, self._job.target)
        if rank >= self._asked.nodes:
            arguments = further_arguments(f"{address}:{port}", self._secret_file)
        work = self._actors[rank].work.remote(arguments, variables, str(self._folder), str(self._log(rank)))
        self._working[work] = rank

    def _look(self, stops: SignalMailbox) -> None:
        """Wait briefly for agents to end, print the new output of node 0, and handle signals."""
        ended, _ = self._ray.wait(list(self._working), num_returns=1, timeout=_LOOK_S)
        self._print_new_lines()
        self._heed(stops)
        for work in ended:
            rank = self._working.pop(work)
            end = self._end_of(work)
            if rank and (end is None or end[0]) and self._node_0_ends_too(stops):
                continue
            if end is None:
                self._bring_back(rank, "was lost", stops)
            else:
                self._note_end(rank, *end, stops)

    def _end_of(self, work: Any) -> tuple[int, str] | None:
        """An agent's exit code and last line; None where it was lost with its actor."""
        try:
            code, line = self._ray.get(work)
        except self._ray.exceptions.RayActorError as error:
            if _CREATION in str(error):
                raise
            return None
        return code, line

    def _node_0_ends_too(self, stops: SignalMailbox) -> bool:
        """Wait a moment for node 0: its end explains another node's, which may come just before."""
        leaders = [work for work, rank in self._working.items() if rank == 0]
        for _ in range(_LOOKS_AT_NODE_0):
            if self._ray.wait(leaders, num_returns=1, timeout=_LOOK_S)[0]:
                return True
            self._print_new_lines()
            self._heed(stops)
        return False

    def _note_end(self, rank: int, code: int, line: str, stops: SignalMailbox) -> None:
        sentence = line.removeprefix("plait: ")
        if rank == 0 and code in _STOPPED_EXITS:
            raise Interrupted(self._stopped_by or "SIGTERM", "the run is stopped and saved; the same command continues")
        if code == PlaitError.exit_code and rank not in self._replaced and rank < self._asked.nodes:
            raise PlaitError(f"node {rank}: {sentence}")
        if code < 0:
            self._bring_back(rank, f"was ended by {signal.Signals(-code).name}", stops)
        elif rank == 0 and code == REQUEUE_EXIT:
            self._bring_back(rank, "needs a node that was lost", stops)
        elif rank == 0 and code:
            raise RunFailed(f"node 0: {sentence or f'it ended with exit code {code}'}")
        elif code == PlaitError.exit_code:
            self._screen.print(f"left out node {rank}: {sentence}")
        elif code:
            self._bring_back(rank, f"ended with exit code {code}: {sentence}", stops)

    def _note_loss(self, rank: int, how: str) -> None:
        """Count losses since the last new step was saved; raises GaveUp where they are too many."""
        saved = newest_saved_step(self._job.target)
        self._losses = 1 if saved > self._saved else self._losses + 1
        self._saved = max(saved, self._saved)
        if self._losses > LOSSES_AT_MOST:
            raise GaveUp(
                f"node {rank} {how}; it is the {self._losses}th loss without a new saved step, so the run is given up: "
                f"see {self._log(rank)}"
            )

    def _bring_back(self, rank: int, how: str, stops: SignalMailbox) -> None:
        if self._stopped_by is not None:
            if rank:
                return
            raise Interrupted(self._stopped_by, f"node 0 {how}; the same command continues from what is saved")
        self._note_loss(rank, how)
        self._replaced.add(rank)
        if rank:
            self._screen.print(f"again    node {rank} {how}; it starts again where Ray has room, and joins the run")
            self._kill(rank)  # one that Ray has only lost sight of
            self._make_actor(rank)
            self._start(rank)
            return
        self._screen.print(f"again    node 0 {how}; all nodes start again from what is saved")
        self._kill_all()
        self._start_all(stops)

    def _kill_all(self) -> None:
        self._working = {}
        for rank in self._actors:
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actors[rank])

    def _let_the_others_end(self) -> None:
        """Wait a moment for the agents that end with node 0; one that still waits for Ray never will."""
        deadline = time.monotonic() + _AFTER_NODE_0_S
        waiting = [work for work, rank in self._working.items() if rank < self._asked.nodes]
        while waiting and time.monotonic() < deadline:
            _, waiting = self._ray.wait(waiting, num_returns=1, timeout=_LOOK_S)

    def _heed(self, stops: SignalMailbox) -> None:
        for name in stops.read():
            if not self._working or self._stopped_by is not None:
                raise Interrupted(name, "ended at once; the same command continues from what is saved")
            self._stopped_by = name
            self._screen.print("stop     finishing this step and saving; Ctrl-C again quits")
            self._actors[0].stop.remote()

    def _print_new_lines(self) -> None:
        """Show the whole lines that node 0 has printed since the last call."""
        with suppress(FileNotFoundError), self._log(0).open("rb") as file:
            file.seek(self._shown)
            whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._shown += len(whole) + 1
                self._screen.print(whole.decode("utf-8", "replace"))


def run_namespace(working: WorkingFolder, run: str) -> str:
    """Ray's namespace for the actors of a run, by its folder: a run of that name elsewhere has another."""
    folder = run_folder(run, working).path.resolve()
    return f"plait-{sha256(os.fsencode(folder)).hexdigest()[:12]}"


def group_name(job: str, namespace: str) -> str:
    """The name of a job's placement group, which a run of that name in another folder does not have."""
    return f"{job}-{namespace}"


def actor_name(job: str, rank: int, made: int) -> str:
    """An actor's name, which no earlier one of the job has."""
    return f"{job}-{rank}-{made}"


def further_arguments(at: str, secret_file: Path) -> list[str]:
    """The arguments of Python on a node that joins the run in its course."""
    return ["-P", "-m", "plait", "join", at, "--again", "--secret-file", str(secret_file)]


def log_name(job: str, rank: int) -> str:
    """The file in the working folder with what a node printed."""
    return f"{job}-ray-{rank}.log"


def _in_words(error: Exception) -> PlaitError:
    """What Ray's own error means for the run."""
    lines = [line.strip().rstrip(".:") for line in str(error).splitlines() if line.strip()]
    if "No module named 'plait" in str(error):
        return PlaitError("the Python that Ray runs on has no plait; install the same version of it on all nodes")
    said = (lines[-1] if "Error: " in lines[-1] else lines[0]) if lines else type(error).__name__
    return RunFailed(f"Ray says: {said}; what was saved stays, and the same command continues it")


# Submitting a job, and its state, output and end.


def _prepare(job: ClusterJob, request: SubmitRequest, options: Mapping[str, str], config: RunConfig | None) -> Outgoing:
    if len(job.groups) > 1:
        raise PlaitError("the actors of a job are equal; describe nodes of one kind, or submit to Slurm or by ssh")
    if request.time is not None:
        raise PlaitError("Ray ends no job at a time limit; leave --time out, or set train.budget")
    if config is None and "max_nodes" in options:
        raise PlaitError("a program of your own takes in no further nodes; leave --with max_nodes out")
    cores = None
    if request.cluster is None:
        cores = min(kind.cores for kind in ray_nodes(_ray(options.get("address")).nodes(), _cpus(options)))
    asked = actors_request(job, cores, options)
    shown: dict[str, Any] = {
        "placement_group": {"strategy": asked.strategy, "bundles": [dict(asked.bundle)] * asked.nodes},
        "command": ["python3", *node_arguments(job, job.target)],
    }
    if asked.max_nodes > asked.nodes:
        further = ["python3", *further_arguments("ADDRESS:PORT", Path(".plait") / f"{job.name}-ray{SECRET_SUFFIX}")]
        shown["further_actors"] = {"at_most": asked.max_nodes - asked.nodes, "command": further}
    lines = ["Made by plait submit: an actor in each bundle, which runs the command.", *job.why]
    text = "".join(f"# {line}\n" for line in lines) + yaml_text(shown)

    def send(screen: Screen, working: WorkingFolder) -> None:
        ray = _ray(options.get("address"))
        address, namespace = str(ray.get_runtime_context().gcs_address), run_namespace(working, job.run)
        record = Submitted(name=job.run, label=job.name, scheduler="ray", job=address, namespace=namespace)
        require_ended(ray, record)
        keep_record(record, working)
        more = "" if asked.max_nodes == asked.nodes else f", {asked.max_nodes} at most"
        screen.print(f"sent     {job.run}: {counted(asked.nodes, 'actor')} of Ray{more}; Ctrl-C saves and ends it")
        RayRun(ray, job, asked, working.path.absolute(), screen).finish()

    return Outgoing(file=f"{job.name}.ray.yaml", text=text, run=job.run, send=send)


def require_ended(ray: Any, record: Submitted) -> None:
    """Raise PlaitError where the run has actors, or waits for room: a second command would take its secret away."""
    state = ray_state(ray, record)
    if state != _ENDED:
        raise PlaitError(
            f"{record.name} is on Ray already ({state}); end it first: plait stop {record.name}, or Ctrl-C in the "
            "terminal where it was submitted"
        )


def ray_state(ray: Any, record: Submitted) -> str:
    """What Ray knows of a run."""
    actors = _actors(ray, record)
    if actors:
        return f"{counted(len(actors), 'actor')} at work"
    named = group_name(record.label, record.namespace)
    groups = {one["state"] for one in ray.util.placement_group_table().values() if one["name"] == named} - {"REMOVED"}
    if not groups:
        return _ENDED
    return "its actors are about to start" if "CREATED" in groups else "waits until Ray has room for it"


def stop_run(ray: Any, record: Submitted) -> None:
    """Have node 0 save and end, which ends the run; raises PlaitError where it cannot be asked."""
    leader = next((actor for name, actor in _actors(ray, record).items() if _rank_of(name) == 0), None)
    if leader is None:
        raise PlaitError(
            f"{record.name} has no node 0 on Ray to be stopped ({ray_state(ray, record)}); Ctrl-C in the terminal "
            "where it was submitted ends a command that waits"
        )
    try:
        ray.get(leader.stop.remote(), timeout=_STOP_ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise PlaitError(
            f"node 0 of {record.name} has not answered within {_STOP_ANSWER_S:.0f} s: Ray has not started it yet, or "
            "its machine is lost; try again later, or press Ctrl-C in the terminal where it was submitted"
        ) from None
    except ray.exceptions.RayError:
        raise PlaitError(
            f"node 0 of {record.name} ended before it could be stopped; if plait status {record.name} says that it is "
            "at work again, stop it again"
        ) from None


def _actors(ray: Any, record: Submitted) -> dict[str, Any]:
    """The living actors of a run by their names, node 0 first."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in named if one["namespace"] == record.namespace]
    found = dict[str, Any]()
    for name in sorted(names, key=_rank_of):
        with suppress(ValueError):  # it has died since it was listed
            found[name] = ray.get_actor(name, namespace=record.namespace)
    return found


def _rank_of(name: str) -> int:
    return int(name.rsplit("-", 2)[1])


def _log_lines(record: Submitted, working: WorkingFolder) -> Iterator[str]:
    file = working.path / log_name(record.label, 0)
    if not file.is_file():
        state = ray_state(_ray(record.job), record)
        raise PlaitError(f"{record.name} has printed nothing yet ({state}); look again later")
    yield from file.read_text(encoding="utf-8", errors="replace").splitlines()


RAY = ClusterSystem(
    options=_OPTIONS,
    cluster=_cluster,
    prepare=_prepare,
    state=lambda record: ray_state(_ray(record.job), record),
    log_lines=_log_lines,
    end=lambda record: stop_run(_ray(record.job), record),
)
