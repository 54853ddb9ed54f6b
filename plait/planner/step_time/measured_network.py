"""How long messages take where a probe has timed them: the same questions as in network_model.py, other answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.machines.catalog import Link
from plait.machines.cluster import Cluster
from plait.machines.measured import CommOperation, LinkScope, Measurements
from plait.planner.problem.candidates import Reals
from plait.planner.step_time import measured_compute
from plait.planner.step_time.host_links import HostLinks, host_links_of
from plait.units import plain_number

RankGroups = tuple[Reals, Reals]
"""Number of ranks of each group, and the stride between their rank numbers."""
COLLECTIVE_OPERATIONS: Mapping[str, tuple[CommOperation, ...]] = {
    "reduce": ("all_reduce",),
    "gather": ("spread_own",),
    "scatter": ("swap_parts",),
    "stream": ("swap_parts", "spread_own"),
    "keys": ("spread_own",),
}
"""The measured operations that each kind of collective consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNetwork:
    """Measured times of a cluster's links, scaled to a cluster whose links may have other rates."""

    measured: Measurements
    rate_ratio: Mapping[LinkScope, float]
    """Rate of the links in question over the measured rate, by scope; only scopes that were measured."""
    host_links: HostLinks | None
    """Links between the hosts, where they are unequal; else None."""

    def collective_s(
        self,
        kind: str,
        message_bytes: Reals,
        rank_groups: RankGroups,
        nodes_per_group: Reals,
        pieces: Reals,
        default_s: Reals,
    ) -> Reals:
        """Seconds of a collective over `rank_groups` on `nodes_per_group` nodes each, its message sent in `pieces`.

        `default_s` is the answer for one rank, and where nothing was measured.
        """
        spent, (size, stride) = default_s.copy(), rank_groups
        groups: set[tuple[int, LinkScope]] = {
            (int(count), _scope(many))
            for count, many in zip(size.ravel(), nodes_per_group.ravel(), strict=True)
            if count > 1
        }
        for count, scope in groups:
            if scope in self.rate_ratio:
                here = (size == count) & ((nodes_per_group > 1) == (scope == "between"))
                each = message_bytes[here] / np.maximum(pieces[here], 1)
                times = [self._operation_s(operation, each, count, scope) for operation in COLLECTIVE_OPERATIONS[kind]]
                spent[here] = pieces[here] * sum(times)
                if self.host_links and scope == "between":
                    spent[here] *= self.host_links.relative_time(each, size[here], stride[here], "each with each")
        return spent

    def send_s(
        self, message_bytes: Reals, rank_groups: RankGroups, between_hosts: NDArray[np.bool_], default_s: Reals
    ) -> Reals:
        """Seconds of one message to the next rank of a group, over the network where `between_hosts`; `default_s`
        where nothing was measured."""
        spent, (size, stride) = default_s.copy(), rank_groups
        for scope, wider in self.rate_ratio.items():
            here = between_hosts == (scope == "between")
            spent[here] = (
                measured_compute.measured_collective_s(self.measured, "send", message_bytes[here], 2, scope) / wider
            )
            if self.host_links and scope == "between":
                spent[here] *= self.host_links.relative_time(
                    message_bytes[here], size[here], stride[here], "each to the next"
                )
        return spent

    def cpu_overhead_s(self, message_bytes: Reals, between_hosts: NDArray[np.bool_]) -> Reals:
        """Processor seconds that one message to a neighbour costs either rank; 0 where none was timed."""
        spent = np.zeros_like(message_bytes)
        for scope in self.rate_ratio:
            here = between_hosts == (scope == "between")
            spent[here] = measured_compute.measured_message_cpu_s(self.measured, message_bytes[here], scope)
        return spent

    def _operation_s(self, operation: CommOperation, message_bytes: Reals, ranks: int, scope: LinkScope) -> Reals:
        return (
            measured_compute.measured_collective_s(self.measured, operation, message_bytes, ranks, scope)
            / self.rate_ratio[scope]
        )


def measured_network_of(measured: Measurements, rates: Mapping[LinkScope, float]) -> MeasuredNetwork:
    """The timed links of a cluster whose links now have these rates, in bytes per second and device."""
    scopes: set[LinkScope] = {link.scope for link in measured.links}
    return MeasuredNetwork(
        measured=measured,
        rate_ratio={scope: rates[scope] / slowest_send_bytes_per_s(measured, scope) for scope in scopes},
        host_links=host_links_of(measured),
    )


def largest_overlap(cluster: Cluster) -> float:
    """Largest share of an all-reduce that arithmetic can hide; 1 where it was not measured."""
    measured, scope = cluster.measured, _scope(cluster.n_nodes)
    if measured is None or all(overlap.scope != scope for overlap in measured.overlaps):
        return 1.0
    return measured_compute.measured_overlap(measured, scope)


def slowest_send_bytes_per_s(measured: Measurements, scope: LinkScope) -> float:
    """The rate of a long message from one rank to another, on the slowest of the links."""
    sends = [link.points[-1] for link in measured.links if link.kind == "send" and link.scope == scope]
    return min(point.bytes / point.seconds for point in sends)


def slowest_measured_link(measured: Measurements, scope: LinkScope) -> Link:
    """The slowest timed link as the planner's words and sweeps take it."""
    shortest = [link.points[0].seconds for link in measured.links if link.kind == "send" and link.scope == scope]
    return Link(
        name=f"the measured link of {plain_number(slowest_send_bytes_per_s(measured, scope) * 8e-9)} Gbit/s",
        bytes_per_s=slowest_send_bytes_per_s(measured, scope),
        latency_s=max(shortest),
        reached=1.0,
        all_reduce_reached=1.0,
        shape="switch",
        source=f"plait probe, {measured.date}",
    )


def _scope(nodes: float) -> LinkScope:
    return "between" if nodes > 1 else "inside"
