"""Watches the ranks of one job, on one host or several, from the first start to the last end; decides how it ended."""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from plait.errors import OutOfTime, PlaitError, RunFailed, StopSignal
from plait.launch.local.failure_causes import FailureCauses, not_started_in_time, stuck_server, unsaved_text
from plait.launch.local.hang_monitor import EndReports, HangMonitor
from plait.launch.local.signals import SignalMailbox
from plait.launch.local.site import KillOrder, MembershipEvents, RankEvent, WorkerHost
from plait.launch.values.failure import RESUME_ADVICE, Failure, HostLost, RankDied, WorkersFailed, rank_raised_from
from plait.launch.values.job import NOTE, STOPPING, JobEnd, Message, StoppedBy
from plait.launch.values.phase import Phase, PhaseTimeouts
from plait.units import counted, format_duration

_MORE_GRACE_S = 2.0
"""How long to wait again, for ranks that were asked to save, while bytes of it still move."""
_LOOK_AGAIN_S = 0.5


class Supervision:
    """One job under watch; call `run` once, and `how` says then whether its ranks were only paused. Each site must have
    been sent its part already."""

    def __init__(
        self,
        sites: Sequence[WorkerHost],
        signals: SignalMailbox,
        on_message: Callable[[Message], None],
        timeouts: PhaseTimeouts,
        membership: MembershipEvents | None = None,
    ) -> None:
        self._site_of = {
            site.job.first_rank + local_rank: site for site in sites for local_rank in range(site.job.ranks)
        }
        self._signals = signals
        self._on_message = on_message
        self._timeouts = timeouts
        self._selector = selectors.DefaultSelector()
        self._sites = list(sites)
        self._open = list(sites)
        self._unforked = list(sites)
        self._not_started = set(self._site_of)
        self._alive = set(self._site_of)
        self._returned: set[int] = set()
        self._blame = FailureCauses()
        self._reports = EndReports(timeouts.report_s)
        self._membership = membership
        self.how: JobEnd = "over"
        self._waits_for_hosts = timeouts.host_s > 0
        self._hang_monitor, self._grace_s = HangMonitor(timeouts.hang_timeouts), timeouts.grace_s
        self._verdict: PlaitError | None = None
        self._stopped_by: StoppedBy = "finished"
        self._signalled_here = False
        self._limit_at_s, self._killed_s = math.inf, math.inf
        self._enter("starting", timeouts.start_s)

    def run(self) -> StoppedBy:
        """Block until every rank has ended; raises the error that ended the job if it neither finished nor stopped."""
        with self._selector:
            self._selector.register(self._signals.wire, selectors.EVENT_READ, self._read_signals)
            if self._membership is not None:
                self._selector.register(self._membership, selectors.EVENT_READ, self._membership.look)
            for site in self._sites:
                self._selector.register(site, selectors.EVENT_READ, partial(self._read_site, site))
            try:
                while self._open:
                    self._turn()
            finally:
                if self._open:  # the caller's on_message raised, or a wire is garbled
                    self._abandon()
        return self._conclusion()

    def _turn(self) -> None:
        watches = self._phase in ("starting", "running", "stopping")
        until = min(self._deadline, self._limit_at_s, self._hang_monitor.next_at_s if watches else math.inf)
        left_s = max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(None if math.isinf(left_s) else left_s):
            key.data()
        if time.monotonic() >= self._limit_at_s:
            self._end_at_limit()
        elif time.monotonic() >= self._deadline and self._open:
            self._time_is_up()
        elif watches and time.monotonic() >= self._hang_monitor.next_at_s:
            self._look()
        if self._membership is not None and self._membership.wants_pause:
            self._pause()

    def _look(self) -> None:
        if found := self._hang_monitor.look(self._open):
            failure, site = found
            self._fail(failure, site)
            if isinstance(failure, HostLost):
                site.kill()
        elif text := self._hang_monitor.slow_text():
            self._on_message(Message(rank=0, kind=NOTE, values={"text": text}))

    def _enter(self, phase: Phase, for_at_most_s: float) -> None:
        self._phase: Phase = phase
        self._deadline = time.monotonic() + for_at_most_s

    def _read_signals(self) -> None:
        for name in self._signals.read():
            if self._signalled_here or self._stopped_by == "finished":  # the first of each host is one stop
                self._stop(name)
            self._signalled_here = True

    def _read_site(self, site: WorkerHost) -> None:
        for event in site.read():
            self._handle_event(site, event)

    def _handle_event(self, site: WorkerHost, event: RankEvent) -> None:
        if "message" in event:
            self._on_message(Message(rank=event["rank"], kind=event["message"], values=event["values"]))
        elif "forked" in event:
            self._unforked.remove(site)
            self._note_start()
        elif "started" in event:
            self._not_started.discard(event["rank"])
            self._note_start()
        elif "returned" in event:
            self._returned.add(event["rank"])
        elif "raised" in event:
            self._fail(rank_raised_from(event["raised"]), site)
        elif "ended" in event:
            self._expect_report(event["rank"])
        elif "died" in event:
            self._record_death(RankDied(rank=event["died"], code=event["code"], at_s=event["at_s"]), site)
        elif "over" in event:
            self._close(site, event.get("reason"), "host lost" if event.get("lost") else "no answer")
        elif "strangers" in event:
            refused = counted(event["strangers"], "connection")
            text = (
                f"{refused} to the port where the workers meet did not come from a worker; check who can reach this "
                "network"
            )
            self._on_message(Message(rank=0, kind=NOTE, values={"text": text}))
        elif "stop" in event and self._stopped_by == "finished" and not self._lets_go(site, event):
            self._stop(event["stop"])  # as in _read_signals

    def _lets_go(self, site: WorkerHost, event: RankEvent) -> bool:
        return self._membership is not None and self._membership.lets_go(site, event["stop"])

    def _note_start(self) -> None:
        if not self._unforked and not self._not_started and self._phase == "starting":
            self._enter("running", math.inf)
            self._limit_at_s = time.monotonic() + self._sites[0].job.limit_s

    def _end_at_limit(self) -> None:
        self._limit_at_s = math.inf
        if self._phase == "running":
            self._verdict = OutOfTime(f"the workers were not done within {format_duration(self._sites[0].job.limit_s)}")
            self._kill()

    def _expect_report(self, rank: int) -> None:
        due_s = self._reports.expect(rank)
        if self._phase == "running":
            self._deadline = min(self._deadline, due_s)

    def _record_death(self, death: RankDied, site: WorkerHost) -> None:
        self._alive.discard(death.rank)
        well = death.code == 0 and death.rank in self._returned
        if not well and not self._blame.explains(death.rank):
            self._fail(death, site)
        self._end_if_nobody_is_left()

    def _close(self, site: WorkerHost, reason: str | None, cause: Literal["host lost", "no answer"]) -> None:
        if site not in self._open:
            return
        self._open.remove(site)
        self._selector.unregister(site)
        left = {rank for rank in self._alive if self._site_of[rank] is site}
        if reason is not None and left:
            self._fail(HostLost(at_s=time.monotonic(), what=reason, cause=cause), site)
        self._alive -= left
        self._end_if_nobody_is_left()

    def _end_if_nobody_is_left(self) -> None:
        if not self._alive and self._phase not in ("ending", "killed"):
            self._enter("ending", self._timeouts.end_s)

    def _stop(self, name: StopSignal) -> None:
        saves = self._sites[0].job.at_stop == "save"
        if self._stopped_by != "finished":
            if saves:
                self._verdict = RunFailed(f"stopped at once by a second {name}, without saving; {RESUME_ADVICE}")
                self._kill()
            return
        self._stopped_by, self.how = name, "over"
        if self._unforked == self._sites and len(self._not_started) == len(self._site_of):  # nothing to save yet
            self._kill_servers()
        elif self._phase in ("starting", "running") and not saves:
            self._kill()
        elif self._phase in ("starting", "running", "stopping"):  # the last: in a pause, which becomes a stop
            if self._phase != "stopping":
                self._have_them_save("SIGTERM")
            self._on_message(Message(rank=0, kind=STOPPING, values={"signal": name}))

    def _pause(self) -> None:
        if self._phase != "running":
            return
        self.how = "paused"
        if self._sites[0].job.at_stop == "save":
            self._have_them_save("pause")
        else:
            self._kill()

    def _have_them_save(self, order: KillOrder) -> None:
        self._order(order)
        self._grace_s = max(self._timeouts.grace_s, self._hang_monitor.stop_grace_s())
        self._enter("stopping", self._grace_s)

    def _fail(self, failure: Failure, site: WorkerHost) -> None:
        if self._phase in ("ending", "killed"):  # by ourselves
            return
        self._blame.add(failure, site)
        if self._phase != "collecting":
            self._enter("collecting", self._timeouts.collect_s)
        if isinstance(failure, HostLost) and failure.cause == "host lost":
            self._deadline = min(self._deadline, time.monotonic() + self._timeouts.host_lost_s)

    def _time_is_up(self) -> None:
        if self._phase == "killed":
            if self._awaits_ends_of_hosts():
                self._deadline = time.monotonic() + _LOOK_AGAIN_S
            else:
                self._open.clear()
        elif self._phase == "ending":
            self._kill_servers()
        elif self._phase == "running":
            self._look_for_unreported_deaths()
        elif self._phase == "stopping" and self._hang_monitor.is_moving():  # a second signal still ends it
            self._enter("stopping", _MORE_GRACE_S)
        elif self._phase == "collecting" and self._a_lost_host_may_explain():
            self._waits_for_hosts = False
            self._enter("collecting", self._timeouts.host_s)
        else:
            self._give_up_waiting()

    def _awaits_ends_of_hosts(self) -> bool:
        """Whether joined hosts have yet to report that their part of the job has ended. A busy host reports late, and
        starts no other job until then; a lost one is noticed by its connection."""
        goes_on = self._stopped_by == "finished" and any(site.host for site in self._open)
        return goes_on and time.monotonic() < self._killed_s + self._timeouts.busy_s

    def _look_for_unreported_deaths(self) -> None:
        overdue_s = time.monotonic() - self._reports.first_due_s(self._alive)
        self._enter("running", -overdue_s)
        if overdue_s < 0:
            return
        site = self._site_of[self._reports.most_overdue(self._alive)]
        if overdue_s < self._timeouts.busy_s and not site.is_server_stopped():
            self._enter("running", _LOOK_AGAIN_S)
            return
        self._verdict = stuck_server(site)
        self._kill_servers()

    def _a_lost_host_may_explain(self) -> bool:
        """Whether to wait for one: ranks notice a lost peer at once, but a frozen or unplugged host comes later."""
        return self._waits_for_hosts and self._blame.only_lost_peers() and any(site.host for site in self._open)

    def _give_up_waiting(self) -> None:
        if self._phase == "starting":
            self._verdict = not_started_in_time(self._unforked, self._not_started, self._timeouts.start_s)
        if self._phase == "stopping":
            after = "a pause" if self.how == "paused" else self._stopped_by
            self._verdict = RunFailed(unsaved_text(self._grace_s, after))
        self._kill(why=self._blame.lost_host)

    def _kill(self, why: str = "") -> None:
        self._enter("ending", self._timeouts.end_s)
        self._order("SIGKILL", why)

    def _order(self, order: KillOrder, why: str = "") -> None:
        for site in self._open:
            with contextlib.suppress(RunFailed):  # a dead server's ranks are dead as well, and its end is an event
                site.signal(order, why)

    def _kill_servers(self) -> None:
        self._killed_s = time.monotonic()
        self._enter("killed", self._timeouts.kernel_s)
        for site in self._open:
            site.kill()

    def _abandon(self) -> None:
        """Kill all ranks and wait for their end, without further messages to the caller."""
        self._on_message = lambda message: None
        self._kill()
        while self._open:
            self._turn()

    def _conclusion(self) -> StoppedBy:
        error = self._verdict or (self._blame.error() if self._blame else None)
        if isinstance(error, WorkersFailed):
            error.stopped_by = self._stopped_by
        if isinstance(error, OutOfTime) and self._stopped_by != "finished":
            return self._stopped_by  # a person who stops the job meanwhile is heard
        if error is not None:
            raise error
        return self._stopped_by
