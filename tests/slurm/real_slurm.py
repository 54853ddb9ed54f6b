"""`plait submit` to a real Slurm: what became of each job is asserted from Slurm's own account. Run by `make slurm`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median

import pytest

from plait.checkpoint.generation import read_generation
from plait.checkpoint.store import published_checkpoints, verify_checkpoint
from tests.end_to_end.command import RECIPE, Ended, Place
from tests.slurm.cluster import SlurmCluster, started_with, wait_for

STEPS = 100
LONGER = RECIPE.replace('budget = "60 steps"', f'budget = "{STEPS} steps"')
EVEN = ("layout.shares=[4, 3]", 'balance.every="never"', "run.threads=1")
"""The shares of equal workers: what nodes measure of each other hangs on what else the machine does."""

ROUNDS = int(os.environ.get("PLAIT_SLURM_ROUNDS", "1"))
"""How often each of the six kinds of jobs is submitted; five times are the thirty of the issue."""
KINDS = 6
ACCOUNTED: dict[str, tuple[str, str]] = {}
"""Of each job that a test saw end as it should: the state in Slurm's account, and how often it was started again."""

LIMIT_S, RUNS_S = 120, 170
"""The limit of time of a job, and about how long it trains: longer, by any count."""

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))) or os.geteuid() != 0,
    reason="needs root, and the packages that make slurm installs",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm") / "daemons")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder that all nodes share."""
    return Place(tmp_path_factory.mktemp("shared"), LONGER)


@pytest.fixture(scope="module")
def here(place: Place) -> str:
    """The same run without Slurm, by two workers of this machine."""
    alone = place.train("here", *EVEN, within_s=400)
    assert alone.code == 0, alone
    return "here"


