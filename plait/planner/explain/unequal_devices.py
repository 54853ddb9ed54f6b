"""A plan's remarks on unequal devices: each one's share of the batch, the layers of each stage, and the savings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plait.planner.heterogeneous.assignment import WorkAssignment
from plait.planner.heterogeneous.batch_shares import equal_shares
from plait.planner.heterogeneous.device_speeds import DeviceSpeeds
from plait.planner.heterogeneous.host_permutations import has_unequal_links
from plait.planner.search.found import Search
from plait.planner.search.host_choice import may_reorder_hosts, with_better_first_host
from plait.planner.search.layout_cost import step_seconds, step_time_of
from plait.units import as_long_text, compared_text, counted, format_bytes, format_duration, times_slower_text

OWNERS_NAMED = 6
"""Owners of devices up to which each one's share is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """A host, or a kind of devices where no host is known."""

    name: str
    slower: float
    """How many times slower its devices are than the fastest owner's."""
    share: float | None
    """Share of the batch; None where its data-parallel ranks span other hosts, too."""


def unequal_lines(found: Search, index: int) -> list[str]:
    """Who does what in a layout on unequal devices, and why; nothing where devices are equal and no shares named."""
    assignment, devices = found.assignment(index), found.assigner.devices
    if assignment is None or (devices.are_equal and not found.assigner.named_shares):
        return []
    lines = [_shares(found, assignment), *_stages(found, assignment)]
    return [line for line in lines if line]


def unequal_reasons(found: Search) -> list[str]:
    """The chosen layout's gain from unequal shares or stages, and what might gain more."""
    assignment, devices = found.assignment(found.chosen), found.assigner.devices
    if assignment is None or devices.are_equal:
        return _order_words(found)
    return _order_words(found) + _equal_words(found, assignment) + _start_words(found)


def unequal_shares_of(found: Search, index: int) -> tuple[int, ...]:
    """The plan's shares: none where they are as equal as can be."""
    assignment = found.assignment(index)
    if assignment is None or assignment.sequences_per_replica == equal_shares(
        sum(assignment.sequences_per_replica), len(assignment.sequences_per_replica)
    ):
        return ()
    return assignment.sequences_per_replica


def _owners(devices: DeviceSpeeds, assignment: WorkAssignment, each: int) -> list[_Owner]:
    """All owners in the order of their ranks; `each` is the number of devices of a part at one stage."""
    speeds, owners = np.array(devices.speeds), np.array(devices.owner_of_device)
    own = [speeds[owners == owner].min() for owner in range(len(devices.names))]
    parts = (
        owners.reshape(assignment.ranks, len(assignment.sequences_per_replica), each)
        .transpose(1, 0, 2)
        .reshape(len(assignment.sequences_per_replica), -1)
    )
    alone = (parts == parts[:, :1]).all()
    done = [
        sum(s for s, owner in zip(assignment.sequences_per_replica, parts[:, 0], strict=True) if owner == o)
        for o in range(len(own))
    ]
    return [
        _Owner(
            name=name, slower=max(own) / speed, share=count / sum(assignment.sequences_per_replica) if alone else None
        )
        for name, speed, count in zip(devices.names, own, done, strict=True)
    ]


def _shares(found: Search, assignment: WorkAssignment) -> str | None:
    count = sum(assignment.sequences_per_replica)
    each = found.cluster.n_devices // assignment.ranks // len(assignment.sequences_per_replica)
    owners = _owners(found.assigner.devices, assignment, each)
    if len(assignment.sequences_per_replica) == 1:
        return None
    if found.assigner.named_shares:
        shares = _numbers(assignment.sequences_per_replica)
        return f"each batch is divided as layout.shares says: {shares} of {count} sequences"
    if assignment.sequences_per_replica == equal_shares(count, len(assignment.sequences_per_replica)):
        slowest = max(owners, key=lambda owner: owner.slower)
        if count < 8 * len(assignment.sequences_per_replica) and slowest.slower > 1 + 1 / 8:
            return (
                f"{counted(count, 'sequence')} a step are too few to be shared by speed; {slowest.name} is "
                f"{times_slower_text(slowest.slower)} and sets the pace: raise train.batch_tokens"
            )
        return None
    if owners[0].share is None or len(owners) > OWNERS_NAMED:
        shares = _numbers(assignment.sequences_per_replica)
        return f"parts of each batch by the speed of their slowest device: {shares} of {count} sequences"
    return _by_owner(owners, found.cluster.n_devices > len(owners))


def _by_owner(owners: Sequence[_Owner], several: bool) -> str:
    """Shares by owner, the slower ones with the reason."""
    fastest = min(owners, key=lambda owner: owner.slower)
    slower = [owner for owner in owners if owner.slower > 1.01]
    whose = "its devices are" if several else "it is"
    if len(owners) == 2 and slower:
        [owner] = slower
        slow = f"{whose} {times_slower_text(owner.slower)} than {fastest.name}"
        return f"{owner.name} does {owner.share:.0%} of each batch: {slow}"
    text = ", ".join(
        f"{owner.name} {owner.share:.0%}" + (f" ({times_slower_text(owner.slower)})" if owner in slower else "")
        for owner in owners
    )
    return f"shares of each batch, by the speed of the devices: {text}"


