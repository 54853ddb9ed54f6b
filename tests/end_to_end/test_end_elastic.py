"""Hosts leave a run and join it while it goes on: the same samples, the same losses, and one leader alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from plait.commands.monitoring.elastic_workers import change_of_speed, in_place_of
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from tests.end_to_end.command import Ended, Place, ended, wait_while_running
from tests.end_to_end.conftest import RunWarm
from tests.end_to_end.namespaces import Net, has_namespaces, network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root and `ip`"),
]
STEPS, PORT, LIKE = 80, 29555, 1e-5
# Note [the rate]: float32's last bits differ from layout to layout, and a run that learns fast makes ten times as much
# of them every 15 steps: at the derived rate of 3.3e-3 two layouts that nobody disturbs differ by 2e-2 after these
# steps, at 5e-4 by 3e-6.
PATIENCE_S = 900
"""More than any of this takes, also where other programs have most of the machine."""
wait_for = partial(wait_while_running, within_s=PATIENCE_S, look_s=0.05)
"""Looks seldom: the hosts have two cores together, and looking starts a process."""
RECIPE = f"""
[data]
files = "play.txt"

[model]
layers = 4
width = 128
heads = 4
vocabulary = 300

[train]
sequence = 128
batch_tokens = 3584
budget = "{STEPS} steps"
matmul_backend = "default"
precision = "float32"

[optimizer]
lr = 5e-4

[balance]
every = "never"

[checkpoint]
every = "5 steps"

[report]
evaluate = "never"
"""


class Hosts:
    """Commands on hosts of a network; host 0 leads."""

    def __init__(self, net: Net, folder: Path, shared: bool) -> None:
        self.net = net
        first = Place(folder / "a", RECIPE)
        self.places = [first, *(first if shared else Place(folder / name, RECIPE) for name in "bcd")]
        self.secret = folder / "secret"

    @property
    def lead_place(self) -> Place:
        return self.places[0]

    def lead(self, name: str, hosts: int, *more: str) -> subprocess.Popen[str]:
        process = self.lead_place.start(
            *("train", "tiny.toml", f"run.name={name}", "--no-check", "--hosts", str(hosts), *more),
            *("--port", str(PORT), "--secret-file", str(self.secret)),
            preexec_fn=self.net.enter(0, 0),
        )
        wait_for(lambda: self.net.listens(0, PORT), process)
        return process

    def join(self, index: int) -> subprocess.Popen[str]:
        return self.places[index].start(
            *("join", f"{self.net.address(0)}:{PORT}", "--secret-file", str(self.secret)),
            preexec_fn=self.net.enter(index, index % 2),
        )

    def hosts_of(self, name: str) -> list[str]:
        """The hosts in the run's present plan."""
        return [host["name"] for host in self.lead_place.plan(name)["hosts"]]


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with the run "fixed", which nobody disturbs."""
    place = Place(tmp_path_factory.mktemp("fixed"), RECIPE)
    cores = partial(os.sched_setaffinity, 0, {0, 1})
    whole = place.train("fixed", "--no-check", within_s=PATIENCE_S, preexec_fn=cores)
    assert whole.code == 0, whole
    return place


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Hosts]:
    yield from _hosts(tmp_path, shared=False)


@pytest.fixture
def together(tmp_path: Path) -> Iterator[Hosts]:
    """Hosts that work in one folder."""
    yield from _hosts(tmp_path, shared=True)


def _hosts(folder: Path, *, shared: bool) -> Iterator[Hosts]:
    with network(4) as net:
        made = Hosts(net, folder, shared)
        yield made
        for place in made.places:
            for pid in place.processes():
                os.kill(pid, signal.SIGKILL)


def steps_done(place: Place, name: str) -> int:
    path = place.path(name) / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def goes_on(hosts: Hosts, name: str, names: str, lead: subprocess.Popen[str]) -> None:
    """Wait until the run works on these hosts, in whatever order their speeds gave them, and has done three steps."""
    wait_for(lambda: sorted(hosts.hosts_of(name)) == list(names), lead)
    starts = hosts.lead_place.path(name) / "starts.jsonl"
    begun = json.loads(starts.read_text().splitlines()[-1])["steps_done"]
    wait_for(lambda: steps_done(hosts.lead_place, name) >= begun + 3, lead)


def assert_like_the_fixed_run(place: Place, name: str, fixed: Place, run_warm: RunWarm) -> None:
    """The ledger of one that was never disturbed, and its losses."""
    runs = ((place, name), (fixed, "fixed"))
    status, whole = (json.loads(run_warm(where, "status", one, "--json", "--ledger").out) for where, one in runs)
    found, undisturbed = status["ledger"], whole["ledger"]
    assert [{**line, "generation": 1} for line in found] == [{**line, "generation": 1} for line in undisturbed]
    assert len(found) == STEPS
    losses = [[line for line in where.lines(one) if "loss" in line] for where, one in runs]
    pairs = list(zip(*losses, strict=True))
    assert max(abs(one["loss"] - other["loss"]) / other["loss"] for one, other in pairs) <= LIKE
    assert status["samples_lost"] == status["samples_repeated"] == 0


HOSTS_WITHOUT_NAMES = "[c10d] The hostname of the client socket cannot be retrieved"
"""torch's warning where addresses have no names, as in these namespaces."""