class Submitter:
    """Types plait's commands where Slurm is; `turn` becomes a part of the names of runs."""

    def __init__(self, slurm: SlurmCluster, place: Place, turn: int) -> None:
        self.slurm, self.place, self.turn = slurm, place, turn

    def named(self, name: str) -> str:
        return f"{name}{self.turn or ''}"

    def type(self, *words: str) -> Ended:
        return self.place.run(*words, environment=self.slurm.environment)

    def submit(self, name: str, *more: str) -> str:
        """Submit the recipe, and say the job's number."""
        told = self.type("submit", "tiny.toml", f"run.name={name}", *EVEN, *more, "--on", "slurm")
        assert told.code == 0 and not told.err, told
        [line] = [line for line in told.out.splitlines() if line.startswith("sent ")]
        return line.split("job ")[1].split()[0]

    def ended(self, number: str, state: str = "COMPLETED", within_s: float = 900) -> dict[str, str]:
        job = self.slurm.wait_for_job(number, state, within_s)
        ends = [line for line in self.slurm.accounting() if line.get("JobId") == number]
        assert ends and ends[-1]["JobState"] == state, ends
        ACCOUNTED[number] = (state, job["Restarts"])
        return job

    def seconds(self, number: str) -> float:
        """How long a job's last start ran, by Slurm's account."""
        line = [line for line in self.slurm.accounting() if line.get("JobId") == number][-1]
        begin, end = (datetime.fromisoformat(line[key]) for key in ("StartTime", "EndTime"))
        return (end - begin).total_seconds()

    def log(self, name: str, number: str) -> str:
        return (self.place.folder / f"{name}-{number}.log").read_text()

    def saved(self, name: str) -> bool:
        return bool(self.place.checkpoints(name))

    def nodes_of(self, number: str) -> list[str]:
        """The nodes that a job runs on, node 0 first."""
        return self.slurm.ask("scontrol", "show", "hostnames", self.slurm.job(number)["NodeList"]).split()

    def checkpoints_are_whole(self, name: str) -> bool:
        """Whether each that was published verifies, and nothing half written is left beside them."""
        folder = self.place.path(name) / "checkpoints"
        for path in published_checkpoints(folder):
            verify_checkpoint(path)
        return not [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def whole(slurm: SlurmCluster, place: Place) -> tuple[str, tuple[str, ...], int]:
    """A run that is longer than a job's limit of time, without one: its name, its settings and its steps."""
    cluster = Submitter(slurm, place, 0)
    step_s = [line["step_s"] for line in metrics(place, "two")]
    steps = math.ceil(RUNS_S / median(step_s) / 100) * 100
    longer = (f"train.budget={steps} steps", "checkpoint.every=500 steps", "report.evaluate=never")
    reference = cluster.submit("whole", *longer, "--nodes", "2")
    cluster.ended(reference)
    assert cluster.seconds(reference) > LIMIT_S, "it would not have reached its limit"
    return "whole", longer, steps


@pytest.fixture(scope="module", params=range(ROUNDS))
def cluster(slurm: SlurmCluster, place: Place, request: pytest.FixtureRequest) -> Submitter:
    return Submitter(slurm, place, request.param)


def assert_same_end(place: Place, name: str, other: str, steps: int = STEPS) -> None:
    """The same losses at every step, and the same bytes in the last checkpoint."""
    assert place.numbers(name) == place.numbers(other)
    assert place.manifest(name, steps) == place.manifest(other, steps)


def test_two_nodes_train_as_one_machine_does_and_fetch_shows_the_receipt(cluster: Submitter, here: str) -> None:
    two = cluster.named("two")
    number = cluster.submit(two, "--nodes", "2")
    job = cluster.ended(number)
    assert (job["NumNodes"], job["Restarts"], job["ExitCode"]) == ("2", "0", "0:0")
    fetched = cluster.type("fetch", two)
    assert fetched.code == 0 and "finished" in fetched.out and "done     100 steps" in fetched.out, fetched
    assert "COMPLETED" in cluster.type("status", two).out
    log = cluster.log(two, number)
    assert "network  127.0.0.1 on lo" in log and "is also that of" in log  # the disk that they share, said by node 0
    assert cluster.type("logs", two).out == log
    assert not list((cluster.place.folder / ".plait").glob("*.secret"))
    assert cluster.place.sums(two) == cluster.place.sums(here)
    assert_same_end(cluster.place, two, here)


def test_the_end_of_its_time_is_warned_of_and_costs_no_bit(
    cluster: Submitter, whole: tuple[str, tuple[str, ...], int]
) -> None:
    """Slurm's own limit, and its own signal before that; it may send that a minute earlier than asked."""
    limited, (reference, longer, steps) = cluster.named("limited"), whole
    number = cluster.submit(
        limited, *longer, "--nodes", "2", "--time", f"{LIMIT_S} seconds", "--with", "grace=20 seconds"
    )
    job = cluster.ended(number)
    assert int(job["Restarts"]) >= 1 and job["ExitCode"] == "0:0" and job["TimeLimit"] == "00:02:00", job
    ends = [line["JobState"] for line in cluster.slurm.accounting() if line.get("JobId") == number]
    assert "TIMEOUT" not in ends, ends
    assert_same_end(cluster.place, limited, reference, steps)


def metrics(place: Place, name: str) -> list[dict[str, float]]:
    lines = (place.path(name) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "step_s" in line]


def test_a_warned_job_saves_is_queued_again_and_ends_with_the_same_bits(cluster: Submitter) -> None:
    warned = cluster.named("warned")
    number = cluster.submit(warned, "--nodes", "2")
    wait_for(lambda: cluster.saved(warned), "a checkpoint", 240, cluster.slurm.explain)
    cluster.slurm.ask("scancel", "--signal=USR1", number)  # as --signal has it sent before the time's end
    job = cluster.ended(number)
    assert (job["Restarts"], job["ExitCode"]) == ("1", "0:0")
    assert_same_end(cluster.place, warned, cluster.named("two"))


def test_what_was_stopped_goes_on_by_the_same_command(cluster: Submitter) -> None:
    stopped, alone, steps = cluster.named("stopped"), cluster.named("alone"), 600
    longer = f"train.budget={steps} steps"  # two commands are typed before it may end
    assert cluster.place.train(alone, *EVEN, longer, within_s=400).code == 0
    number = cluster.submit(stopped, longer, "--nodes", "2")
    wait_for(lambda: cluster.saved(stopped), "a checkpoint", 240, cluster.slurm.explain)
    again = cluster.type("submit", "tiny.toml", f"run.name={stopped}", *EVEN, longer, "--on", "slurm", "--nodes", "2")
    assert again.code == 2 and f"plait stop {stopped}" in again.sentence()
    assert cluster.type("stop", stopped).code == 0
    cluster.ended(number, "CANCELLED")
    cluster.ended(cluster.submit(stopped, longer, "--nodes", "2"))
    assert_same_end(cluster.place, stopped, alone, steps)


def test_a_node_that_is_lost_and_comes_back_costs_no_bit(cluster: Submitter) -> None:
    lost = cluster.named("lost")
    number = cluster.submit(lost, "--nodes", "2")
    wait_for(lambda: cluster.saved(lost), "a checkpoint", 240, cluster.slurm.explain)
    node = cluster.nodes_of(number)[1]
    cluster.slurm.kill_node(node)
    cluster.slurm.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")
    # With --no-kill it is not Slurm that starts it again: EVEN names two workers, so the run itself asks for it.
    wait_for(lambda: cluster.slurm.job(number)["Restarts"] == "1", "a restart", 120, cluster.slurm.explain)
    assert "the hosts that are left cannot carry the run" in cluster.log(lost, number)
    cluster.slurm.start_node(node)
    cluster.slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.ended(number)
    wait_for(lambda: set(cluster.slurm.states().values()) == {"idle"}, "idle nodes")
    assert_same_end(cluster.place, lost, cluster.named("two"))


def test_what_still_runs_on_a_lost_node_writes_no_checkpoint(cluster: Submitter) -> None:
    """Only the daemon of node 0 is gone: Slurm gives the node up, and what it runs, which stands still a while, lives
    on, Slurm's own srun included. A network disk would give up its lock by then; so does who takes the lock's file
    away."""
    fenced = cluster.named("fenced")
    number = cluster.submit(fenced, "--nodes", "2")
    wait_for(lambda: cluster.saved(fenced), "a checkpoint", 240, cluster.slurm.explain)
    node = cluster.nodes_of(number)[0]
    own = started_with(f"SLURMD_NODENAME={node}")
    assert own, "node 0's processes"
    for pid in own:
        os.kill(pid, signal.SIGSTOP)
    cluster.slurm.kill_daemon(node)
    wait_for(lambda: cluster.slurm.job(number)["Restarts"] == "1", "a restart", 180, cluster.slurm.explain)
    (cluster.place.path(fenced) / ".lock").unlink()
    before = generation(cluster.place, fenced)
    wait_for(lambda: generation(cluster.place, fenced) > before, "another start", 240, cluster.slurm.explain)
    go_on(own)
    cluster.ended(number)
    wait_for(lambda: not any(map(is_alive, own)), "the end of what the lost node ran", 120)
    assert_same_end(cluster.place, fenced, cluster.named("two"))
    assert cluster.checkpoints_are_whole(fenced)
    cluster.slurm.start_node(node)
    cluster.slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    wait_for(lambda: set(cluster.slurm.states().values()) == {"idle"}, "idle nodes")


def generation(place: Place, name: str) -> int:
    return read_generation(place.path(name))


def go_on(stopped: Iterable[int]) -> None:
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_unequal_partitions_are_one_job(cluster: Submitter) -> None:
    words = ("--cluster", "1x(1xserver)+1x(1xdesktop)", "--nodes", "2", "--with", "partition=old+new")
    unequal = cluster.named("unequal")
    number = cluster.submit(unequal, *words, "--time", "10 minutes", "--with", "grace=1 minute")
    parts = cluster.slurm.ask("scontrol", "show", "job", number).split("\n\n")
    assert ["TimeLimit=00:10:00" in part for part in parts if "JobId=" in part] == [True, True], parts
    job = cluster.ended(number)
    assert job["HetJobId"] == number and job["Partition"] == "old"
    assert_same_end(cluster.place, unequal, cluster.named("two"))


def test_four_nodes(cluster: Submitter) -> None:
    four = cluster.named("four")
    words = ("layout.replicate=4", "layout.shares=[2, 2, 2, 1]", f"run.name={four}", 'balance.every="never"')
    told = cluster.type("submit", "tiny.toml", *words, "--on", "slurm", "--nodes", "4")
    assert told.code == 0, told
    wait_for((cluster.place.path(four) / "metrics.jsonl").exists, "a step", 600, cluster.slurm.explain)
    assert_secret_is_in_its_file_alone(cluster)
    assert cluster.ended(told.out.split("job ")[1].split()[0])["NumNodes"] == "4"


def assert_secret_is_in_its_file_alone(cluster: Submitter) -> None:
    """While a run goes on: in no script, log, state of Slurm's, or program's arguments."""
    [file] = (cluster.place.folder / ".plait").glob("*.secret")
    secret = file.read_bytes().strip()
    assert len(secret.replace(b"-", b"")) == 28 and file.stat().st_mode & 0o077 == 0
    for path in (*cluster.place.folder.rglob("*"), *cluster.slurm.folder.rglob("*")):
        assert path == file or not path.is_file() or secret not in _bytes(path), path
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        assert secret not in _bytes(entry), entry


def test_slurms_own_account_has_them_all(cluster: Submitter) -> None:
    """Of each turn: two nodes, four, a time limit, a stop and its going on, a node that was lost, unequal
    partitions."""
    ends = {line["JobId"]: line["JobState"] for line in cluster.slurm.accounting() if line.get("JobId") in ACCOUNTED}
    assert ends == {number: state for number, (state, _) in ACCOUNTED.items()}
    assert len(ends) >= KINDS * (1 + cluster.turn), (len(ends), ends)
    print(f"{len(ends)} of {len(ACCOUNTED)} jobs ended as they should, by Slurm's own account")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "5"), "Slurm has 4 nodes; ask for as many or fewer"),
        (("--with", "partition=fast"), "no nodes; name another partition"),
        (("--with", "partition=old", "--nodes", "2", "--with", "memory=9999G"), "ask for less"),
        (("--nodes", "2", "--with", "constraint=fpga"), "no node has such a feature"),
    ],
)
def test_what_slurm_refuses_is_one_sentence(cluster: Submitter, words: tuple[str, ...], says: str) -> None:
    told = cluster.type("submit", "tiny.toml", "run.name=no", *EVEN, "--on", "slurm", *words)
    assert told.code == 2 and says in told.sentence(), told


