"""The bytes of other processes' TCP connections, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import socket

from plait.launch.watching.traffic import Traffic, traffic_of
from tests.launch.processes import wait_until


def test_bytes_that_are_confirmed_or_arrive_are_counted_and_waiting_ones_name_their_address() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        before = own_traffic().nbytes
        sender.sendall(b"x" * 50_000)
        received = 0
        while received < 50_000:
            received += len(receiver.recv(1 << 16))
        # 50,000 received at one end, and as many confirmed to the other, which may come a moment later.
        wait_until(lambda: own_traffic().nbytes >= before + 100_000, within_s=10)
        assert own_traffic().nbytes <= before + 100_100 and own_traffic().sends_to == ""
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # nobody reads: the rest waits here
            while sender.send(b"x" * (1 << 20)):
                pass
        assert own_traffic().sends_to == "127.0.0.1"


def own_traffic() -> Traffic:
    return traffic_of([os.getpid()])[os.getpid()]


def test_a_process_that_has_ended_has_no_traffic() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert traffic_of([child]) == {} and traffic_of([]) == {}
