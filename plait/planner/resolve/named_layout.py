"""Layouts whose degrees a person has named: what the names leave open, so that what is priced is what runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from plait.cluster.cluster import Cluster
from plait.layout import Layout
from plait.planner.explain.fit_suggestions import mended
from plait.planner.problem.software_profile import Stack
from plait.planner.problem.workload import Workload
from plait.planner.resolve.constraints import pins_of
from plait.planner.search.enumeration import Pins
from plait.planner.search.host_order import in_an_order_that_fits, in_best_order
from plait.planner.search.search import DoesNotFit, Search, search
from plait.recipe.schema import RunConfig


def named_pins(config: RunConfig, layout: Layout) -> Pins:
    """What a recipe with named degrees settles: of a pipeline its order as well."""
    pins = pins_of(config)
    if layout.pipeline == 1:
        return pins
    order = {"schedule": layout.schedule, "virtual": layout.virtual_stages}
    return replace(pins, knobs={**pins.knobs, **order})


def asked_search(workload: Workload, cluster: Cluster, stack: Stack, pins: Pins) -> Search:
    """The search that a recipe asks for, on the machines in their best order; raises DoesNotFit, with the mend, where
    nothing fits.

    Beside named degrees nothing is computed again, and `shard` splits the optimizer's state alone, unless only more of
    it fits: so that a name means the same on every machine that it can run on.
    """
    usual = pins
    if pins.degrees:
        knobs = {"recompute": "none"} | ({"shard_what": "optimizer"} if pins.degrees.get("shard", 1) > 1 else {})
        usual = replace(pins, knobs={**knobs, **pins.knobs})
        with suppress(DoesNotFit):
            found = search(workload, cluster, stack=stack, pins=usual)
            if found.reserved(found.chosen) <= found.capacity(found.chosen):
                return in_best_order(found)
    try:
        return in_best_order(search(workload, cluster, stack=stack, pins=pins))
    except DoesNotFit as error:
        for asked in [usual] if usual is pins else [usual, pins]:
            if turned := in_an_order_that_fits(workload, cluster, stack, asked):
                return turned
        raise mended(error, pins, stack) from None
