"""Ray: the machines of a cluster that runs, and a job as a placement group with an actor on each of its nodes.

Each actor starts one agent, `plait node`, and passes on what it prints. The command that submits stays until the end:
it brings lost actors back. Ray is an extra: pip install "plait[ray]".
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.clusters.job import (
    GPUS_VARIABLE,
    LEADER_VARIABLE,
    PORT_VARIABLE,
    RANK_VARIABLE,
    ClusterJob,
    ClusterSystem,
    Outgoing,
    Submitted,
    keep_record,
    node_arguments,
)
from plait.clusters.kubernetes import yaml_text
from plait.clusters.machines import SERVER, NodeKind, cluster_of_node_kinds
from plait.clusters.request import Option, SubmitRequest
from plait.clusters.tools import DESCRIBE
from plait.errors import Interrupted, PlaitError, RunFailed
from plait.hosts.handshake import SECRET_VARIABLE, new_secret
from plait.machines.catalog import find_device_by_driver_name
from plait.machines.cluster import Cluster
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted
from plait.working_folder import WorkingFolder

_OPTIONS: Mapping[str, Option] = {
    "address": Option("Ray's address; that of RAY_ADDRESS, or of the cluster of this machine, if left out"),
    "cpus": Option("cores that each actor reserves; 1 if left out", r"[1-9]\d{0,4}", "16"),
    "python": Option("Python with plait on the nodes; the one that runs now if left out"),
}
_NAMESPACE = "plait"
_LOOK_S = 1.0
_ACCELERATOR = "accelerator_type:"
_SAVES_WHEN_ITS_PARENT_DIES = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)
"""PR_SET_PDEATHSIG with SIGTERM, then the command."""
_READY_S = 10.0
_AFTER_NODE_0_S = 30.0
RESTARTS_AT_MOST = 20
"""Lost actors that are brought back in one run."""


def _ray(address: str | None, *, prints: bool) -> Any:
    """The library, connected to a cluster; raises PlaitError where there is none."""
    try:
        ray = import_module("ray")
    except ImportError:
        raise PlaitError('--on ray needs Ray\'s own library; install it: pip install "plait[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", namespace=_NAMESPACE, log_to_driver=prints, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            why = str(error).partition("\n")[0].rstrip(".")
            raise PlaitError(
                f"no cluster of Ray answers ({why}); start one with ray start --head, or name it by --with address="
            ) from None
    return ray


# The machines.


def _cluster(request: SubmitRequest, options: Mapping[str, str]) -> Cluster:
    ray = _ray(options.get("address"), prints=True)
    return cluster_of_node_kinds(ray_nodes(ray.nodes()), "Ray")


def ray_nodes(answer: Sequence[Mapping[str, Any]]) -> list[NodeKind]:
    """The nodes of ray.nodes() that live: those with GPUs, or where no node has any, all."""
    found = [_node_kind(one.get("Resources", {})) for one in answer if one.get("Alive")]
    return [kind for kind in found if kind.device != SERVER] or found


def _node_kind(resources: Mapping[str, float]) -> NodeKind:
    cores, gpus = max(1, int(resources.get("CPU", 1))), int(resources.get("GPU", 0))
    if not gpus:
        return NodeKind(device=SERVER, per_node=1, cores=cores)
    named = next((key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)), "")
    device = find_device_by_driver_name(named.replace("-", " "))
    if device is None:
        raise PlaitError(f'the catalogue does not know the GPUs of a node of Ray ("{named}"); {DESCRIBE}')
    return NodeKind(device=device.name, per_node=gpus, cores=cores)


# The agents.


class Agent:
    """An actor of Ray: the agent of one node, as a child process that ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def place(self) -> tuple[str, int]:
        """The address of this node, and a port that is free there."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        return str(import_module("ray").util.get_node_ip_address()), port

    def work(self, command: Sequence[str], variables: Mapping[str, str], folder: str, log: str) -> int:
        """Run the agent in a folder until it ends; returns its exit code. Its lines become the actor's, and are added
        to the file `log` where one is named."""
        if not Path(folder).is_dir():
            print(f"plait: {folder} is not on this node; submit from a folder that all nodes share")
            return PlaitError.exit_code
        # Ray's own idea of a process's threads; the plan has another.
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        with subprocess.Popen(
            [sys.executable, "-c", _SAVES_WHEN_ITS_PARENT_DIES, *command],
            cwd=folder,
            env={**inherited, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            self._process = process
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if log:
                    with Path(log).open("a", encoding="utf-8") as file:
                        file.write(line)
        return process.returncode

    def stop(self) -> None:
        """Have the agent save and end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


