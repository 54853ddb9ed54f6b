"""A host joins a run: the invitation for its user, the port of host 0, what the host says of itself, who may join.

Hosts that know the secret get in; others cost host 0 next to nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import queue
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from plait.checked_json import SingleLine, one_line, typed_value
from plait.errors import PlaitError
from plait.hosts.connection import DEFAULT_HEARTBEAT, ConnectionLoop, Heartbeat, HostConnection, bell
from plait.hosts.handshake import SECRET_VARIABLE, Refused, Secret, greet_joiner, new_secret, read_secret
from plait.hosts.protocol import Refusal
from plait.hosts.wire import Wire, WireEnded
from plait.launch.network import interface_of, local_addresses, network_facts, network_lines
from plait.launch.values.job import THREADS_AT_MOST
from plait.machines.machine import software_versions, usable_cores
from plait.units import counted, format_duration
from plait.version import wheel_install_line
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_STRANGERS_AT_MOST = 32
_HELLO_S = 60.0
_RETRY_S = 0.1
FULL_SENTENCE = "the run has all its hosts; start it with a larger --hosts, or leave this one out"
CROWDED_SENTENCE = "too many hosts wait to be admitted; join again in a minute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A host that has proven to know the secret and waits to be admitted, with what it reports about itself."""

    link: HostConnection
    hello: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What it calls itself, else its address."""
        return one_line(str(self.hello.get("name", self.link.address)))


class FailedAttempts:
    """Counts connections that could not prove that they belong to the run, for one line in a while."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._told_at_s = -every_s
        self._count = 0

    def add(self) -> None:
        """One more; from any thread."""
        self._count += 1

    def due(self, now_s: float) -> int:
        """How many there were since this last said so; 0 while that was less than `every_s` ago."""
        if now_s - self._told_at_s < self._every_s or not self._count:
            return 0
        self._told_at_s, count = now_s, self._count
        self._count -= count
        return count


