"""`plait submit` to a real Slurm: what became of each job is asserted from Slurm's own account. Run by `make slurm`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import RECIPE, Ended, Place
from tests.slurm.cluster import SlurmCluster, wait_for

STEPS = 100
LONGER = RECIPE.replace('budget = "60 steps"', f'budget = "{STEPS} steps"')
EVEN = ("layout.shares=[4, 3]", 'balance.every="never"')
"""The shares of equal workers: what nodes measure of each other hangs on what else the machine does."""

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


class Submitter:
    """Types plait's commands where Slurm is."""

    def __init__(self, slurm: SlurmCluster, place: Place) -> None:
        self.slurm, self.place = slurm, place

    def type(self, *words: str) -> Ended:
        return self.place.run(*words, environment=self.slurm.environment)

    def submit(self, name: str, *more: str) -> str:
        """Submit the recipe, and say the job's number."""
        told = self.type("submit", "tiny.toml", f"run.name={name}", *EVEN, "--on", "slurm", *more)
        assert told.code == 0 and not told.err, told
        [line] = [line for line in told.out.splitlines() if line.startswith("sent ")]
        return line.split("job ")[1].split()[0]

    def ended(self, number: str, state: str = "COMPLETED", within_s: float = 400) -> dict[str, str]:
        job = self.slurm.wait_for_job(number, state, within_s)
        ends = [line for line in self.slurm.accounting() if line.get("JobId") == number]
        assert ends and ends[-1]["JobState"] == state, ends
        return job

    def log(self, name: str, number: str) -> str:
        return (self.place.folder / f"{name}-{number}.log").read_text()

    def saved(self, name: str) -> bool:
        return bool(self.place.checkpoints(name))


@pytest.fixture
def cluster(slurm: SlurmCluster, place: Place) -> Submitter:
    return Submitter(slurm, place)


def assert_same_end(place: Place, name: str, other: str) -> None:
    """The same losses at every step, and the same bytes in the last checkpoint."""
    assert place.numbers(name) == place.numbers(other)
    assert place.manifest(name, STEPS) == place.manifest(other, STEPS)


def test_two_nodes_train_and_fetch_shows_the_receipt(cluster: Submitter) -> None:
    number = cluster.submit("two", "--nodes", "2")
    job = cluster.ended(number)
    assert (job["NumNodes"], job["Restarts"], job["ExitCode"]) == ("2", "0", "0:0")
    fetched = cluster.type("fetch", "two")
    assert fetched.code == 0 and "finished" in fetched.out, fetched
    assert "COMPLETED" in cluster.type("status", "two").out
    assert "network  127.0.0.1 on lo" in cluster.log("two", number)
    assert cluster.type("logs", "two").out == cluster.log("two", number)
    assert not (cluster.place.folder / ".plait" / "two.secret").exists()


def test_a_warned_job_saves_is_queued_again_and_ends_with_the_same_bits(cluster: Submitter) -> None:
    number = cluster.submit("warned", "--nodes", "2")
    wait_for(lambda: cluster.saved("warned"), "a checkpoint", 240, cluster.slurm.explain)
    cluster.slurm.ask("scancel", "--signal=USR1", number)  # as --signal has it sent before the time's end
    job = cluster.ended(number)
    assert (job["Restarts"], job["ExitCode"]) == ("1", "0:0")
    assert_same_end(cluster.place, "warned", "two")


def test_a_job_that_is_ended_is_saved_and_the_same_submit_goes_on(cluster: Submitter) -> None:
    number = cluster.submit("ended", "--nodes", "2")
    wait_for(lambda: cluster.saved("ended"), "a checkpoint", 240, cluster.slurm.explain)
    again = cluster.type("submit", "tiny.toml", "run.name=ended", *EVEN, "--on", "slurm", "--nodes", "2")
    assert again.code == 2 and "plait stop ended" in again.sentence()
    assert cluster.type("stop", "ended").code == 0
    cluster.ended(number, "CANCELLED")
    cluster.ended(cluster.submit("ended", "--nodes", "2"))
    assert_same_end(cluster.place, "ended", "two")


def test_a_node_that_is_lost_and_comes_back_costs_no_bit(cluster: Submitter) -> None:
    number = cluster.submit("lost", "--nodes", "2")
    wait_for(lambda: cluster.saved("lost"), "a checkpoint", 240, cluster.slurm.explain)
    node = "n2"
    assert node in cluster.slurm.job(number)["NodeList"].replace("[1-2]", "1 n2")
    cluster.slurm.kill_node(node)
    cluster.slurm.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")
    wait_for(lambda: cluster.slurm.job(number)["Restarts"] == "1", "a restart", 120, cluster.slurm.explain)
    cluster.slurm.start_node(node)
    cluster.slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.ended(number)
    wait_for(lambda: set(cluster.slurm.states().values()) == {"idle"}, "idle nodes")
    assert_same_end(cluster.place, "lost", "two")


def test_unequal_partitions_are_one_job(cluster: Submitter) -> None:
    words = ("--cluster", "1x(1xserver)+1x(1xdesktop)", "--nodes", "2", "--with", "partition=old+new")
    number = cluster.submit("unequal", *words)
    job = cluster.ended(number)
    assert job["HetJobId"] == number and job["Partition"] == "old"
    assert_same_end(cluster.place, "unequal", "two")


def test_four_nodes(cluster: Submitter) -> None:
    words = ("layout.replicate=4", "layout.shares=[2, 2, 2, 1]", "run.name=four", 'balance.every="never"')
    told = cluster.type("submit", "tiny.toml", *words, "--on", "slurm", "--nodes", "4")
    assert told.code == 0, told
    assert cluster.ended(told.out.split("job ")[1].split()[0])["NumNodes"] == "4"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "5"), "Slurm has 4 nodes; ask for so many or fewer"),
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