class RayRun:
    """A job's actors, which `finish` follows to the end; a lost one is made again on the node that Ray finds for its
    bundle, and takes part again."""

    def __init__(self, ray: Any, job: ClusterJob, options: Mapping[str, str], folder: Path, screen: Screen) -> None:
        self._ray, self._job, self._options, self._screen = ray, job, options, screen
        self._folder, self._log = folder, folder / log_name(job.name)
        self._secret = new_secret().text
        self._lost = 0
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}
        self._group = ray.util.placement_group(bundles(job, options), strategy="SPREAD")
        self._leader: tuple[str, int] = ("", 0)

    def finish(self) -> None:
        """Start all agents and wait for their end; raises RunFailed where node 0 failed."""
        self._log.unlink(missing_ok=True)
        self._start_all()
        stopped = False
        try:
            while self._pending:
                try:
                    self._look()
                except KeyboardInterrupt:
                    if stopped:
                        raise
                    stopped = True
                    self._screen.print("stop     Ctrl-C: finishing this step and saving; Ctrl-C again quits")
                    self._actors[0].stop.remote()
        finally:
            for actor in self._actors.values():
                with suppress(Exception):
                    self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)
        if stopped:
            raise Interrupted("SIGINT", "saved; the same command goes on")

    def _start_all(self) -> None:
        self._pending = {}
        try:
            self._ray.get(self._group.ready(), timeout=_READY_S)
        except self._ray.exceptions.GetTimeoutError:
            needs = " and ".join(f"{count} {what}" for what, count in bundles(self._job, self._options)[0].items())
            self._screen.print(f"waits    until Ray has {self._job.nodes} times {needs} free")
            self._ray.get(self._group.ready())
        for rank in range(self._job.nodes):
            self._new_actor(rank)
        self._leader = self._ray.get(self._actors[0].place.remote())
        for rank in range(self._job.nodes):
            self._start(rank)

    def _new_actor(self, rank: int) -> None:
        resources = bundles(self._job, self._options)[rank]
        place = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank
        )
        self._actors[rank] = (
            self._ray.remote(Agent)
            .options(
                name=f"{self._job.name}-{rank}-{self._lost}",
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_concurrency=3,
                scheduling_strategy=place,
            )
            .remote()
        )

    def _start(self, rank: int) -> None:
        address, port = self._leader
        gpus = self._job.groups[0].gpus
        variables = {
            RANK_VARIABLE: str(rank),
            LEADER_VARIABLE: address,
            PORT_VARIABLE: str(port),
            **({GPUS_VARIABLE: str(gpus)} if gpus else {}),
            **({SECRET_VARIABLE: self._secret} if self._job.nodes > 1 else {}),
            "PYTHONUNBUFFERED": "1",
        }
        command = agent_command(self._job, self._options)
        log = str(self._log) if rank == 0 else ""
        done = self._actors[rank].work.remote(command, variables, str(self._folder), log)
        self._pending[done] = rank

    def _look(self) -> None:
        """Wait a moment for agents that end; make lost ones again."""
        ended, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=_LOOK_S)
        for one in ended:
            rank = self._pending.pop(one)
            try:
                code = self._ray.get(one)
            except self._ray.exceptions.RayError:
                self._bring_back(rank, "was lost")
                continue
            if rank == 0 and code:
                raise RunFailed(f"node 0 ended with exit code {code}; see what it printed, then submit again")
            if rank == 0:
                self._pending = {key: other for key, other in self._pending.items() if self._has_ended(key)}
            elif code and 0 in self._pending.values() and code != PlaitError.exit_code:
                self._bring_back(rank, f"ended with exit code {code}")

    def _has_ended(self, done: Any) -> bool:
        """Whether an agent has ended by itself a moment after node 0; one that would join again waits for it."""
        ended, _ = self._ray.wait([done], num_returns=1, timeout=_AFTER_NODE_0_S)
        return bool(ended)

    def _bring_back(self, rank: int, how: str) -> None:
        self._lost += 1
        if self._lost > RESTARTS_AT_MOST:
            raise RunFailed(f"node {rank} {how}, after {RESTARTS_AT_MOST} others; see what they printed, submit again")
        if rank:
            self._screen.print(f"again    node {rank} {how}; it is started again, and joins the run")
            self._new_actor(rank)
            self._start(rank)
            return
        self._screen.print(f"again    node 0 {how}; all nodes start again, and go on from what is saved")
        for actor in self._actors.values():
            with suppress(Exception):
                self._ray.kill(actor)
        time.sleep(_LOOK_S)  # the agents of killed actors have been signalled, and let go of the run's folder
        self._start_all()


