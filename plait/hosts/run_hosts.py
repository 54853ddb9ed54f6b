"""The hosts of a run as they come and go, by loss or by wish: who is there is asked again between any two starts of its
workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from plait.errors import Interrupted, PlaitError, StopSignal
from plait.hosts.connectivity import ConnectivityListener, check_connectivity, host_cut_off
from plait.hosts.job_files import FileStager
from plait.hosts.joining import HostsRequest, own_host_info
from plait.hosts.leader import Hosts, invited_hosts
from plait.hosts.membership import Departure, HostIdentity, Member
from plait.hosts.workers import KnownMachines, LeaderWorkers, RunOnHosts, WaitingHostWorkers
from plait.launch.values.failure import FailureFacts
from plait.planner.plan import Plan
from plait.workers import CannotGoOn, PlanFor, Renewed

MeasureAhead = Callable[[WaitingHostWorkers], None]
"""Measures a host that waits, for the plan that it will take part in; raises PlaitError where it is of no use."""
_MAY_BE_OF_A_LINK = ("hung", "lost connection", "no answer")
"""Causes of failures after which hosts look whether they still reach each other."""


class RunHosts:
    """ElasticWorkers of this host and of those that joined it. `plan_for` makes each further plan; `measure_ahead`
    measures what it needs to know of a host that waits, while the others train."""

    def __init__(
        self, hosts: Hosts, run: RunOnHosts, plan_for: PlanFor, measure_ahead: MeasureAhead = lambda workers: None
    ) -> None:
        self._hosts, self._run, self._plan_for, self._measure_ahead = hosts, run, plan_for, measure_ahead
        self._known: KnownMachines = {}
        self._usable_hosts: list[Member] = []
        """Newcomers that reach all others and whose folder takes this run."""
        self._connecting = threading.Lock()
        """Held while hosts try to reach each other: each listens for one such attempt at a time."""
        self.workers = self._new_workers()

    def prepare(self, member: Member) -> None:
        """Do all for a host that waits that can be done while the others train: look whether it is of use, send it the
        data, and measure it. Raises PlaitError where it is of none. For a thread of its own."""
        try:
            stager = self._require_usable(member)
            newcomer = WaitingHostWorkers(self._hosts, self._run, self._known, member)  # refuses another kind of device
            stager.send_ahead()
            self._measure_ahead(newcomer)
        except PlaitError as error:
            if member.link.lost is None:  # else it has left by itself, or the run is over
                self._say_refused(member.name, str(error))
            raise
        except Interrupted as stop:  # its user's; the run's own signals come to another thread
            self._say_refused(member.name, f"it was stopped there by {stop.signal}")
            raise PlaitError(f"{stop}; join again to take part in the run") from stop

    @property
    def may_shrink(self) -> bool:
        return self._run.joining == "open"

    def renewed(self, plan: Plan, failure: FailureFacts | None) -> Renewed | None:
        """As in ElasticWorkers. A host that joins and turns out to be of no use is sent away with the reason, and the
        others go on; one that is lost meanwhile is left out, too."""
        membership = self._hosts.membership
        change = membership.renew()
        cut = [*self._cut_off()] if failure and failure.cause in _MAY_BE_OF_A_LINK else []
        cut += self._without_room(failure)
        if not change and not cut:
            return None
        there, new_names = _links(membership.members), _names(change.came)
        gone = [*change.gone, *(one for one in cut if one.name not in new_names)]
        came = self._usable([one for one in change.came if one.link in there])
        while gone or came:
            self.workers = self._new_workers()
            try:
                return self._as_renewed(self._plan_for(self.workers), gone, came)
            except PlaitError as error:
                later = membership.renew()  # so that may be why; or more hosts came
                if gone and not came and not later:  # those that are left may be too few without the ones that wait
                    later = membership.renew("all")
                if later:
                    there = _links(membership.members)
                    left = _names([one for one in came if one.link not in there])
                    gone += [one for one in later.gone if one.name not in left]
                    came = [*(one for one in came if one.link in there), *self._usable(later.came)]
                elif came:
                    self._send_home(came, str(error))
                    came = []
                else:
                    raise _cannot_go_on(gone, error) from error
        self.workers = self._new_workers()
        return None

    def _as_renewed(self, plan: Plan, gone: Sequence[Departure], came: Sequence[Member]) -> Renewed:
        used = [one for one in came if one.link in _links(self._hosts.members)]  # the plan may leave some out
        who = came_and_went([one.name for one in gone], _names(used))
        who = who or f"{' and '.join(_names(came))} came and is not needed"
        returned = "it returns" if len(gone) == 1 else "they return"
        until = f"until {returned} (plait join {self._hosts.join_address})" if gone else ""
        return Renewed(plan=plan, subject="hosts", who=who, until=until)

    def _cut_off(self) -> Iterator[Departure]:
        """Send those home that host 0 hears, and other hosts do not reach: workers would wait for them for ever."""
        with suppress(PlaitError), self._connecting:  # one is lost meanwhile: the next start notices
            while one := host_cut_off(self._own_listener(), self._hosts.members):
                (member,) = [member for member in self._hosts.members if member is one]
                why = "was cut off from other hosts"
                self._send_home([member], f"this host {why}; fix the network between them, and join again")
                yield Departure(name=member.name, why=why, by=None)

    def _without_room(self, failure: FailureFacts | None) -> Iterator[Departure]:
        """Send the host home that cannot keep what the run needs there."""
        if failure is not None and failure.cause == "no room":
            for member in [one for one in self._hosts.members if str(one) == failure.host]:
                self._send_home([member], f"this host cannot take part: {failure.what}; fix that and join again")
                yield Departure(name=member.name, why=f"cannot take part ({failure.what})", by=None)

    def _own_listener(self) -> ConnectivityListener:
        return ConnectivityListener(own_host_info().name, self._hosts.addresses[0])

    def _usable(self, came: Sequence[Member]) -> list[Member]:
        """The hosts that reach all others and whose folder takes this run; the others are sent home."""
        usable: list[Member] = []
        for one in came:
            try:
                if one.link not in _links(self._usable_hosts):
                    self._require_usable(one, came[came.index(one) + 1 :])
            except PlaitError as error:
                self._send_home([one], str(error))
            else:
                usable.append(one)
        return usable

    def _require_usable(self, member: Member, unknown: Sequence[Member] = ()) -> FileStager:
        """What sends a host its files; raises PlaitError where it does not reach the others, but for those of which
        nothing is known yet, or its folder does not take this run."""
        with self._connecting:
            self._check_reaches_others(member, unknown)
            self._usable_hosts.append(member)  # those that are looked at next must reach it, too
        try:
            stager = FileStager((member,), self._run.folder.path, self._run.screen.print, self._run.working)
            stager.open_run_folder()
        except PlaitError:
            self._usable_hosts.remove(member)
            raise
        return stager

    def _check_reaches_others(self, member: Member, unknown: Sequence[Member]) -> None:
        """Again where another host was lost meanwhile: that one is no fault of this one's."""
        while True:
            there = {one.link: one for one in (*self._hosts.members, *self._usable_hosts) if one.link.lost is None}
            others = [one for link, one in there.items() if link not in _links([member, *unknown])]
            try:
                return check_connectivity(self._own_listener(), [*others, member])
            except PlaitError:
                if member.link.lost is not None or all(one.link.lost is None for one in others):
                    raise

    def _send_home(self, members: Sequence[Member], sentence: str) -> None:
        for name in _names(members):
            self._say_refused(name, sentence)
        self._hosts.membership.send_home(members, sentence)

    def _say_refused(self, name: str, sentence: str) -> None:
        self._run.screen.print(f"refused  {name}: {' '.join(sentence.split())}")

    def _new_workers(self) -> LeaderWorkers:
        return LeaderWorkers(self._hosts, self._run, self._known)


