"""Gathers what went wrong in one job, on whichever host, and says it as the one error that its caller gets."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from plait.errors import PlaitError
from plait.launch.local.site import WorkerHost
from plait.launch.values.failure import (
    RESUME_ADVICE,
    Failure,
    FailureFacts,
    HostLost,
    RankRaised,
    WorkersFailed,
    error_for_caller,
    is_shown_traceback,
    root_cause,
)

LINES_OF_ANOTHER_HOST = 100


class FailureCauses:
    """The failures of one job, each with the site it came from."""

    def __init__(self) -> None:
        self._failures: list[tuple[Failure, WorkerHost]] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, failure: Failure, site: WorkerHost) -> None:
        """Add one failure; call it in the order in which failures become known."""
        self._failures.append((failure, site))

    def explains(self, rank: int) -> bool:
        """Whether this rank itself has reported why it ended."""
        return any(isinstance(one, RankRaised) and one.rank == rank for one, _ in self._failures)

    def only_lost_peers(self) -> bool:
        """Whether all failures so far are broken connections, so that their cause is still unknown."""
        return all(isinstance(one, RankRaised) and one.lost_peer for one, _ in self._failures)

    @property
    def lost_host(self) -> str:
        """A sentence about the host that was lost, if that is the cause; empty if it is another."""
        cause = root_cause([failure for failure, _ in self._failures]) if self._failures else None
        return cause.what if isinstance(cause, HostLost) else ""

    def error(self) -> PlaitError:
        """The root cause as an exception; prints its traceback where no log has it."""
        cause = root_cause([failure for failure, _ in self._failures])
        site = next(site for failure, site in self._failures if failure is cause)
        log_dir = site.job.log_dir
        of_program = isinstance(cause, RankRaised) and bool(cause.plait_classes) and is_shown_traceback(cause)
        if log_dir is not None and not of_program and not isinstance(cause, HostLost) and cause.rank is not None:
            return error_for_caller(cause, f"in {Path(log_dir) / f'rank-{cause.rank}.log'}", host=site.host)
        if isinstance(cause, RankRaised) and is_shown_traceback(cause):
            print(_traceback_text(cause.traceback, site.host), file=sys.stderr, flush=True)
        return error_for_caller(cause, "above", host=site.host)


def not_started_in_time(unforked: Sequence[WorkerHost], not_started: Collection[int], within_s: float) -> WorkersFailed:
    """A fork server, or else ranks, had not started in time."""
    missing = sorted(not_started)
    who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} did not start"
    if unforked:
        who = f"the process that starts the workers{on_host(unforked[0])} was not ready"
    return WorkersFailed(f"{who} within {within_s:g} s", FailureFacts(cause="no answer"))


def unsaved_text(grace_s: float, after: str) -> str:
    """The meaning of ranks not having ended in time after they were asked to save."""
    how = f"they had not saved and ended {grace_s:.3g} s after {after}"
    return f"the workers were killed because {how}; {RESUME_ADVICE}"


def stuck_server(site: WorkerHost) -> WorkersFailed:
    """The process that starts a site's ranks said nothing of one that has ended."""
    who = f"the process that starts the workers{on_host(site)}"
    return WorkersFailed(f"{who} does not answer", FailureFacts(cause="no answer"))


def on_host(site: WorkerHost) -> str:
    """The host of a site, as part of a sentence; empty for this machine."""
    return f" on {site.host}" if site.host else ""


def _traceback_text(traceback: str, host: str | None) -> str:
    """A rank's traceback; from another host its last lines, each with the host's name before it."""
    if host is None:
        return traceback
    return "\n".join(f"{host}| {line}" for line in traceback.splitlines()[-LINES_OF_ANOTHER_HOST:])