def without_torch(one: Ended) -> Ended:
    """The same, without that warning."""
    return replace(one, err="".join(line for line in one.err.splitlines(True) if HOSTS_WITHOUT_NAMES not in line))


def test_four_hosts_become_two_three_four_and_three_again(apart: Hosts, fixed: Place, run_warm: RunWarm) -> None:
    """Two are lost, two come, and one is stopped, which leaves without a failure."""
    name, place = "elastic", apart.lead_place
    lead = apart.lead(name, 4)
    guests = [apart.join(index) for index in (1, 2, 3)]
    wait_for(lambda: steps_done(place, name) > 6, lead)
    assert sorted(apart.hosts_of(name)) == list("abcd")
    os.killpg(guests[1].pid, signal.SIGKILL)  # c
    apart.net.pull(3)  # d
    goes_on(apart, name, "ab", lead)
    gone = ended(guests[2], PATIENCE_S)
    assert gone.code == 1 and "was lost" in gone.err.splitlines()[-1]
    apart.net.plug(3)
    again = [apart.join(2)]
    goes_on(apart, name, "abc", lead)
    again.append(apart.join(3))
    goes_on(apart, name, "abcd", lead)
    failures = (place.path(name) / "incidents.jsonl").read_text()
    os.killpg(again[1].pid, signal.SIGINT)
    stopped = ended(again.pop(), PATIENCE_S)
    assert stopped.code == 130 and "left by SIGINT; everything is saved" in stopped.out
    first, *others = (ended(process, PATIENCE_S) for process in (lead, guests[0], *again))
    assert [one.code for one in (first, *others)] == [0, 0, 0], (first, others)
    assert (place.path(name) / "incidents.jsonl").read_text() == failures
    assert not without_torch(first).err, first.err
    told, plans = _changes(first), plans_of(place, name)
    # How many hosts go at once hangs on when each is missed.
    *lost, left, c_came, d_came, d_left = plans
    assert [one.world_size for one in (lost[0], left, c_came, d_came, d_left)] == [4, 2, 3, 4, 3] and len(lost) <= 2
    chosen = [in_place_of(old, new) for old, new in pairwise(plans)]
    pairs = list(zip(told, chosen, strict=True))
    assert all(line.partition(": ")[2].startswith(what) for line, what in pairs), pairs
    *gone, c_joined, d_joined, d_stopped = told
    speeds = [change_of_speed(old, new) for old, new in pairwise(plans)]
    assert all(speed in line for line, speed in zip(told, speeds, strict=True)), (told, speeds)
    assert all(" gone: " in line and (" slower until " in line or "faster" in line) for line in gone), told
    assert {name for name in "cd" if any(name in line.partition(":")[0].split() for line in gone)} == {"c", "d"}, told
    assert c_joined.startswith("c joined: ") and d_joined.startswith("d joined: "), told
    assert d_stopped.startswith("d is gone: "), told
    assert "taken in at the next checkpoint" in others[1].out and "pauses the run" in others[0].out
    assert_like_the_fixed_run(place, name, fixed, run_warm)


def plans_of(place: Place, name: str) -> list[Plan]:
    """All plans that a run has had, the first one first."""
    kept = sorted(place.path(name).glob("plan-*.json"), key=lambda path: int(path.stem[5:]))
    return [read_plan(path) for path in (*kept, place.path(name) / "plan.json")]


