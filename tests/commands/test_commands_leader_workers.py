"""Who may join, how hosts are used, and where the secret and the address come from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from plait.checked_json import parse_object, typed_value
from plait.errors import PlaitError
from plait.hosts import joining
from plait.hosts.job_files import read_job_argument
from plait.hosts.joining import (
    HostInfo,
    HostsRequest,
    admitted_info,
    choose_address,
    choose_secret,
    code_hash,
    own_host_info,
)
from plait.hosts.leader import HostPart, Hosts
from plait.hosts.protocol import Reply, RequestKind
from plait.hosts.shared_folder import SEE_FOLDER, SharedReply
from plait.hosts.workers import (
    LeaderWorkers,
    RunOnHosts,
    check_worker_count,
    default_host_shares,
    host_shares_text,
    machine_survey,
)
from plait.launch import network
from plait.launch.network import local_addresses
from plait.launch.values.job import Job, JobResult, Message
from plait.machines.machine import Machine, make_names_unique
from plait.machines.requested_workers import PeakNeed, SurveyRequest
from plait.planner.plan import HostShare, refreshed_hosts, same_hosts
from plait.planner.plan_file import read_plan, write_plan
from plait.recipe.schema import RunConfig
from plait.run_folder import RunFolder
from plait.screen.screen import SilentScreen
from plait.workers import CHECK_ENTRY, MEASURE_ENTRY, PROBE_ENTRY
from tests.planner.machines import EIGHT_H100, LAPTOP, PLAYS, planned, recipe
from tests.plans import changed

LEAD = HostInfo(
    name="lead", mark="f00d", plait="0.4.0", code="c0de", torch="2.13.0+cpu", python="3.11.7", clock_s=1e9, cores=8,
    folder="/home/a",
)  # fmt: skip


class Guest:
    """A joined host that sees host 0's folder, mounted at a place of its own."""

    host = 1

    def __init__(self, folder: str, name: str = "guest") -> None:
        self.name = name
        self.host_info = replace(LEAD, name=name, folder=folder, mark="beef")
        self.link = object()  # as another connection than any other host has

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        assert request is SEE_FOLDER
        return Reply(values=SharedReply(shared=True))


class Led:
    """Hosts on which every job ends at once, all of them laptops; keeps the parts of the last job."""

    def __init__(self, *members: Guest) -> None:
        self.members = self.arrived = members
        self.membership = self
        self.parts: Sequence[HostPart] = ()
        self.said: list[Message] = []
        self.surveys: list[str] = []
        """Of each survey what it asked of processors' peaks."""

    def renumber(self, order: Sequence[int]) -> None:
        self.members = tuple(self.arrived[host - 1] for host in order[1:])

    def run(
        self,
        job: Job,
        *,
        on_message: Callable[[Message], None],
        parts: Sequence[HostPart],
        grace_s: float = 0.0,
        membership: None = None,
    ) -> JobResult:
        assert membership is None, "nobody may join"
        self.parts = parts
        if job.entry == MEASURE_ENTRY:
            self.surveys.append(typed_value(SurveyRequest, parse_object(job.argument)).peak)
            for rank in range(job.world_size):
                machine = replace(LAPTOP, cores=LAPTOP.cores + rank)
                peak = 1e11 * (1 + rank) if self.surveys[-1] == "measured" else None
                values = {"fingerprint": machine.fingerprint(), "peak_flops": peak}
                on_message(Message(rank=rank, kind="machine", values=values))
        for message in self.said:
            on_message(message)
        return JobResult(stopped_by="finished", wall_s=0.0)


def leading(
    hosts: Led, folder: Path, config: RunConfig, said: list[str] | None = None, peak: PeakNeed = "measured"
) -> LeaderWorkers:
    """The workers of these hosts for a run in a folder; what is printed goes to `said`."""
    lines: list[str] = [] if said is None else said

    class Said(SilentScreen):
        def print(self, text: str) -> None:
            lines.append(text)

    run = RunOnHosts(config=config, folder=RunFolder(folder), screen=Said(), peak=peak)
    return LeaderWorkers(cast(Hosts, hosts), run, {})


def told(**other: Any) -> str | None:
    try:
        assert admitted_info({**asdict(LEAD), "name": "guest", **other}, LEAD).name == "guest"
    except PlaitError as error:
        return str(error)
    return None