def memory_limit_lines(found: Search, index: int) -> list[str]:
    """Who takes fewer sequences at a time than others, for want of memory."""
    limits, assignment = found.micro_sequences(index), found.assignment(index)
    if assignment is None or len(limits) == 1:
        return []
    devices, most = found.assigner.devices, max(limits)
    place = assignment.ranks, len(limits), -1
    owners, memories = (
        np.array(devices.owner_of_device).reshape(place),
        np.array(devices.memory_bytes).reshape(place),
    )
    fewer: dict[str, tuple[int, float]] = {}
    for part, limit in enumerate(limits):
        least = memories[:, part].argmin()
        name = devices.names[owners[:, part].ravel()[least]]
        if limit < most:
            fewer[name] = (min(limit, fewer.get(name, (limit, 0))[0]), float(memories[:, part].ravel()[least]))
    lines = [f"{name} takes {limit}, it has {format_bytes(size)}" for name, (limit, size) in fewer.items()]
    if len(lines) > OWNERS_NAMED:
        lines = [*lines[: OWNERS_NAMED - 1], f"and {len(lines) - OWNERS_NAMED + 1} others fewer, too"]
    return [f"{counted(most, 'sequence')} at a time, and fewer where memory is short: {'; '.join(lines)}"]


def _stages(found: Search, assignment: WorkAssignment) -> list[str]:
    """The layers of each stage of a pipeline, and why."""
    devices = found.assigner.devices
    if assignment.ranks == 1 or (assignment.relative_speed == 1).all():
        return []
    owners = np.array(devices.owner_of_device).reshape(assignment.ranks, -1)
    speeds = assignment.relative_speed.sum(axis=1)
    lines = []
    for rank in range(assignment.ranks):
        names = list(dict.fromkeys(devices.names[owner] for owner in owners[rank]))
        slower = speeds.max() / speeds[rank]
        note = f", {times_slower_text(slower)}" if slower > 1.01 else ""
        lines.append(
            f"{assignment.layers_per_rank[rank]:.0f} on {' and '.join(names[:3])}{' and others' * (len(names) > 3)}"
            f"{note}"
        )
    if len(lines) > OWNERS_NAMED:
        lines = [*lines[: OWNERS_NAMED - 1], f"… {lines[-1]}"]
    head = f"the head and the loss count as {devices.head_cost_in_layers:.2g} layers"
    return [f"layers by the speed of their devices: {'; '.join(lines)} ({head})"]


def _equal_words(found: Search, assignment: WorkAssignment) -> list[str]:
    """The time with equal shares and stages of equal cost."""
    here = float(found.step_s[found.chosen])
    if assignment.is_even or found.assigner.named_shares:
        return []
    one = found.cost_inputs.with_candidates(found.candidates.select(np.array([found.chosen])))
    if isinstance(one.candidates.layer_split, tuple):
        equal_s = float(step_time_of(one).step_s[0])
    else:
        flat = replace(found.assigner.devices, speeds=(1.0,) * found.cluster.n_devices, is_measured=False)
        assigner = replace(found.assigner, devices=flat)
        numbers = found.n_microbatches[[found.chosen]]
        equal_s = float(step_seconds(one, assigner, numbers)[0])
    if equal_s < 1.01 * here:
        return []
    what = "equal stages" if assignment.ranks > 1 else "equal shares"
    there = f"{format_duration(equal_s)} a step, {as_long_text(equal_s / here)}"
    return [f"with {what} the slowest device would set the pace: {there}"]


def _order_words(found: Search) -> list[str]:
    """The host order with its reason, where it differs from the given order."""
    if found.host_order is None:
        return []
    names, before_s = ", ".join(found.assigner.devices.names), found.host_order.step_s_in_given_order
    if before_s is None:
        what = "what [layout] asks for would not fit" if found.constraints.degrees else "no layout would fit"
        return [f"the machines are in the order {names}: as they were given {what}"]
    longer = compared_text(before_s / float(found.step_s[found.chosen]), "longer", "shorter")
    links = " (some links between them are faster than others)" if has_unequal_links(found.cluster) else ""
    return [f"the machines are in the order {names}: as they were given a step would take {longer}{links}"]


def _start_words(found: Search) -> list[str]:
    """Advice to start the run on another host, where that is faster."""
    if not (other := with_better_first_host(found)):
        return []
    names, spent = other.assigner.devices.names, float(other.step_s[other.chosen])
    rest = (
        "the others find their places" if may_reorder_hosts(found.constraints) else "let the others join in this order"
    )
    here = format_duration(float(found.step_s[found.chosen]))
    return [
        f"with the machines in the order {', '.join(names)} a step would take {format_duration(spent)}, not {here}: "
        f"start the run on {names[0]}, {rest}"
    ]


def _numbers(shares: Sequence[int]) -> str:
    if len(shares) <= 2 * OWNERS_NAMED:
        return " + ".join(str(share) for share in shares)
    return f"{min(shares)} to {max(shares)}"
