"""Hosts load programs with a processor each, and are measured at their own share."""

from benchmarks.lab.startup import share_for


def test_hosts_are_measured_at_their_own_share() -> None:
    joined = "hosts    2; on the other host, type:\njoined   b: 1 core\n"
    measuring = f"{joined}hosts    a 1 worker, b 1 worker\n"
    assert share_for("") == "a processor"
    assert share_for(joined) == "a processor"
    assert share_for(measuring) == "own"
    assert share_for(f"{measuring}probe    958 Mbit/s between the hosts\n") == "a processor"
