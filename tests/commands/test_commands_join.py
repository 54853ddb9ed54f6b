"""What `plait join` says when the run ends by an error."""

from __future__ import annotations

from plait.commands.join import error_to_show
from plait.errors import PlaitError, RunFailed

OWN = PlaitError("this host cannot use /mnt/full (No space left on device); fix that, then join again")


def test_an_error_of_this_host_that_the_leader_passes_on_is_shown_as_its_own() -> None:
    assert error_to_show(OWN, RunFailed(f"on b (10.0.0.2): {OWN}")) is OWN


def test_an_earlier_error_is_not_why_host_0_is_silent() -> None:
    silent = RunFailed("host 0 (10.0.0.1) sent nothing for 60 s; see whether it still runs")
    assert error_to_show(OWN, silent) is silent
    assert error_to_show(None, silent) is silent
