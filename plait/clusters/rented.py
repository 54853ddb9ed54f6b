"""SkyPilot and dstack, which rent machines: a job as their YAML, handed to their command; each machine runs plait node.

Both start a job again on other machines when a spot machine is taken away. It continues from its newest checkpoint,
which is on a volume that outlives the machines.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from plait.clusters.job import (
    GPUS_VARIABLE,
    LEADER_VARIABLE,
    RANK_VARIABLE,
    ClusterJob,
    ClusterSystem,
    Outgoing,
    Submitted,
    keep_record,
    node_arguments,
)
from plait.clusters.kubernetes import IMAGE_FORM, WORK_FOLDER, yaml_text
from plait.clusters.request import Option, SubmitRequest
from plait.clusters.ssh import find_wheel, input_files
from plait.clusters.tools import tool_answer
from plait.data.file_faults import shown_path
from plait.errors import REQUEUE_EXIT, PlaitError
from plait.hosts.handshake import SECRET_VARIABLE, new_secret
from plait.private_folder import make_private_folder
from plait.recipe.schema import RunConfig
from plait.report.atomic import replace_file
from plait.screen.screen import Screen
from plait.units import counted
from plait.working_folder import WorkingFolder

Renter = Literal["skypilot", "dstack"]
RENTED_INPUT_FOLDER = "/tmp/plait-input"
"""Where the recipe or the program, its files and plait's wheel are on each machine."""
SENT_AT_LATEST_S = 1800.0
"""SkyPilot may start a machine of its own first, which looks after its jobs."""
RESTARTED_WITHIN_S = 600
"""dstack notices a lost machine within minutes, and then starts all nodes again."""
_NO_SKYPILOT_JOBS = "No in-progress managed jobs"
"""SkyPilot's words where the machine that looks after its jobs is not up."""
_RANK_OF_NODE = "{rank}"
_NAME = r"[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?"
_OPTIONS: Mapping[str, Option] = {
    "gpu": Option("the name that the tool has for the GPU, where plait does not know it", r"[\w.-]+", "H100"),
    "spot": Option("yes: spot machines, which may be taken away; needs volume", "yes", "yes"),
    "volume": Option("the volume for runs and checkpoints, which all machines mount at /work", _NAME, "play-work"),
    "image": Option("a container image that has plait; if left out the wheel is installed", IMAGE_FORM, "plait:gpu"),
    "wheel": Option("the wheel to install; the newest in dist/ if left out", ".*"),
    "cpus": Option("the least number of cores of each machine", r"[1-9]\d{0,3}", "16"),
    "memory": Option("its least memory in GB", r"[1-9]\d{0,4}", "64"),
}
_SKYPILOT_OPTIONS: Mapping[str, Option] = {
    **_OPTIONS,
    "infra": Option("where SkyPilot may rent: CLOUD/REGION/ZONE; REGION and ZONE are optional", example="aws"),
}
_DSTACK_OPTIONS: Mapping[str, Option] = {
    **_OPTIONS,
    "volume": Option(
        "the volume for runs and checkpoints at /work; {rank} where each node has its own",
        rf"{_NAME}(-{re.escape(_RANK_OF_NODE)})?",
        "play-work",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _GpuNames:
    """A GPU's name in SkyPilot, and in dstack with the memory where there are several."""

    skypilot: str
    dstack: str


_GPUS: Mapping[str, _GpuNames] = {
    "B300 SXM": _GpuNames(skypilot="B300", dstack="B300"),
    "B200 SXM": _GpuNames(skypilot="B200", dstack="B200"),
    "H200 SXM": _GpuNames(skypilot="H200", dstack="H200"),
    "H100 SXM": _GpuNames(skypilot="H100", dstack="H100:80GB"),
    "A100 SXM 80GB": _GpuNames(skypilot="A100-80GB", dstack="A100:80GB"),
    "A100 SXM 40GB": _GpuNames(skypilot="A100", dstack="A100:40GB"),
    "L40S": _GpuNames(skypilot="L40S", dstack="L40S"),
    "L4": _GpuNames(skypilot="L4", dstack="L4"),
    "A10G": _GpuNames(skypilot="A10G", dstack="A10G"),
    "A10": _GpuNames(skypilot="A10", dstack="A10"),
    "T4": _GpuNames(skypilot="T4", dstack="T4"),
    "RTX 4090": _GpuNames(skypilot="RTX4090", dstack="RTX4090"),
}
"""By the catalogue's name."""


# The texts.


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedInputs:
    """The files that go to each machine."""

    paths: tuple[Path, ...] = ()
    """The recipe or the program first."""
    wheel: Path | None = None
    """plait's; None where an image has it."""

    @property
    def places(self) -> dict[str, str]:
        """The place of each file on the machines, by its path here."""
        paths = [*self.paths, *([self.wheel] if self.wheel else [])]
        return {shown_path(path): f"{RENTED_INPUT_FOLDER}/{path.name}" for path in paths}

    @property
    def installation(self) -> list[str]:
        """Commands that install plait."""
        return [f"pip install {shlex.quote(f'{RENTED_INPUT_FOLDER}/{self.wheel.name}')}"] if self.wheel else []


def skypilot_task(job: ClusterJob, options: Mapping[str, str], inputs: RentedInputs) -> dict[str, Any]:
    """A task for `sky jobs launch`."""
    gpu = _gpu(job, options, "skypilot")
    again = {"recover_on_exit_codes": [REQUEUE_EXIT]}  # saved, and needs a node that was lost
    resources = {
        **({"infra": options["infra"]} if "infra" in options else {}),
        **({"accelerators": gpu} if gpu else {}),
        **{key: f"{options[key]}+" for key in ("cpus", "memory") if key in options},
        **({"use_spot": True} if "spot" in options else {}),
        **({"image_id": f"docker:{options['image']}"} if "image" in options else {}),
        "job_recovery": again,
    }
    place = {RANK_VARIABLE: "$SKYPILOT_NODE_RANK", LEADER_VARIABLE: '$(head -n 1 <<<"$SKYPILOT_NODE_IPS")'}
    run = [*_into_work_folder(options), *_exports(job, place), f"exec {_agent(job)}"]
    return {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": _variables(job),
        **({"secrets": {SECRET_VARIABLE: None}} if job.nodes > 1 else {}),
        "file_mounts": {there: here for here, there in inputs.places.items()},
        **({"volumes": {WORK_FOLDER: options["volume"]}} if "volume" in options else {}),
        **({"setup": _lines(inputs.installation)} if inputs.installation else {}),
        "run": _lines(run),
    }


def dstack_task(job: ClusterJob, options: Mapping[str, str], inputs: RentedInputs) -> dict[str, Any]:
    """A task for `dstack apply`."""
    gpu = _gpu(job, options, "dstack")
    resources = {
        **({"cpu": f"{options['cpus']}.."} if "cpus" in options else {}),
        **({"memory": f"{options['memory']}GB.."} if "memory" in options else {}),
        "gpu": gpu or 0,
    }
    place = {RANK_VARIABLE: "$DSTACK_NODE_RANK", LEADER_VARIABLE: "$DSTACK_MASTER_NODE_IP"}
    agent = [f"exec {_agent(job)}"] if job.nodes == 1 else _waiting_for_restart(job)
    volume = options.get("volume", "").replace(_RANK_OF_NODE, "${{ dstack.node_rank }}")
    several = {"nodes": job.nodes, "stop_criteria": "master-done"} if job.nodes > 1 else {}
    return {
        "type": "task",
        "name": job.name,
        **several,
        **({"image": options["image"]} if "image" in options else {"python": "3.12"}),
        "files": [{"local_path": here, "path": there} for here, there in inputs.places.items()],
        "env": [
            *(f"{name}={value}" for name, value in _variables(job).items()),
            *([SECRET_VARIABLE] if job.nodes > 1 else []),
        ],
        # As one command in braces: dstack joins commands by &&.
        "commands": [
            *inputs.installation,
            *_into_work_folder(options),
            _lines(["{", *_exports(job, place), *agent, "}"]),
        ],
        "resources": resources,
        **({"volumes": [{"name": volume, "path": WORK_FOLDER}]} if volume else {}),
        "spot_policy": "spot" if "spot" in options else "on-demand",
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": "1d"},
    }


def _gpu(job: ClusterJob, options: Mapping[str, str], renter: Renter) -> str:
    """The GPUs of each machine as the tool writes them, "H100:8"; "" for processors."""
    group = job.groups[0]
    if not group.gpus:
        return ""
    known = _GPUS.get(group.device)
    if "gpu" in options:
        name = options["gpu"]
    elif known is not None:
        name = known.skypilot if renter == "skypilot" else known.dstack
    else:
        raise PlaitError(
            f"plait does not know the name that {renter} has for {group.device}; write it by --with gpu=NAME"
        )
    return f"{name}:{group.gpus}"


def _variables(job: ClusterJob) -> dict[str, str]:
    gpus = job.groups[0].gpus
    return {"PYTHONUNBUFFERED": "1", **({GPUS_VARIABLE: str(gpus)} if gpus else {})}


def _into_work_folder(options: Mapping[str, str]) -> list[str]:
    return [f"cd {WORK_FOLDER}"] if "volume" in options else ["mkdir -p ~/plait-work && cd ~/plait-work"]


def _exports(job: ClusterJob, place: Mapping[str, str]) -> list[str]:
    words = " ".join(f"{name}={value}" for name, value in place.items())
    return [f"export {words}"] if job.nodes > 1 else []


def _agent(job: ClusterJob) -> str:
    return shlex.join(["python3", *node_arguments(job, job.target)])


def _waiting_for_restart(job: ClusterJob) -> list[str]:
    """Runs the agent, which saves at a signal. A node that needs a lost one waits until dstack, which gives a run up
    for any failure of its own, starts all of them again: node 0 if it gives up for lack of it, others if that is
    node 0."""
    return [
        "stopped=; trap 'stopped=1; kill -s TERM $!' INT TERM",
        f"{_agent(job)} &",
        # A signal ends wait with its own number, and the agent's follows from the next one.
        "code=0; wait $! || code=$?",
        'while [ -n "$stopped" ]; do stopped= code=0; wait $! || code=$?; done',
        f'case "$code-$DSTACK_NODE_RANK" in {REQUEUE_EXIT}-*|1-[1-9]*) sleep {RESTARTED_WITHIN_S};; esac',
        "exit $code",
    ]


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


# A job that is sent, and what becomes of it.


def _no_cluster(request: SubmitRequest, options: Mapping[str, str]) -> NoReturn:
    raise PlaitError(
        f"{request.scheduler} rents machines, so plait cannot ask which there are; name them, as in "
        "--cluster 2x(8xH100)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedState:
    """A job as the tool sees it."""

    job: str
    """What the tool calls it: SkyPilot's number, dstack's name."""
    word: str
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renter:
    """A tool that rents machines: its text for a job, and its commands, which take the job by `RentedState.job`."""

    name: Renter
    task: Callable[[ClusterJob, Mapping[str, str], RentedInputs], dict[str, Any]]
    launch: Callable[[ClusterJob, Path], list[str]]
    """Sends the text that stands in the file, and on standard input."""
    state: Callable[[Submitted], RentedState | None]
    logs: Callable[[str], list[str]]
    end: Callable[[str], list[str]]

    def system(self, options: Mapping[str, Option]) -> ClusterSystem:
        """What plait submit and the commands for a submitted job do with it."""
        return ClusterSystem(
            options=options,
            cluster=_no_cluster,
            prepare=self._prepare,
            state=lambda record: _words(self.state(record)),
            log_lines=self._log_lines,
            end=self._end,
            copy=_copy,
        )

    def _prepare(
        self, job: ClusterJob, request: SubmitRequest, options: Mapping[str, str], config: RunConfig | None
    ) -> Outgoing:
        _check_request(self.name, job, request, options)
        wheel = None
        if "image" not in options:
            wheel = find_wheel(options.get("wheel"), "an image that has plait by --with image=NAME:TAG")
        files = input_files(job.target, config, on=self.name, folder=RENTED_INPUT_FOLDER)
        inputs = RentedInputs(paths=files.paths, wheel=wheel)
        if len(set(inputs.places.values())) < len(inputs.places):
            raise PlaitError("two files of this job have the same name, and all go to one folder; rename one")
        target = (f"{RENTED_INPUT_FOLDER}/{files.paths[0].name}", *job.target[1:], *files.settings)
        lines = [f"Made by plait submit for {self.name}.", *job.why]
        if job.nodes > 1:
            lines.append(f"The secret is not in this file: {SECRET_VARIABLE} is taken from the environment.")
        task = self.task(replace(job, target=target), options, inputs)
        text = "".join(f"# {line}\n" for line in lines) + yaml_text(task)
        return Outgoing(
            file=f"{job.name}.{self.name}.yaml",
            text=text,
            run=job.run,
            send=lambda screen, working: self._send(job, text, options.get("volume", ""), screen, working),
        )

    def _send(self, job: ClusterJob, text: str, volume: str, screen: Screen, working: WorkingFolder) -> None:
        record = Submitted(name=job.run, label=job.name, scheduler=self.name, volume=volume.replace(_RANK_OF_NODE, "0"))
        before = self.state(record)
        if before is not None and not before.is_over:
            raise PlaitError(
                f"{job.run} is in {self.name} already ({before.word}); end it first: plait stop {job.run}, or where it "
                f"was submitted from another folder {shlex.join(self.end(before.job))}"
            )
        file = working.cache / "submitted" / f"{job.name}.{self.name}.yaml"
        make_private_folder(file.parent)
        replace_file(file, text.encode())
        secret = {SECRET_VARIABLE: new_secret().text} if job.nodes > 1 else {}
        about = f"the job {job.run}"
        tool_answer(self.launch(job, file), about=about, stdin=text, within_s=SENT_AT_LATEST_S, environment=secret)
        sent = self.state(record)
        if sent is None:
            raise PlaitError(f"{self.name} accepted {job.run} but does not list it; look there for the job {job.name}")
        keep_record(replace(record, job=sent.job), working)
        screen.print(f"sent     {job.run}: {counted(job.nodes, 'machine')} of {self.name}, {sent.word}")
        screen.print(f"         plait status {job.run}, plait logs {job.run}, plait stop {job.run}")

    def _log_lines(self, record: Submitted, working: WorkingFolder) -> Iterator[str]:
        yield from tool_answer(self.logs(record.job), about=f"the output of {record.name}").splitlines()

    def _end(self, record: Submitted) -> None:
        tool_answer(self.end(record.job), about=f"the job {record.name}")


def _copy(record: Submitted, folder: Path, working: WorkingFolder, screen: Screen) -> NoReturn:
    where = f"the volume {record.volume}" if record.volume else "the disk of its first machine, and is lost with it"
    raise PlaitError(
        f"{folder} of {record.name} is on {where}; plait copies nothing from {record.scheduler}: read it there, by a "
        "task of your own"
    )


def _words(state: RentedState | None) -> str:
    return "not known there any more" if state is None else state.word


def _check_request(renter: Renter, job: ClusterJob, request: SubmitRequest, options: Mapping[str, str]) -> None:
    if len(job.groups) > 1:
        raise PlaitError("all machines of a job must be of one kind; describe one kind, or submit to Slurm or by ssh")
    if request.time is not None:
        raise PlaitError(f"{renter} ends a job at a time limit before it can save; set train.budget instead of --time")
    if "spot" in options and "volume" not in options:
        raise PlaitError(
            "the disk of a spot machine is lost with it, and so are all checkpoints; name a volume: --with volume=NAME"
        )
    if "image" in options and "wheel" in options:
        raise PlaitError("an image has plait already; leave --with wheel out, or --with image")


def _skypilot_launch(job: ClusterJob, file: Path) -> list[str]:
    secret = ["--secret", SECRET_VARIABLE] if job.nodes > 1 else []  # its value comes from the environment
    return ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name, *secret, str(file)]


def _skypilot_state(record: Submitted) -> RentedState | None:
    """The newest job of that name, or the one of that number."""
    try:
        said = tool_answer(["sky", "jobs", "queue", "--output", "json"], about="SkyPilot's jobs")
    except PlaitError as error:
        if _NO_SKYPILOT_JOBS in str(error):
            return None
        raise
    try:
        jobs = json.loads(said[said.index("[") :])
        own = [one for one in jobs if one["job_name"] == record.label and record.job in ("", str(one["job_id"]))]
        newest = max(own, key=lambda one: int(one["job_id"]), default=None)
        if newest is None:
            return None
        word = str(newest["status"]).rpartition(".")[2]
        is_over = word.startswith("FAILED") or word in ("SUCCEEDED", "CANCELLED")
        return RentedState(job=str(newest["job_id"]), word=word, is_over=is_over)
    except (ValueError, KeyError, TypeError) as error:
        raise PlaitError(f"SkyPilot's list of jobs is not understood ({error!r}); update SkyPilot or plait") from None


def _dstack_state(record: Submitted) -> RentedState | None:
    said = tool_answer(["dstack", "ps", "--all", "--json"], about="dstack's runs")
    try:
        runs = json.loads(said[said.index("{") :])["runs"]
        own = next((one for one in runs if one["run_spec"]["run_name"] == record.label), None)  # the newest first
        if own is None:
            return None
        word = str(own["status"])
        is_over = word in ("terminated", "failed", "done")
        return RentedState(job=record.label, word=own.get("status_message") or word, is_over=is_over)
    except (ValueError, KeyError, TypeError) as error:
        raise PlaitError(f"dstack's list of runs is not understood ({error!r}); update dstack or plait") from None


SKYPILOT = _Renter(
    name="skypilot",
    task=skypilot_task,
    launch=_skypilot_launch,
    state=_skypilot_state,
    logs=lambda job: ["sky", "jobs", "logs", "--no-follow", job],
    end=lambda job: ["sky", "jobs", "cancel", "--yes", job],
).system(_SKYPILOT_OPTIONS)
DSTACK = _Renter(
    name="dstack",
    task=dstack_task,
    launch=lambda job, file: ["dstack", "apply", "--yes", "--detach", "--file", "-"],
    state=_dstack_state,
    logs=lambda job: ["dstack", "logs", job],
    end=lambda job: ["dstack", "stop", "--yes", job],
).system(_DSTACK_OPTIONS)