@contextmanager
def run_hosts(
    request: HostsRequest,
    run: RunOnHosts,
    plan_for: PlanFor,
    measure_ahead: MeasureAhead,
    previous_hosts: Sequence[HostIdentity],
) -> Iterator[RunHosts]:
    """Invite the hosts of a run and lead them until the end of the block; see `invited_hosts`.

    With `recover.mode` "auto" hosts may join as long as it lasts. A secret that was shown on the terminal lives in the
    run's folder as long as the run: the same command takes it again.
    """
    kept = run.secret_file
    try:
        with invited_hosts(
            request,
            log=run.screen.print,
            previous_hosts=previous_hosts,
            working=run.working,
            joining=run.joining,
            kept_secret=kept,
            why_full=run.why_full,
            entries=run.entries,
        ) as hosts:
            led = RunHosts(hosts, run, plan_for, measure_ahead)
            hosts.membership.prepare_with(led.prepare)
            yield led
    finally:
        if not run.folder.has_begun or run.folder.is_finished:
            with suppress(OSError):
                kept.unlink(missing_ok=True)


def _cannot_go_on(gone: Sequence[Departure], error: PlaitError) -> CannotGoOn:
    who = " and ".join(f"{one.name} {one.why}" for one in gone)
    names = " and ".join(one.name for one in gone)
    by: StopSignal | None = next((one.by for one in gone if one.by is not None), None)
    return CannotGoOn(
        f"{who}, and the hosts that are left cannot carry the run: {error}; or join {names} again: the run is saved, "
        "and the same command goes on with it",
        by,
    )


def _names(members: Sequence[Member]) -> list[str]:
    return [one.name for one in members]


def _links(members: Sequence[Member]) -> list[object]:
    return [one.link for one in members]


def came_and_went(gone: Sequence[str], came: Sequence[str]) -> str:
    """Names of hosts as a sentence."""
    left = f"{_listed(gone)} {'is' if len(gone) == 1 else 'are'} gone" if gone else ""
    joined = f"{_listed(came)} joined" if came else ""
    return " and ".join(part for part in (left, joined) if part)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
