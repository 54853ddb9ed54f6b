"""How two hosts prove to each other that they know the run's secret, without ever sending it.

    joiner ──► mark, protocol, nonce          ──► host 0
           ◄── mark, protocol, nonce          ◄──
           ──► proof of the joiner, checksum  ──►
           ◄── verdict, proof of host 0       ◄── or, to whom it does not believe, a checksum

A proof is HMAC-SHA256 of the role and both nonces, keyed with the secret: recorded, it opens no other connection.
Host 0 shows its own proof only to whom it has believed. Checksums, which anybody could make, tell a wrong secret from
what was altered on the way. Every part has a fixed size, and all must come in time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Literal

from plait.errors import PlaitError
from plait.launch.remote.secret import Secret
from plait.launch.remote.wire import SessionKeys, Wire
from plait.version import wheel_install_line

PROTOCOL = 2
JOINER_S = 10.0
LEADER_S = 5.0
Role = Literal["joiner", "leader"]
_WELCOME, _WRONG_SECRET, _ALTERED = b"\x00", b"\x01", b"\x02"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_OPENING = struct.Struct(f"!8sH{_NONCE_BYTES}s")
_MARK = b"plait/jn"


class Refused(Exception):
    """A peer that is not admitted; for the leader's own use, a person never sees it."""


def greet_joiner(connection: socket.socket, secret: Secret, *, within_s: float = LEADER_S) -> Wire:
    """Host 0's half; raises Refused or OSError when the peer is silent, a stranger, or does not know the secret."""
    deadline = time.monotonic() + within_s
    theirs = _exactly(connection, _OPENING.size, deadline)
    mark, protocol, _ = _OPENING.unpack(theirs)
    if mark != _MARK:
        raise Refused("no plait")
    ours = _opening()
    connection.sendall(ours)
    if protocol != PROTOCOL:  # the joiner has read ours, and says so
        raise Refused("another protocol")
    nonces = theirs + ours
    proof, checksum = (_exactly(connection, _PROOF_BYTES, deadline) for _ in range(2))
    if checksum != _checksum(nonces, proof):
        connection.sendall(_ALTERED + _checksum(nonces, proof, _ALTERED))
        raise Refused("wrong secret, or altered on the way")
    if not hmac.compare_digest(proof, _keyed(secret, "proof", "joiner", nonces)):
        connection.sendall(_WRONG_SECRET + _checksum(nonces, proof, _WRONG_SECRET))
        raise Refused("wrong secret")
    connection.sendall(_WELCOME + _keyed(secret, "proof", "leader", nonces))
    return Wire(connection, _keys(secret, "leader", nonces), peer=connection.getpeername()[0])


def greet_leader(connection: socket.socket, secret: Secret, *, address: str) -> Wire:
    """The joiner's half; raises PlaitError with what can be fixed here. `address` is host 0's, for sentences."""
    try:
        return _prove(connection, secret, address)
    except TimeoutError:
        raise PlaitError(f"what listens at {address} does not answer as plait does; check the address") from None
    except OSError as error:
        raise PlaitError(f"{address} broke off the connection ({error}); check the address and try again") from None


def _prove(connection: socket.socket, secret: Secret, address: str) -> Wire:
    deadline = time.monotonic() + JOINER_S
    ours = _opening()
    connection.sendall(ours)
    theirs = _exactly(connection, _OPENING.size, deadline)
    mark, protocol, _ = _OPENING.unpack(theirs)
    if mark != _MARK:
        raise PlaitError(f"what listens at {address} is not plait; check the address")
    if protocol != PROTOCOL:
        raise PlaitError(
            f"host 0 at {address} speaks protocol {protocol} and this plait protocol {PROTOCOL}; "
            "install the same version of plait on both: copy the newer one's wheel to the other and type there: "
            + wheel_install_line("VERSION")
        )
    nonces = ours + theirs
    proof = _keyed(secret, "proof", "joiner", nonces)
    connection.sendall(proof + _checksum(nonces, proof))
    verdict, theirs = _exactly(connection, 1, deadline), _exactly(connection, _PROOF_BYTES, deadline)
    if verdict == _WRONG_SECRET and theirs == _checksum(nonces, proof, verdict):
        raise PlaitError(f"the secret is wrong for the run at {address}; copy it again from the terminal of host 0")
    if verdict != _WELCOME:
        raise PlaitError(
            f"what came from {address} was altered on the way or is not from plait; check the address and the network"
        )
    if not hmac.compare_digest(theirs, _keyed(secret, "proof", "leader", nonces)):
        raise PlaitError(
            f"what listens at {address} does not know the secret itself, or its answer was altered on the way; check "
            "the address and the network"
        )
    return Wire(connection, _keys(secret, "joiner", nonces), peer=f"host 0 ({address})")


def _opening() -> bytes:
    return _OPENING.pack(_MARK, PROTOCOL, secrets.token_bytes(_NONCE_BYTES))


def _keys(secret: Secret, role: Role, nonces: bytes) -> SessionKeys:
    joiner, leader = (_keyed(secret, "frames of", each, nonces) for each in ("joiner", "leader"))
    if role == "joiner":
        return SessionKeys(sending=joiner, receiving=leader)
    return SessionKeys(sending=leader, receiving=joiner)


def _keyed(secret: Secret, purpose: str, role: str, nonces: bytes) -> bytes:
    return hmac.digest(secret.key, f"plait {purpose} {role}:".encode() + nonces, hashlib.sha256)


def _checksum(*parts: bytes) -> bytes:
    return hashlib.sha256(b"plait checksum:" + b"".join(parts)).digest()


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    taken = b""
    while len(taken) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(count - len(taken))
        if not chunk:
            raise ConnectionError("closed")
        taken += chunk
    return taken
