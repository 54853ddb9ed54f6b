"""Hosts that do not reach each other are found before anything waits for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.hosts import connectivity
from plait.hosts.connectivity import (
    ALL_PAIRS_AT_MOST,
    OPEN_LISTENER,
    TRY_CONNECTING,
    ConnectivityListener,
    ConnectQuestion,
    ListenAddress,
    check_connectivity,
    host_cut_off,
    neighbours_of,
)
from plait.hosts.protocol import Nothing, Reply, RequestKind


class Firewalled(ConnectivityListener):
    """A host that takes nothing which comes in at a port of its own choice."""

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        reply = super().ask(request, question)
        if request is OPEN_LISTENER:
            self.close()
        return reply


class Seen:
    """A host as others see it, by another address than its own."""

    def __init__(self, listener: ConnectivityListener, own: str) -> None:
        self.name, self.address = listener.name, listener.address
        self._listener = ConnectivityListener(listener.name, own)

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        return self._listener.ask(request, question)


def three(
    last: type[ConnectivityListener] = ConnectivityListener,
) -> tuple[ConnectivityListener, ConnectivityListener, ConnectivityListener]:
    return ConnectivityListener("a", "127.0.0.1"), ConnectivityListener("b", "127.0.0.2"), last("c", "127.0.0.3")


def test_hosts_that_reach_each_other_are_left_as_they_were() -> None:
    first, *others = three()
    asked: list[tuple[str, str]] = []
    for listener in others:
        own = listener.ask
        listener.ask = lambda kind, asks, own=own, name=listener.name: (
            asked.append((name, kind.name)) or own(kind, asks)
        )
    check_connectivity(first, others)
    assert sorted(asked) == [(name, kind) for name in "bc" for kind in ("close", "connect", "listen")]
    for listener in (first, *others):
        assert listener._listener is None


def test_a_host_behind_a_firewall_is_named_with_who_does_not_reach_it() -> None:
    first, *others = three(Firewalled)
    with pytest.raises(PlaitError) as caught:
        check_connectivity(first, others)
    told = str(caught.value)
    assert told.startswith("a (127.0.0.1) does not reach c at 127.0.0.3:") and "Connection refused" in told
    assert (
        "let the firewall of 127.0.0.3 take what comes from 127.0.0.1 (for example: ufw allow from 127.0.0.1)" in told
    )
    assert caught.value.exit_code == 2


def test_the_host_that_others_do_not_reach_is_the_one_to_go_on_without() -> None:
    first, *others = three(Firewalled)
    assert host_cut_off(first, others) is others[1]
    assert first._listener is None
    assert host_cut_off(first, others[:1]) is None


def test_a_host_behind_an_address_translation_is_told_so() -> None:
    first, *others = three()
    others[0].address = "203.0.113.7"  # as others see it
    others[0].close()
    with pytest.raises(PlaitError, match=r"b is 127\.0\.0\.2 to itself and 203\.0\.113\.7 to this host"):
        check_connectivity(first, [Seen(others[0], "127.0.0.2"), others[1]])


def test_a_host_that_drops_what_comes_in_is_found_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is full, so that the kernel lets who connects wait, as a firewall does."""
    monkeypatch.setattr(connectivity, "CONNECT_S", 0.3)
    listener = ConnectivityListener("b", "127.0.0.2")
    at = listener.ask(OPEN_LISTENER, Nothing()).values.at
    assert listener._listener is not None
    listener._listener.listen(0)
    waiting = [ConnectivityListener("a", "127.0.0.1") for _ in range(3)]
    whys = [one.ask(TRY_CONNECTING, ConnectQuestion(addresses=(at,))).values.whys[0] for one in waiting]
    listener.close()
    assert whys[-1] == "timed out"


@pytest.mark.parametrize("hosts", [2, 3, ALL_PAIRS_AT_MOST, ALL_PAIRS_AT_MOST + 1, 257, 1024])
def test_each_host_of_many_tries_few_and_is_tried_by_as_many(hosts: int) -> None:
    """So that one that takes nothing is found from several sides, and one that nothing leaves finds several closed."""
    tried = [neighbours_of(at, hosts) for at in range(hosts)]
    heard = [sum(to in one for one in tried) for to in range(hosts)]
    most = hosts - 1 if hosts <= ALL_PAIRS_AT_MOST else hosts.bit_length() + 1
    assert all(at not in one and min(one) >= 0 and max(one) < hosts for at, one in enumerate(tried))
    assert max(map(len, tried)) <= most and min(heard) >= min(hosts - 1, 4)
    assert all(0 in one for one in tried[1:])  # rank 0's store is there


SPACE, NEAR, FAR = "plaitreach", "10.38.0.1", "10.38.0.2"
WIRING = f"""netns add {SPACE}
link add plaitreach0 type veth peer name plaitreach1
link set plaitreach1 netns {SPACE} name eth0
addr add {NEAR}/24 dev plaitreach0
link set plaitreach0 up
-netns {SPACE} addr add {FAR}/24 dev eth0
-netns {SPACE} link set eth0 up"""
OPENED = f"""import sys
from plait.hosts.connectivity import OPEN_LISTENER, ConnectivityListener
from plait.hosts.protocol import Nothing
listener = ConnectivityListener("far", "{FAR}")
print(listener.ask(OPEN_LISTENER, Nothing()).values.at.port, flush=True)
sys.stdin.readline()"""


@pytest.fixture
def far_port() -> Iterator[int]:
    """The port of a host's listener in a network of its own, one cable away."""
    try:
        for line in WIRING.splitlines():
            subprocess.run(["ip", *line.split()], check=True)
        command = ["ip", "netns", "exec", SPACE, sys.executable, "-c", OPENED]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes) as host:
            assert host.stdout is not None
            yield int(host.stdout.readline())
            host.communicate("\n")
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], check=False)
        subprocess.run(["ip", "link", "del", "plaitreach0"], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="needs root and iproute2")
def test_a_way_on_which_only_small_packets_pass_is_named(far_port: int) -> None:
    """A real cable that carries nothing larger than 900 bytes: connections stand, and no message arrives."""
    near = ConnectivityListener("near", NEAR)
    asked = ConnectQuestion(addresses=(ListenAddress(address=FAR, port=far_port),))
    assert near.ask(TRY_CONNECTING, asked).values.whys == ("",)
    cable = "qdisc add dev plaitreach0 root tbf rate 100mbit burst 900 limit 100000"
    subprocess.run(["tc", *cable.split()], check=True)
    assert near.ask(TRY_CONNECTING, asked).values.whys == (connectivity.LARGE_PACKETS_LOST,)
