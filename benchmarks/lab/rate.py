"""What a cable really carries: a short TCP transfer from each host to its neighbour, and a word on whether it will do.

As a program (`python -I -S rate.py receive ADDRESS`, then `send ADDRESS`) it is one end of such a transfer.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PORT = 5001
SECONDS = 1.0
WARM_UP = 0.3
"""Share of a transfer that is left out: the window opens, and the token bucket is full at first."""
WIRE_PER_PAYLOAD = 1514 / 1448
"""Bytes on the cable for each byte of payload: Ethernet, IP and TCP with time stamps."""
TOLERANCE = 0.10


def rate_of(stamps: Sequence[tuple[float, int]]) -> float:
    """Bits a second on the cable from (seconds, bytes so far) at the receiver, without the warm-up."""
    (first_s, _), (last_s, last) = stamps[0], stamps[-1]
    warm_s = first_s + WARM_UP * (last_s - first_s)
    from_s, before = next(stamp for stamp in stamps if stamp[0] >= warm_s)
    return (last - before) * 8 * WIRE_PER_PAYLOAD / (last_s - from_s)


def objection(asked: float, measured: Sequence[float]) -> str | None:
    """Why a cable of this rate will not do, as a sentence; None where all transfers came within 10 %."""
    worst = max(measured, key=lambda rate: abs(rate / asked - 1))
    if abs(worst / asked - 1) <= TOLERANCE:
        return None
    return f"a cable of {asked / 1e6:.0f} Mbit/s carried {worst / 1e6:.0f}; end what else runs here, or ask for less"


def receive(address: str) -> float:
    """Take what comes in one connection; answers its rate."""
    block, total, stamps = bytearray(2**20), 0, []
    with socket.create_server((address, PORT)) as server:
        connection, _ = server.accept()
        with connection:
            while number := connection.recv_into(block):
                total += number
                stamps.append((time.perf_counter(), total))
    return rate_of(stamps)


def send(address: str) -> None:
    """Send for a second."""
    block = bytes(2**16)
    with socket.create_connection((address, PORT)) as connection:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            connection.sendall(block)


def read_rate(log: Path) -> float:
    """What the receiving end printed."""
    return json.loads(log.read_text())


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(json.dumps(receive(sys.argv[2])))
    else:
        send(sys.argv[2])
