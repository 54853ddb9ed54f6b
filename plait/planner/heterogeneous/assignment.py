"""What each device of a layout does where devices are unequal: shares of the batch, layers of the pipeline's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from plait.planner.heterogeneous.batch_shares import equal_shares, worthwhile
from plait.planner.heterogeneous.device_speeds import Devices
from plait.planner.memory.estimate import memory
from plait.planner.problem.candidates import SCHEDULES, Candidates, Counts, Reals, Same, places_alike
from plait.planner.problem.software_profile import Stack
from plait.planner.problem.stage_partition import balanced_by_speed
from plait.planner.problem.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deal:
    """Who does what in layouts of one weave: same pipeline, same parts of the batch, same devices in each of them."""

    stage_layers: tuple[int, ...]
    """Of each stage, in the model's order; all layers where there is no pipeline."""
    shares: tuple[int, ...]
    """Sequences of each part of the batch in a step."""
    speeds: Reals
    """(pipeline, parts): of the slowest device at each place, where 1 is what a device was priced with."""
    memory_bytes: Reals
    """(pipeline, parts): of the smallest device there."""
    lookup: float
    """What the embedding costs the first stage, in average layers, beyond what pricing knows of."""

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return len(self.speeds)

    @property
    def held(self) -> Reals:
        """Layers on each rank of the pipeline."""
        return np.array([sum(self.stage_layers[rank :: self.ranks]) for rank in range(self.ranks)], dtype=np.float64)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage on each rank of the pipeline."""
        return tuple(self.stage_layers[rank :: self.ranks] for rank in range(self.ranks))

    @property
    def even(self) -> bool:
        """Whether all devices are priced alike and all parts of the batch are as equal as can be."""
        count = sum(self.shares)
        return bool((self.speeds == 1).all()) and self.shares == equal_shares(count, len(self.shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Candidates of one deal and their places among all; without a deal devices are equal and nothing is named."""

    places: Counts
    candidates: Candidates
    """Their `dealing` is the deal's."""
    deal: Deal | None
    numbers: Counts | None = None
    """Micro-batches that its parts of the batch take, where devices that hold little make it more."""

    @property
    def unlike(self) -> bool:
        """Whether its devices do or have so unlike things that memory is asked for one by one
        (micro_batch_limits.py)."""
        deal = self.deal
        return deal is not None and not (deal.even and len(np.unique(deal.memory_bytes)) == 1)

    def select(self, chosen: np.ndarray) -> Group:
        """Those where a mask over the group holds."""
        rows = np.flatnonzero(chosen)
        numbers = None if self.numbers is None else self.numbers[rows]
        return replace(self, places=self.places[rows], candidates=self.candidates.select(rows), numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
    """Deals a workload to the devices of a cluster, whatever the layout."""

    workload: Workload
    devices: Devices
    stack: Stack
    named: tuple[int, ...] = ()
    """Shares that a person has named."""

    def groups(self, candidates: Candidates) -> list[Group]:
        """All candidates with who does what, in groups of the same deal."""
        everyone = np.arange(len(candidates))
        devices, c = self.devices, candidates
        plain = devices.alike and devices.equal_memory and not self.named
        if c.dealing == "published" or (plain and not devices.timed):
            return [Group(places=everyone, candidates=c, deal=None)]
        keys = np.stack([c.pipeline, c.virtual, c.batch_parts, c.context * c.tensor])
        if plain:  # only stages are cut otherwise than by the weights of the head
            keys = np.where(c.pipeline > 1, keys, 0)
        found = []
        for rows in places_alike(keys):
            few = c.select(rows)
            if plain and int(few.pipeline[0]) == 1:
                found.append(Group(places=rows, candidates=few, deal=None))
                continue
            for deal, own in self._deals(few):
                dealing = deal.stage_layers if deal.ranks > 1 else c.dealing
                found.append(Group(places=rows[own], candidates=replace(few.select(own), dealing=dealing), deal=deal))
        return found

    def one(self, candidates: Candidates, index: int) -> Group:
        """A single candidate, as it was priced: a deal does not hang on who else is looked at."""
        [group] = self.groups(candidates.select(np.array([index])))
        return replace(group, places=np.array([index]))

    def _deals(self, few: Candidates) -> list[tuple[Deal, Counts]]:
        """The deals of candidates of one shape, each with the places of those that it is for."""
        # What is kept decides how many layers a small device holds.
        knobs = np.stack([few.tensor, few.recompute, few.shard, few.shard_what, few.expert])
        if int(few.pipeline[0]) == 1 or self.devices.equal_memory:
            knobs = np.zeros_like(knobs)
        kinds = places_alike(knobs)
        once = np.ones(len(kinds), dtype=np.int64)
        lean = replace(
            few.select(np.array([rows[0] for rows in kinds])),
            micro_sequences=once,
            schedule=SCHEDULES.index("1f1b") * once,
        )
        places: dict[Deal, list[Counts]] = {}
        for deal, rows in zip(_dealt(self, Same(lean)), kinds, strict=True):
            places.setdefault(deal, []).append(rows)
        return [(deal, np.sort(np.concatenate(rows))) for deal, rows in places.items()]


@lru_cache(maxsize=4096)
def _dealt(dealer: Dealer, lean: Same) -> tuple[Deal, ...]:
    """The deal of each of some candidates of one shape, which take one sequence at a time; equal deals are one object.
    Searches that differ in links alone ask for the same ones again."""
    c, devices = lean.candidates, dealer.devices
    pipeline, virtual, parts = int(c.pipeline[0]), int(c.virtual[0]), int(c.batch_parts[0])
    place = pipeline, parts, -1
    speeds = np.array(devices.speeds).reshape(place).min(axis=2)
    memory_bytes = np.array(devices.memory_bytes, dtype=np.float64).reshape(place).min(axis=2)
    by_stage, lookup = speeds.sum(axis=1).tolist() * virtual, devices.lookup if pipeline > 1 else 0.0
    cut = pipeline > 1 and not isinstance(c.dealing, tuple)
    limits: list[tuple[int, ...]] = [()] * len(c)
    if cut and not devices.equal_memory:
        limits = _most(dealer, c, memory_bytes.min(axis=1))
    made: dict[tuple[int, ...], Deal] = {}
    found = []
    for most in limits:
        layers = c.dealing if isinstance(c.dealing, tuple) else (dealer.workload.layers,)
        if cut:
            layers = balanced_by_speed(dealer.workload.layers, by_stage, devices.head, lookup, most * virtual)
        if layers not in made:
            deal = Deal(stage_layers=layers, shares=(), speeds=speeds, memory_bytes=memory_bytes, lookup=lookup)
            sequences = dealer.named or worthwhile(dealer.workload.batch_sequences, _parts(dealer, deal))
            made[layers] = replace(deal, shares=sequences)
        found.append(made[layers])
    return tuple(found)


def _parts(dealer: Dealer, deal: Deal) -> list[float]:
    """The speed of each part of the batch: that of its slowest stage."""
    costs = deal.held.copy()
    costs[0] += deal.lookup
    costs[-1] += dealer.devices.head
    return [float(speed) for speed in 1 / (costs[:, None] / deal.speeds).max(axis=0)]


def _most(dealer: Dealer, lean: Candidates, memory_bytes: Reals) -> list[tuple[int, ...]]:
    """For each candidate the layers that each stage of a rank can hold, one sequence at a time."""
    ranks, virtual = int(lean.pipeline[0]), int(lean.virtual[0])
    once, twice = (stage_bytes(dealer.workload, lean, dealer.stack, [(n,) * virtual] * ranks) for n in (1, 2))
    each = np.maximum((twice - once) / virtual, 1.0)
    most = virtual + np.floor((memory_bytes[:, None] - once) / each)
    return [tuple(max(1, int(layers) // virtual) for layers in ranks_most) for ranks_most in most.T]


def stage_bytes(workload: Workload, candidates: Candidates, stack: Stack, chunks: Sequence[tuple[int, ...]]) -> Reals:
    """Bytes of a device on each rank of pipelines of one shape whose stages hold so many layers: (ranks, candidates).

    Asked of estimate.py rank by rank: as a pipeline whose other ranks hold as little as can be. Ranks in the middle
    count as the first one, which keeps most micro-batches.
    """
    asked = [(layers, rank == len(chunks) - 1) for rank, layers in enumerate(chunks)]
    answers = {
        (layers, last): memory(
            *lone_rank(workload, candidates, layers, last=last), stack, end="last" if last else "first"
        ).reserved
        for layers, last in dict.fromkeys(asked)
    }
    return np.stack([answers[each] for each in asked])


def lone_rank(
    workload: Workload, candidates: Candidates, chunks: tuple[int, ...], *, last: bool
) -> tuple[Workload, Candidates]:
    """Such a pipeline with stages of so many layers on the first or the last rank, and one layer in all others."""
    ranks = int(candidates.pipeline[0])
    stages = [1] * ranks * len(chunks)
    stages[ranks - 1 if last else 0 :: ranks] = chunks
    return replace(workload, layers=sum(stages)), replace(candidates, dealing=tuple(stages))
