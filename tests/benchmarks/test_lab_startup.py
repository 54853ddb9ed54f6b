"""Hosts load programs with a processor each, and are measured at their own share."""

from pathlib import Path

from benchmarks.lab.startup import share_for
from plait.hosts import leader
from plait.probing import survey

PLAIT = Path(leader.__file__).read_text(), Path(survey.__file__).read_text()


def test_hosts_are_measured_at_their_own_share() -> None:
    waiting = "hosts    3; on the others, type:\njoined   b: 1 core\n"
    measuring = f"{waiting}joined   c: 1 core\nhosts    a 1 worker × 1 threads, b 1 worker × 1 threads\n"
    complaining = (
        f"{measuring}probe    between worker 0 on a and worker 1 on b a short message takes 15 times as long\n"
    )
    assert share_for("", others=2) == "a processor"
    assert share_for(waiting, others=2) == "a processor"
    assert share_for(measuring, others=2) == share_for(complaining, others=2) == "own"
    assert share_for(f"{complaining}probe    958 Mbit/s between the hosts, 200 µs\n", others=2) == "a processor"
    assert share_for("", others=None) == "a processor", "a baseline measures nothing"


def test_plait_still_says_so() -> None:
    assert "f\"joined   {info.name}: {counted(info.cores, 'core')}\"" in PLAIT[0]
    assert "f\"probe    {format_si(rate, 'bit/s')} between the hosts" in PLAIT[1]
