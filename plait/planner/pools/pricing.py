"""Prices selections of a pool in the same way as every plan: request, search, layout."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.machines.pool import Pool
from plait.model.weights import trained_parameter_count
from plait.planner.derive.model_size import CorpusFacts, TrainingRate
from plait.planner.derive.resources import Resources, on_paper
from plait.planner.derive.training_job import SizedJob
from plait.planner.pools.choice import PoolChoice, Work, choices_of
from plait.planner.pools.egress import bytes_between_zones
from plait.planner.pools.selection import DeviceCounts, Selection
from plait.planner.resolve.constrained_search import FoundLayout, found_layout, searched_devices
from plait.planner.resolve.request import Request, request_of
from plait.planner.search.host_choice import least_step_s
from plait.planner.search.layout_kinds import layout_text
from plait.recipe.schema import RunConfig


def resources_of_selection(cluster: Cluster) -> Resources:
    """A selection's devices as resources on paper; a layout must use all of them, since fewer devices are a different
    selection."""
    return replace(on_paper(cluster), devices_used="all")


class PoolPricer:
    """Prices selections of a pool for one job; equal machines are searched once, regardless of their zones."""

    def __init__(self, config: RunConfig, corpus: CorpusFacts, sized: SizedJob, pool: Pool, steps: int) -> None:
        self._config, self._corpus, self._sized, self._pool = config, corpus, sized, pool
        self.work = Work(steps=steps, tokens=steps * sized.job.batch_tokens)
        self._found: dict[object, FoundLayout | PlaitError] = {}
        self._requests: dict[frozenset[str], Request] = {}
        self.refusals: list[PlaitError] = []
        """Why selections were refused."""

    def price(self, counts: DeviceCounts) -> list[PoolChoice]:
        """The ways to pay for these devices with their best layout; empty if no layout fits them."""
        selection = Selection(self._pool, counts)
        found = self.found(selection.cluster)
        if isinstance(found, PlaitError):
            self.refusals.append(found)
            return []
        one, index = found.search, found.index
        zones = selection.zone_of_nodes
        return choices_of(
            selection,
            self.work,
            step_s=float(one.step_s[index]),
            layout=layout_text(one.candidates.row(index)),
            precision=one.workload.precision,
            sent=bytes_between_zones(one, index, zones, trained_parameter_count(self._sized.job.shape)),
            search=one,
        )

    def price_bound(self, counts: DeviceCounts) -> list[PoolChoice]:
        """The same, if the devices did nothing but their largest products."""
        selection = Selection(self._pool, counts)
        kinds = frozenset(entry.device.name for entry, _ in selection.taken)
        try:
            if kinds not in self._requests:  # its arithmetic holds for all selections of these kinds
                self._requests[kinds] = self._request(selection.cluster)
            request = self._requests[kinds]
        except PlaitError:
            return []
        step_s = least_step_s(request.workload, selection.cluster, request.profile)
        return choices_of(selection, self.work, step_s=step_s, layout="", precision=request.workload.precision, sent={})

    def found(self, cluster: Cluster) -> FoundLayout | PlaitError:
        """The layout for a cluster, or the reason why there is none."""
        key = cluster.islands, cluster.between
        if key not in self._found:
            try:
                self._found[key] = self._searched(cluster)
            except PlaitError as error:
                self._found[key] = error
        return self._found[key]

    @property
    def clusters_searched(self) -> int:
        return len(self._found)

    def _searched(self, cluster: Cluster) -> FoundLayout:
        request = self._request(cluster)
        found = searched_devices(request, request.options[0])
        one = found_layout(request, found, found.chosen)
        return replace(one, search=replace(one.search, host_order=found.host_order))

    def _request(self, cluster: Cluster) -> Request:
        rate: TrainingRate = self._sized.rate
        return request_of(self._config, self._corpus, resources_of_selection(cluster), self._sized, rate)