def test_a_host_like_ours_may_join() -> None:
    own = own_host_info()
    assert told() is None and admitted_info(asdict(own), own_host_info()) == own
    assert told(python="3.12.1", cores=2, folder="/elsewhere", clock_s=1e9 - 59, torch="2.13.0+cu126") is None


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"plait": "0.3.9"}, "this host has plait 0.3.9 and lead has 0.4.0; install plait 0.4.0 here, too"),
        ({"torch": "2.12.1"}, "this host has torch 2.12.1 and lead has 2.13.0; install torch 2.13.0 here, too"),
        ({"code": "other"}, "its files differ; install the same commit on both"),
        ({"clock_s": 1e9 + 75}, "this host's clock is 1 min 15 s ahead of lead's; set it right"),
        ({"clock_s": 1e9 - 3600}, "this host's clock is 1 h 0 min behind lead's; set it right"),
        ({"clock_s": "now"}, "lead does not understand this host's greeting; install plait 0.4.0 here, too"),
        ({"plait": None}, "lead does not understand this host's greeting"),
        ({"clock_s": math.nan}, "lead does not understand this host's greeting"),
        ({"clock_s": math.inf}, "lead does not understand this host's greeting"),
        ({"clock_s": 10**400}, "lead does not understand this host's greeting"),
        ({"cores": -1}, "lead does not understand this host's greeting"),
        ({"cores": True}, "lead does not understand this host's greeting"),
        ({"name": "[bold]guest[/nothing]"}, "lead does not understand this host's greeting"),
        ({"name": "guest\njoined   another"}, "lead does not understand this host's greeting"),
        ({"folder": "relative"}, "lead does not understand this host's greeting"),
        ({"more": 1}, "lead does not understand this host's greeting"),
    ],
)
def test_what_must_be_mended_is_told_to_the_host_that_joins(other: dict[str, Any], sentence: str) -> None:
    assert sentence in (told(**other) or "")


@pytest.mark.parametrize("other", [{"plait": "0.3.9"}, {"torch": "2.12.1+cpu"}, {"code": "other"}, {"more": 1}])
def test_a_host_with_other_software_is_told_the_line_that_installs_ours(other: dict[str, Any]) -> None:
    line = "uv tool install --force --torch-backend auto --with torch==2.13.0 ./plait-0.4.0-py3-none-any.whl"
    assert (told(**other) or "").endswith(f"; copy the wheel of its plait here and type: {line}")


@pytest.mark.parametrize(
    "change",
    [
        {"cores": 0}, {"cores": "8"}, {"devices": 10**9}, {"memory_bytes": -1}, {"device": "toaster"}, {"name": "[/x]"},
        {"versions": 5}, {"versions": {"torch": 2}}, {"more": 1}, {"unlike": "a"}, {"name": None},
        {"without": ["sense"]}, {"uncompiled": "[red]"}, {"uncompiled": "a\nb"}, {"uncompiled": 5},
    ],
)  # fmt: skip
def test_a_machine_that_cannot_be_is_refused_with_the_name_of_its_host(change: dict[str, Any]) -> None:
    fingerprint = json.loads(json.dumps(LAPTOP.fingerprint()))
    survey = machine_survey({"fingerprint": fingerprint, "peak_flops": 1e11, "reason": None}, "guest")
    assert survey.machine == LAPTOP and survey.peak_flops == 1e11
    with pytest.raises(PlaitError, match=r"^guest does not say what machine it is"):
        machine_survey({"fingerprint": {**fingerprint, **change}, "peak_flops": 1e11}, "guest")
    for values in (None, {}, {"fingerprint": [], "peak_flops": 1}, {"fingerprint": fingerprint, "peak_flops": -1.0}):
        with pytest.raises(PlaitError, match=r"^guest does not say what machine it is"):
            machine_survey(values, "guest")


def test_only_rank_0_is_heard_by_who_runs_a_job_on_all_hosts(tmp_path: Path) -> None:
    """What another host's rank says, beyond what checkpoints need, is for nobody: it may be anything."""
    heard: list[Message] = []
    hosts = Led(Guest("/a"))
    workers = leading(hosts, tmp_path, recipe(tmp_path))
    hosts.said = [Message(rank=rank, kind="probed", values={}) for rank in (1, 0)]
    workers.run(Job(entry=PROBE_ENTRY, argument="{}", world_size=2, threads=1), heard.append)
    assert [message.rank for message in heard] == [0]


def test_the_hash_of_the_code_is_stable() -> None:
    assert len(code_hash()) == 64 and code_hash() == own_host_info().code


