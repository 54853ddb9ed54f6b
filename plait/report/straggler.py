"""Names who holds a run up, from the times of every rank's steps: a device, a link between hosts, or the data.

Note [how a straggler is found]: all values are of one step; "now" is the median of the last 11, "usual" the median of
up to 100 that are older than 14 steps, s the standard deviation of those (from their median absolute deviation).
1. device: x = log(compute seconds per sequence) of a rank, and y = x less the median x of the ranks on other hosts.
   Suspected while x and y are both above usual by more than log 1.25 and 3 s: slower than it was *and* than the others
   are, so that a slowdown of all ranks, or a peer that gets faster, accuses no rank.
2. data: the seconds that a rank waits for its samples, above usual by more than 0.15 usual steps and 3 s, while x is
   not. A prefetched step costs no wait, so this is what training really lost.
3. link: w = the least wait of all ranks. Whoever comes last to a sum waits for the messages alone, so that w does not
   grow when a device or the data are slow. Above usual as in 2, while no other suspicion is open.
4. Four such steps in a row (a link: six) name it, so nine to twelve steps after its onset; four steps in a row below
   0.7 of the bar end it. In between what is usual stays as it was.
5. since = the first step of the stretch that is most clearly above half the rise (the maximum of a clipped sum).
After a change of shares, levels are taken again with their rise kept, for seconds per sequence depend a little on them;
but a rise of which most has gone meanwhile has ended, and the level is the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import exp, log
from statistics import median

from plait.report.steadiness import Learning, Series
from plait.report.straggler_words import FindingKind, Shares, StragglerFinding, begin_words, end_words

LEAST_SLOWDOWN = log(1.25)
LEAST_ADDED_WAIT_SHARE = 0.15
"""Added wait that a finding needs, as a share of a usual step."""
CONFIRMING_STEPS = 4
CONFIRMING_STEPS_LINK = 6
"""Steps in a row before a slow link is named: slow ranks must have had the time to show."""
LINK_FACTOR = 1.5
"""A slow link takes this many times as long as the faster half of the links."""
CLEARED_BELOW = 0.7  # evidence below this, in thresholds, speaks for the end of a finding
WARM_UP_STEPS_IGNORED = 2
LEAST_COMPUTE_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """How one rank spent one step, in seconds."""

    rank: int
    compute_s: float
    """Forward and backward of its own samples, without any wait."""
    wait_s: float
    """Waiting for other ranks and for messages."""
    data_s: float
    """Waiting for its samples."""
    link_s: float = 0.0
    """A timed message from the previous rank (the last one for rank 0); 0 where none was timed."""


@dataclass(slots=True)
class _Case:
    """Evidence against a rank or link: steps in a row above or below the threshold, and whether it was reported."""

    above: int = 0
    below: int = 0
    is_reported: bool = False

    def count(self, excess: float) -> None:
        """Add a step's evidence, as a multiple of the threshold: above 1 is suspect."""
        self.above = self.above + 1 if excess > 1 else 0
        self.below = self.below + 1 if excess < CLEARED_BELOW else 0


@dataclass(slots=True)
class _Rank:
    """One rank's series of times, and the evidence against it."""

    own: Series = field(default_factory=Series)
    beside_peers: Series = field(default_factory=Series)
    data: Series = field(default_factory=Series)
    link_s: float = 0.0
    device_case: _Case = field(default_factory=_Case)
    data_case: _Case = field(default_factory=_Case)

    @property
    def series(self) -> tuple[Series, ...]:
        return self.own, self.beside_peers, self.data


