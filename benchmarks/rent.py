"""Sailor's published runs, layer times and choices of machines (SOSP 2025), beside plait's forecasts and choices.

    python -m benchmarks.rent

Its program is Megatron-DeepSpeed in float32 with TF32 products; `program_profiles.SAILOR` describes it. Three tables:
steps that Sailor ran on GH200s (published/sailor_runs.csv), layers that it timed (published/sailor_layers.csv), and the
machines that it chose from pools of A100s and V100s. Nothing was run there: its simulator forecast those steps from the
timed layers, as `_by_sailor` does again. Facts are from github.com/eth-easl/sailor, commit cf2c8e3. Written to
benchmarks/results.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from math import ceil, log2
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.pairing import save
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.catalog import Link, find_device, find_link
from plait.machines.cluster import Cluster, Island
from plait.machines.pool import Pool, pool_from_toml
from plait.model.shape import ModelShape
from plait.planner.heterogeneous.batch_shares import equal_shares
from plait.planner.pools.selection import DeviceCounts, Selection
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.program_profiles import SAILOR
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import layout_text
from plait.planner.search.search import search
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.step_time import estimate_step_time

TABLES = Path(__file__).parent / "published"
OPT_350M = ModelShape(
    layers=24, width=1024, heads=16, kv_heads=16, head_width=64, ffn=4096, vocabulary=50688, sequence=2048,
    norm="layernorm", activation="gelu", positions="learned", bias="all", tied=False,
)  # fmt: skip
# Its pipeline ends in a norm: the "logits" of the loss are the 2,560 numbers of the stream, and there is no head.
GPT_NEO = replace(
    OPT_350M, layers=32, width=2560, heads=32, kv_heads=32, head_width=80, ffn=10240, vocabulary=2560
)  # fmt: skip
SHAPES = {"OPT-350M": OPT_350M, "GPT-Neo-2.7B": GPT_NEO}
STAGES: Mapping[tuple[str, int], tuple[int, ...]] = {
    ("OPT-350M", 2): (11, 13),
    ("OPT-350M", 4): (4, 7, 7, 6),
    ("GPT-Neo-2.7B", 2): (15, 17),
    ("GPT-Neo-2.7B", 4): (6, 9, 9, 8),
    ("GPT-Neo-2.7B", 8): (2, 5, 5, 5, 4, 4, 4, 3),
}
"""Layers of each stage: DeepSpeed counts embedding and head as layers."""
# As Sailor measured (providers/network_coeffs_all_homo.json): 125 of 150 GB/s from one GH200 of a node to another, 92.6
# GB/s from node to node by four cards of 25.
ALPS_INSIDE = replace(find_link("nvlink4"), name="four GH200", reached=0.83, all_reduce_reached=0.83)
ALPS_BETWEEN = replace(find_link("slingshot-11"), name="four cards of Alps", bytes_per_s=25e9, reached=0.92)
GOOGLE_CLOUD = replace(SAILOR, name="sailor on Google Cloud", launch_s=43e-6)
"""The same layer of one sequence on four A100 takes 4.4 ms in place of 3.2: slower hosts."""
WORK: Workload = workload_of(
    OPT_350M, sequence=2048, batch_sequences=1024, precision="tf32", attention="unfused", moments=2
)
A100_PRICE, V100_PRICE = 3.673385, 2.859998
"""US dollars an hour of one device, as Sailor counts (simulations/constants.py)."""
NEAR, FAR = 6e9, 1.2e9
"""Bytes a second that Sailor measured between two nodes of a region, and of two regions."""
PAIR_GBYTES_PER_S = {
    "A100 SXM 40GB": (-0.0024414231, 0.1408627339, 1.1168227571),
    "V100 SXM2": (0.0044083806, 0.0465799322, 0.8793574712),
}
"""Coefficients of a device's rate to one of another node, by the logarithm of a message in MB (Sailor's fit)."""
BUCKET_BYTES = 5e8
WITHIN = 0.15


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


TWO_ZONES = {zone: {"A100-40GB": 128, "V100": 128} for zone in ("near 0", "near 1")}
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
        zones=TWO_ZONES, answer=(64, 0, 0, 0), sailor_s=0.278 * 3600 / 64 / A100_PRICE,
        others=((48, 0, 0, 0), (56, 0, 0, 0), (128, 0, 0, 0)),
    ),
    "1.2 $ a step, fastest": Problem(
        zones=TWO_ZONES, answer=(128, 0, 128, 0), sailor_s=1.51, others=((128, 0, 0, 0), (128, 128, 128, 128))
    ),
}  # fmt: skip


def main() -> None:
    """Price the runs and the layers, answer all problems; print and save the tables."""
    runs = [priced_run(row) for row in rows_of("sailor_runs.csv")]
    for run in runs:
        print("run", *run.values())
    summary = {model: _summary([run for run in runs if run["model"] == model]) for model in SHAPES}
    print(summary)
    layers = [priced_layer(row) for row in rows_of("sailor_layers.csv")]
    for layer in layers:
        print("layer", *layer.values())
    result = {name: _answered(problem) for name, problem in PROBLEMS.items()}
    for name, one in result.items():
        print(name, one)
    prices = {"A100": A100_PRICE, "V100": V100_PRICE}
    print(save("rent", {"runs": runs, "errors": summary, "layers": layers, "problems": result, "prices": prices}))


def priced_run(row: Mapping[str, str]) -> dict[str, object]:
    """A step that Sailor ran on nodes of four GH200, each a tensor group, and plait's forecast of it."""
    pipeline, batch, measured_s = int(row["pipeline"]), int(row["batch"]), float(row["step_s"])
    workload = workload_of(
        SHAPES[row["model"]], sequence=2048, batch_sequences=batch, precision="tf32", attention="unfused", moments=2
    )
    kept = Constraints(
        degrees=Layout(pipeline=pipeline, replicate=int(row["replicate"]), tensor=4),
        knobs={"recompute": "none", **({"schedule": "1f1b"} if pipeline > 1 else {})},
        micro_sequences_exactly=int(row["micro"]),
        stage_layers=STAGES.get((row["model"], pipeline), ()),
    )
    found = search(workload, _alps(int(row["nodes"])), profile=SAILOR, constraints=kept, tolerance=0.0)
    step_s = float(found.step_s.min())
    return {**row, "step_s": measured_s, "plait_s": round(step_s, 4), "error": round(step_s / measured_s - 1, 4)}