class JoinListener:
    """Listens on one address of this machine until stopped; arrivals are taken with `next`.

    Each connection gets a few seconds and a fixed number of bytes to prove itself, in a thread of its own. Only as many
    as are `expected`, and some more, may be open before they have; with one more, the oldest is closed: honest
    ones are quick, and they may all come at once. As many may have proven themselves and not yet said who they are, and
    as many may wait for `next`; later ones are refused."""

    def __init__(
        self,
        *,
        address: str,
        port: int,
        secret: Secret,
        heartbeat: Heartbeat,
        expected: int = 1,
        loop: ConnectionLoop | None = None,
    ) -> None:
        self._secret = secret
        self._heartbeat = heartbeat
        self._greeted_at_most = _STRANGERS_AT_MOST + expected
        self._loop = loop or ConnectionLoop()
        self._listener = listener_at(address, port)
        self.port: int = self._listener.getsockname()[1]
        self.join_address = joined_text(address, self.port)
        """HOST:PORT, for the others to type."""
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._awake, self._wake = bell()
        self._strangers: deque[socket.socket] = deque()
        """Connections that have not proven themselves yet."""
        self._nameless: deque[socket.socket] = deque()
        """Connections that have, and have not said hello yet."""
        self._lock = threading.Lock()
        self._turned_away_because: str | None = None
        self._stopped = threading.Event()
        self.failed_attempts = FailedAttempts()
        self._thread = threading.Thread(target=self._accept, daemon=True, name="plait gate")
        self._thread.start()

    def fileno(self) -> int:
        """Readable when a host has proven itself since `next` last found none."""
        return self._awake.fileno()

    def next(self, within_s: float) -> Arrival | None:
        """The next host that has proven itself, or None when the time is up."""
        with contextlib.suppress(OSError):  # nothing rings, or all is closed
            while self._awake.recv(64):
                pass
        try:
            return self._arrivals.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None

    def stop(self, why: str) -> None:
        """Stop listening; hosts that have connected and know the secret are refused with this sentence."""
        with self._lock:
            self._turned_away_because = self._turned_away_because or why
        self._stopped.set()
        _hang_up(self._listener)  # wakes the thread that waits for connections
        self._thread.join()
        self._listener.close()
        while (late := self.next(0)) is not None:
            refuse_host(late.link, why)

    def close(self, why: str) -> None:
        """Stop, and hang up on all who have not proven themselves yet; may be called twice."""
        self.stop(why)
        with self._lock:
            unknown = [*self._strangers, *self._nameless]
        for connection in unknown:
            _hang_up(connection)
        self._awake.close()
        self._wake.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # stopped; or descriptors are short for a while
                self._stopped.wait(_RETRY_S)
                continue
            self._note(connection, self._strangers)
            threading.Thread(target=self._greet, args=(connection,), daemon=True, name="plait greeting").start()

    def _note(self, connection: socket.socket, crowd: deque[socket.socket]) -> None:
        """Add a connection to a crowd, and hang up on the oldest where it grows too large."""
        with self._lock:
            crowd.append(connection)
            oldest = crowd.popleft() if len(crowd) > self._greeted_at_most else None
        if oldest is not None:
            _hang_up(oldest)

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = greet_joiner(connection, self._secret)
            self._forget(connection)
            self._note(connection, self._nameless)
            hello = _hello(wire)
            self._forget(connection)
        except (OSError, Refused, WireEnded):
            self.failed_attempts.add()
            self._forget(connection)
            connection.close()
        else:
            self._take_arrival(wire, hello)

    def _take_arrival(self, wire: Wire, hello: Mapping[str, Any]) -> None:
        link = HostConnection(wire, handlers={}, heartbeat=self._heartbeat, loop=self._loop)
        arrival = Arrival(link=link, hello=hello)
        with self._lock:
            why = self._turned_away_because
            if why is None and self._arrivals.qsize() >= self._greeted_at_most:
                why = CROWDED_SENTENCE
            if why is None:
                self._arrivals.put(arrival)
                with contextlib.suppress(OSError):  # full: it rings already
                    self._wake.send(b"!")
        if why is not None:
            refuse_host(arrival.link, why)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            for crowd in (self._strangers, self._nameless):
                with contextlib.suppress(ValueError):
                    crowd.remove(connection)


def _hello(wire: Wire) -> Mapping[str, Any]:
    """What a host that has proven itself says of itself."""
    hello = wire.receive(_HELLO_S)
    if hello is None or hello.kind != "hello" or hello.blob:
        raise Refused("no hello")
    return hello.values


def refuse_host(link: HostConnection, sentence: str) -> None:
    """Tell a host why it is not admitted, and hang up; never blocks."""
    link.part(Refusal(sentence=sentence))


