"""Sailor's published problems of choosing machines (SOSP 2025), priced and answered by plait.

    python -m benchmarks.rent

For each pool: the step that Sailor's own simulator forecast for its answer, plait's forecast for that layout on those
machines, and the best that plait finds among the same pool's machines, of all layouts and of those that Sailor has (no
sharded state, no recompute). Nothing was run: these are forecasts beside forecasts. OPT-350M, 1,024 sequences of 2,048
tokens, float32 with TF32 products where there are any, unfused attention, Megatron-DeepSpeed. Written to
benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from benchmarks.pairing import save
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.pool import Pool, pool_from_toml
from plait.model.shape import ModelShape
from plait.planner.pools.selection import DeviceCounts, Selection
from plait.planner.problem.program_profiles import MEGATRON_DEEPSPEED
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import layout_text
from plait.planner.search.search import search

OPT_350M = ModelShape(
    layers=24, width=1024, heads=16, kv_heads=16, head_width=64, ffn=4096, vocabulary=50272, sequence=2048,
    norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True,
)  # fmt: skip
WORK: Workload = workload_of(
    OPT_350M, sequence=2048, batch_sequences=1024, precision="tf32", attention="unfused", moments=2
)
A100_PRICE, V100_PRICE = 3.67, 2.48
"""US dollars an hour of one device, Google Cloud on demand in us-central1, from memory."""
NEAR, FAR = 6e9, 1.2e9
"""Bytes a second that Sailor measured between two nodes of a region, and of two regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A pool, the machines of Sailor's answer, and what its simulator said of it."""

    zones: Mapping[str, Mapping[str, int]]
    """Devices by zone and kind; a zone that begins with "far" is in another region."""
    answer: DeviceCounts
    sailor_s: float
    layout: Layout | None = None
    """None where plait has no such layout: it mixes tensor degrees."""
    others: tuple[DeviceCounts, ...] = field(default=())
    """Other selections of the pool that are worth a look."""


PROBLEMS: Mapping[str, Problem] = {
    "32 A100": Problem(
        zones={"z": {"A100-40GB": 32}}, answer=(32,), sailor_s=7.99, layout=Layout(replicate=8, tensor=4)
    ),
    "32 A100, the other layout": Problem(
        zones={"z": {"A100-40GB": 32}}, answer=(32,), sailor_s=7.71, layout=Layout(replicate=16, tensor=2)
    ),
    "128 A100": Problem(
        zones={"z": {"A100-40GB": 128}}, answer=(128,), sailor_s=2.40, layout=Layout(replicate=32, tensor=4)
    ),
    "32 A100 + 96 V100": Problem(
        zones={"z": {"A100-40GB": 32, "V100": 96}}, answer=(32, 96), sailor_s=5.88, others=((32, 0), (0, 96))
    ),
    "32 A100 + 32 V100": Problem(
        zones={"z": {"A100-40GB": 32, "V100": 32}}, answer=(32, 32), sailor_s=7.40, others=((32, 0),)
    ),
    "5 zones of 32 A100": Problem(
        zones={**{f"near {n}": {"A100-40GB": 32} for n in range(4)}, "far": {"A100-40GB": 32}},
        answer=(32, 32, 32, 32, 0),
        sailor_s=2.41,
        others=((32, 32, 32, 32, 32), (32, 32, 0, 0, 0), (32, 0, 0, 0, 0)),
    ),
    "0.2 steps a second, cheapest": Problem(
        zones={"z": {"A100-40GB": 128, "V100": 384}}, answer=(64, 0), sailor_s=0.278 * 3600 / 64 / A100_PRICE,
        others=((32, 0), (48, 0), (128, 0)),
    ),
    "1.2 $ a step, fastest": Problem(
        zones={"z": {"A100-40GB": 512}}, answer=(256,), sailor_s=1.51, others=((128,), (512,))
    ),
}  # fmt: skip


def main() -> None:
    """Price and answer all problems; print and save the table."""
    result = {name: _answered(problem) for name, problem in PROBLEMS.items()}
    for name, one in result.items():
        print(name, one)
    print(save("rent", {"problems": result, "prices": {"A100": A100_PRICE, "V100": V100_PRICE}}))


def _answered(problem: Problem) -> Mapping[str, object]:
    pool = _pool(problem)
    found: dict[str, object] = {"sailor_s": round(problem.sailor_s, 3)}
    if problem.layout is not None:
        kept = Constraints(degrees=problem.layout, knobs={"recompute": "none"})
        ours = _searched(Selection(pool, problem.answer), kept)
        found |= {"same_layout_s": None if ours is None else round(float(ours.step_s.min()), 3)}
    for counts in (problem.answer, *problem.others):
        selection = Selection(pool, counts)
        found[str(selection)] = _best(_searched(selection, Constraints()), selection)
    return found


def _searched(selection: Selection, constraints: Constraints) -> Search | None:
    try:
        return search(WORK, selection.cluster, profile=MEGATRON_DEEPSPEED, constraints=constraints, tolerance=0.0)
    except PlaitError:
        return None


def _best(found: Search | None, selection: Selection) -> Mapping[str, object]:
    """The fastest of all layouts, and of those that Sailor has."""
    if found is None:
        return {"step_s": None}
    c = found.candidates
    plain = (c.shard == 1) & (c.recompute == 0) & (c.context == 1)
    rate = sum((entry.price or 0) * count for entry, count in selection.taken)
    fastest = int(found.step_s.argmin())
    best: dict[str, object] = {
        "step_s": round(float(found.step_s[fastest]), 3),
        "layout": layout_text(c.row(fastest)),
        "usd_a_step": round(rate * float(found.step_s[fastest]) / 3600, 3),
    }
    if plain.any():
        index = int(np.where(plain, found.step_s, np.inf).argmin())
        best |= {"as_sailor_s": round(float(found.step_s[index]), 3), "as_sailor": layout_text(c.row(index))}
    return best


def _pool(problem: Problem) -> Pool:
    text = ""
    for zone, kinds in problem.zones.items():
        for kind, count in kinds.items():
            price = A100_PRICE if kind.startswith("A100") else V100_PRICE
            text += f'[[device]]\nname = "{kind}"\ncount = {count}\nper_node = 4\nzone = "{zone}"\nprice = {price}\n'
    for one in problem.zones:
        text += f'[[link]]\nfrom = "{one}"\nto = "{one}"\nbandwidth = {NEAR}\n'
    for one, other in combinations(problem.zones, 2):
        far = other.startswith("far")
        rate, egress = (FAR, 0.02) if far else (NEAR, 0.01)
        text += f'[[link]]\nfrom = "{one}"\nto = "{other}"\nbandwidth = {rate}\negress_price = {egress}\n'
    return pool_from_toml(text.encode(), "pool")


if __name__ == "__main__":
    main()
