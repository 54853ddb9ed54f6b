"""Hosts are invited to a run, and admitted: the secret, the address, who may join, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.commands.hosts.host_info import (
    failed_attempts_text,
    joined_host_text,
    own_host_info,
    why_host_cannot_join,
)
from plait.commands.hosts.invitation import HostsRequest, choose_address, choose_secret, invitation_text, network_text
from plait.commands.hosts.leader_workers import LeaderWorkers
from plait.commands.planning.make_plan import Log
from plait.launch.remote.connectivity import ConnectivityListener, check_connectivity
from plait.launch.remote.host_numbering import HostIdentity
from plait.launch.remote.leader import Hosts
from plait.launch.remote.membership import JoinPolicy
from plait.launch.values.entries import EntryTable
from plait.recipe.schema import RunConfig
from plait.workers import ENTRIES
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

JOIN_TIMEOUT_S = 3600.0


@contextmanager
def leader_workers(
    request: HostsRequest, *, config: RunConfig, folder: Path, log: Log, working: WorkingFolder = CURRENT_FOLDER
) -> Iterator[LeaderWorkers]:
    """Invite other hosts, wait until all have joined, and lead them; the end of the block releases them.

    Hosts are sorted by address. Raises PlaitError where the address, the port or the secret cannot be used, or nobody
    came for an hour.
    """
    with invited_hosts(request, log=log, working=working) as hosts:
        yield LeaderWorkers(hosts, folder=folder, config=config, log=log, working=working)


@contextmanager
def invited_hosts(
    request: HostsRequest,
    *,
    log: Log,
    previous_hosts: Sequence[HostIdentity] = (),
    working: WorkingFolder = CURRENT_FOLDER,
    joining: JoinPolicy = "closed",
    kept_secret: Path | None = None,
    why_full: Callable[[int], str | None] = lambda others: None,
    entries: EntryTable = ENTRIES,
) -> Iterator[Hosts]:
    """Invite other hosts and wait until all have joined; the end of the block releases them.

    Hosts in `previous_hosts`, matched by mark or name, keep their order; the others follow, sorted by address. A secret
    that is shown on a terminal is kept in the file `kept_secret`, for those that join later. By an "open" door others
    join later, unless `why_full` gives a sentence for the number of those that are in. Raises as leader_workers.
    """
    address = choose_address(request.address)
    secret, told = choose_secret(request.secret_file, kept=kept_secret)
    members = request.n_hosts - 1
    with Hosts(
        address=address,
        port=request.port,
        secret=secret,
        members=members,
        entries=entries,
        working_folder=working.path,
    ) as hosts:
        log(network_text(address))
        log(invitation_text(members, hosts.join_address, told))

        def check(host_info: Mapping[str, Any]) -> str | None:
            sentence = why_host_cannot_join(host_info, own_host_info())
            if sentence is None and hosts.membership.is_complete:
                sentence = why_full(len(hosts.members))
            name = " ".join(str(host_info.get("name")).split())[:80]
            if sentence is None:
                log(f"joined   {joined_host_text(name, host_info)}")
            else:
                log(f"refused  {name}: {' '.join(sentence.split())}")
            return sentence

        arrived = hosts.admit(
            check,
            JOIN_TIMEOUT_S,
            order=previous_hosts,
            on_lost=lambda name: log(f"lost     {name}"),
            on_failed=lambda count: log(f"refused  {failed_attempts_text(count)}"),
            joining=joining,
        )
        check_connectivity(ConnectivityListener(own_host_info()["name"], address), arrived)
        yield hosts
