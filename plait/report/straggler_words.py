"""A finding about a straggler, and the sentence that reports it: who, how much, since when, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plait.units import compared_text, plain_number

FindingKind = Literal["device", "link", "data"]
Shares = Literal["balanced", "fixed", "least", "recut", "uncut", "stages", "same"]
"""Whether the run moves shares of the batch itself, could do so, or cannot, since each rank has at least one sequence;
whether, where all ranks work on the same ones, it moves layers between a pipeline's stages, could do so, or cannot; or
whether there are no stages either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFinding:
    """A device, link or data source that began to slow the run down, or ceased to."""

    kind: FindingKind
    phase: Literal["begins", "ends"]
    ranks: tuple[int, ...]
    """Ranks of the device or data; for a link those at its ends, for a host's cable that host's; empty: unknown."""
    host: str | None
    """The host concerned; None where there are several, or it is unknown which."""
    since_step: int
    """The first slow step; for an end, the step at which the end was certain."""
    factor: float
    """device: times as long for a sequence as before; link, data: times as long for a step, had nothing hidden it."""
    sentence: str


def begin_words(
    kind: FindingKind, ranks: Sequence[int], hosts: Sequence[str],
    *, since: int, factor: float, shares: Shares, others: bool = False,
) -> StragglerFinding:  # fmt: skip
    """The finding that `kind` holds the run up since a step, `others` at the same time; `hosts` names the host of every
    rank of the run."""
    several = len(ranks) > 1
    if kind == "device":
        words = (
            f"{who_words(ranks, hosts)} {'compute' if several else 'computes'} {factor:.1f} times slower than before "
            f"step {since}: {_mend(shares, 'their shares' if several else 'its share')}; "
            "check whether another program runs there"
        )
    elif kind == "data":
        words = (
            f"{who_words(ranks, hosts)} {'wait' if several else 'waits'} for data since step {since}, "
            f"{_of_a_step(factor - 1)}: balance cannot help; a faster disk would, or the prepared data on a disk of "
            "that machine"
        )
    else:
        words = (
            f"{link_words(ranks, hosts)} make every step {compared_text(factor, 'longer', 'shorter')} since step "
            f"{since}{'' if others else ', and no rank computes slower'}: balance cannot help"
            f"{_link_mend(hosts, shares)}"
        )
    return _finding(kind, "begins", ranks, hosts, since=since, factor=factor, words=words)


def _of_a_step(steps: float) -> str:
    return f"{steps:.0%} of a usual step" if steps < 1 else f"as long as {plain_number(steps, 2)} usual steps"


def _link_mend(hosts: Sequence[str], shares: Shares) -> str:
    less, wider = "a layout that sends less would (a pipeline: see `plait plan`)", "a faster network link"
    piped = shares in ("recut", "uncut", "stages")
    if len(set(hosts)) == 1:
        return "" if piped else f"; {less}"
    return f"; {wider} would" if piped else f"; {less}, or {wider}"


def _mend(shares: Shares, share: str) -> str:
    match shares:
        case "balanced":
            return f"{share} should fall at the next rebalancing"
        case "recut":
            return "it should get fewer layers at the next rebalancing"
        case "fixed":
            return f'{share} could fall with [balance] every = "50 steps"'
        case "uncut":
            return 'it could get fewer layers with [balance] every = "50 steps"'
        case "least":
            return f"{share} cannot fall below one sequence; with a larger train.batch_tokens it could"
        case "stages":
            return "fewer layers would do there, if it lasts: stop, and go on with plait train --replan"
        case "same":
            return "balance cannot help, for all ranks work on the same sequences"


def end_words(begun: StragglerFinding, hosts: Sequence[str], step: int) -> StragglerFinding:
    """The finding that what began is over, seen at a step."""
    again = f"as fast as before step {begun.since_step} again (step {step})"
    several = len(begun.ranks) > 1
    if begun.kind == "link":
        words = f"{link_words(begun.ranks, hosts)} are {again}"
    elif begun.kind == "device":
        words = f"{who_words(begun.ranks, hosts)} {'compute' if several else 'computes'} {again}"
    else:
        words = f"{who_words(begun.ranks, hosts)} {'get their data' if several else 'gets its data'} {again}"
    return _finding(begun.kind, "ends", begun.ranks, hosts, since=step, factor=begun.factor, words=words)


def who_words(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """(1,) -> "rank 1 (host b)"; the host is left out where all ranks are on one."""
    numbers = [str(rank) for rank in ranks]
    text = f"rank {numbers[0]}" if len(ranks) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
    if len(set(hosts)) == 1:
        return text
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{text} ({'host' if len(names) == 1 else 'hosts'} {', '.join(names)})"


def link_words(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """The messages of the link that these ranks are at the ends of, or of all links of the one rank or its host."""
    if not ranks:
        return "messages between ranks"
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(ranks) == 1:
        link = "over the network link of" if len(set(hosts)) > 1 else "to and from"
        return f"messages {link} {who_words(ranks, hosts)}"
    if len(names) == 2:
        return f"messages between host {names[0]} and host {names[1]}"
    return f"messages between {who_words(ranks, hosts)}"


def _finding(
    kind: FindingKind, phase: Literal["begins", "ends"], ranks: Sequence[int], hosts: Sequence[str],
    *, since: int, factor: float, words: str,
) -> StragglerFinding:  # fmt: skip
    names = {hosts[rank] for rank in ranks}
    return StragglerFinding(
        kind=kind, phase=phase, ranks=tuple(ranks), host=names.pop() if len(names) == 1 else None,
        since_step=since, factor=factor, sentence=words,
    )  # fmt: skip