def bundles(job: ClusterJob, options: Mapping[str, str]) -> list[dict[str, int]]:
    """What Ray reserves for each node."""
    gpus = {"GPU": job.groups[0].gpus} if job.uses_gpus else {}
    return [{"CPU": int(options.get("cpus", "1")), **gpus} for _ in range(job.nodes)]


def agent_command(job: ClusterJob, options: Mapping[str, str]) -> list[str]:
    """The command of each node."""
    return [options.get("python", sys.executable), *node_arguments(job, job.target)]


def log_name(name: str) -> str:
    """The file below the working folder with what node 0 printed."""
    return f"{name}-ray.log"


# Submitting a job, and its state, output and end.


def _prepare(job: ClusterJob, request: SubmitRequest, options: Mapping[str, str], config: RunConfig | None) -> Outgoing:
    if len(job.groups) > 1:
        raise PlaitError("the actors of a job are equal; describe nodes of one kind, or submit to Slurm or by ssh")
    if job.time_s is not None:
        raise PlaitError("Ray ends no job at a time limit; leave --time out, or set train.budget")
    shown = {
        "placement_group": {"strategy": "SPREAD", "bundles": bundles(job, options)},
        "command": agent_command(job, options),
    }
    lines = ["Made by plait submit: one actor a bundle, which runs the command.", *job.why]
    text = "".join(f"# {line}\n" for line in lines) + yaml_text(shown)

    def send(screen: Screen, working: WorkingFolder) -> None:
        ray = _ray(options.get("address"), prints=True)
        keep_record(Submitted(name=job.run, label=job.name, scheduler="ray"), working)
        screen.print(f"sent     {job.run}: {counted(job.nodes, 'actor')} of Ray; Ctrl-C saves and ends it")
        RayRun(ray, job, options, working.path.absolute(), screen).finish()

    return Outgoing(file=f"{job.name}.ray.yaml", text=text, run=job.run, send=send)


def _agents(record: Submitted) -> dict[str, Any]:
    """The actors of a job that live, by their names."""
    ray = _ray(None, prints=False)
    names = [
        name for name in ray.util.list_named_actors() if name.rpartition("-")[0].rpartition("-")[0] == record.label
    ]
    return {name: ray.get_actor(name) for name in sorted(names)}


def _state(record: Submitted) -> str:
    agents = _agents(record)
    return f"{counted(len(agents), 'node')} at work" if agents else "ended"


def _log_lines(record: Submitted, working: WorkingFolder) -> Iterator[str]:
    file = working.path / log_name(record.label)
    if not file.is_file():
        raise PlaitError(f"{record.name} has printed nothing yet; look again later, or in Ray's dashboard")
    yield from file.read_text(encoding="utf-8", errors="replace").splitlines()


def _end(record: Submitted) -> None:
    """Have node 0 save and end, which ends the run."""
    leader = next((actor for name, actor in _agents(record).items() if name.startswith(f"{record.label}-0-")), None)
    if leader is None:
        raise PlaitError(f"{record.name} has ended already: plait logs {record.name}")
    leader.stop.remote()


RAY = ClusterSystem(options=_OPTIONS, cluster=_cluster, prepare=_prepare, state=_state, log_lines=_log_lines, end=_end)
