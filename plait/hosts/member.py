"""A host that joined another one's run: it starts the ranks that host 0 names, forwards their messages, and decides
nothing."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from plait.errors import HostLeft, PlaitError, RunFailed, signal_in_words
from plait.hosts.connection import DEFAULT_HEARTBEAT, Heartbeat, HostConnection
from plait.hosts.copies import memory_handlers
from plait.hosts.handshake import JOINER_S, Secret, greet_leader
from plait.hosts.joining import HostInfo, joined_text
from plait.hosts.protocol import (
    EventReport,
    Handlers,
    HostMessage,
    KillServerOrder,
    Notice,
    RanksProgress,
    Refusal,
    RunEnd,
    SignalOrder,
    StartOrder,
    UnexpectedMessage,
)
from plait.hosts.wire import Wire
from plait.launch.local.run import ForkServer, Rendezvous
from plait.launch.local.signals import SignalMailbox, collected_signals
from plait.launch.local.site import LocalWorkerHost, RankEvent
from plait.launch.network import interface_of
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import STOP_IN_WORDS, Job, ReleasedBy
from plait.launch.values.phase import HangTimeouts
from plait.launch.watching.hang_watch import LOOK_EVERY_S

Say = Callable[[Literal["stop", "hosts"], str], None]
"""Gets what a sentence for this host's user is about, and the sentence."""
_JOIN_AGAIN = "see what host 0 printed, start the run there again and join it"


class LeaderNotReached(PlaitError):
    """Host 0 does not listen yet, or cannot be reached; a later attempt may succeed."""


def connect(address: str, port: int, secret: Secret, *, local_address: str | None = None) -> Wire:
    """Connect to a run's host 0 and prove that we know its secret; raises PlaitError with what to fix here.

    `local_address` is the one of this machine to come from, where the kernel's own choice would not do.
    """
    place = joined_text(address, port)
    source = (local_address, 0) if local_address is not None else None
    try:
        connection = socket.create_connection((address, port), timeout=JOINER_S, source_address=source)
    except ConnectionRefusedError:
        raise LeaderNotReached(
            f"no run accepts hosts at {place}: host 0 still prepares its text, or the run has ended or has all its "
            "hosts; wait for the line that host 0 prints, and join with its address and secret"
        ) from None
    except (OSError, OverflowError, UnicodeError) as error:  # the last: what can be no name of a host
        raise LeaderNotReached(f"{place} cannot be reached ({error}); check the address and the network") from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return greet_leader(connection, secret, address=place)
    except BaseException:
        connection.close()
        raise


def serve(
    wire: Wire,
    *,
    host_info: HostInfo,
    handlers: Handlers,
    entries: EntryTable,
    while_running: Callable[[Job], AbstractContextManager[None]] = lambda job: nullcontext(),
    say: Say = lambda subject, sentence: None,
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
    working_folder: Path | None = None,
) -> ReleasedBy:
    """Take part in host 0's run until it ends or does without this host; returns how its last job was stopped; main
    thread only.

    Ranks run nothing but `entries`. `while_running` is the context of each job: it begins before the first rank starts,
    refuses the job by a PlaitError, and has ended when host 0 hears that the job is over. `handlers` answer host 0's
    requests, one after another in a thread of their own, also while ranks run. The first stop signal while ranks run
    makes host 0 stop them all; any other one leaves. `say` gets a sentence when a stop begins, or
    hosts come and go. Raises PlaitError when host 0 does not admit this host; RunFailed when the run failed, host 0 is
    lost, or this host leaves. No rank outlives it.
    """
    starts = "at once" if entries.preload else "with a job"
    with collected_signals() as signals, ForkServer(entries, working_folder=working_folder, starts=starts) as server:
        wire.send("hello", asdict(host_info))
        link = HostConnection(wire, handlers={**handlers, **memory_handlers(server)}, heartbeat=heartbeat)
        with contextlib.closing(link):
            return _Agent(link, server, signals, wire, while_running, say).run()


