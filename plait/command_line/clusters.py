"""The commands that submit a run to a cluster, follow it, and fetch it: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.command_line.models import screen_on
from plait.launch.local.output import OptionalOutput
from plait.process_exit import exit_code_of

JobName = Annotated[str, typer.Argument(metavar="JOB", help="The name of a job submitted from this folder.")]
_TARGET = typer.Argument(metavar="RECIPE|PROGRAM.py [KEY=VALUE|ARGUMENT]...", help="What to run.")


def submit_command(
    target: Annotated[list[str], _TARGET],
    *,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="Submit a module by name, like plait run -m: plait submit -m pkg.train."),
    ] = False,
    on: Annotated[
        str, typer.Option("--on", metavar="slurm|ssh|kubernetes|ray|skypilot|dstack", help="Where to submit it.")
    ],
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="MACHINES", help='The machines: "4x(8xH100)+400G"; default: ask.'),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Number of nodes; default: as many as pay off.", min=1)
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="NUMBER", help="GPUs per node; default: all.", min=1)] = None,
    machines: Annotated[str | None, typer.Option(metavar="A,B,C", help="Host names for ssh; the first leads.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help='Time limit: "8 hours". An unfinished run continues later.')
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="jobset|trainjob|job", help="Kind of Kubernetes object; default: JobSet.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--with", metavar="KEY=VALUE", help="account, partition, qos, image, queue, …")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the files that would be used.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Only write them to this folder.")] = None,
) -> None:
    """Run on as many nodes of a cluster as pay off. Slurm, Kubernetes, Ray, ssh, SkyPilot or dstack starts it."""
    from plait.clusters.request import SubmitRequest, parse_kind, parse_machines, parse_scheduler
    from plait.clusters.submit import submit_or_show
    from plait.clusters.target import MODULE_OPTION

    request = SubmitRequest(
        target=(MODULE_OPTION, *target) if module else tuple(target),
        scheduler=parse_scheduler(on),
        cluster=cluster,
        nodes=nodes,
        gpus=gpus,
        machines=parse_machines(machines),
        time=time,
        kind=parse_kind(kind) if kind is not None else None,
        options=tuple(options or []),
    )
    only_text = dry_run or out is not None
    output = OptionalOutput(sys.stdout)
    # Only the files go to standard output, so that they can be piped to sbatch or kubectl.
    screen = screen_on(sys.stderr if only_text and out is None else sys.stdout)
    submit_or_show(request, deed="show" if only_text else "send", out=out, screen=screen, show=output.write)


def node_command(
    target: Annotated[list[str], _TARGET],
    nodes: Annotated[int, typer.Option(metavar="NUMBER", help="Number of nodes of the job.", min=1)],
    rank: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", envvar=["PLAIT_NODE_RANK", "SLURM_PROCID"], help="Number of this node, from 0."),
    ] = None,
    leader: Annotated[
        str | None,
        typer.Option(metavar="HOST", envvar="PLAIT_LEADER", help="Name or address at which the others reach node 0."),
    ] = None,
    port: Annotated[
        int,
        typer.Option(metavar="NUMBER", envvar="PLAIT_PORT", help="Port of node 0.", min=1, max=65535),
    ] = 24717,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            envvar="PLAIT_SECRET_FILE",
            help="A file with the secret on each node, or one that node 0 makes where all nodes see it.",
        ),
    ] = None,
) -> None:
    """Run one node's part of a job. For any scheduler that starts the same command on each node."""
    from plait.clusters.node import NodePlace, tell_scheduler, work_on_node

    place = NodePlace(nodes=nodes, rank=rank, leader=leader, port=port, secret_file=secret_file)
    code = exit_code_of(work_on_node(target, place, screen_on(sys.stdout)))
    tell_scheduler(target, place, code)
    raise typer.Exit(code)


def logs_command(name: JobName) -> None:
    """Print the output so far of a submitted job's first node."""
    from plait.clusters.submitted import job_log_lines

    output = OptionalOutput(sys.stdout)
    for line in job_log_lines(name):
        output.write(f"{line}\n")


def stop_command(name: JobName) -> None:
    """End a submitted job. Its progress is saved, and plait submit continues it."""
    from plait.clusters.submitted import end_job

    OptionalOutput(sys.stdout).write(f"{end_job(name)}\n")


def fetch_command(name: JobName) -> None:
    """Copy a submitted job's run here, and show its receipt."""
    from plait.clusters.submitted import fetch_job

    fetch_job(name, screen_on(sys.stdout))