def _summary(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    errors = [abs(float(str(run["error"]))) for run in runs]
    within = sum(error <= WITHIN for error in errors)
    return {"runs": len(errors), "within": within, "median": round(median(errors), 4), "most": max(errors)}


def priced_layer(row: Mapping[str, str]) -> dict[str, object]:
    """Milliseconds of one layer, forward and backward, as Sailor timed it and by plait."""
    device, tensor, sequences = row["device"], int(row["tensor"]), int(row["sequences"])
    island = Island(device=find_device(device), per_node=tensor, nodes=1, inside=_inside(device))
    cluster = Cluster(name=device, islands=(island,), between=find_link("ethernet-100g"))
    profile = SAILOR if device == "GH200" else GOOGLE_CLOUD
    candidates = Candidates.from_rows([{"tensor": tensor, "micro_sequences": sequences}])
    inputs = CostInputs(
        workload=replace(WORK, batch_sequences=sequences), cluster=cluster, candidates=candidates, profile=profile
    )
    times = estimate_step_time(inputs)
    whole = times.products + times.scores + times.stream + times.tensor + times.host
    ours_ms = 1e3 * float(whole[0]) / WORK.layers
    timed_ms = float(row["layer_ms"])
    return {
        "device": device,
        "tensor": tensor,
        "sequences": sequences,
        "timed_ms": timed_ms,
        "plait_ms": round(ours_ms, 3),
        "error": round(ours_ms / timed_ms - 1, 3),
    }


def _alps(nodes: int) -> Cluster:
    island = Island(device=find_device("GH200"), per_node=4, nodes=nodes, inside=ALPS_INSIDE)
    return Cluster(name=f"{nodes} nodes of Alps", islands=(island,), between=ALPS_BETWEEN)


def _inside(device: str) -> Link:
    return ALPS_INSIDE if device == "GH200" else find_link(find_device(device).inside)


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
        return search(WORK, selection.cluster, profile=GOOGLE_CLOUD, constraints=constraints, tolerance=0.0)
    except PlaitError:
        return None


def _best(found: Search | None, selection: Selection) -> Mapping[str, object]:
    """The fastest of all layouts, of those that Sailor has, and of these the one whose longer time, by plait or by
    Sailor's simulator, is shortest."""
    if found is None:
        return {"step_s": None}
    c = found.candidates
    plain = (c.shard == 1) & (c.recompute == 0) & (c.context == 1) & (c.schedule <= 1) & (c.virtual == 1)
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
    by_sailor = {int(one): _by_sailor(found, int(one)) for one in np.flatnonzero(plain & (c.pipeline == 1))}
    both = {one: max(float(found.step_s[one]), theirs_s) for one, theirs_s in by_sailor.items() if theirs_s}
    if both:
        index = min(both, key=lambda one: both[one])
        best |= {
            "both": layout_text(c.row(index)),
            "both_plait_s": round(float(found.step_s[index]), 3),
            "both_sailor_s": round(by_sailor[index] or 0.0, 3),
        }
    return best


def _by_sailor(found: Search, index: int) -> float | None:
    """Seconds of a step as Sailor's simulator sums it up, of layouts of copies and tensor groups within one region: its
    timed layers, and gradients that go around in buckets at the rate of a single pair of devices. Copies on different
    devices have the sequences that plait gives them."""
    row = found.candidates.row(index)
    tensor, copies = int(row["tensor"]), int(row["replicate"])
    kinds = [i.device.name for i in found.cluster.islands for _ in range(i.n_devices // tensor)]
    assigned, at_once, times = found.assignment(index), found.micro_sequences(index), _layer_times()
    shares = assigned.sequences_per_replica if assigned else equal_shares(WORK.batch_sequences, copies)
    computing = 0.0
    for kind, share, micro in zip(kinds, shares, at_once * (copies // len(at_once)), strict=True):
        if (kind, tensor, micro) not in times:
            return None
        once_s, update_s = times[kind, tensor, micro]
        computing = max(computing, ceil(share / micro) * once_s + update_s)
    weights = 24 * 12_596_224 + 2 * 50_304 * 1024 + 2048 * 1024
    rates = [PAIR_GBYTES_PER_S[kind] for kind in dict.fromkeys(kinds)]
    left, summing = 4.0 * weights / tensor, 0.0
    while left > 0:
        bucket = min(left, BUCKET_BYTES)
        summing += max(2 * (copies - 1) * _pair_s(bucket / copies, rate) for rate in rates)
        left -= bucket
    return computing + summing


def _pair_s(message_bytes: float, rate: tuple[float, float, float]) -> float:
    size = log2(message_bytes / 1e6)
    return message_bytes / 1e9 / (rate[0] * size**2 + rate[1] * size + rate[2])


@cache
def _layer_times() -> dict[tuple[str, int, int], tuple[float, float]]:
    """Seconds of one micro-batch through the whole model, and of the update, by device, tensor degree and sequences."""
    return {
        (row["device"], int(row["tensor"]), int(row["sequences"])): (
            1e-3 * (float(row["embedding_ms"]) + 24 * float(row["layer_ms"]) + float(row["head_ms"])),
            1e-3 * float(row["update_ms"]),
        )
        for row in rows_of("sailor_layers.csv")
    }


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of one of Sailor's tables."""
    with (TABLES / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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
