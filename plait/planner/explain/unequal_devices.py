"""What a plan says of unequal devices: who does how much of each batch, which layers stand where, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait.planner.heterogeneous.assignment import Deal
from plait.planner.heterogeneous.batch_shares import equal_shares
from plait.planner.heterogeneous.device_speeds import Devices
from plait.planner.heterogeneous.host_permutations import unlike_roads
from plait.planner.search.found import Search
from plait.planner.search.host_order import better_start, free_to_move
from plait.planner.search.layout_cost import price, step_seconds
from plait.units import format_bytes, format_duration

NAMED = 6
"""Owners of devices up to which each one's share is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """A host, or a kind of devices where no host is known."""

    name: str
    slower: float
    """How many times slower its devices are than the fastest owner's."""
    share: float | None
    """Of the batch; None where parts of it are worked on by others, too."""


def unequal_words(found: Search, index: int) -> list[str]:
    """Who does what in a layout on unequal devices, and why; nothing where devices are equal and no shares named."""
    deal, devices = found.deal(index), found.dealer.devices
    if deal is None or (devices.alike and not found.dealer.named):
        return []
    told = [_shares(found, deal), *_stages(found, deal)]
    return [line for line in told if line]


def unequal_reasons(found: Search) -> list[str]:
    """What the chosen layout gains by unequal shares or stages, and what might gain more."""
    deal, devices = found.deal(found.chosen), found.dealer.devices
    if deal is None or devices.alike:
        return _order_words(found)
    return _order_words(found) + _equal_words(found, deal) + _start_words(found)


def shares_of(found: Search, index: int) -> tuple[int, ...]:
    """The plan's shares: none where they are as equal as can be."""
    deal = found.deal(index)
    if deal is None or deal.shares == equal_shares(sum(deal.shares), len(deal.shares)):
        return ()
    return deal.shares


def _owners(devices: Devices, deal: Deal, each: int) -> list[_Owner]:
    """All owners in the order of their ranks; `each` is the number of devices of a part at one stage."""
    speeds, owners = np.array(devices.speeds), np.array(devices.owners)
    own = [speeds[owners == owner].min() for owner in range(len(devices.names))]
    parts = owners.reshape(deal.ranks, len(deal.shares), each).transpose(1, 0, 2).reshape(len(deal.shares), -1)
    alone = (parts == parts[:, :1]).all()
    done = [sum(s for s, owner in zip(deal.shares, parts[:, 0], strict=True) if owner == o) for o in range(len(own))]
    return [
        _Owner(name=name, slower=max(own) / speed, share=count / sum(deal.shares) if alone else None)
        for name, speed, count in zip(devices.names, own, done, strict=True)
    ]


def _shares(found: Search, deal: Deal) -> str | None:
    count = sum(deal.shares)
    each = found.cluster.devices // deal.ranks // len(deal.shares)
    owners = _owners(found.dealer.devices, deal, each)
    if len(deal.shares) == 1:
        return None
    if found.dealer.named:
        return f"each batch is dealt out as layout.shares says: {_numbers(deal.shares)} of {count} sequences"
    if deal.shares == equal_shares(count, len(deal.shares)):
        slowest = max(owners, key=lambda owner: owner.slower)
        if count < 8 * len(deal.shares) and slowest.slower > 1 + 1 / 8:
            return (
                f"{count} sequences a step are too few to deal out by speed; {slowest.name} is "
                f"{_times(slowest.slower)} slower and sets the pace: raise train.batch_tokens"
            )
        return None
    if owners[0].share is None or len(owners) > NAMED:
        return f"parts of each batch by the speed of their slowest device: {_numbers(deal.shares)} of {count} sequences"
    return _by_owner(owners, found.cluster.devices > len(owners))


def _by_owner(owners: Sequence[_Owner], several: bool) -> str:
    """Shares by owner, the slower ones with the reason."""
    fastest = min(owners, key=lambda owner: owner.slower)
    slower = [owner for owner in owners if owner.slower > 1.01]
    whose = "its devices are" if several else "it is"
    if len(owners) == 2 and slower:
        [owner] = slower
        slow = f"{whose} {_times(owner.slower)} slower than {fastest.name}"
        return f"{owner.name} does {owner.share:.0%} of each batch: {slow}"
    told = ", ".join(
        f"{owner.name} {owner.share:.0%}" + (f" ({_times(owner.slower)} slower)" if owner in slower else "")
        for owner in owners
    )
    return f"of each batch do, by the speed of their devices: {told}"


def at_once_values(found: Search, index: int) -> dict[str, Any]:
    """Sequences at a time, for programs: as a plan has them."""
    limits = found.at_once(index)
    return {"micro_sequences": max(limits), "micro_limits": limits if len(limits) > 1 else ()}