class Watch:
    """Watches a run's steps, in one process for all ranks; `hosts` names the host of each.

    Give it every step, in order, with all ranks' times; it answers at most one finding a step.
    """

    def __init__(self, hosts: Sequence[str], *, shares: Shares) -> None:
        self._hosts = tuple(hosts)
        self._shares: Shares = shares
        self._peers = [_peers(self._hosts, rank) for rank in range(len(hosts))]
        self._ranks = [_Rank() for _ in hosts]
        self._messages, self._length = Series(), Series()
        self._link_case = _Case()
        self._open: list[tuple[StragglerFinding, list[_Case]]] = []
        self._sequences: tuple[int, ...] = ()
        self._seen = 0

    @property
    def asks_for_links(self) -> bool:
        """Whether timed messages (`RankTimes.link_s`) would help now: a link is suspected, but not yet which one."""
        return len(self._hosts) > 2 and self._link_case.above > 0 and not self._link_case.is_reported

    def observe(
        self, step: int, times: Sequence[RankTimes], sequences_per_rank: Sequence[int]
    ) -> StragglerFinding | None:
        """Take a step's times, by rank, and how many sequences each had; returns what began or ended, once."""
        self._seen += 1
        if self._seen <= WARM_UP_STEPS_IGNORED:
            return None
        self._take_shares(tuple(sequences_per_rank))
        self._take_times(step, times)
        if not self._length.ready:
            return None
        self._weigh()
        return self._ended(step) or self._device() or self._data() or self._link()

    def _take_shares(self, sequences: tuple[int, ...]) -> None:
        if self._sequences and sequences != self._sequences:
            for series in (self._messages, self._length, *chain(*(one.series for one in self._ranks))):
                series.change_expected("rise")
        self._sequences = sequences

    def _take_times(self, step: int, times: Sequence[RankTimes]) -> None:
        logs = [log(max(t.compute_s, LEAST_COMPUTE_S) / max(n, 1)) for t, n in zip(times, self._sequences, strict=True)]
        beside = _learning(one.device_case for one in self._ranks)
        for one, time, peers, own in zip(self._ranks, times, self._peers, logs, strict=True):
            one.own.add(step, own, _learning([one.device_case]))
            if peers:
                one.beside_peers.add(step, own - median(logs[peer] for peer in peers), beside)
            one.data.add(step, time.data_s, _learning([one.data_case]))
            one.link_s = time.link_s or one.link_s
        self._messages.add(step, min(time.wait_s for time in times), _learning([self._link_case]))
        self._length.add(step, max(t.compute_s + t.wait_s + t.data_s for t in times), "hold" if self._open else "learn")

    def _weigh(self) -> None:
        """Count, for each case, the steps in a row on which it shows."""
        least_wait_s = LEAST_ADDED_WAIT_SHARE * self._length.level
        for one in self._ranks:
            slower = _excess(one.own, LEAST_SLOWDOWN)
            one.device_case.count(min(slower, _excess(one.beside_peers, LEAST_SLOWDOWN)))
            waits = _excess(one.data, least_wait_s)
            # A slow processor is slow with its data as well.
            explained = slower > CLEARED_BELOW and not one.data_case.is_reported
            one.data_case.count(min(waits, CLEARED_BELOW) if explained else waits)
        cases = chain(*((one.device_case, one.data_case) for one in self._ranks))
        others_open = any(case.above and not case.is_reported for case in cases)
        if self._messages.ready:
            excess = _excess(self._messages, least_wait_s)
            explained = others_open and not self._link_case.is_reported
            self._link_case.count(min(excess, CLEARED_BELOW) if explained else excess)

    def _device(self) -> StragglerFinding | None:
        suspects = self._confirmed(lambda one: one.device_case)
        if not suspects:
            return None
        worst = max(suspects, key=lambda rank: self._ranks[rank].beside_peers.rise)
        ranks = [rank for rank in suspects if self._hosts[rank] == self._hosts[worst]]
        own = self._ranks[worst].own
        return self._report("device", ranks, own.since(), exp(own.rise))

    def _data(self) -> StragglerFinding | None:
        suspects = self._confirmed(lambda one: one.data_case)
        if not suspects:
            return None
        data = max((self._ranks[rank].data for rank in suspects), key=lambda series: series.rise)
        return self._report("data", suspects, data.since(), 1 + data.rise / self._length.level)

    def _link(self) -> StragglerFinding | None:
        if self._link_case.is_reported or self._link_case.above < CONFIRMING_STEPS_LINK:
            return None
        messages = self._messages
        ranks = _slow_link_ends([one.link_s for one in self._ranks], self._hosts)
        return self._report("link", ranks, messages.since(), 1 + messages.rise / self._length.level)

    def _confirmed(self, case_of: Callable[[_Rank], _Case]) -> list[int]:
        """The ranks with evidence that was not reported yet, once it is certain for one of them."""
        cases = {rank: case_of(one) for rank, one in enumerate(self._ranks)}
        found = [rank for rank, case in cases.items() if case.above and not case.is_reported]
        return found if any(cases[rank].above >= CONFIRMING_STEPS for rank in found) else []

    def _report(self, kind: FindingKind, ranks: Sequence[int], since: int, factor: float) -> StragglerFinding:
        least = self._shares in ("balanced", "fixed") and all(self._sequences[rank] == 1 for rank in ranks)
        others = any(begun.kind == "device" for begun, _ in self._open)
        shares = "least" if least else self._shares
        finding = begin_words(kind, ranks, self._hosts, since=since, factor=factor, shares=shares, others=others)
        cases = [one.device_case if kind == "device" else one.data_case for one in (self._ranks[r] for r in ranks)]
        cases = [self._link_case] if kind == "link" else cases
        for case in cases:
            case.is_reported = True
        self._open.append((finding, cases))
        self._expect_other_messages()
        return finding

    def _ended(self, step: int) -> StragglerFinding | None:
        over = next((one for one in self._open if all(case.below >= CONFIRMING_STEPS for case in one[1])), None)
        if over is None:
            return None
        self._open.remove(over)
        begun, cases = over
        for case in cases:
            case.is_reported = False
        self._forget(begun)
        self._expect_other_messages()
        return end_words(begun, self._hosts, step)

    def _forget(self, begun: StragglerFinding) -> None:
        """Discard the recent values, so that what was slow does not become usual."""
        if begun.kind == "link":
            self._messages.forget_recent()
            for one in self._ranks:
                one.link_s = 0.0
        for series in chain(*(one.series for one in self._ranks)):
            series.forget_recent()
        self._length.forget_recent()

    def _expect_other_messages(self) -> None:
        """Take the messages' level again: a device that changes its speed changes theirs, which accuses no link."""
        if not self._link_case.is_reported:
            self._messages.change_expected("nothing")


