"""A run whose hosts come and go: who is taken in, what is planned, what is said, and when it cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from plait.commands.monitoring.elastic_workers import (
    OneMachine,
    change_of_speed,
    change_text,
    in_place_of,
)
from plait.errors import PlaitError, StopSignal
from plait.hosts import run_hosts
from plait.hosts.handshake import new_secret, read_secret
from plait.hosts.joining import choose_secret, own_host_info
from plait.hosts.leader import Hosts
from plait.hosts.membership import Departure, HostChange, Member, TakenIn
from plait.hosts.run_hosts import MeasureAhead, RunHosts, came_and_went
from plait.hosts.workers import RunOnHosts, WaitingHostWorkers
from plait.launch.values.failure import FailureFacts
from plait.launch.values.job import Job, JobResult, Message
from plait.layout import Layout
from plait.machines.machine import Machine, usable_cores
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import Forecast, Plan
from plait.probing.survey import MachineSurvey, PlannedHosts, places_in
from plait.run_folder import RunFolder
from plait.screen.screen import SilentScreen
from plait.workers import MEASURE_ENTRY, CannotGoOn, HostWorkers, OnMessage, Renewed
from tests.planner.machines import EIGHT_H100, LAPTOP, PLAYS, SERVER, planned, recipe
from tests.plans import changed


def copies(plan: Plan, count: int, step_s: float) -> Plan:
    """The plan with so many copies, whose step takes so long by the forecast."""
    forecast = Forecast(step_s=step_s, tensor_bytes=1.0, bytes_per_device=1.0, one_device_step_s=None, error=0.1)
    return replace(
        plan,
        step_s=None,
        forecast=forecast,
        placement=replace(plan.placement, layout=Layout(replicate=count), shares=()),
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(recipe(tmp_path_factory.mktemp("plan"), "train.budget=50 steps"), PLAYS, LAPTOP)


# What is said.


@pytest.mark.parametrize(
    ("before", "after", "who", "line"),
    [
        ((4, 3.0), (3, 4.0), (["c"], []), "hosts    c is gone: 3 copies in place of 4, 25% slower until it returns"),
        ((3, 4.0), (4, 3.0), ([], ["c"]), "hosts    c joined: 4 copies in place of 3, 33% faster"),
        ((4, 3.0), (2, 6.0), (["c", "d"], []), "hosts    c and d are gone: 2 copies in place of 4, 50% slower until"),
        ((3, 4.0), (3, 4.01), (["a"], ["b"]), "hosts    a is gone and b joined: 3 copies, as before, as fast as bef"),
        ((2, 3.0), (1, 6.0), (["b"], []), "hosts    b is gone: 1 copy in place of 2, 50% slower until it returns"),
    ],
)  # fmt: skip
def test_a_change_is_told_with_what_was_done_and_what_it_costs(
    plan: Plan, before: Any, after: Any, who: Any, line: str
) -> None:
    renewed = Renewed(plan=copies(plan, *after), subject="hosts", who=came_and_went(*who), until="until it returns")
    assert change_text(copies(plan, *before), renewed).startswith(line)


def test_other_layouts_are_named_and_unknown_times_left_out(plan: Plan) -> None:
    pipeline = changed(copies(plan, 2, 1.0), layout=Layout(pipeline=2, replicate=2), forecast=None)
    assert in_place_of(copies(plan, 3, 1.0), pipeline) == "2 groups of layers × 2 copies in place of 3 copies"
    assert change_of_speed(copies(plan, 3, 1.0), pipeline) == ""


# Who is there.


class _Link:
    lost: str | None = None

    def __init__(self, address: str) -> None:
        self.address = address


class _Membership:
    """Answers `renew` with one change after another."""

    def __init__(self, members: Sequence[Member], *changes: HostChange) -> None:
        self.members, self.changes = tuple(members), [*changes]
        self.sent_home: list[tuple[str, str]] = []
        self.is_complete = True

    def renew(self, taken: TakenIn = "ready") -> HostChange:
        change = self.changes.pop(0) if self.changes else HostChange(gone=(), came=())
        left = [one.name for one in change.gone]
        self.members = (*(one for one in self.members if one.name not in left), *change.came)
        return change

    def send_home(self, members: Sequence[Member], sentence: str) -> None:
        self.sent_home += [(one.name, sentence) for one in members]
        self.members = tuple(one for one in self.members if one not in members)


class _Hosts:
    join_address = "10.0.0.1:24717"

    def __init__(self, membership: _Membership) -> None:
        self.membership = membership

    @property
    def members(self) -> tuple[Member, ...]:
        return self.membership.members

    newcomer, stopped_by = LAPTOP, "finished"

    def run_on(self, member: Member, job: Job, on_message: OnMessage) -> JobResult:
        """What a host that waits says of itself."""
        assert job.entry == MEASURE_ENTRY
        if self.stopped_by == "finished":
            values = {"fingerprint": self.newcomer.fingerprint(), "peak_flops": 1e11, "peak_doubt": ""}
            on_message(Message(rank=0, kind="machine", values=values))
        return JobResult(stopped_by=cast(Any, self.stopped_by), wall_s=0.0)


def member(name: str) -> Member:
    link = _Link(f"10.0.0.{ord(name)}")
    return Member(host=1, host_info=replace(own_host_info(), name=name), link=cast(Any, link))


def gone(*names: str, by: StopSignal | None = None) -> HostChange:
    why = f"left by {by}" if by else "was lost: nothing was heard from it for 10 s"
    return HostChange(gone=tuple(Departure(name=name, why=why, by=by) for name in names), came=())


class _Sender:
    """Notes to whom data were sent."""

    def __init__(self, sent: list[str], name: str) -> None:
        self.sent, self.name = sent, name

    def send_ahead(self) -> None:
        self.sent.append(self.name)


class _TestedHosts(RunHosts):
    """Whose new hosts reach all others, but for those with a firewall."""

    firewalled: Sequence[str] = ()

    @property
    def sent(self) -> list[str]:
        """Who was sent the data ahead."""
        return vars(self).setdefault("_sent", [])

    def know_leader(self, machine: Machine) -> None:
        self._known[None, "measured"] = MachineSurvey(machine=machine, peak_flops=1e11)

    def knows(self, one: Member) -> bool:
        return (one.link, "measured") in self._known

    def _require_usable(self, member: Member, unknown: Sequence[Member] = ()) -> Any:
        return _Sender(self.sent, member.name)

    def _usable(self, came: Sequence[Member]) -> list[Member]:
        for one in [one for one in came if one.name in self.firewalled]:
            self._send_home([one], "a firewall is in between")
        return [one for one in came if one.name not in self.firewalled]


def workers_of(
    folder: Path,
    membership: _Membership,
    plan_for: Callable[[tuple[str, ...]], Plan],
    measure_ahead: MeasureAhead = lambda workers: None,
) -> tuple[_TestedHosts, list[str]]:
    """Workers on several hosts, and what they print."""
    said: list[str] = []

    class Said(SilentScreen):
        def print(self, text: str) -> None:
            said.append(text)

    run = RunOnHosts(config=recipe(folder), folder=RunFolder(folder), screen=Said())
    hosts = _Hosts(membership)
    plan_of = lambda workers: plan_for(tuple(one.name for one in membership.members))  # noqa: E731
    return _TestedHosts(cast(Hosts, hosts), run, plan_of, measure_ahead), said


def test_without_a_change_nothing_is_planned(tmp_path: Path, plan: Plan) -> None:
    workers, _ = workers_of(tmp_path, _Membership([member("b")]), lambda names: pytest.fail("planned again"))
    assert workers.may_shrink and workers.renewed(plan, None) is None


def test_a_lost_host_is_planned_without_and_workers_are_those_of_the_others(tmp_path: Path, plan: Plan) -> None:
    planned_for: list[tuple[str, ...]] = []

    def plan_for(names: tuple[str, ...]) -> Plan:
        planned_for.append(names)
        return copies(plan, 1 + len(names), 1.0)

    workers, said = workers_of(tmp_path, _Membership([member("b"), member("c")], gone("c")), plan_for)
    before = workers.workers
    renewed = workers.renewed(plan, None)
    assert planned_for == [("b",)] and said == [] and workers.workers is not before, "no membership is kept"
    assert renewed and (renewed.who, renewed.plan.placement.layout.replicate) == ("c is gone", 2)
    assert renewed.until == "until it returns (plait join 10.0.0.1:24717)"


def test_a_host_that_is_lost_while_the_others_are_planned_for_is_left_out_too(tmp_path: Path, plan: Plan) -> None:
    def plan_for(names: tuple[str, ...]) -> Plan:
        if "b" in names:
            raise PlaitError("b (10.0.0.2) was lost")
        return copies(plan, 1, 1.0)

    workers, _ = workers_of(tmp_path, _Membership([member("b"), member("c")], gone("c"), gone("b")), plan_for)
    renewed = workers.renewed(plan, None)
    assert renewed and renewed.who == "c and b are gone" and renewed.until.startswith("until they return")


def test_a_host_that_joins_does_not_make_the_run_slower_until_something_returns(tmp_path: Path, plan: Plan) -> None:
    membership = _Membership([member("b")], HostChange(gone=(), came=(member("c"),)))
    workers, _ = workers_of(tmp_path, membership, lambda names: copies(plan, 1 + len(names), 4.0))
    renewed = workers.renewed(plan, None)
    assert renewed and renewed.who == "c joined"
    assert change_text(copies(plan, 2, 3.0), renewed) == "hosts    c joined: 3 copies in place of 2, 25% slower"


def test_new_hosts_of_no_use_are_sent_away_with_the_reason_and_the_others_go_on(tmp_path: Path, plan: Plan) -> None:
    def plan_for(names: tuple[str, ...]) -> Plan:
        if "gpu" in names or "e" in names:
            raise PlaitError("e has GPUs and a has none that torch sees; leave out one of the two")
        return copies(plan, 1 + len(names), 1.0)

    came = HostChange(gone=(), came=(member("d"), member("e")))
    membership = _Membership([member("b")], came)
    workers, said = workers_of(tmp_path, membership, plan_for)
    workers.firewalled = ("d",)
    assert workers.renewed(plan, None) is None, "the plan stays"
    assert [name for name, _ in membership.sent_home] == ["d", "e"]
    assert said[0] == "refused  d: a firewall is in between" and said[1].startswith("refused  e: e has GPUs and a has")
    assert [one.name for one in membership.members] == ["b"]


def test_after_a_hang_the_run_goes_on_without_a_host_that_others_do_not_reach(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = _Membership([member("b"), member("c")])
    workers, _ = workers_of(tmp_path, membership, lambda names: copies(plan, 1 + len(names), 1.0))
    monkeypatch.setattr(workers, "_own_listener", lambda: None)
    cut = [membership.members[1], None]
    monkeypatch.setattr(run_hosts, "host_cut_off", lambda first, others: cut.pop(0))
    renewed = workers.renewed(plan, FailureFacts(cause="hung", rank=1, what="waiting"))
    assert renewed and renewed.who == "c is gone" and renewed.plan.placement.layout.replicate == 2
    assert membership.sent_home[0][0] == "c" and "cut off from other hosts" in membership.sent_home[0][1]
    assert workers.renewed(plan, FailureFacts(cause="killed", rank=1, what="SIGKILL")) is None, "not of a link"


@pytest.mark.parametrize(("kind", "sentence"), [("cpu", ""), ("cuda", "b has GPUs and"), ("stopped", "Ctrl-C")])
def test_who_waits_is_sent_its_files_and_measured_unless_it_is_of_no_use(
    tmp_path: Path, kind: str, sentence: str
) -> None:
    done: list[object] = []
    workers, said = workers_of(tmp_path, _Membership([]), lambda names: pytest.fail("planned"), done.append)
    workers.know_leader(LAPTOP)
    cast(Any, workers)._hosts.newcomer = EIGHT_H100 if kind == "cuda" else SERVER
    cast(Any, workers)._hosts.stopped_by = "SIGINT" if kind == "stopped" else "finished"
    newcomer = member("b")
    if sentence:
        with pytest.raises(PlaitError, match=sentence):
            workers.prepare(newcomer)
        assert said[0].startswith("refused  b: ") and not workers.sent and not done
        return
    workers.prepare(newcomer)
    [measured] = done
    assert isinstance(measured, WaitingHostWorkers) and (measured.leading_machine, measured.machine) == (LAPTOP, SERVER)
    assert measured.fixed_workers == FixedWorkers(workers=1, threads=SERVER.cores)
    assert workers.sent == ["b"] and not said and workers.knows(newcomer)


@pytest.mark.parametrize("by", [None, "SIGINT"])
def test_where_what_is_left_cannot_carry_the_run_it_stops_and_says_what_is_missing(
    tmp_path: Path, plan: Plan, by: StopSignal | None
) -> None:
    def plan_for(names: tuple[str, ...]) -> Plan:
        raise PlaitError("the recipe's layout needs 3 workers, and the hosts have 2; name degrees whose product is 2")

    workers, _ = workers_of(tmp_path, _Membership([member("b"), member("c")], gone("c", by=by)), plan_for)
    with pytest.raises(CannotGoOn) as caught:
        workers.renewed(plan, None)
    why = "left by SIGINT" if by else "was lost: nothing was heard from it for 10 s"
    assert caught.value.left_by == by and caught.value.exit_code == 1
    assert str(caught.value) == (
        f"c {why}, and the hosts that are left cannot carry the run: the recipe's layout needs 3 workers, and the "
        "hosts have 2; name degrees whose product is 2; or join c again: the run is saved, and the same command goes "
        "on with it"
    )


def test_a_late_host_is_refused_at_once_where_the_recipe_names_the_workers(tmp_path: Path) -> None:
    def run(*more: str) -> RunOnHosts:
        return RunOnHosts(config=recipe(tmp_path, *more), folder=RunFolder(tmp_path), screen=SilentScreen())

    assert run().why_full(5) is None and run("layout.replicate=4").why_full(2) is None
    assert "layout needs 2 workers, and the run has 2 hosts" in (run("layout.replicate=2").why_full(1) or "")
    assert run().joining == "open" and run('recover.mode="never"').joining == "closed"


# Measured before.


def test_hosts_are_found_among_those_that_were_measured() -> None:
    def hosts(*there: tuple[Machine, str]) -> PlannedHosts:
        return PlannedHosts(hosts=tuple((one, None, 1) for one, _ in there), addresses=tuple(at for _, at in there))

    a, b, c, d = (LAPTOP, "a"), (SERVER, "b"), (LAPTOP, "c"), (SERVER, "d")
    before = hosts(a, b, c, d)
    assert places_in(hosts(a, d), before) == [0, 3]
    assert places_in(hosts(a, c, b), before) == [0, 2, 1]
    assert places_in(hosts(a, c, (LAPTOP, "e")), before) == []
    assert places_in(hosts(a, (LAPTOP, "b")), before) == [], "another machine at its address"
    assert places_in(hosts(d, a), before) == [], "host 0 was another one"
    assert places_in(PlannedHosts(hosts=((LAPTOP, None, 2),), addresses=("a",)), before) == [], "with as many workers"


# One machine.


class _Machine:
    fixed_workers = None


def one_machine(devices: int, plan: Plan) -> OneMachine:
    now = replace(LAPTOP, device="cuda", devices=devices)
    return OneMachine(cast(HostWorkers, _Machine()), lambda: now, lambda workers: copies(plan, devices, 2.0))


def test_gpus_that_are_lost_for_good_change_the_plan_of_one_machine(plan: Plan) -> None:
    begun = changed(
        copies(plan, 4, 1.0), device="cuda", fingerprint={**plan.machines.fingerprint, "devices": 4, "cores": 8}
    )
    failed = FailureFacts(cause="raised", what="RuntimeError: CUDA error: unspecified launch failure", rank=1)
    renewed = one_machine(2, begun).renewed(begun, failed)
    assert (
        renewed and change_text(begun, renewed) == "devices  2 of 4 GPUs are gone: 2 copies in place of 4, 50% slower"
    )
    assert one_machine(4, begun).renewed(begun, failed) is None, "all are there: the same layout"
    killed = replace(failed, cause="killed", what="SIGKILL")
    assert one_machine(2, begun).renewed(begun, killed) is None, "nobody looks at GPUs after a kill"
    assert one_machine(2, begun).renewed(begun, None) is None


def test_cores_that_are_taken_away_change_the_plan_of_one_machine(plan: Plan) -> None:
    here = usable_cores()
    begun = changed(copies(plan, 2, 1.0), fingerprint={**plan.machines.fingerprint, "cores": here + 3})
    renewed = one_machine(1, begun).renewed(begun, None)
    assert renewed and renewed.who == f"3 of {here + 3} cores are gone"
    same = changed(begun, fingerprint={**plan.machines.fingerprint, "cores": here})
    assert one_machine(1, same).renewed(same, None) is None


# The secret.


def test_a_secret_that_is_shown_lives_as_long_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_SECRET", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    kept = tmp_path / ".secret"
    first, told = choose_secret(None, kept)
    assert first.text in told and kept.stat().st_mode & 0o777 == 0o600
    again, _ = choose_secret(None, kept)
    assert again.text == first.text == read_secret(str(kept)).text
    kept.chmod(0o644)
    with pytest.raises(PlaitError, match="can be read by other users"):
        choose_secret(None, kept)
    own = tmp_path / "own"
    own.write_text(new_secret().text)
    own.chmod(0o600)
    assert choose_secret(own, kept)[0].text == own.read_text().strip() != first.text
