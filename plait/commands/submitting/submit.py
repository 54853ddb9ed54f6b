"""`plait submit`: how many nodes pay, the scripts or manifests for them, and their way to a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from plait.arguments import texts_of
from plait.commands.planning.output_files import write_output_file
from plait.commands.programs.program_file import program_hash
from plait.commands.submitting.machines import kubernetes_cluster, slurm_cluster, slurm_limit_s
from plait.commands.submitting.node import is_program
from plait.commands.submitting.options import (
    Scheduler,
    parse_grace_s,
    parse_kind,
    parse_machines,
    parse_options,
    parse_scheduler,
    parse_time_s,
)
from plait.commands.submitting.over_ssh.sending import ssh_cluster
from plait.commands.submitting.scaling import Scaling, forecast_scaling, pays_sentences, scaled, scaling_text
from plait.commands.submitting.senders import Outgoing, kubernetes_job, slurm_job, ssh_job
from plait.deploy.cluster_job import SAVE_GRACE_S, ClusterJob, NodeGroup, cluster_job_name
from plait.deploy.manifests import JobKind
from plait.errors import PlaitError
from plait.machines.cluster import Cluster, Island, read_cluster
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """What a person typed; None and empty where it is left to plait."""

    target: tuple[str, ...]
    scheduler: Scheduler
    cluster: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    machines: tuple[str, ...] = ()
    time: str | None = None
    kind: JobKind | None = None
    options: tuple[str, ...] = ()


def request_from_call(
    target: tuple[str, ...], on: str, cluster: str | None, nodes: int | None, options: Mapping[str, object] | None
) -> SubmitRequest:
    """The request of a Python caller: `options` has time, gpus, machines and kind beside what `--with` takes. Raises
    PlaitError for what is none."""
    if not isinstance(options or {}, Mapping):
        raise PlaitError(f"options = {options!r:.80} is not usable; give a dict, for example {{'partition': 'gpu'}}")
    asked = dict(options or {})
    gpus, machines, time = asked.pop("gpus", None), asked.pop("machines", ()), asked.pop("time", None)
    if gpus is not None and (isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1):
        raise PlaitError(f"options: gpus = {gpus!r:.80} is not usable; give a whole number, 1 or more")
    named = ",".join(texts_of("options: machines", machines))
    return SubmitRequest(
        target=target,
        scheduler=parse_scheduler(on),
        cluster=cluster,
        nodes=nodes,
        gpus=gpus,
        machines=parse_machines(named or None),
        time=None if time is None else str(time),
        kind=parse_kind(str(asked.pop("kind"))) if "kind" in asked else None,
        options=tuple(f"{key}={value}" for key, value in asked.items()),
    )


def submit_or_show(
    request: SubmitRequest,
    *,
    deed: Literal["send", "show"],
    out: Path | None,
    screen: Screen,
    show: Callable[[str], object],
    working: WorkingFolder = CURRENT_FOLDER,
) -> None:
    """Say how many nodes pay, then send the job, or `show` its files or write them to `out`; raises PlaitError with
    what to mend, before anything is sent.

    What is shown is for other programs to read; what a person reads goes to the screen.
    """
    outgoing = outgoing_job(request, screen, working)
    if deed == "send":
        outgoing.send()
    elif out is None:
        show(outgoing.text)
    else:
        _write(out, outgoing, screen)


def _write(out: Path, outgoing: Outgoing, screen: Screen) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlaitError(f"{out} cannot be made ({error.strerror}); name another folder by --out") from None
    write_output_file(out / outgoing.file, outgoing.text)
    screen.print(f"written  {out / outgoing.file}")


def outgoing_job(request: SubmitRequest, screen: Screen, working: WorkingFolder = CURRENT_FOLDER) -> Outgoing:
    """The job as it would be sent, after its forecast was shown; raises PlaitError."""
    options = parse_options(request.options, request.scheduler)
    _check_request(request, options)
    config = None if is_program(request.target) else load_recipe(Path(request.target[0]), request.target[1:])
    if config is None:
        program_hash(Path(request.target[0]))
    name = config.run.name if config else Path(request.target[0]).stem
    job = _job(request, options, name, config, screen, working)
    match request.scheduler:
        case "slurm":
            return slurm_job(job, options, screen, working)
        case "kubernetes":
            return kubernetes_job(job, options, request.kind or "jobset", screen, working)
        case "ssh":
            return ssh_job(job, options, request.machines[: job.nodes], request.gpus, config, screen, working)


def _check_request(request: SubmitRequest, options: dict[str, str]) -> None:
    if (request.scheduler == "ssh") != bool(request.machines):
        raise PlaitError(
            "--on ssh needs the machines' names: --machines a,b,c" if request.scheduler == "ssh"
            else f"--machines is for --on ssh; {request.scheduler} itself chooses the machines"
        )  # fmt: skip
    if len(set(request.machines)) < len(request.machines):
        raise PlaitError("--machines names a machine twice; name each once")
    if request.nodes and request.scheduler == "ssh" and request.nodes > len(request.machines):
        raise PlaitError(f"--nodes {request.nodes} are more than the {len(request.machines)} of --machines; name more")
    if request.scheduler == "kubernetes" and "image" not in options:
        raise PlaitError(
            "Kubernetes runs containers; build one from install/Containerfile, and name it: --with image=NAME:TAG"
        )
    if request.kind and request.scheduler != "kubernetes":
        raise PlaitError(f"--kind is for --on kubernetes; leave it out for {request.scheduler}")
    if request.time and request.scheduler == "ssh":
        raise PlaitError("nobody ends a run by ssh when a time is over; leave --time out, or set train.budget")


def _job(
    request: SubmitRequest,
    options: dict[str, str],
    name: str,
    config: RunConfig | None,
    screen: Screen,
    working: WorkingFolder,
) -> ClusterJob:
    cluster = _with_gpus(_machines(request, options), request.gpus)
    wanted = request.nodes or len(request.machines) or None
    if wanted and request.cluster is None and request.scheduler != "ssh" and wanted > cluster.n_nodes:
        raise PlaitError(f"{cluster.name} has {counted(cluster.n_nodes, 'node')}; ask for so many or fewer by --nodes")
    if config is None:
        if wanted is None:
            raise PlaitError("a program of your own is not forecast; say how many nodes by --nodes")
        why = [f"{counted(wanted, 'node')}, as asked"]
        chosen, near = wanted, ""
    else:
        scaling = forecast_scaling(
            config, lambda n: scaled(cluster, n), existing=cluster.n_nodes, wanted=wanted, working=working
        )
        chosen = wanted or scaling.pays
        why = pays_sentences(scaling, chosen)
        screen.print(scaling_text(scaling, chosen, cluster.hardware))
        near = _near(scaling, chosen, cluster)
    limit = parse_time_s(request.time) if request.time else None
    grace = _grace_s(request, options, limit, screen)
    return ClusterJob(
        name=cluster_job_name(name),
        run=name,
        target=request.target,
        groups=_groups(cluster, chosen, options.get("partition", ""), request.scheduler),
        time_s=limit,
        grace_s=grace,
        why=tuple(why),
        near=near,
    )


def _grace_s(request: SubmitRequest, options: dict[str, str], limit: int | None, screen: Screen) -> int:
    """Seconds before the job's time limit at which the run is signalled to save.

    Shortened for partitions of short jobs: a grace as long as the limit would make every start save at once and
    requeue. Raises PlaitError if no time to train is left.
    """
    grace = parse_grace_s(options["grace"]) if "grace" in options else SAVE_GRACE_S
    if limit is not None and limit < 2 * grace:
        raise PlaitError(
            f"--time {request.time} leaves no time to train before the {grace} s in which a run saves; ask for more, "
            'or shorten it by --with "grace=1 minute"'
        )
    ends = slurm_limit_s(options.get("partition", "")) if request.scheduler == "slurm" and limit is None else None
    if ends is None or ends[1] >= 2 * grace:
        return grace
    partition, seconds = ends
    ends_it = f"partition {partition} ends a job after {format_duration(seconds)}"
    if "grace" in options or seconds < _SHORTEST_JOB_S:
        raise PlaitError(
            f"{ends_it} unless it asks for more, which leaves no time to train before the {grace} s in which a run "
            "saves; ask for more by --time, or name another partition by --with partition=NAME"
            + (', or shorten the saving by --with "grace=1 minute"' if "grace" in options else "")
        )
    screen.print(
        f"grace    {seconds // 4} s in place of {grace} s to save in: {ends_it} unless it asks for more (--time)"
    )
    return seconds // 4


_SHORTEST_JOB_S = 180
"""Slurm warns a minute too early at worst: a quarter of less leaves nothing."""


def _machines(request: SubmitRequest, options: dict[str, str]) -> Cluster:
    """The machines as described, else as the scheduler or the machines themselves tell."""
    if request.cluster is not None:
        return read_cluster(request.cluster)
    match request.scheduler:
        case "slurm":
            return slurm_cluster(options.get("partition", ""))
        case "kubernetes":
            return kubernetes_cluster()
        case "ssh":
            return ssh_cluster(request.machines, options.get("folder", "plait-runs"))


def _with_gpus(cluster: Cluster, gpus: int | None) -> Cluster:
    """The cluster with only so many GPUs of each node."""
    if gpus is None:
        return cluster
    for island in cluster.islands:
        if island.device.kind == "cpu":
            raise PlaitError(f"--gpus {gpus}, and {cluster.name} has no GPUs; leave --gpus out")
        if gpus > island.per_node:
            raise PlaitError(f"--gpus {gpus}, and a node of {island.device.name} has {island.per_node}; ask for fewer")
    return replace(cluster, islands=tuple(replace(island, per_node=gpus) for island in cluster.islands))


def _groups(cluster: Cluster, nodes: int, partition: str, scheduler: Scheduler) -> tuple[NodeGroup, ...]:
    """Equal nodes together, the first `nodes` of the cluster; in Slurm each kind of them may have a partition of its
    own."""
    partitions = partition.split("+") if partition else [""]
    if len(partitions) not in (1, len(cluster.islands)):
        raise PlaitError(
            f"{len(partitions)} partitions for {counted(len(cluster.islands), 'kind')} of nodes; name one, or one for "
            "each kind, joined by +"
        )
    islands = scaled(cluster, nodes).islands
    _check_devices(islands, scheduler)
    named = partitions * len(islands) if len(partitions) == 1 else partitions
    return tuple(
        NodeGroup(nodes=island.nodes, gpus=0 if island.device.kind == "cpu" else island.per_node, partition=where)
        for island, where in zip(islands, named, strict=False)  # those that come last may not be needed
    )


def _check_devices(islands: Sequence[Island], scheduler: Scheduler) -> None:
    for device in (island.device for island in islands):
        if device.kind == "tpu":
            raise PlaitError(
                f"plait plans for {device.name} on paper, and trains on processors and GPUs; describe those"
            )
        if scheduler == "kubernetes" and device.kind == "gpu" and device.vendor != "NVIDIA":
            raise PlaitError(f"plait's pods ask for NVIDIA GPUs, and {device.name} is none; submit to Slurm or by ssh")
    if len(islands) > 1 and scheduler == "kubernetes":
        raise PlaitError("the pods of a job are equal; describe nodes of one kind, or submit to Slurm or by ssh")


def _near(scaling: Scaling, chosen: int, cluster: Cluster) -> str:
    """Why all nodes must be close together; empty where they need not be."""
    layout = scaling.row(chosen).layout
    together, per_node = layout.tensor * layout.context, cluster.islands[0].per_node
    if together <= per_node:
        return ""
    return f"all pods in one zone: {together} devices split each layer, and a machine has {per_node}"