def test_a_worker_for_each_gpu_or_one_with_all_the_cores() -> None:
    small = replace(LAPTOP, cores=2)
    assert default_host_shares(["a", "b"], [LAPTOP, small]) == (
        HostShare(name="a", workers=1, threads=8, machine=LAPTOP.digest()),
        HostShare(name="b", workers=1, threads=2, machine=small.digest()),
    )
    one = replace(EIGHT_H100, devices=1, cores=4)
    assert [(share.workers, share.threads) for share in default_host_shares(["a", "b"], [EIGHT_H100, one])] == [
        (8, 24),
        (1, 4),
    ]


def test_who_does_what_is_told_on_a_line() -> None:
    shares = default_host_shares(["a", "b"], [EIGHT_H100, replace(EIGHT_H100, devices=1, cores=4)])
    assert host_shares_text(shares) == "a 8 workers × 24 threads, b 1 worker × 4 threads"


def test_hosts_of_one_name_are_told_apart() -> None:
    assert make_names_unique(["vm", "big", "vm", "vm"]) == ("vm", "big", "vm (2)", "vm (3)")


def test_gpus_and_processors_do_not_mix() -> None:
    with pytest.raises(PlaitError, match=r"^b has GPUs and a has none that torch sees, .*; leave out one of the two"):
        default_host_shares(["a", "b"], [LAPTOP, EIGHT_H100])


def test_a_layout_of_another_size_is_refused(tmp_path: Path) -> None:
    shares = default_host_shares(["a", "b"], [EIGHT_H100, replace(EIGHT_H100, devices=4)])
    check_worker_count(recipe(tmp_path), shares)
    check_worker_count(recipe(tmp_path, "layout.replicate=3", "layout.tensor=4"), shares)
    with pytest.raises(
        PlaitError, match=r"layout needs 8 workers, and the hosts have 12 \(a 8, b 4\); name degrees wh"
    ):
        check_worker_count(recipe(tmp_path, "layout.replicate=8"), shares)


