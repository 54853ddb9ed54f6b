"""`plait node`, which any scheduler starts on every node of a job: node 0 leads, the others wait for it and join."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.checkpoint.shared_disk import names_now
from plait.checkpoint.store import published_checkpoints, read_manifest
from plait.clusters.job import AGAIN_SUFFIX, GPUS_VARIABLE, LEADER_VARIABLE, RANK_VARIABLE, USUAL_PORT
from plait.clusters.slurm import REQUEUES_AT_MOST
from plait.clusters.target import is_program, program_of
from plait.clusters.tools import tool_answer
from plait.commands.join import join
from plait.commands.programs.run_program import run_program
from plait.commands.train import train
from plait.errors import REQUEUE_EXIT, GaveUp, PlaitError, RunFailed, StartAgain
from plait.hosts.handshake import SECRET_VARIABLE, Secret, read_secret
from plait.hosts.joining import ONE_HOST, HostsRequest, choose_secret
from plait.hosts.member import LeaderNotReached
from plait.launch.network import local_addresses
from plait.launch.values.job import StoppedBy
from plait.private_folder import make_private_folder
from plait.recipe.load import load_recipe
from plait.report.atomic import replace_file
from plait.run_folder import FolderTaken, run_folder
from plait.screen.screen import Screen
from plait.units import counted
from plait.workers import CannotGoOn
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

JOIN_AT_LATEST_S = 3600.0
EARLIER_START_ENDS_S = 600.0
"""A host that is alone notices the loss of the others within seconds; a network disk releases a lost host's locks
within minutes."""
LISTENS_AT_LATEST_S = 900.0
"""Time after its secret appears in which node 0 listens: at once, or when an earlier start has ended. A node 0 that was
killed leaves its secret."""
NAME_AT_LATEST_S = 180.0
"""DNS learns the name of a pod only some time after the pod has started."""
WATCHING_RANKS = 4
"""Nodes 1 to this one ask Slurm; not all of a large job."""
FOUND_LOST_WITHIN_S = 1800.0
"""Slurm gives up a node that has not answered for SlurmdTimeout, 300 s unless the site changed it."""
_LOOK_EVERY_S = 0.5
_SAY_AFTER_S = 10.0
_ASK_SLURM_EVERY_S = 5.0
_CONNECT_EVERY_S = 0.1
"""Once node 0 has begun, it listens within a second or two; an early attempt costs it nothing."""
FRUITLESS_STARTS = 3
"""After this many consecutive starts of one Slurm job that saved no new step, it is not requeued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starts:
    """State kept between the starts of one Slurm job."""

    step: int = 0
    """The newest saved step."""
    fruitless: int = 0
    """Consecutive starts that saved no new step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """The position of this process in a job, and the address of node 0."""

    nodes: int
    rank: int | None = None
    leader: str | None = None
    port: int = USUAL_PORT
    secret_file: Path | None = None
    """A file with the secret. If it does not exist, node 0 creates it in a folder that all nodes see, and removes it at
    its end. None: the secret is in PLAIT_SECRET."""

    def __post_init__(self) -> None:
        if self.nodes > 1 and (self.rank is None or not self.leader):
            missing, what = (
                (RANK_VARIABLE, "this node's number, from 0 on")
                if self.rank is None
                else (LEADER_VARIABLE, "the name or address of node 0")
            )
            raise PlaitError(f"{missing} is not set, so this node does not know its part; set it to {what}")
        if self.rank is not None and not 0 <= self.rank < self.nodes:
            raise PlaitError(
                f"node {self.rank} of {self.nodes}: set {RANK_VARIABLE} to a number from 0 to {self.nodes - 1}"
            )


def work_on_node(target: Sequence[str], place: NodePlace, screen: Screen) -> StoppedBy:
    """Do this node's part of a job to its end: lead if its number is 0, else join; returns what ended it.

    Raises PlaitError for wrong input, RunFailed if the run failed or node 0 never came.
    """
    _save_on_warning()
    require_promised_gpus(os.environ)
    if place.nodes == 1:
        return _run(target, ONE_HOST, screen)
    assert place.leader is not None
    if place.rank == 0:
        with _secret_file_while_leading(place.secret_file, os.environ):
            address = own_address(place.leader, screen)
            hosts = HostsRequest(n_hosts=place.nodes, address=address, port=place.port, secret_file=place.secret_file)
            try:
                return _run(target, hosts, screen)
            except CannotGoOn as error:
                return queued_again(error, screen, os.environ)
    try:
        return _join_when_possible(target, place, place.leader, screen)
    except RunFailed:
        requeue_if_leader_lost(place.rank, place.secret_file, screen)
        raise


def queued_again(error: CannotGoOn, screen: Screen, environment: Mapping[str, str]) -> StoppedBy:
    """Under Slurm, handle the end of a run that needs all of its nodes and lost one: it is saved, and the job is
    requeued, which Slurm itself does not do with --no-kill. Raises StartAgain elsewhere."""
    if not environment.get("SLURM_JOB_ID"):
        raise StartAgain(str(error)) from None
    screen.print(f"requeue  {error}")
    return "SIGTERM"


def tell_scheduler(target: Sequence[str], place: NodePlace, code: int) -> None:
    """Leave a file next to the secret's if node 0 has saved but is not finished: srun returns the highest exit code of
    all nodes, and one of them may have been lost long ago.

    Raises GaveUp if the job's last starts have saved no new step: it is not requeued.
    """
    if code != REQUEUE_EXIT or place.rank not in (0, None):
        return
    if (job := os.environ.get("SLURM_JOB_ID")) and not is_program(target):  # programs save when they like
        count_fruitless_starts(job, newest_saved_step(target))
    if place.secret_file is not None:
        place.secret_file.with_suffix(AGAIN_SUFFIX).touch()


def newest_saved_step(target: Sequence[str]) -> int:
    """The step of the newest checkpoint of a recipe's run here; 0 for a program."""
    if is_program(target):
        return 0
    folder = run_folder(load_recipe(Path(target[0]), target[1:]).run.name)
    return max((read_manifest(path).step for path in published_checkpoints(folder.checkpoints)), default=0)


