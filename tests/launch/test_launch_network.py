"""What is told of the network, and why: each by the facts of a described machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from plait.hosts.connectivity import Firewall, opening_advice, own_firewall
from plait.launch.network import NetworkFacts, RdmaPort, network_facts, network_lines, network_variables

ROOT = Path(__file__).parents[2]


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def names(facts: NetworkFacts, *, spans_hosts: bool = True) -> dict[str, str]:
    return {one.name: one.value for one in network_variables(facts, spans_hosts=spans_hosts)}


def told(facts: NetworkFacts, **set_by_person: str) -> list[str]:
    return network_lines(facts, set_by_person, address="10.0.0.1", lost_after_s=10)


def test_facts_are_those_of_the_interface(tmp_path: Path) -> None:
    card = "sys/class/infiniband/mlx5_0/ports"
    root = files(
        tmp_path,
        {
            "sys/class/net/eth0/mtu": "9000\n",
            "sys/class/net/eth0/speed": "25000\n",
            f"{card}/1/state": "4: ACTIVE\n",
            f"{card}/1/link_layer": "InfiniBand\n",
            f"{card}/1/rate": "200 Gb/sec (4X HDR)\n",
            f"{card}/2/state": "1: DOWN\n",
            "dev/nvidiactl": "",
        },
    )
    found = network_facts("eth0", root=root)
    assert (found.mtu, found.megabits, found.has_gpus) == (9000, 25000, True)
    assert found.rdma == (RdmaPort(name="mlx5_0:1", link="InfiniBand", rate="200 Gb/sec (4X HDR)"),)
    assert network_facts("nowhere", root=tmp_path).mtu is None


def test_a_speed_that_the_kernel_does_not_know_is_none(tmp_path: Path) -> None:
    assert network_facts("eth0", root=files(tmp_path, {"sys/class/net/eth0/speed": "-1\n"})).megabits is None


def test_within_one_machine_only_gloo_is_told_of_an_interface() -> None:
    assert names(NetworkFacts(interface="lo"), spans_hosts=False) == {"GLOO_SOCKET_IFNAME": "lo"}
    usual = names(NetworkFacts(interface="eth0", megabits=10_000))
    assert usual == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_variables_follow_the_facts() -> None:
    fast = NetworkFacts(interface="eth0", megabits=200_000)
    assert names(fast).items() >= {("NCCL_SOCKET_NTHREADS", "4"), ("NCCL_NSOCKS_PERTHREAD", "4")}
    port = RdmaPort(name="mlx5_0:1", link="Ethernet", rate="200 Gb/sec")
    assert "NCCL_SOCKET_NTHREADS" not in names(NetworkFacts(interface="eth0", megabits=200_000, rdma=(port,)))
    assert names(NetworkFacts(interface="eth0", is_ipv6=True))["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_each_variable_is_told_with_its_reason_and_a_persons_own_stays() -> None:
    lines = told(NetworkFacts(interface="eth0", mtu=9000, megabits=25_000), NCCL_SOCKET_IFNAME="ib0")
    assert lines[0] == "network  10.0.0.1 on eth0, packets of 9,000 bytes at most (MTU), 25 Gb/s"
    assert lines[1].startswith("         · GLOO_SOCKET_IFNAME=eth0: gloo (on CPUs) uses the interface")
    assert lines[2] == "         · NCCL_SOCKET_IFNAME=ib0 stays as you set it"
    assert lines[3].startswith("         · a host that says nothing for 10 s is lost") and len(lines) == 4


def test_what_is_in_the_way_of_gpus_is_told_with_the_mend() -> None:
    port = RdmaPort(name="mlx5_0:1", link="InfiniBand", rate="200 Gb/sec")
    facts = {"rdma": (port,), "lockable_bytes": 64 << 10, "shared_memory_bytes": 64 << 20}
    text = "\n".join(told(NetworkFacts(interface="eth0", has_gpus=True, **facts)))
    assert "GPUs use RDMA through mlx5_0:1 (InfiniBand, 200 Gb/sec)" in text
    assert "the capability IPC_LOCK" in text and "--shm-size=8g" in text
    without = "\n".join(told(NetworkFacts(interface="eth0", **facts)))
    assert "RDMA" not in without and "shm" not in without


def test_ranks_are_started_with_what_was_told(tmp_path: Path) -> None:
    """The rank's own process, with a variable that the person has set."""
    program = (
        "import os, socket; from plait.launch.local.rank import RankPlacement, _set_environment\n"
        "from plait.launch.values.job import HostRanks, Job\n"
        "job = Job(entry='x', argument='', world_size=2, threads=1, part=HostRanks(first_rank=0, ranks=1))\n"
        "place = RankPlacement(entry=print, local_rank=0, rendezvous='tcp://[fd00::1]:1/job-1', interface='lo',\n"
        "                      wire=socket.socket(), server_pid=1, board=0, memory=0)\n"
        "_set_environment(job, place)\n"
        "print({name: os.environ.get(name) for name in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME', "
        "'NCCL_SOCKET_FAMILY')})"
    )
    environment = {**os.environ, "NCCL_SOCKET_IFNAME": "ib0"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    wanted = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_FAMILY": "AF_INET6"}
    assert done.stdout.strip() == str(wanted)


@pytest.mark.parametrize(
    ("texts", "environment", "name"),
    [
        ({"etc/ufw/ufw.conf": "LOGLEVEL=low\nENABLED=yes\n"}, {}, "ufw"),
        ({"etc/ufw/ufw.conf": "ENABLED=no\n", "run/firewalld/x": ""}, {}, "firewalld"),
        ({"proc/net/ip_tables_names": "nat\nfilter\n"}, {}, "iptables"),
        ({"etc/ufw/ufw.conf": "ENABLED=yes\n"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "NetworkPolicy"),
        ({}, {}, "unknown"),
    ],
)
def test_a_firewall_is_known_by_its_traces(
    tmp_path: Path, texts: dict[str, str], environment: dict[str, str], name: str
) -> None:
    assert own_firewall(files(tmp_path, texts), environment) == name


def test_nftables_is_one_where_it_starts_with_the_machine(tmp_path: Path) -> None:
    root = files(
        tmp_path, {"etc/nftables.conf": "table inet filter { chain input { type filter hook input priority 0; } }"}
    )
    assert own_firewall(root, {}) == "unknown"
    wants = root / "etc/systemd/system/sysinit.target.wants"
    wants.mkdir(parents=True)
    (wants / "nftables.service").symlink_to("/lib/systemd/system/nftables.service")
    assert own_firewall(root, {}) == "nftables"


def test_each_firewall_has_a_line_to_type_for_both_kinds_of_addresses() -> None:
    for firewall in get_args(Firewall):
        for source in ("10.0.0.2", "fd00::2"):
            advice = opening_advice(firewall, source)
            assert source in advice or firewall == "NetworkPolicy"
    assert "ip6 saddr fd00::2" in opening_advice("nftables", "fd00::2")