def _changes(one: Ended) -> list[str]:
    """What the leader said of hosts that came and went."""
    lines = [line.removeprefix("hosts    ") for line in one.out.splitlines() if line.startswith("hosts ")]
    return [line for line in lines if " gone: " in line or " joined: " in line]


def test_a_lost_host_costs_a_step_where_the_others_hold_the_whole_state(
    apart: Hosts, fixed: Place, run_warm: RunWarm
) -> None:
    """No checkpoint is due before the end: what two of three copies have in memory becomes one."""
    name, place = "copies", apart.lead_place
    lead = apart.lead(name, 3, "checkpoint.every=1000 steps", "recover.state_every=1")
    guests = [apart.join(1), apart.join(2)]
    wait_for(lambda: steps_done(place, name) > 20, lead)
    os.killpg(guests[1].pid, signal.SIGKILL)
    first, other = ended(lead, PATIENCE_S), ended(guests[0], PATIENCE_S)
    assert (first.code, other.code) == (0, 0), (first, other)
    assert "nothing to do here: this host takes part again when the run goes on" in other.out
    [incident] = [
        json.loads(line)
        for line in (place.path(name) / "incidents.jsonl").read_text().splitlines()
        if "back_after_s" not in line
    ]
    assert incident["cause"] == "host lost" and incident["from_copies"] and incident["steps_lost"] <= 1, incident
    assert_like_the_fixed_run(place, name, fixed, run_warm)


def test_a_recipe_that_cannot_fit_on_what_is_left_stops_saved_and_says_what_is_missing(apart: Hosts) -> None:
    name, place = "named", apart.lead_place
    lead, guests = apart.lead(name, 2, "layout.replicate=2"), [apart.join(1)]
    wait_for(lambda: bool(place.checkpoints(name)), lead)
    late = ended(apart.join(2), PATIENCE_S)
    wanted = "the recipe's layout needs 2 workers, and the run has 2 hosts"
    assert late.code == 2 and wanted in without_torch(late).sentence()
    guests[0].kill()
    stopped = ended(lead, PATIENCE_S)
    assert stopped.code == 1, stopped
    sentence = without_torch(stopped).sentence()
    assert sentence.startswith(
        "b was lost: its connection was closed, and the hosts that are left cannot carry the run: "
    )
    assert "the recipe's layout needs 2 workers, and the hosts have 1" in sentence and "join b again" in sentence
    lines = [json.loads(line) for line in (place.path(name) / "incidents.jsonl").read_text().splitlines()]
    assert [line["decision"] for line in lines if "cause" in line][-2:] == ["started again", "ended"]
    lead, guest = apart.lead(name, 2, "layout.replicate=2"), apart.join(1)
    assert [ended(one, PATIENCE_S).code for one in (lead, guest)] == [0, 0]


def test_a_second_leader_is_refused_a_short_partition_heals_and_a_zombie_host_writes_nothing(
    together: Hosts, fixed: Place, run_warm: RunWarm
) -> None:
    """The hosts share a folder, so that a frozen one could write into it when it thaws."""
    name, place = "partitioned", together.lead_place
    lead, guests = together.lead(name, 3), [together.join(1), together.join(2)]
    wait_for(lambda: steps_done(place, name) > 6, lead)
    words = ("train", "tiny.toml", f"run.name={name}", "--no-check")
    second = place.run(*words, preexec_fn=together.net.enter(3, 0))
    assert second.code == 2 and "another plait is training in" in second.sentence()
    together.net.pull(2)
    threading.Event().wait(3)  # how long a cable is out is what is tested
    together.net.plug(2)
    at = steps_done(place, name)
    wait_for(lambda: steps_done(place, name) > at + 10, lead)
    assert not (place.path(name) / "incidents.jsonl").exists(), "three seconds are no failure"
    zombies = _processes_of(guests[1])
    for pid in zombies:
        os.kill(pid, signal.SIGSTOP)
    goes_on(together, name, "ab", lead)
    root = place.path(name) / "checkpoints"
    for pid in zombies:
        os.kill(pid, signal.SIGCONT)
    assert ended(guests[1], PATIENCE_S).code == 1
    first, other = ended(lead, PATIENCE_S), ended(guests[0], PATIENCE_S)
    assert (first.code, other.code) == (0, 0), (first, other)
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert_like_the_fixed_run(place, name, fixed, run_warm)


def _processes_of(process: subprocess.Popen[str]) -> list[int]:
    """A command's processes, its workers included."""
    found = [process.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
