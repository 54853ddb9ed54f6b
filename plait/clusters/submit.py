"""`plait submit` and `plait.submit`: how many nodes pay off, and the job for them, shown or sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.arguments import check_arguments, texts_of
from plait.clusters.job import SAVE_GRACE_S, ClusterJob, Outgoing, cluster_job_name
from plait.clusters.machines import node_groups, with_gpus
from plait.clusters.request import Scheduler, SubmitRequest, parse_options, parse_time_s, request_from_call
from plait.clusters.scaling import Scaling, forecast_scaling, pays_sentences, scaling_text
from plait.clusters.slurm import slurm_limit_s
from plait.clusters.submitted import SYSTEMS, end_job, fetch_job, job_log_lines, job_state_line
from plait.clusters.target import program_of
from plait.commands.planning.output_files import write_output_file
from plait.commands.programs.program_file import program_hash
from plait.commands.python_call import ProgressDisplay, as_command, known_keywords, screen_for
from plait.commands.runs import Run
from plait.errors import PlaitError
from plait.machines.cluster import Cluster, read_cluster
from plait.recipe.load import load_recipe
from plait.screen.screen import Screen
from plait.units import counted, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_SHORTEST_JOB_S = 180
"""Slurm warns a minute too early at worst: a quarter of less leaves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A job by its name; another process finds it again by `SubmittedJob(name=…)`, in the same current folder."""

    name: str
    """The run's, or the program's without ".py"."""
    text: str = ""
    """The script or the manifests."""

    def __str__(self) -> str:
        return self.text

    @property
    def state(self) -> str:
        """Its state as the scheduler reports it; raises PlaitError if it was not submitted."""
        with as_command():
            line = job_state_line(self.name)
        if line is None:
            raise PlaitError(f'no job "{self.name}" was submitted from this folder; submit it with deed="send"')
        return line

    def logs(self) -> str:
        """The output of its first node so far."""
        with as_command():
            return "".join(f"{line}\n" for line in job_log_lines(self.name))

    def stop(self) -> None:
        """End it; it saves first, and the same call of `plait.submit` continues it."""
        with as_command():
            end_job(self.name)

    def fetch(self) -> Run:
        """Copy its run into runs/ here; raises PlaitError if it has not begun to train."""
        with as_command():
            fetch_job(self.name, screen_for("off"))
        return Run(self.name)


@known_keywords
def submit(
    target: str | Path,
    arguments: Sequence[str] = (),
    *,
    on: Scheduler,
    cluster: str | None = None,
    nodes: int | None = None,
    options: Mapping[str, object] | None = None,
    deed: Literal["send", "show"] = "send",
    progress: ProgressDisplay = "auto",
) -> SubmittedJob:
    """Run a recipe (`arguments` are its settings) or a program (its arguments) on a cluster, from the current folder.

    `options`: time, gpus, machines, kind, and the keys of `--with`. "show" submits nothing: the job's `text` is what
    would be submitted. With ssh it blocks until the run ends, otherwise until the scheduler has the job. Raises
    PlaitError.
    """
    if isinstance(arguments, str):
        raise PlaitError(f"arguments = {arguments!r:.80} is not usable; give a list of texts, one for each argument")
    check_arguments(target=target, on=on, cluster=cluster, nodes=nodes, deed=deed, progress=progress)
    with as_command():
        words = (str(target), *texts_of("arguments", arguments))
        screen = screen_for(progress)
        outgoing = outgoing_job(request_from_call(words, on, cluster, nodes, options), screen)
        if deed == "send":
            outgoing.send(screen, CURRENT_FOLDER)
    return SubmittedJob(name=outgoing.run, text=outgoing.text)


def submit_or_show(
    request: SubmitRequest,
    *,
    deed: Literal["send", "show"],
    out: Path | None,
    screen: Screen,
    show: Callable[[str], object],
    working: WorkingFolder = CURRENT_FOLDER,
) -> None:
    """Say how many nodes pay off, then send the job, or `show` its files or write them to `out`; raises PlaitError
    before anything is sent.

    Only the files are shown, for other programs; lines for the user go to the screen.
    """
    outgoing = outgoing_job(request, screen, working)
    if deed == "send":
        outgoing.send(screen, working)
        return
    if out is None:
        show(outgoing.text)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlaitError(f"{out} cannot be made ({error.strerror}); name another folder by --out") from None
    write_output_file(out / outgoing.file, outgoing.text)
    screen.print(f"written  {out / outgoing.file}")


def outgoing_job(request: SubmitRequest, screen: Screen, working: WorkingFolder = CURRENT_FOLDER) -> Outgoing:
    """The job as it would be sent, after showing its forecast; raises PlaitError."""
    system = SYSTEMS[request.scheduler]
    options = parse_options(request.options, system.options, request.scheduler)
    _check_request(request, options)
    own = program_of(request.target)
    if own is not None:
        program_hash(own.program.path)
        name, config = own.name, None
        if own.program.module and request.scheduler not in ("slurm", "ray"):
            raise PlaitError(
                f"--on {request.scheduler} copies one file, and module {own.name} lies among others; submit it by "
                "--on slurm, which runs it in this folder, or start it on each machine: plait run -m, plait join -m"
            )
    else:
        config = load_recipe(Path(request.target[0]), request.target[1:])
        name = config.run.name
    described = read_cluster(request.cluster) if request.cluster is not None else system.cluster(request, options)
    cluster = with_gpus(described, request.gpus)
    wanted = request.nodes or len(request.machines) or None
    if wanted and request.cluster is None and request.scheduler != "ssh" and wanted > cluster.n_nodes:
        raise PlaitError(f"{cluster.name} has {counted(cluster.n_nodes, 'node')}; ask for as many or fewer by --nodes")
    if config is None:
        if wanted is None:
            raise PlaitError("a program of your own is not forecast; say how many nodes by --nodes")
        chosen, near, why = wanted, "", [f"{counted(wanted, 'node')}, as asked"]
    else:
        scaling = forecast_scaling(config, cluster, wanted=wanted, working=working)
        chosen = wanted or scaling.pays
        near, why = _near(scaling, chosen, cluster), pays_sentences(scaling, chosen)
        screen.print(scaling_text(scaling, chosen, cluster.hardware))
    limit = parse_time_s(request.time) if request.time else None
    job = ClusterJob(
        name=cluster_job_name(name),
        run=name,
        target=request.target,
        grace_s=_grace_s(request, options, limit, screen),
        groups=node_groups(cluster, chosen, options.get("partition", ""), request.scheduler),
        time_s=limit,
        why=tuple(why),
        near=near,
    )
    return system.prepare(job, request, options, config)


def _check_request(request: SubmitRequest, options: Mapping[str, str]) -> None:
    is_ssh = request.scheduler == "ssh"
    if is_ssh and not request.machines:
        raise PlaitError("--on ssh needs the machines' names: --machines a,b,c")
    if request.machines and not is_ssh:
        raise PlaitError(f"--machines is for --on ssh; {request.scheduler} itself chooses the machines")
    if len(set(request.machines)) < len(request.machines):
        raise PlaitError("--machines names a machine twice; name each once")
    if is_ssh and request.nodes and request.nodes > len(request.machines):
        raise PlaitError(f"--nodes {request.nodes} are more than the {len(request.machines)} of --machines; name more")
    if request.scheduler == "kubernetes" and "image" not in options:
        raise PlaitError(
            "Kubernetes runs containers; build one from install/Containerfile, and name it: --with image=NAME:TAG"
        )
    if request.kind and request.scheduler != "kubernetes":
        raise PlaitError(f"--kind is for --on kubernetes; leave it out for {request.scheduler}")
    if request.time and is_ssh:
        raise PlaitError("by ssh no scheduler ends a run at a time limit; leave --time out, or set train.budget")


def _grace_s(request: SubmitRequest, options: Mapping[str, str], limit: int | None, screen: Screen) -> int:
    """Seconds before the job's time limit at which the run is signalled to save.

    Shortened for partitions of short jobs: a grace as long as the limit would make every start save at once and
    requeue. Raises PlaitError if no time to train is left.
    """
    grace = SAVE_GRACE_S
    if "grace" in options:
        grace = parse_time_s(options["grace"], option="--with grace=", shortest_s=10)
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


def _near(scaling: Scaling, chosen: int, cluster: Cluster) -> str:
    """Why all nodes must be close together; empty if they need not be."""
    layout = scaling.row(chosen).layout
    together, per_node = layout.tensor * layout.context, cluster.islands[0].per_node
    if together <= per_node:
        return ""
    return f"all pods in one zone: {together} devices split each layer, and a machine has {per_node}"