def listener_at(address: str, port: int) -> socket.socket:
    """A listening socket on exactly this address of this machine; port 0 takes a free one. Raises PlaitError."""
    interface_of(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PlaitError(f"port {port} of {address} is taken; choose another, or none to have a free one") from None
        raise PlaitError(f"port {port} of {address} cannot be used ({error.strerror}); choose another") from None
    return listener


def joined_text(address: str, port: int) -> str:
    """HOST:PORT, with the brackets that an IPv6 address needs."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


MAX_CLOCK_SKEW_S = 60.0
_LATEST_CLOCK_S = 1e11  # some three thousand years after 1970
# What travels as a name is printed on other hosts: no brackets, which rich takes for markup.
_HOST_NAME = re.compile(r"[\w.-][\w .-]{0,63}")
_HEXADECIMAL = re.compile(r"[0-9a-f]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """What a host says of itself: its name, software, clock (seconds since 1970), cores and working folder."""

    name: str
    mark: str
    """`hardware_id` of the host."""
    plait: SingleLine
    code: SingleLine
    """`code_hash` of its plait."""
    torch: SingleLine
    python: SingleLine
    clock_s: float
    cores: int
    folder: str
    program: str = ""
    """SHA-256 of the program file that this host runs, where it joined with one."""

    def __post_init__(self) -> None:
        is_right = (
            _HOST_NAME.fullmatch(self.name)
            and _HEXADECIMAL.fullmatch(self.mark)
            and _HEXADECIMAL.fullmatch(self.program)
            and 1 <= self.cores <= THREADS_AT_MOST
            and 0 <= self.clock_s < _LATEST_CLOCK_S
            and Path(self.folder).is_absolute()
        )
        if not is_right:
            raise ValueError("HostInfo is invalid")


def own_host_info(working: WorkingFolder = CURRENT_FOLDER, program: str = "") -> HostInfo:
    """What this host says of itself now; `program` is the hash of the program file that it runs, if any."""
    versions = dict(software_versions())
    return HostInfo(
        name=re.sub(r"[^\w.-]", "-", platform.node())[:64] or "a host without a name",
        mark=hardware_id(),
        plait=versions["plait"],
        code=code_hash(),
        torch=versions["torch"],
        python=versions["python"],
        clock_s=time.time(),
        cores=usable_cores(),
        folder=str(working.path.absolute()),
        program=program,
    )


def admitted_info(hello: Mapping[str, Any], leader: HostInfo) -> HostInfo:
    """What a host that may join says of itself; raises PlaitError, with one sentence for that host's own terminal, for
    one that may not.

    `leader` is the leading host at this moment. The part of a version after "+" (which build of torch it is) may
    differ.
    """
    line = wheel_install_line(leader.plait, torch=leader.torch.partition("+")[0])
    lead, install = leader.name, f"copy the wheel of its plait here and type: {line}"
    try:
        host = typed_value(HostInfo, hello)
    except ValueError:
        raise PlaitError(
            f"{lead} does not understand this host's greeting; install plait {leader.plait} here, too; {install}"
        ) from None
    for package, own, theirs in (("plait", host.plait, leader.plait), ("torch", host.torch, leader.torch)):
        here, there = own.partition("+")[0], theirs.partition("+")[0]
        if here != there:
            raise PlaitError(
                f"this host has {package} {here} and {lead} has {there}; install {package} {there} here, too; {install}"
            )
    if host.code != leader.code:
        raise PlaitError(
            f"this host's plait is of the same version as {lead}'s, {leader.plait}, but its files differ; "
            f"install the same commit on both; {install}"
        )
    if sentence := _why_not_its_program(host.program, leader.program, lead):
        raise PlaitError(sentence)
    ahead_s = host.clock_s - leader.clock_s
    if abs(ahead_s) > MAX_CLOCK_SKEW_S:
        raise PlaitError(
            f"this host's clock is {format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} {lead}'s; "
            "set it right (for example: timedatectl set-ntp true) and join again"
        )
    return host


def _why_not_its_program(here: str, there: str, lead: str) -> str | None:
    """Code is never sent: each host runs a program file of its own user's, the same on all."""
    if there and not here:
        return f"{lead} runs a program; name your copy of it here: plait join HOST:PORT --program PROGRAM.py"
    if here and not there:
        return f"{lead} trains a recipe and runs no program; leave --program out"
    if here != there:
        return f"this host's program file is not {lead}'s; copy that file here, look at it, and join again"
    return None


def failed_attempts_text(count: int) -> str:
    """Attempts to join that failed, in words."""
    return f"{counted(count, 'attempt')}: a wrong secret, or not plait"


@cache
def hardware_id() -> str:
    """A digest of the machine id and of the addresses of the physical network cards: machines that were made from one
    image share their host name, and often the machine id."""
    cards = [path for path in sorted(Path("/sys/class/net").glob("*")) if (path / "device").exists()]
    digest = sha256()
    for file in (Path("/etc/machine-id"), *(path / "address" for path in cards)):
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def code_hash() -> str:
    """A digest of plait's own files: two checkouts of one version number can still differ. The same for a checkout and
    for the wheel that was built from it; examples are no code."""
    package = Path(__file__).parents[1]
    digest = sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in (".py", ".toml") and path.parent.name != "examples":
            digest.update(os.fsencode(path.relative_to(package)) + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRequest:
    """The number of hosts of a run and where this one listens; `port` 0 takes any free one, and without `address` the
    machine must have only one."""

    n_hosts: int
    address: str | None = None
    port: int = 0
    secret_file: Path | None = None

    def __post_init__(self) -> None:
        if self.n_hosts == 1 and (self.address or self.port or self.secret_file):
            raise PlaitError("--address, --port and --secret-file are for several hosts; say how many with --hosts")


ONE_HOST = HostsRequest(n_hosts=1)


def choose_address(requested: str | None) -> str:
    """The address that other hosts reach this one by; raises PlaitError that lists them where there is a choice."""
    if requested is not None:
        check_first_address(requested, "choose it by --address")
        return requested
    outside = [text for text in local_addresses() if not ip_address(text).is_loopback]
    usual = [text for text in outside if ip_address(text).version == 4] or outside
    if len(usual) != 1:
        found = f"this machine has several addresses: choose --address {' or '.join(usual)}"
        raise PlaitError(
            found if usual else "this machine has no address for others; connect it, or name one: --address"
        )
    return usual[0]


def network_text(address: str) -> str:
    """The interface on which a run's workers meet here, and the variables set for it, with the reasons."""
    facts = network_facts(interface_of(address), is_ipv6=":" in address)
    return "\n".join(network_lines(facts, os.environ, address=address, lost_after_s=DEFAULT_HEARTBEAT.lost_after_s))


def check_first_address(address: str, advice: str) -> None:
    """Raise PlaitError for a second address of an interface: gloo is given interfaces, and binds to the first
    address of each, whatever its family."""
    interface = interface_of(address)
    first = next((text for text, name in local_addresses().items() if name == interface), address)
    if not ip_address(address).is_loopback and str(ip_address(address)) != first:
        raise PlaitError(
            f"{address} is not the first address of {interface}, and workers would meet at that, {first}; {advice}, or "
            f"give {address} an interface of its own"
        )


def choose_secret(file: Path | None, kept: Path | None = None) -> tuple[Secret, str]:
    """The run's secret, and the words that say how others get it; a new one is shown on a terminal or written to
    `file`. One that is shown is that in the file `kept`, which an earlier start of the run left; it stays there."""
    if file is not None and not file.exists():
        secret = new_secret()
        _write_secret_file(file, secret.text)
        return secret, f"with --secret-file and a copy of {file}"
    if file is not None or SECRET_VARIABLE in os.environ:
        where = f"--secret-file and a copy of {file}" if file else f"the same secret in {SECRET_VARIABLE}"
        return read_secret(str(file) if file else None), f"with {where}"
    if not sys.stdout.isatty():  # such output may end up in a file that others can read
        raise PlaitError(
            f"there is no terminal to show the secret on; name a file for it by --secret-file, or set {SECRET_VARIABLE}"
        )
    if kept is None:
        secret = new_secret()
    elif kept.exists():
        secret = read_secret(str(kept))
    else:
        secret = new_secret()
        _write_secret_file(kept, secret.text)
    return secret, f"and, when asked for it, the secret {secret.text}"


def invitation_text(members: int, join_address: str, secret_text: str, options: str = "") -> str:
    """What to type on the other hosts, of which there are `members`, with which options, and where the secret is."""
    others = "the other host" if members == 1 else f"each of the {members} other hosts"
    return (
        f"hosts    {members + 1}; on {others}, in the folder to work in, type:\n"
        f"             plait join {join_address}{options}\n"
        f"         {secret_text}"
    )


def _write_secret_file(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise PlaitError(f"the secret file {path} cannot be written ({error.strerror}); name another place") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
