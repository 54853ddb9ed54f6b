"""Who takes part in a run over several hosts beside host 0: those that were admitted, those that wait, those that
leave. It may change whenever no ranks run. Hosts of a run that continues keep the numbers that they had."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from typing import Any, Literal, TypeVar

from plait.checked_json import typed_value
from plait.errors import PlaitError, StopSignal
from plait.hosts.connection import HostConnection, part_from_all
from plait.hosts.joining import CROWDED_SENTENCE, FULL_SENTENCE, Arrival, HostInfo, JoinListener, refuse_host
from plait.hosts.protocol import Notice, Refusal, Reply, RequestKind, RunEnd
from plait.hosts.remote_ranks import RemoteWorkerHost
from plait.launch.local.site import WorkerHost
from plait.launch.values.job import SIGNAL_OF_LEAVING, LeftBy
from plait.machines.machine import strip_name_number

_LOOK_S = 0.2
_LET_GO_S = 3.0
"""How long the end of a run waits for what still prepares a host."""
_Q = TypeVar("_Q")
_A = TypeVar("_A")
WAITING_AT_MOST = 64
"""Hosts that wait to be taken in at the next checkpoint; later ones are asked to come again."""
GIVEN_UP_SENTENCE = "host 0 gave up the run before all hosts were in; see what it printed"
OVER_SENTENCE = "the run ended before this host was taken in; see what host 0 printed"
WAITS_SENTENCE = "the run is at work; this host is taken in at its next checkpoint"
PREPARED_SENTENCE = (
    "the run goes on while this host gets its files and is measured; it is then taken in at the next checkpoint"
)
JoinPolicy = Literal["closed", "open"]
"""Whether hosts may still join once all that were wanted are in."""
TakenIn = Literal["ready", "all"]
"""Which of the hosts that wait become members: those that are ready, or all, once they are ready, too."""
_LEFT_BY: Mapping[StopSignal, LeftBy] = {signal: left for left, signal in SIGNAL_OF_LEAVING.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An admitted host, numbered from 1."""

    host: int
    host_info: HostInfo
    link: HostConnection = field(repr=False)

    @property
    def name(self) -> str:
        return self.host_info.name

    @property
    def address(self) -> str:
        return self.link.address

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"

    def ask(self, request: RequestKind[_Q, _A], question: _Q, blob: bytes = b"") -> Reply[_A]:
        """What the host's handler of this request replies; from any thread, at any time, also while a job runs.

        Blocks for as long as the host lives. Raises RunFailed when it is lost, and the handler's PlaitError.
        """
        return self.link.ask(request, question, blob, host=str(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A member that is none any more; `by` is None where it was lost, and else what its user stopped it by."""

    name: str
    why: str
    """The end of a sentence that begins with the name."""
    by: StopSignal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChange:
    """How the members of a run changed between two of its starts."""

    gone: tuple[Departure, ...]
    came: tuple[Member, ...]

    def __bool__(self) -> bool:
        return bool(self.gone or self.came)


class Membership:
    """The hosts that came to one listener. As MembershipEvents of a job it pauses the ranks: for those that wait once
    `may_take_in` was called, for those that leave at once."""

    def __init__(self, listener: JoinListener, wanted: int) -> None:
        self.members: tuple[Member, ...] = ()
        self._listener, self._wanted = listener, wanted
        self._joining: JoinPolicy = "closed"
        self._arrived: tuple[Member, ...] = ()
        self._admitted: list[Member] = []
        self._waiting: list[Member] = []
        self._prepare: Callable[[Member], None] | None = None
        self._preparing: dict[HostConnection, Future[None]] = {}
        """How far those that wait are prepared; done with an error for those that were sent away."""
        self._leaving: dict[HostConnection, StopSignal] = {}
        self.is_complete = False
        """Whether all wanted hosts came, so that those who come now are late."""
        self._wants_pause = False
        self._check: Callable[[Mapping[str, Any]], HostInfo] = partial(typed_value, HostInfo)
        self._on_failed: Callable[[int], None] = lambda count: None

    def admit(
        self,
        check: Callable[[Mapping[str, Any]], HostInfo],
        within_s: float,
        order: Sequence[HostIdentity] = (),
        on_lost: Callable[[str], None] = lambda name: None,
        on_failed: Callable[[int], None] = lambda count: None,
        joining: JoinPolicy = "closed",
    ) -> tuple[Member, ...]:
        """Wait until all wanted hosts are in. If `joining` is "closed" the port closes then, and the secret opens
        nothing any more; if it is "open" others may join later.

        Hosts are numbered by their addresses, except that those in `order`, host 0 first, come before all others in
        that order: each known by its mark, or else by its name. `check` gets what each host says of itself and returns
        it as its HostInfo; a PlaitError that it raises is shown there and sends the host away. `on_lost` gets the name
        of a host that left; `on_failed`, each minute and when all are in, how many came in vain. Raises PlaitError when
        time is up.
        """
        self._check, self._on_failed, self._joining = check, on_failed, joining
        deadline = time.monotonic() + within_s
        while len(self._admitted) < self._wanted:
            if time.monotonic() > deadline:
                raise PlaitError(
                    f"{len(self._admitted)} of {self._wanted} other hosts joined {self._listener.join_address} within "
                    f"{within_s:g} s; start plait join on each, see that they reach this address, and run the same "
                    "command again"
                )
            arrival = self._listener.next(min(_LOOK_S, deadline - time.monotonic()))
            if arrival is not None and (member := self._let_in(arrival)):
                self._admitted.append(member)
            self._drop_the_lost(on_lost)
            self._tell_failed(time.monotonic() if len(self._admitted) < self._wanted else float("inf"))
        self.is_complete = True
        if joining == "closed":
            self._listener.stop(FULL_SENTENCE)
        came = sorted(self._admitted, key=lambda one: by_address(one.address))
        places = host_numbers([(one.host_info.mark, one.name) for one in came], order)
        arrived = sorted(zip(places, came, strict=True), key=lambda pair: pair[0])
        self._arrived = self.members = _numbered([one for _, one in arrived])
        return self.members

    def renumber(self, order: Sequence[int]) -> None:
        """Make host n the one that was admitted as order[n]; host 0 stays, those not in `order` are sent home."""
        assert order[0] == 0 and len(set(order)) == len(order), order
        stay = [self._arrived[host - 1] for host in order[1:]]
        for left in [one for one in self.members if all(one.link is not other.link for other in stay)]:
            left.link.part(RunEnd(stopped_by="not needed"))
        self.members = _numbered(stay)

    def prepare_with(self, prepare: Callable[[Member], None]) -> None:
        """From now on call `prepare` for each host that begins to wait, in a thread of its own while ranks work; the
        host is ready to be taken in when that returns, and sent away with the PlaitError that it raises."""
        self._prepare = prepare

    def renew(self, taken: TakenIn = "ready") -> HostChange:
        """Make members of those that are there now, in the order that they had: without the lost and those that were
        stopped, and with those that wait and are ready, or with all of them. Call it while no ranks run."""
        self.look()
        if taken == "all":
            wait(self._preparing.values())
        gone = [(one, departure) for one in self.members if (departure := self._departure_of(one)) is not None]
        for one, departure in gone:
            if departure.by is not None:
                one.link.part(RunEnd(stopped_by=_LEFT_BY[departure.by]))
            one.link.close()
        left = [one for one, _ in gone]
        self._drop_lost_arrivals()
        came = [one for one in self._waiting if self._is_ready(one)]
        for one in came:
            self._preparing.pop(one.link, None)
        self._waiting, self._wants_pause = [one for one in self._waiting if one not in came], False
        self._arrived = self.members = _numbered([*(one for one in self.members if one not in left), *came])
        newest = self.members[len(self.members) - len(came) :]
        return HostChange(gone=tuple(departure for _, departure in gone), came=newest)

    def send_home(self, members: Sequence[Member], sentence: str) -> None:
        """Refuse hosts that were taken in and are of no use, with the reason for their users."""
        links = [one.link for one in members]
        for link in links:
            refuse_host(link, sentence)
        self._arrived = self.members = _numbered([one for one in self.members if one.link not in links])

    def close(self, last: RunEnd) -> None:
        """Stop listening, send those that wait home, and the members the last message of the run."""
        self._listener.close(OVER_SENTENCE if self.is_complete else GIVEN_UP_SENTENCE)
        for arrival in self._waiting:  # while the members are waited for below
            if self._is_ready(arrival):
                refuse_host(arrival.link, OVER_SENTENCE)
            else:  # the thread that prepares it closes the link, when the other end has hung up
                arrival.link.send(Refusal(sentence=OVER_SENTENCE))
        part_from_all([one.link for one in (self.members if self.is_complete else self._admitted)], last)
        wait(self._preparing.values(), _LET_GO_S)

    # As the MembershipEvents of a job.

    def fileno(self) -> int:
        return self._listener.fileno()

    def look(self) -> None:
        """Refuse those that may not join; send the others a notice that they wait."""
        self._drop_lost_arrivals()
        while self._joining == "open" and (arrival := self._listener.next(0)) is not None:
            if len(self._waiting) >= WAITING_AT_MOST:
                refuse_host(arrival.link, CROWDED_SENTENCE)
            elif member := self._let_in(arrival):
                self._waiting.append(member)
                member.link.send(Notice(sentence=PREPARED_SENTENCE if self._prepare else WAITS_SENTENCE))
                if self._prepare is not None:
                    self._preparing[member.link] = _in_background(partial(self._prepare, member), member.link)
        self._tell_failed(time.monotonic())

    def may_take_in(self) -> None:
        """The ranks have a checkpoint behind them: if hosts wait and are ready, they may be paused for them now."""
        self._wants_pause = self._wants_pause or any(self._is_ready(one) for one in self._waiting)

    @property
    def wants_pause(self) -> bool:
        return self._wants_pause

    def lets_go(self, site: WorkerHost, by: StopSignal) -> bool:
        if self._joining == "closed" or not isinstance(site, RemoteWorkerHost) or by not in _LEFT_BY:
            return False
        self._leaving[site.link] = by
        self._wants_pause = True
        return True

    def _is_ready(self, member: Member) -> bool:
        done = self._preparing.get(member.link)
        return member.link.lost is None and (done is None or (done.done() and done.exception() is None))

    def _drop_lost_arrivals(self) -> None:
        """Forget those that waited and went away, or were sent away."""
        for one in [one for one in self._waiting if one.link.lost is not None]:
            one.link.close()
            self._waiting.remove(one)
            self._preparing.pop(one.link, None)

    def _departure_of(self, member: Member) -> Departure | None:
        if (by := self._leaving.pop(member.link, None)) is not None:
            return Departure(name=member.name, why=f"left by {by}", by=by)
        if member.link.lost is not None:
            return Departure(name=member.name, why=f"was lost: {member.link.lost}", by=None)
        return None

    def _let_in(self, arrival: Arrival) -> Member | None:
        try:
            return Member(host=0, host_info=self._check(arrival.hello), link=arrival.link)
        except PlaitError as error:
            refuse_host(arrival.link, str(error))
            return None

    def _tell_failed(self, now_s: float) -> None:
        if failed := self._listener.failed_attempts.due(now_s):
            self._on_failed(failed)

    def _drop_the_lost(self, on_lost: Callable[[str], None]) -> None:
        """Remove hosts that left while they waited, so that others can take their places."""
        for arrival in [one for one in self._admitted if one.link.lost is not None]:
            arrival.link.close()
            self._admitted.remove(arrival)
            on_lost(arrival.name)


def _in_background(prepare: Callable[[], None], link: HostConnection) -> Future[None]:
    """Prepare a host in a thread that ends at the latest with its link; a refusal reaches its user at once."""
    done = Future[None]()

    def work() -> None:
        try:
            prepare()
        except PlaitError as error:
            refuse_host(link, str(error))
            done.set_exception(error)
        except BaseException as error:
            refuse_host(link, f"host 0 failed with {type(error).__name__}; see what it printed")
            done.set_exception(error)
            raise
        else:
            done.set_result(None)

    threading.Thread(target=work, daemon=True, name=f"plait prepare {link.address}").start()
    return done


def _numbered(members: Sequence[Member]) -> tuple[Member, ...]:
    return tuple(replace(member, host=host) for host, member in enumerate(members, start=1))


HostIdentity = tuple[str, str]
"""What identifies a host: its mark, empty where it is unknown, and its name."""


def by_address(address: str) -> tuple[int, bytes, str]:
    """Sort key that gives hosts the same order whoever joins first, as a probe's results are stored by host number."""
    try:
        packed = ip_address(address.partition("%")[0]).packed
    except ValueError:
        return 0, b"", address
    return len(packed), packed, address


def host_numbers(arrived: Sequence[HostIdentity], order: Sequence[HostIdentity]) -> list[int]:
    """The number that each arrived host had in `order`, each given once; newcomers take the numbers of missing hosts,
    and the count of all numbers where none is left.

    Hosts are matched by their marks first. Names say less: machines of one image get numbered names ("ubuntu (2)") in
    `order`.
    """
    free, places = set(range(1, len(order))), [len(order)] * len(arrived)

    def give(alike: Callable[[HostIdentity, HostIdentity], bool]) -> None:
        for at, host in enumerate(arrived):
            known = [place for place in sorted(free) if places[at] == len(order) and alike(host, order[place])]
            if known:
                places[at] = known[0]
                free.remove(known[0])

    give(lambda host, one: host[0] == one[0] != "")
    give(lambda host, one: strip_name_number(one[1]) == host[1])
    give(lambda host, one: True)
    return places
