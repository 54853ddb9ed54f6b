"""`plait join`: lends this host to a run led by another host, until that run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import cast

from plait.commands.programs.program_file import PROGRAM_ENTRIES, ProgramFile, program_hash, program_in_environment
from plait.errors import HostLeft, PlaitError, RunFailed, signal_in_words
from plait.hosts.connectivity import ConnectivityListener
from plait.hosts.handshake import Secret, read_secret
from plait.hosts.job_files import JoinedHostFiles
from plait.hosts.joining import check_first_address, network_text, own_host_info
from plait.hosts.member import LeaderNotReached, connect, serve
from plait.hosts.wire import Wire
from plait.launch.values.job import SIGNAL_OF_LEAVING, Job, ReleasedBy, StoppedBy
from plait.screen.screen import Log, Screen, ShowProgress
from plait.workers import (
    CHECK_ENTRY,
    ENTRIES,
    MACHINE_CHECK_ENTRY,
    MEASURE_ENTRY,
    PROBE_ENTRY,
    PRODUCTS_ENTRY,
    TIMING_ENTRY,
)
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_JOIN_AGAIN_EVERY_S = 2.0


def join(
    at: str,
    *,
    secret_file: Path | None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
    program: ProgramFile | None = None,
) -> StoppedBy:
    """Join the run at HOST:PORT and serve it; blocks until it ends. Returns what ended it, which is "finished" also if
    the run does without this host. With a `program`, this host's workers run that one and nothing else.

    Raises PlaitError, with what to fix on this host, if it may not join or cannot keep the run's files; RunFailed if
    the run failed or its leading host is lost.
    """
    address, port = _parse_address(at)
    secret = read_secret(str(secret_file) if secret_file else None)
    return signal_of(_join_once(at, address, port, secret, screen, working, program))


def stay_joined(
    at: str,
    *,
    secret_file: Path | None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
    program: ProgramFile | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> StoppedBy:
    """Serve the run at HOST:PORT as `join` does, and rejoin it after host 0 stopped, failed or was lost; waits for a
    host 0 that is not there yet. Blocks until the run is finished, or this host is stopped.

    Raises PlaitError, with what to fix on this host, if it may not join.
    """
    address, port = _parse_address(at)
    secret, said = read_secret(str(secret_file) if secret_file else None), ""
    while True:
        try:
            ended_by = _join_once(at, address, port, secret, screen, working, program)
        except HostLeft:
            raise
        except LeaderNotReached as error:  # a name with a typing error is waited for as well, so say what is wrong
            sentence = f"waits    {str(error).partition('; ')[0]}; Ctrl-C leaves"
        except RunFailed as error:
            sentence = f"waits    {str(error).partition('; ')[0]}; this host rejoins by itself, Ctrl-C leaves"
        else:
            if ended_by in ("finished", "not needed") or ended_by.startswith("left by"):
                return signal_of(ended_by)
            sentence = f"waits    until the run continues at {at}; Ctrl-C leaves"
        if sentence != said:
            screen.print(sentence)
            said = sentence
        wait(_JOIN_AGAIN_EVERY_S)


def _join_once(
    at: str,
    address: str,
    port: int,
    secret: Secret,
    screen: Screen,
    working: WorkingFolder,
    program: ProgramFile | None,
) -> ReleasedBy:
    def say(line: str) -> None:
        screen.print(line)

    with closing(WaitingLine(screen)) as line:
        line.show("looking for host 0")
        wire = connect(address, port, secret)
        check_first_address(wire.local_address, "join by an address of host 0 that leads over it")
        say(joining_text(at))
        say(network_text(wire.local_address))
        ended_by = _serve(wire, line, say, working, program)
    say(ending_text(ended_by))
    return ended_by


def _serve(wire: Wire, line: WaitingLine, say: Log, working: WorkingFolder, program: ProgramFile | None) -> ReleasedBy:
    """Take part in the run until it ends; returns what ended it."""
    line.show(WAITING)
    host_info = own_host_info(working, program="" if program is None else program_hash(program.path))
    with (
        program_in_environment(program),
        closing(JoinedHostFiles(working.path.absolute(), say)) as files,
        closing(ConnectivityListener(host_info.name, wire.local_address)) as connectivity,
    ):
        try:
            # A program has no run files: nothing here is read, written or listed for the leader.
            handlers = {**files.handlers, **connectivity.handlers} if program is None else connectivity.handlers
            return serve(
                wire,
                host_info=host_info,
                handlers=handlers,
                entries=ENTRIES if program is None else PROGRAM_ENTRIES,
                while_running=partial(line.while_running, files.running if program is None else _no_files),
                say=lambda subject, sentence: say(f"{subject:8} {sentence}"),
                working_folder=working.path,
            )
        except PlaitError as error:
            raise error_to_show(files.local_error, error) from error.__cause__


WAITING = "waiting for host 0"
MEASURING, TRAINING = "measuring together with host 0", "at work for the run; host 0 prints its steps"


class WaitingLine:
    """The status line of a joined host, which prints nothing else. While the run trains, nothing goes to a log: host
    0's log has the steps."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._open = screen, ExitStack()
        self._show: ShowProgress | None = None

    def show(self, stage: str) -> None:
        """Set the current activity of this host."""
        if self._show is None:
            self._show = self._open.enter_context(self._screen.progress())
        self._show(0, 0, stage)

    def close(self) -> None:
        """Remove the line; a second call does nothing."""
        self._open.close()
        self._show = None

    @contextmanager
    def while_running(self, context: Callable[[Job], AbstractContextManager[None]], job: Job) -> Iterator[None]:
        """The context of a job, with the job's activity in the line."""
        trains = job.entry not in _MEASURING
        if trains and self._screen.columns is None:
            self.close()
        else:
            self.show(TRAINING if trains else MEASURING)
        with context(job):
            yield
        self.show(WAITING)


_MEASURING = frozenset({MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY, TIMING_ENTRY, CHECK_ENTRY, MACHINE_CHECK_ENTRY})


def error_to_show(local: PlaitError | None, ended: PlaitError) -> PlaitError:
    """This host's own error if it is the reason why the leader ended the run; otherwise the reason for the end. An
    earlier error of this host that the run survived does not count."""
    return local if local is not None and str(local) in str(ended) else ended


def signal_of(ended_by: ReleasedBy) -> StoppedBy:
    """The signal that stopped this host's part, for the exit code; "finished" if there was none."""
    left = cast(Mapping[str, StoppedBy], SIGNAL_OF_LEAVING)
    return cast(StoppedBy, left.get(ended_by, "finished" if ended_by == "not needed" else ended_by))


def _no_files(job: Job) -> AbstractContextManager[None]:
    """A program's job names no folder."""
    return nullcontext()


def joining_text(at: str) -> str:
    """The line that a host prints once it was admitted."""
    return f"found    a run at {at}"


def ending_text(ended_by: ReleasedBy) -> str:
    """The line that a joined host prints at the end of a run."""
    if ended_by == "not needed":
        return "over     this host is not needed: the run leaves it out, because a step would take no less time with it"
    if ended_by.startswith("left by"):
        return f"over     this host {ended_by}; everything is saved, and the run continues without it if it can"
    how = "it is finished" if ended_by == "finished" else f"it was stopped by {signal_in_words(ended_by)}"
    return f"over     the run has ended: {how}"


def _parse_address(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PlaitError(f'"{at}" is not HOST:PORT; use the line that plait train --hosts prints')
    return host.removeprefix("[").removesuffix("]"), int(port)
