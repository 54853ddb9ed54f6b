"""Random pools, and the exhaustive search that the planner's own is held to."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod

from plait.machines.pool import Pool, pool_from_toml
from plait.planner.pools.choice import PoolChoice
from plait.planner.pools.exploring import every_selection
from plait.planner.pools.pricing import PoolPricer

KINDS = {"A100-40GB": 2.74, "V100": 1.6, "T4": 0.53, "L4": 0.8}
LEAST_SELECTIONS, MOST_SELECTIONS = 41, 120
"""More than the planner prices as a whole, and few enough to price all of them here."""


def random_pool(seed: int) -> Pool:
    """Two or three entries in one or two zones, with and without spot machines."""
    drawn = random.Random(seed)
    while True:
        text = _random_text(drawn)
        pool = pool_from_toml(text.encode(), f"pool {seed}")
        if LEAST_SELECTIONS <= prod(len(entry.sizes) + 1 for entry in pool.devices) - 1 <= MOST_SELECTIONS:
            return pool


def _random_text(drawn: random.Random) -> str:
    places = [(name, zone) for name in KINDS for zone in ("a", "b")]
    text, zones = "", list[str]()
    for name, zone in drawn.sample(places, drawn.choice([2, 2, 3])):
        per_node = drawn.choice([1, 2, 4])
        price = round(KINDS[name] * drawn.uniform(0.5, 1.5), 2)
        text += f'[[device]]\nname = "{name}"\nzone = "{zone}"\nper_node = {per_node}\n'
        text += f"count = {per_node * drawn.randint(1, 4)}\nprice = {price}\n"
        text += f"spot_price = {round(price * 0.4, 2)}\n" if drawn.random() < 0.5 else ""
        zones.append(zone)
    for one, other in combinations(sorted(set(zones)), 2):
        bandwidth, egress = drawn.choice([1.2e9, 5e9, 12e9]), drawn.choice([0, 0.01, 0.05])
        text += f'[[link]]\nfrom = "{one}"\nto = "{other}"\nbandwidth = {bandwidth}\negress_price = {egress}\n'
    return text


def all_choices(pool: Pool, pricer: PoolPricer) -> list[PoolChoice]:
    """Every selection of a pool, priced."""
    return [choice for counts in every_selection(pool) for choice in pricer.price(counts)]