def limit_words(found: Search, index: int) -> list[str]:
    """Who takes fewer sequences at a time than others, for want of memory."""
    limits, deal = found.at_once(index), found.deal(index)
    if deal is None or len(limits) == 1:
        return []
    devices, most = found.dealer.devices, max(limits)
    place = deal.ranks, len(limits), -1
    owners, memories = np.array(devices.owners).reshape(place), np.array(devices.memory_bytes).reshape(place)
    fewer: dict[str, tuple[int, float]] = {}
    for part, limit in enumerate(limits):
        least = memories[:, part].argmin()
        name = devices.names[owners[:, part].ravel()[least]]
        if limit < most:
            fewer[name] = (min(limit, fewer.get(name, (limit, 0))[0]), float(memories[:, part].ravel()[least]))
    told = [f"{name} takes {limit}, it has {format_bytes(size)}" for name, (limit, size) in fewer.items()]
    if len(told) > NAMED:
        told = [*told[: NAMED - 1], f"and {len(told) - NAMED + 1} others fewer, too"]
    return [f"{most} sequences at a time, and fewer where memory is short: {'; '.join(told)}"]


def _stages(found: Search, deal: Deal) -> list[str]:
    """Which layers stand where in a pipeline, and why."""
    devices = found.dealer.devices
    if deal.ranks == 1 or (deal.speeds == 1).all():
        return []
    owners = np.array(devices.owners).reshape(deal.ranks, -1)
    speeds = deal.speeds.sum(axis=1)
    told = []
    for rank in range(deal.ranks):
        names = list(dict.fromkeys(devices.names[owner] for owner in owners[rank]))
        slower = speeds.max() / speeds[rank]
        note = f", {_times(slower)} slower" if slower > 1.01 else ""
        told.append(f"{deal.held[rank]:.0f} on {' and '.join(names[:3])}{' and others' * (len(names) > 3)}{note}")
    if len(told) > NAMED:
        told = [*told[: NAMED - 1], f"… {told[-1]}"]
    head = f"the head and the loss count as {devices.head:.2g} layers"
    return [f"layers by the speed of their devices: {'; '.join(told)} ({head})"]


def _equal_words(found: Search, deal: Deal) -> list[str]:
    """What equal shares and stages of equal cost would take."""
    here = float(found.step_s[found.chosen])
    if deal.even or found.dealer.named:
        return []
    one = found.candidates.select(np.array([found.chosen]))
    if isinstance(one.dealing, tuple):
        equal_s = float(price(found.workload, found.cluster, one, found.stack).step_s[0])
    else:
        flat = replace(found.dealer.devices, speeds=(1.0,) * found.cluster.devices, timed=False)
        dealer = replace(found.dealer, devices=flat)
        numbers = found.numbers[[found.chosen]]
        equal_s = float(step_seconds(found.workload, found.cluster, one, found.stack, dealer, numbers)[0])
    if equal_s < 1.01 * here:
        return []
    what = "equal stages" if deal.ranks > 1 else "equal shares"
    there = f"{format_duration(equal_s)} a step, {equal_s / here:.2g} times as long"
    return [f"with {what} the slowest device would set the pace: {there}"]


def _order_words(found: Search) -> list[str]:
    """In which order the machines stand, where that is not as they were given."""
    if found.turned is None:
        return []
    names, before_s = ", ".join(found.dealer.devices.names), found.turned.step_s_in_given_order
    if before_s is None:
        what = "what [layout] asks for would not fit" if found.constraints.degrees else "no layout would fit"
        return [f"the machines stand in the order {names}: as they were given {what}"]
    longer = before_s / float(found.step_s[found.chosen]) - 1
    roads = " (some roads between them are faster than others)" if unlike_roads(found.cluster) else ""
    return [f"the machines stand in the order {names}: as they were given a step would take {longer:.0%} longer{roads}"]


def _start_words(found: Search) -> list[str]:
    """Whether another machine should be the first."""
    if not (other := better_start(found)):
        return []
    names, spent = other.dealer.devices.names, float(other.step_s[other.chosen])
    rest = "the others find their places" if free_to_move(found.constraints) else "let the others join in this order"
    here = format_duration(float(found.step_s[found.chosen]))
    return [
        f"with the machines in the order {', '.join(names)} a step would take {format_duration(spent)}, not {here}: "
        f"start the run on {names[0]}, {rest}"
    ]


def _times(factor: float) -> str:
    return f"{factor:.2g} times" if factor < 10 else f"{factor:.0f} times"


def _numbers(shares: Sequence[int]) -> str:
    if len(shares) <= 2 * NAMED:
        return " + ".join(str(share) for share in shares)
    return f"{min(shares)} to {max(shares)}"
