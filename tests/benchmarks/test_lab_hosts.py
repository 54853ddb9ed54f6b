"""Are hosts, cables and limits what they should be, and is a cable that lies found out? Without making any."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.lab import hosts, leftovers
from benchmarks.lab.orders import JoinedRunner, TorchrunRunner, baseline_party
from benchmarks.lab.rate import WIRE_PER_PAYLOAD, objection, rate_of
from benchmarks.lab.wiring import PREFIX, building, hosts_of, limiting, parting

LAB = f"{PREFIX}17-99"
HOSTS = hosts_of(LAB, (1.0, 0.5))


def test_nothing_is_made_outside_of_the_labs_own_namespaces():
    for command in [*building(LAB, HOSTS), *limiting(LAB, HOSTS, 50e6), *parting(LAB, HOSTS[1:], 50e6)]:
        if command[:3] == ("ip", "netns", "add"):
            assert command[3].startswith(LAB)
        elif command[1] == "-n":
            assert command[2].startswith(LAB)
        else:
            assert command[:3] == ("ip", "link", "add"), command
            places = [after for word, after in pairwise(command) if word == "netns"]
            assert len(places) == 2 and all(place.startswith(LAB) for place in places)


def test_every_cable_is_limited_in_both_directions():
    commands = limiting(LAB, HOSTS, 50e6)
    limits = [command for command in commands if command[0] == "tc"]
    ends = {(command[2], command[command.index("dev") + 1]) for command in limits}
    assert ends == {
        (f"{LAB}-switch", "port0"), (f"{LAB}-switch", "port1"), (f"{LAB}-host0", "eth0"), (f"{LAB}-host1", "eth0"),
    }  # fmt: skip
    assert all(command[command.index("rate") + 1] == "50000000bit" for command in limits)
    assert limiting(LAB, HOSTS, "unshaped") == []


def test_another_room_has_a_switch_of_its_own_and_a_limited_road_in_both_directions():
    commands = parting(LAB, HOSTS[1:], 50e6)
    moved = [command for command in commands if command[-1] == "annex" and "port1" in command]
    assert len(moved) == 1 and not any("port0" in command for command in commands)
    limits = [command for command in commands if command[0] == "tc"]
    assert {command[command.index("dev") + 1] for command in limits} == {"road0", "road1"}
    assert all(command[command.index("rate") + 1] == "50000000bit" for command in limits)


@pytest.mark.parametrize(("number", "cores", "quota_us"), [(0, 1.0, "10000"), (1, 1.0, "-1"), (1, 0.5, "5000")])
def test_a_host_has_what_it_was_granted_and_no_quota_where_that_is_all_of_its_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, cores: float, quota_us: str
):
    monkeypatch.setattr(hosts, "GROUPS", (tmp_path,))
    lab = hosts.Lab((2.0, 0.7), "unshaped", work=tmp_path, files="shared")  # the first may use any core
    host = lab.hosts[number]
    (tmp_path / host.namespace).mkdir()
    lab.grant(host, cores)
    assert lab.granted(host) == cores
    assert (tmp_path / host.namespace / "cpu.cfs_quota_us").read_text() == quota_us


@pytest.mark.parametrize("rate", [10e6, 50e6, 250e6, 1e9])
def test_no_packet_of_a_host_is_larger_than_a_burst_that_its_cable_lets_through(rate: float):
    commands = limiting(LAB, HOSTS, rate)
    (burst,) = {command[command.index("burst") + 1] for command in commands if command[0] == "tc"}
    largest = [int(command[command.index("gso_max_size") + 1]) for command in commands if command[0] == "ip"]
    assert len(largest) == len(HOSTS) and 1500 < max(largest) <= min(0.95 * int(burst.removesuffix("b")), 65536)


def test_a_cable_is_measured_without_its_first_burst():
    bits_per_s = 80e6
    steady = [(0.001 * n, 200_000 + round(bits_per_s / 8 * 0.001 * n)) for n in range(1000)]
    assert rate_of(steady) == pytest.approx(bits_per_s * WIRE_PER_PAYLOAD, rel=1e-3)


def test_a_cable_beside_its_rate_is_named():
    assert objection(50e6, [49e6, 52e6]) is None
    sentence = objection(50e6, [49e6, 61e6])
    assert sentence and "50 Mbit/s carried 61" in sentence


def test_traces_belong_to_the_lab_that_left_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    living = leftovers.name_of_lab(os.getpid())
    gone = f"{PREFIX}{os.getpid()}-1"  # the same number, another process
    for lab in (living, gone):
        (tmp_path / f"{lab}-host0").mkdir()
    for other in ("somebody-elses", f"{PREFIX}notes"):
        (tmp_path / other).mkdir()
    (tmp_path / gone).mkdir()
    for name in ("NAMESPACES", "SCRATCH"):
        monkeypatch.setattr(leftovers, name, tmp_path / ("none" if name == "NAMESPACES" else ""))
    monkeypatch.setattr(leftovers, "GROUPS", ())
    assert leftovers.sweep() == [gone]
    assert {path.name for path in tmp_path.iterdir()} == {f"{living}-host0", "somebody-elses", f"{PREFIX}notes"}


def test_plait_is_started_as_a_user_starts_it_and_the_secret_is_no_argument():
    party = JoinedRunner("K7QM-2XHD").party(Path("r.toml"), Path("runs/x"), HOSTS)
    lead, join = party.commands
    assert lead[1:5] == ("-m", "plait", "train", "r.toml")
    assert lead[lead.index("--hosts") + 1] == "2" and lead[lead.index("--address") + 1] == HOSTS[0].address
    assert join[1:] == ("-m", "plait", "join", f"{HOSTS[0].address}:{lead[lead.index('--port') + 1]}")
    assert "K7QM" not in json.dumps(party.commands) and "K7QM" not in repr(party)
    assert all(environment["PLAIT_SECRET"] == "K7QM-2XHD" for environment in party.environments)


def test_one_host_alone_waits_for_nobody():
    party = JoinedRunner("K7QM-2XHD").party(Path("r.toml"), Path("runs/x"), HOSTS[:1])
    assert len(party.commands) == 1 and "--hosts" not in party.commands[0] and not party.leads


def test_torchrun_and_baselines_meet_on_the_first_host_by_the_cable():
    torchrun = TorchrunRunner().party(Path("r.toml"), Path("runs/x"), HOSTS)
    baseline = baseline_party("accelerate-fsdp", {"steps": 3}, Path("runs/y"), HOSTS)
    assert [command[command.index("--node-rank") + 1] for command in torchrun.commands] == ["0", "1"]
    assert [environment["RANK"] for environment in baseline.environments] == ["0", "1"]
    assert baseline.commands[0][2] == "benchmarks.lab.baselines.accelerate_fsdp"
    for party in (torchrun, baseline):
        assert {environment["GLOO_SOCKET_IFNAME"] for environment in party.environments} == {"eth0"}
    assert baseline.environments[1]["MASTER_ADDR"] == HOSTS[0].address
