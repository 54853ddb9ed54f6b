"""The hosts that a person requested for a run, and the invitation for the others: where to join, and with which
secret."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from plait.errors import PlaitError
from plait.launch.network.facts import network_facts
from plait.launch.network.interface import interface_of, local_addresses
from plait.launch.network.variables import network_lines
from plait.launch.remote.link import DEFAULT_HEARTBEAT
from plait.launch.remote.secret import SECRET_VARIABLE, Secret, new_secret, read_secret


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
    """The interface that a run's workers meet on here, and what they are told of it, with the reasons."""
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
