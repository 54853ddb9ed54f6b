"""The one-time secret of a run, and how two hosts prove to each other that they know it, without ever sending it.

    joiner ──► mark, protocol, nonce          ──► host 0
           ◄── mark, protocol, nonce          ◄──
           ──► proof of the joiner, checksum  ──►
           ◄── verdict, proof of host 0       ◄── or, to whom it does not believe, a checksum

A proof is HMAC-SHA256 of the role and both nonces, keyed with the secret: recorded, it opens no other connection.
Host 0 shows its own proof only to whom it has believed. Checksums, which anybody could make, tell a wrong secret from
what was altered on the way. Every part has a fixed size, and all must come in time.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.errors import PlaitError
from plait.hosts.wire import SessionKeys, Wire
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


SECRET_VARIABLE = "PLAIT_SECRET"
# Without I, L, O and U, which people mistake for other characters. 28 characters of 5 bits are 140 bits.
_SIGNS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_MISREAD = str.maketrans("OIL", "011")
_GROUP = 4
_LENGTH = 28
_FILE_BYTES_AT_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Secret:
    """What proves that a host belongs to the run; `text` is for a person's eyes, and no repr, log or error shows it."""

    text: str

    @property
    def key(self) -> bytes:
        """The HMAC key of the proofs."""
        return self.text.replace("-", "").encode()

    def __repr__(self) -> str:
        return "Secret(…)"


def new_secret() -> Secret:
    """A fresh secret for one run."""
    return _grouped("".join(secrets.choice(_SIGNS) for _ in range(_LENGTH)))


def parse_secret(text: str) -> Secret:
    """The secret that a person typed: case, dashes and blanks do not matter, nor O for 0, nor I or L for 1."""
    signs = "".join(text.upper().replace("-", "").split()).translate(_MISREAD)
    if len(signs) != _LENGTH or set(signs) - set(_SIGNS):
        raise PlaitError(
            f"the secret has {_LENGTH // _GROUP} groups of {_GROUP} letters and digits, and this is not of that form; "
            "take the one that plait train printed on host 0 (it makes one if you give it none)"
        )
    return _grouped(signs)


def read_secret(secret_file: str | None) -> Secret:
    """The secret, from a file that nobody else can read, else from PLAIT_SECRET, else typed on the terminal."""
    if secret_file is not None:
        return parse_secret(_private_text(Path(secret_file)))
    if SECRET_VARIABLE in os.environ:
        return parse_secret(os.environ.pop(SECRET_VARIABLE))  # the programs that we start need not inherit it
    if not sys.stdin.isatty():
        raise PlaitError(
            f"there is no terminal to ask for the secret; give it by --secret-file or in {SECRET_VARIABLE}"
        )
    return parse_secret(getpass.getpass("secret shown by host 0: "))


def _grouped(signs: str) -> Secret:
    return Secret(text="-".join(signs[at : at + _GROUP] for at in range(0, _LENGTH, _GROUP)))


def is_private(about: os.stat_result, user: int, groups: Collection[int]) -> bool:
    """Whether a file is the user's alone, or root's and meant for one of the user's groups to read, as Kubernetes
    mounts a secret for the group of a pod."""
    if about.st_uid == user:
        return not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return about.st_uid == 0 and about.st_gid in groups and not about.st_mode & (stat.S_IWGRP | stat.S_IRWXO)


def _private_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if not is_private(about, os.geteuid(), (os.getegid(), *os.getgroups())):
                raise PlaitError(f"{path} can be read by other users; make it your own: chmod 600 {path}")
            return file.read(_FILE_BYTES_AT_MOST).decode("ascii", "replace")
    except OSError as error:
        raise PlaitError(f"the secret file {path} cannot be read ({error.strerror}); give the file's path") from None