def count_fruitless_starts(job: str, step: int, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Record the newest saved step at the end of a start of a Slurm job; raises GaveUp if FRUITLESS_STARTS consecutive
    starts have saved no new one."""
    file = working.cache / f"slurm-{job}.json"
    try:
        before = typed_value(_Starts, parse_object(file.read_bytes()))
    except (OSError, ValueError):
        before = _Starts()
    starts = before.fruitless + 1 if step <= before.step else 0
    make_private_folder(file.parent)
    replace_file(file, sealed_text(asdict(_Starts(step=step, fruitless=starts))).encode())
    if starts >= FRUITLESS_STARTS:
        file.unlink(missing_ok=True)
        raise GaveUp(
            f"{starts} starts of Slurm job {job} in a row saved no step after step {step}, so it is not queued again; "
            'give it more --time or another partition, or less time to save in by --with "grace=1 minute", and submit '
            "it again"
        )


def require_promised_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> None:
    """Raise PlaitError if a scheduler gave this node NVIDIA GPUs that no worker can use: the image's torch has no CUDA,
    or the container does not see them."""
    given = environment.get(GPUS_VARIABLE) or environment.get("SLURM_GPUS_ON_NODE") or ""
    if not given.isdecimal() or not int(given):
        return
    has = f"this node was given {counted(int(given), 'GPU')}"
    try:
        build = version("torch")
    except PackageNotFoundError:
        raise PlaitError(f"{has}, and its image has no torch; build it from install/Containerfile") from None
    if "+cpu" in build:
        raise PlaitError(
            f"{has}, and torch {build} is built without CUDA; build the image by --build-arg TORCH_INDEX= (see "
            "install/Containerfile), or install a CUDA build (pytorch.org/get-started)"
        )
    if not any(dev.glob("nvidia[0-9]*")) and not (dev / "kfd").exists():
        raise PlaitError(
            f"{has}, and none is seen inside the container; a pod needs NVIDIA's device plugin and container toolkit "
            f"on its machine, Apptainer --nv, podman --device nvidia.com/gpu=all"
        )


def _save_on_warning() -> None:
    """Treat SIGUSR1 as SIGTERM: the batch script ignores it, and the processes that it starts inherit that."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))


def _run(target: Sequence[str], hosts: HostsRequest, screen: Screen) -> StoppedBy:
    """Run the job; if the scheduler restarted it, first wait for the end of an earlier start."""
    is_again = int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
    deadline, announced = time.monotonic() + EARLIER_START_ENDS_S, False
    while True:
        try:
            return _run_once(target, hosts, screen)
        except FolderTaken as error:
            if not is_again or time.monotonic() > deadline:
                raise
            if not announced:
                screen.print(f"waits    {str(error).partition(';')[0]}: an earlier start of this job on a lost node")
            announced = True
        time.sleep(_LOOK_EVERY_S)


def _run_once(target: Sequence[str], hosts: HostsRequest, screen: Screen) -> StoppedBy:
    own = program_of(target)
    if own is not None:
        return run_program(own.program, own.arguments, hosts=hosts, screen=screen)
    return train(Path(target[0]), target[1:], hosts=hosts, screen=screen).stopped_by


@contextmanager
def _secret_file_while_leading(file: Path | None, environment: Mapping[str, str]) -> Iterator[None]:
    """Create the secret's file at the start, so that no node reads an older one, and remove it at the end, which tells
    late nodes that the job is over. A file that existed before belongs to the user, unless it is from a killed start of
    this Slurm job."""
    if file is None:
        if not environment.get(SECRET_VARIABLE):
            raise PlaitError(
                f"the nodes have no secret to recognize each other; name a file that all of them see with "
                f"--secret-file (node 0 makes it), or give all of them the same {SECRET_VARIABLE}, made by "
                "tr -dc 0-9A-HJKMNP-TV-Z </dev/urandom | head -c 28"
            )
        yield
        return
    of_this_job = f"-{environment['SLURM_JOB_ID']}-" in file.name if "SLURM_JOB_ID" in environment else False
    if file.exists() and not of_this_job:
        yield
        return
    make_private_folder(file.parent)
    choose_secret(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _join_when_possible(target: Sequence[str], place: NodePlace, leader: str, screen: Screen) -> StoppedBy:
    """Join as soon as node 0 listens; "finished" if the run is over already."""
    began, announced = time.monotonic(), False
    deadline, looks_next = began + JOIN_AT_LATEST_S, began + _ASK_SLURM_EVERY_S
    kept = read_secret(None) if place.secret_file is None else None
    # Under Slurm node 0 makes the file. Elsewhere one that exists already may be the user's, and stays after the run.
    was_there = "SLURM_JOB_ID" not in os.environ and place.secret_file is not None and _holds_text(place.secret_file)
    own = program_of(target)
    program = own.program if own is not None else None
    while time.monotonic() < deadline:
        ready = place.secret_file is None or _holds_text(place.secret_file)
        if ready and not was_there and place.secret_file is not None:
            was_there, deadline = True, time.monotonic() + LISTENS_AT_LATEST_S
        if not ready and _is_over(target):
            return "finished"
        if not ready and was_there:
            raise RunFailed(
                "node 0 ended before this node could join it; see what it printed, correct that, and submit again"
            )
        if ready:
            try:
                with _secret_in_environment(kept):
                    at = f"{leader}:{place.port}"
                    return join(at, secret_file=place.secret_file, screen=screen, program=program)
            except LeaderNotReached:
                if time.monotonic() > looks_next:  # a node of its own secret hears of the end by the run's folder alone
                    looks_next = time.monotonic() + _ASK_SLURM_EVERY_S
                    if _is_over(target):
                        return "finished"
                if not announced and time.monotonic() - began > _SAY_AFTER_S:
                    announced = True
                    screen.print(f"waits    for node 0 to listen at {leader}:{place.port}")
        time.sleep(_CONNECT_EVERY_S if ready else _LOOK_EVERY_S)
    raise RunFailed(f"node 0 ({leader}) did not listen at port {place.port} in time; see what it printed")


def _is_over(target: Sequence[str]) -> bool:
    """Whether the run, whose folder this node sees, has done all its steps, and no more are requested."""
    if is_program(target):
        return False
    try:
        config = load_recipe(Path(target[0]), target[1:])
    except PlaitError:  # only node 0 needs to have the recipe
        return False
    folder = run_folder(config.run.name)
    return folder.has_begun and folder.is_finished and folder.saved_config().train.budget == config.train.budget


def _holds_text(file: Path) -> bool:
    """Whether the file exists and is not empty."""
    try:
        return file.name in names_now(file.parent) and file.read_bytes() != b""
    except OSError:
        return False


@contextmanager
def _secret_in_environment(secret: Secret | None) -> Iterator[None]:
    """Set the secret for one attempt to join, which takes it out of the environment."""
    if secret is not None:
        os.environ[SECRET_VARIABLE] = secret.text
    try:
        yield
    finally:
        os.environ.pop(SECRET_VARIABLE, None)


def own_address(name: str, screen: Screen) -> str:
    """The address at which the others reach this host, by its name; waits for a name that is not known yet.

    A host often takes its own name for a loopback address (Debian's /etc/hosts, containers): then it is the address
    with the way to others. Raises PlaitError.
    """
    addresses = _addresses_of(name)
    if _is_address(name) or not all(ip_address(one).is_loopback for one in addresses):
        own = local_addresses()
        return next((one for one in addresses if one in own), addresses[0])
    address = _address_with_a_way_out(name)
    screen.print(
        f"address  {address}: {name} means {addresses[0]} here, by which no other host reaches it, so this is the "
        f"one with the way to others"
    )
    return address


def _addresses_of(name: str) -> list[str]:
    deadline = time.monotonic() + NAME_AT_LATEST_S
    while True:
        try:
            return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError as error:
            if time.monotonic() > deadline:
                raise PlaitError(f"{name} is a name that no host here has ({error}); check the cluster's DNS") from None
        time.sleep(_LOOK_EVERY_S)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _address_with_a_way_out(name: str) -> str:
    """The only address that is not loopback, else the one from which packets leave for elsewhere; none is sent."""
    outside = [text for text in local_addresses() if not ip_address(text).is_loopback]
    if len(outside) == 1:
        return outside[0]
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # for documents alone
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((elsewhere, 9))
            return str(asking.getsockname()[0])
    raise PlaitError(
        f"{name} is a loopback address here, and this host has {' and '.join(outside) or 'no other'}; let the name "
        "resolve to the address at which the other nodes reach it (/etc/hosts, NodeAddr in slurm.conf)"
    )


def requeue_if_leader_lost(
    rank: int | None,
    secret_file: Path | None,
    screen: Screen,
    *,
    environment: Mapping[str, str] = os.environ,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """On a node whose agent failed: wait until node 0 has ended, or Slurm has taken its node from the job, and in the
    second case queue the job again, which ends this process, too.

    Node 0 removes the secret's file when it ends in whichever way, unless its machine is lost. Returns at once outside
    Slurm, in a heterogeneous job and where scontrol is missing.
    """
    job, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
    if not job or not nodes or not rank or rank > WATCHING_RANKS or "SLURM_HET_SIZE" in environment:
        return
    deadline = time.monotonic() + FOUND_LOST_WITHIN_S
    try:
        leader = _hostnames(nodes)[0]
        while secret_file is not None and secret_file.exists() and time.monotonic() < deadline:
            left = re.search(r" NodeList=(\S+)", _scontrol("--oneliner", "show", "job", job))
            if left and leader not in _hostnames(left[1]) and restarts < REQUEUES_AT_MOST:
                screen.print(f"requeue  job {job}: its node 0 ({leader}) was lost, so it is queued again")
                _scontrol("requeue", job)
                return
            wait(_ASK_SLURM_EVERY_S)
    except PlaitError:
        return  # no scontrol here, or Slurm does not answer: its time limit ends the job


def _hostnames(nodes: str) -> list[str]:
    return _scontrol("show", "hostnames", nodes).split() or [""]


def _scontrol(*words: str) -> str:
    return tool_answer(["scontrol", *words], about="the job of this node")