class _Agent:
    def __init__(
        self,
        link: HostConnection,
        server: ForkServer,
        signals: SignalMailbox,
        wire: Wire,
        while_running: Callable[[Job], AbstractContextManager[None]],
        say: Say,
    ) -> None:
        self._link = link
        self._server = server
        self._signals = signals
        self._leader = wire.peer
        self._while_running = while_running
        self._say = say
        self._local_address = wire.local_address
        self._selector = selectors.DefaultSelector()
        self._part = ExitStack()
        self._site: LocalWorkerHost | None = None
        self._number = 0
        self._asked_to_stop = False
        self._next_look_at_s, self._server_stopped_looks = 0.0, 0
        self._stopped_by: ReleasedBy | None = None

    def run(self) -> ReleasedBy:
        with self._selector, self._part:
            self._selector.register(self._signals.wire, selectors.EVENT_READ, self._read_signals)
            self._selector.register(self._link, selectors.EVENT_READ, self._read_link)
            while self._stopped_by is None:
                watches = self._site is not None
                for key, _ in self._selector.select(LOOK_EVERY_S if watches else None):
                    key.data()
                if self._site is not None:
                    self._look(self._site)
        return self._stopped_by

    def _read_link(self) -> None:
        for message in self._link.read():
            try:
                self._obey(message)
            except UnexpectedMessage as error:
                self._link.leave(str(error))
        if self._link.lost is not None and self._stopped_by is None:
            raise RunFailed(f"{self._leader} was lost: {self._link.lost}; {_JOIN_AGAIN}")

    def _obey(self, message: HostMessage) -> None:
        match message:
            case StartOrder():
                self._start(message)
            case Refusal():
                raise PlaitError(message.sentence)
            case RunEnd():
                if message.failed is not None:
                    raise RunFailed(f"{self._leader} ended the run: {message.failed}")
                self._stopped_by = message.stopped_by
            case Notice():
                self._say("hosts", message.sentence)
            case SignalOrder():
                self._signal(message)
            case KillServerOrder():
                if self._site is not None and message.number == self._number:
                    self._site.kill()
            case EventReport() | RanksProgress():
                raise UnexpectedMessage("it reported ranks to a host that leads none; install the same commit on both")

    def _signal(self, order: SignalOrder) -> None:
        if self._site is not None and order.number == self._number:
            with contextlib.suppress(RunFailed):  # the end of a dead server is an event of its own
                self._site.signal(order.order)
            if order.why:
                self._say(
                    "hosts",
                    f"{self._leader} ends the workers: {order.why}; nothing to do here: this host takes part again "
                    "when the run goes on",
                )
            elif order.order == "SIGTERM" and not self._asked_to_stop:
                self._say("stop", f"{self._leader} stops the run: {STOP_IN_WORDS}")
            elif order.order == "pause" and not self._asked_to_stop:
                self._say("hosts", f"{self._leader} pauses the run, because its hosts change: {STOP_IN_WORDS}")

    def _start(self, order: StartOrder) -> None:
        if self._site is not None:
            raise UnexpectedMessage(
                "it started a second job before the first was over; install the same commit on both"
            )
        self._number, self._asked_to_stop = order.number, False
        meeting = None
        if order.rendezvous is not None:
            meeting = Rendezvous(rendezvous=order.rendezvous, interface=interface_of(self._local_address))
        try:
            self._part.enter_context(self._while_running(order.job))
            self._site = self._part.enter_context(self._server.start(order.job, meeting))
        except PlaitError as error:
            self._part.close()
            self._send_event({"over": True, "reason": str(error)})
        else:
            self._selector.register(self._site, selectors.EVENT_READ, self._read_site)

    def _read_site(self) -> None:
        assert self._site is not None
        if not self._link.wait_for_room(LOOK_EVERY_S):  # ranks wait, too, when host 0 reads more slowly than they write
            return
        try:
            events = self._site.read()
        except RunFailed as error:  # the rank's wire is garbled, so no rank is better than this one
            self._site.kill()
            events = [{"over": True, "reason": str(error)}]
        if any("over" in event for event in events):
            self._selector.unregister(self._site)
            self._site = None
            self._part.close()  # before host 0 hears of it, and sends what the next job needs
        for event in events:
            self._send_event(event)

    def _look(self, site: LocalWorkerHost) -> None:
        """Tell host 0 how far the ranks are; it decides, but for a fork server that was stopped."""
        now_s = time.monotonic()
        if now_s < self._next_look_at_s:
            return
        self._next_look_at_s = now_s + LOOK_EVERY_S
        self._server_stopped_looks = self._server_stopped_looks + 1 if site.is_server_stopped() else 0
        if self._server_stopped_looks * LOOK_EVERY_S >= HangTimeouts().stopped_s:
            site.kill()
        if ranks := site.observe():
            self._link.send(RanksProgress(number=self._number, ranks=tuple(ranks)))

    def _send_event(self, event: RankEvent) -> None:
        self._link.send(EventReport(number=self._number, event=event, sent_at_s=time.monotonic()))

    def _read_signals(self) -> None:
        for name in self._signals.read():
            if self._site is None or self._asked_to_stop:
                self._link.leave(f"it was stopped there by {name}")
                raise HostLeft(f"this host left the run by {name}; {_JOIN_AGAIN}")
            self._asked_to_stop = True
            how = STOP_IN_WORDS if self._site.job.at_stop == "save" else "giving up what is being measured"
            self._say("stop", f"{signal_in_words(name)}: {how}; {signal_in_words(name)} again leaves the run at once")
            self._send_event({"stop": name})