def _peers(hosts: Sequence[str], rank: int) -> list[int]:
    """The ranks that a rank is compared with: those of other hosts, or all others on a single host."""
    elsewhere = [other for other, host in enumerate(hosts) if host != hosts[rank]]
    return elsewhere or [other for other in range(len(hosts)) if other != rank]


def _learning(cases: Iterable[_Case]) -> Learning:
    return "hold" if any(case.is_reported for case in cases) else "learn"


def _excess(series: Series, least: float) -> float:
    return series.rise / max(series.bar(least), 1e-12) if series.ready else 0.0


def _slow_link_ends(took_s: Sequence[float], hosts: Sequence[str]) -> list[int]:
    """The two ranks at the ends of the slow link, the one rank whose host has two slow links, or none if it is unclear.

    `took_s` holds the seconds of a message to each rank from the previous one. Links inside a host are not
    compared with those between hosts.
    """
    count = len(took_s)
    links = [rank for rank in range(count) if hosts[rank] != hosts[rank - 1]] or list(range(count))
    if len(links) == 2:
        return sorted([(links[0] - 1) % count, links[0]])
    if min(took_s[rank] for rank in links) <= 0:
        return []
    usual_s = median(sorted(took_s[rank] for rank in links)[: len(links) // 2 + 1])
    slow = [at for at, rank in enumerate(links) if took_s[rank] > LINK_FACTOR * usual_s]
    if len(slow) == 1:
        rank = links[slow[0]]
        return sorted([(rank - 1) % count, rank])
    # A message reaches a host and leaves it over both ends of one cable.
    both = [links[at] for at in slow if (at + 1) % len(links) in slow]
    return both if len(both) == 1 and len(slow) == 2 else []