def test_a_plan_over_hosts_reads_back_and_knows_each_rank(tmp_path: Path) -> None:
    hosts = (HostShare(name="a", workers=2, threads=3), HostShare(name="b", workers=1, threads=8))
    plan = planned(recipe(tmp_path, "layout.replicate=3", "model.size=1M"), PLAYS, LAPTOP)
    assert plan.machines.hosts == () and {plan.threads_of(rank) for rank in range(3)} == {plan.placement.threads}
    placed = replace(plan, machines=replace(plan.machines, hosts=hosts))
    write_plan(placed, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == placed
    assert [placed.threads_of(rank) for rank in range(3)] == [3, 3, 8]


def test_a_checkpoint_s_parts_are_fetched_from_the_host_of_their_rank(tmp_path: Path) -> None:
    """Of three hosts with two, one and two workers."""
    old, new = Guest("/a"), Guest("/b")
    workers = leading(Led(old, new), tmp_path, recipe(tmp_path))
    vars(workers)["_host_shares_as_admitted"] = tuple(
        HostShare(name=name, workers=count, threads=1) for name, count in zip("abc", (2, 1, 2), strict=True)
    )
    assert [workers._member_of(rank) for rank in (2, 3, 4)] == [old, new, new]


def test_hosts_take_the_places_that_a_plan_gives_them(tmp_path: Path) -> None:
    """The probe comes before it, a checkpoint's parts after it."""
    guests = [Guest(f"/{name}", name) for name in "abc"]
    hosts = Led(*guests)
    workers = leading(hosts, tmp_path, recipe(tmp_path))
    plan = planned(recipe(tmp_path, "layout.replicate=4", "model.size=1M"), PLAYS, LAPTOP)
    lead = own_host_info().name
    assert [share.name for share in workers.with_hosts(plan).machines.hosts] == [lead, "a", "b", "c"]
    moved = replace(plan, placement=replace(plan.placement, host_order=(0, 3, 1, 2)))
    for _ in range(2):  # a step may have been timed for the plan before
        placed = workers.with_hosts(moved)
        assert [share.name for share in placed.machines.hosts] == [
            lead,
            "c",
            "a",
            "b",
        ] and not placed.placement.host_order
        assert [share.mark for share in placed.machines.hosts[1:]] == ["beef"] * 3
        assert workers.with_hosts(placed) == placed
    assert hosts.members == (guests[2], guests[0], guests[1]) and workers._member_of(1) is guests[2]
    assert [machine.cores for machine, _, _ in workers.host_machines()] == [8, 11, 9, 10]
    assert [flops for _, flops, _ in workers.host_machines()] == [1e11, 4e11, 2e11, 3e11]
    workers.run(Job(entry=PROBE_ENTRY, argument="{}", world_size=4, threads=1), lambda message: None)
    assert [part.threads for part in hosts.parts] == [8, 11, 9, 10]
    with pytest.raises(AssertionError):
        workers.with_hosts(replace(plan, placement=replace(plan.placement, host_order=(0, 1))))


def test_a_processor_is_measured_only_where_its_rate_is_asked_for(tmp_path: Path) -> None:
    hosts, config = Led(Guest("/a")), recipe(tmp_path, "model.size=1M")
    workers = leading(hosts, tmp_path, config, peak="as known")
    assert workers.fixed_workers.workers == 2
    assert [flops for _, flops, _ in workers.host_machines("as known")] == [None, None]
    placed = changed(
        planned(recipe(tmp_path, "layout.replicate=2", "model.size=1M"), PLAYS, LAPTOP), hosts=workers.host_shares
    )
    assert workers.with_hosts(placed) == placed and hosts.surveys == ["as known"], "a run that goes on by its plan"
    assert [flops for _, flops, _ in workers.host_machines()] == [1e11, 2e11]
    assert [flops for _, flops, _ in workers.host_machines("as known")] == [1e11, 2e11]
    assert hosts.surveys == ["as known", "measured"]


def test_a_host_that_the_plan_leaves_out_is_released_and_left_out_again_when_the_run_goes_on(tmp_path: Path) -> None:
    def lead(said: list[str]) -> tuple[Led, LeaderWorkers]:
        guests = [Guest(f"/{name}", name) for name in "ab"]
        hosts = Led(*guests)
        return hosts, leading(hosts, tmp_path, recipe(tmp_path, "model.size=1M"), said)

    said: list[str] = []
    hosts, workers = lead(said)
    plan = planned(recipe(tmp_path, "layout.replicate=2", "model.size=1M"), PLAYS, LAPTOP)
    placed = workers.with_hosts(replace(plan, placement=replace(plan.placement, host_order=(0, 1))))
    own = own_host_info().name
    assert [share.name for share in placed.machines.hosts] == [own, "a"] and placed.placement.host_order == ()
    assert [share.name for share in placed.machines.left_out] == ["b"] and len(hosts.members) == 1
    assert said[-1] == (
        "left out b: a step takes no less time with it (--why has the figures); it may be used for something else, or "
        'write layout.devices = "all"'
    )
    assert workers.with_hosts(placed) == placed and workers.fixed_workers.workers == 2
    write_plan(placed, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == placed

    hosts, workers = lead(said)
    assert workers.with_hosts(placed) == placed and len(hosts.members) == 1, "the same hosts joined again"


def test_the_folder_of_a_job_is_its_argument_or_in_it() -> None:
    whole = read_job_argument(json.dumps({"folder": "/a/b", "resume": None}))
    assert read_job_argument("/a/b") == whole and whole.folder == "/a/b" and whole.resume is None


@pytest.mark.parametrize("corpus", ["in the cache", "elsewhere"])
def test_the_data_of_a_job_have_a_name_that_holds_where_a_shared_folder_is_mounted_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run, job = Path("runs") / "x", tmp_path / ".plait" / "proof"
    run.mkdir(parents=True)
    job.mkdir(parents=True)
    config = recipe(tmp_path, "layout.replicate=2", "model.size=1M")
    named = job / "corpus" if corpus == "in the cache" else Path("/data/corpus")
    write_plan(changed(planned(config, PLAYS, LAPTOP), corpus=str(named)), job / "plan.json")
    hosts = Led(Guest("/mnt/work"))
    workers = leading(hosts, run, config)
    asked = json.dumps({"folder": str(job), "extent": "all", "who": "layout"})
    workers.run(
        Job(entry=CHECK_ENTRY, argument=asked, world_size=2, threads=1),
        lambda message: None,
    )
    assert read_plan(job / "plan.json").job.corpus == (
        ".plait/proof/corpus" if corpus == "in the cache" else "/data/corpus"
    )
    assert [Path(read_job_argument(part.argument).folder) for part in hosts.parts] == [
        job,
        Path("/mnt/work/.plait/proof"),
    ]


def test_an_address_must_be_of_this_machine() -> None:
    assert choose_address("127.0.0.1") == "127.0.0.1" and choose_address("127.0.0.2") == "127.0.0.2"
    with pytest.raises(PlaitError, match=r"^203.0.113.7 is not an address of this machine; "):
        choose_address("203.0.113.7")
    outside = [text for text in local_addresses() if not text.startswith("127.") and ":" not in text]
    if len(outside) == 1:
        assert choose_address(None) == outside[0]
    else:
        with pytest.raises(PlaitError, match=r"choose --address|has no address"):
            choose_address(None)


def test_a_second_address_of_an_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"127.0.0.1": "lo", "192.168.1.5": "eth0", "10.0.0.1": "eth0", "10.0.0.2": "eth1", "fd00::1": "eth0"}
    for module in (network, joining):
        monkeypatch.setattr(module, "local_addresses", lambda: known)
    assert [choose_address(one) for one in ("192.168.1.5", "10.0.0.2")]
    for second in ("10.0.0.1", "fd00::1"):
        with pytest.raises(PlaitError, match=rf"{second} is not the first address of eth0, .*at that, 192\.168\.1\.5;"):
            choose_address(second)


def test_a_new_secret_goes_to_a_private_file_and_is_found_there_again(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    first, words = choose_secret(file)
    assert file.stat().st_mode & 0o777 == 0o600 and first.text in file.read_text()
    assert first.text not in words and str(file) in words
    again, words = choose_secret(file)
    assert again == first and first.text not in words
    file.chmod(0o644)
    with pytest.raises(PlaitError, match="chmod 600"):
        choose_secret(file)
    with pytest.raises(PlaitError, match=r"cannot be written \(No such file or directory\); name another place"):
        choose_secret(tmp_path / "nowhere" / "secret")


def test_a_secret_in_the_environment_is_taken_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known, _ = choose_secret(tmp_path / "secret")
    monkeypatch.setenv("PLAIT_SECRET", known.text)
    found, words = choose_secret(None)
    assert found == known and known.text not in words and "PLAIT_SECRET" in words


def test_a_secret_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("PLAIT_SECRET", raising=False)
    with pytest.raises(PlaitError, match=r"no terminal to show the secret on; name a file for it by --secret-file"):
        choose_secret(None)


def test_what_belongs_to_several_hosts_is_refused_for_one() -> None:
    assert HostsRequest(n_hosts=2, address="127.0.0.1").port == 0
    more: list[dict[str, Any]] = [{"address": "127.0.0.1"}, {"port": 5}, {"secret_file": Path("x")}]
    for one in more:
        with pytest.raises(PlaitError, match="say how many with --hosts"):
            HostsRequest(n_hosts=1, **one)


def test_a_machine_is_what_a_rank_tells(tmp_path: Path) -> None:
    assert Machine.from_fingerprint(json.loads(json.dumps(LAPTOP.fingerprint()))) == LAPTOP


def test_hosts_keep_the_names_of_a_plan_where_their_marks_are_known() -> None:
    """Of one name, they are numbered as they come: after they changed places they come in another order."""
    hosts = default_host_shares(["lead", "vm (2)", "vm"], [LAPTOP] * 3)
    known = tuple(replace(share, mark=mark) for share, mark in zip(hosts, ("m0", "m2", "m1"), strict=True))
    now = tuple(replace(share, name=name) for share, name in zip(known, ("lead", "vm", "vm (2)"), strict=True))
    assert refreshed_hosts(known, now) == known
    assert refreshed_hosts(hosts, known) == known, "a new mark of a known name"
    other = (now[0], replace(now[1], name="old"), now[2])
    assert refreshed_hosts(known, other) == other, "a new name of a known machine"
    assert refreshed_hosts(hosts, now) is None and refreshed_hosts((), now) is None
    assert refreshed_hosts(known, (*now[:2], replace(now[2], threads=99))) is None


def test_hosts_are_told_apart_by_what_they_are_and_not_by_their_names() -> None:
    small = replace(LAPTOP, cores=2)
    made_for = default_host_shares(["a", "b"], [LAPTOP, small])
    assert same_hosts(made_for, default_host_shares(["c", "d"], [LAPTOP, small]))
    assert not same_hosts(made_for, default_host_shares(["b", "a"], [small, LAPTOP]))
    assert not same_hosts(made_for, default_host_shares(["a", "b"], [LAPTOP, replace(small, memory_bytes=2**40)]))
    assert not same_hosts(made_for, made_for[:1])
    of_an_earlier_version = [replace(share, machine="") for share in made_for]
    assert same_hosts(of_an_earlier_version, made_for)