def test_a_job_that_waits_for_ever_says_why(cluster: Submitter) -> None:
    number = cluster.submit("waits", "--nodes", "2", "--with", "partition=old", "--time", "1 hour")
    assert "the partition allows less time" in cluster.type("status", "waits").out
    cluster.slurm.ask("scancel", number)


def test_no_secret_is_left_anywhere(cluster: Submitter, slurm: SlurmCluster) -> None:
    """Neither in the folder that the nodes share nor in Slurm's own state, once the jobs are over."""
    texts = [path for folder in (cluster.place.folder, slurm.folder) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in texts if path.suffix == ".secret"]
    assert not [path for path in texts if b"PLAIT_SECRET" in _bytes(path)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


AGENT = """#!/usr/bin/python3 -SI
import os, signal, sys, time
again = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
names = ("SLURM_PROCID", "PLAIT_LEADER", "PLAIT_PORT")
print("start", again, *map(os.environ.get, names), *sys.argv[1:], flush=True)
if "node" in sys.argv and not again:
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
    while True:
        time.sleep(1)
"""
"""Stands for Python with plait: as slow as plait's own is on a busy machine, it would not reach its warning in time."""


def test_each_start_of_a_job_has_a_port_and_a_secret_of_its_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The script alone, to Slurm's own warning before the limit of time and through one requeue."""
    place = Place(tmp_path / "work", LONGER)
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    (place.folder / "own.py").write_text("import plait\n")
    words = ("--nodes", "2", "--time", "1 minute", "--with", "grace=20 seconds", "--with", f"python={agent}")
    told = place.run("submit", "own.py", "--on", "slurm", *words, environment=slurm.environment)
    assert told.code == 0, told
    number = told.out.split("job ")[1].split()[0]
    job = slurm.wait_for_job(number, "COMPLETED", 600)
    assert (job["Restarts"], job["ExitCode"], job["TimeLimit"]) == ("1", "0:0", "00:01:00"), job
    lines = [line.split() for line in (place.folder / f"own-{number}.log").read_text().splitlines()]
    starts = [line[1:] for line in lines if line and line[0] == "start"]
    assert sorted(line[:2] for line in starts) == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]], starts
    assert {line[2] for line in starts} == {"127.0.0.1"} and len({line[3] for line in starts}) == 2
    secrets = {line[line.index("--secret-file") + 1] for line in starts}
    assert secrets == {f".plait/own-{number}-0.secret", f".plait/own-{number}-1.secret"}
