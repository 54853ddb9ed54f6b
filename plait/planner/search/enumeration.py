"""Every layout that a number of devices allows for a workload, within what a recipe has settled: as candidates, or
counted by the reason against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import ceil, gcd
from typing import Generic, TypeVar

import numpy as np

from plait.errors import PlaitError
from plait.layout import Layout, is_possible
from plait.planner.problem.candidates import CANDIDATE_COLUMNS, RECOMPUTE_MODES, SCHEDULES, SHARDED_STATES, Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE, SendModel, SoftwareProfile
from plait.planner.problem.workload import ExpertRanks, Workload
from plait.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The part of a layout that a person has named; whatever is not named here is for the search to choose."""

    degrees: Layout | None = None
    """The degrees of all axes, of which only the degrees count; None where the search is free to choose them."""
    knobs: Mapping[str, int | str] = field(default_factory=dict)
    """Named values of other columns of `Candidates`: virtual, schedule, recompute, shard_what, micro_sequences,
    expert."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage of the named pipeline, as validity.check_layout accepts them; they settle how many stages a
    rank holds, too."""
    shares: tuple[int, ...] = ()
    """Sequences per step of each data-parallel rank, as validity.check_shares accepts them."""
    micro_sequences_exactly: int = 0
    """Sequences of a micro-batch even if that is more than an equal share of the batch; 0 leaves it open."""

    def __bool__(self) -> bool:
        named = self.degrees or self.knobs or self.stage_layers or self.shares or self.micro_sequences_exactly
        return bool(named)

    @property
    def has_micro_sequences(self) -> bool:
        """Whether the size of a micro-batch is settled."""
        return bool(self.micro_sequences_exactly or self.knobs.get("micro_sequences"))

    @property
    def virtual_stages(self) -> int | None:
        """Stages on each rank of the pipeline, where that is settled."""
        if self.stage_layers:
            return len(self.stage_layers) // (self.degrees.pipeline if self.degrees else 1)
        named = self.knobs.get("virtual")
        return None if named is None else int(named)


LONGEST_MICRO_TOKENS = 65536
"""Tokens of a micro-batch on one device beyond which products become no faster."""
SHORTEST_PIECE_TOKENS = 256
"""Tokens of a sequence per device below which context parallelism costs more in messages than it saves."""
MOST_VIRTUAL_STAGES = 12
"""Virtual stages per rank beyond which an interleaved schedule waits for its messages."""

TOO_FEW_LAYERS = "more pipeline stages than layers"
LAYERS_JOINED = "layers that use each other's keys or the embedding cannot be parted by a pipeline"
STATES_PASS_ON = "the states of linear attention pass along whole sequences, which the context axis would cut"
HEADS_INDIVISIBLE = "the number of heads does not divide by the tensor axis"
SEQUENCE_INDIVISIBLE = (
    "sequences do not divide into twice as many pieces as the context axis has ranks, of 128 tokens or more"
)
BATCH_TOO_SMALL = "more groups of devices than sequences in a step"
CHUNKS_UNEVEN = "layers do not divide evenly over the chunks of an interleaved pipeline"
GPIPE_NEEDLESS = "gpipe keeps every micro-batch in memory and is no faster than 1f1b"
INCOMPATIBLE_SPLITS = "ways of splitting that exclude each other"
MICRO_BATCH_TOO_LONG = "micro-batches larger than they need to be for full speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnumeratedLayouts:
    """Layouts that are possible, and how many are not, by reason.

    Rows stand in triples that differ in `recompute` alone (none, selective, full), unless that is named.
    """

    candidates: Candidates
    refused: Mapping[str, int]


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept(Generic[_T]):
    """What is left of some choices, and how many layouts are refused, by reason."""

    values: _T
    refused: Mapping[str, int] = field(default_factory=dict[str, int])


def enumerate_layouts(
    workload: Workload, devices: int, constraints: Constraints, profile: SoftwareProfile = PLAIT_PROFILE
) -> EnumeratedLayouts:
    """All layouts of this many devices; raises PlaitError where the constraints leave none.

    gpipe is among them unasked only where messages travel "ahead": with all micro-batches under way, no rank waits for
    a slow cable.
    """
    named = constraints.stage_layers
    assert not named or (sum(named) == workload.layers)
    refused: Counter[str] = Counter()
    columns: dict[str, list[np.ndarray]] = {name: [] for name in CANDIDATE_COLUMNS}
    for degrees in _degrees(devices, constraints):
        if reason := _against(workload, degrees, 1 if constraints.degrees else SHORTEST_PIECE_TOKENS):
            refused[reason] += 1
            continue
        options = _options(workload, degrees, constraints, profile)
        refused.update(options.refused)
        for name, column in options.values.items():
            columns[name].append(column)
    if not sum(map(len, columns["tensor"])):
        raise PlaitError(_nothing_left(workload, devices, constraints, refused))
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    return EnumeratedLayouts(candidates=Candidates(**whole, layer_split=named or "balanced"), refused=refused)


def _degrees(devices: int, constraints: Constraints) -> Iterator[Layout]:
    """Degrees whose product is the number of devices; "replicate" stands for all data-parallel ranks, sharded or
    not."""
    if named := constraints.degrees:
        if named.world_size != devices:
            raise PlaitError(
                f"[layout] names {named}, and the cluster has {counted(devices, 'device')}; name degrees whose "
                "product is "
                f"{devices}"
            )
        yield replace(named, replicate=named.data_parallel_degree, shard=1)
        return
    for pipeline in divisors(devices):
        for tensor in divisors(devices // pipeline):
            for context in divisors(devices // pipeline // tensor):
                parallel = devices // pipeline // tensor // context
                yield Layout(pipeline=pipeline, replicate=parallel, context=context, tensor=tensor)


def _against(w: Workload, degrees: Layout, least_piece_tokens: int) -> str | None:
    """Why these degrees cannot run the workload, or why they would be useless; None for valid ones."""
    if degrees.pipeline > w.layers:
        return TOO_FEW_LAYERS
    if w.one_stage and degrees.pipeline > 1:
        return LAYERS_JOINED
    if w.heads % degrees.tensor or (w.norms_all_heads and degrees.tensor > 1) or w.delta_key_heads % degrees.tensor:
        return HEADS_INDIVISIBLE
    if w.delta_key_heads and degrees.context > 1:
        return STATES_PASS_ON
    piece = w.sequence / degrees.context
    if degrees.context > 1 and (w.sequence % (2 * degrees.context) or piece < least_piece_tokens):
        return SEQUENCE_INDIVISIBLE
    return BATCH_TOO_SMALL if degrees.replicate > w.batch_sequences else None


def _options(
    w: Workload, degrees: Layout, constraints: Constraints, profile: SoftwareProfile
) -> _Kept[dict[str, np.ndarray]]:
    """The product of all other knobs for these degrees."""
    sizes = _micros(w, degrees, constraints)
    schedules = _orders(w, degrees.pipeline, constraints, profile.send_model)
    micros, splits, orders = sizes.values, _splits(degrees, constraints), schedules.values
    refused = Counter(sizes.refused)
    refused.update(schedules.refused)
    named = constraints.knobs.get("expert")
    experts = [int(named)] if named else divisors(experts_and_ranks(w, degrees))
    combinations = []
    for (shard, what), (virtual, schedule) in product(splits, orders):
        run_as = what if what != "gradients" or profile.lasting_weights != "for each pass" else "optimizer"
        if _clash(
            min(degrees.pipeline, 2), min(shard, 2), min(degrees.context, 2), min(degrees.tensor, 2), run_as, schedule
        ):
            refused[INCOMPATIBLE_SPLITS] += len(micros) * len(experts)
        else:
            combinations.append((shard, SHARDED_STATES.index(what), virtual, SCHEDULES.index(schedule)))
    again = _pinned(constraints, "recompute", RECOMPUTE_MODES)
    places = np.arange(len(combinations)), micros, np.arange(len(experts)), again
    combination, micro, expert_place, recompute = (index.ravel() for index in np.meshgrid(*places, indexing="ij"))
    may_share_out = np.array(
        [
            [
                _may_share_out(w.expert_ranks, degrees.replicate // shard, shard, what, degrees.context, n)
                for n in experts
            ]
            for shard, what, _, _ in combinations
        ],
        dtype=bool,
    ).reshape(-1, len(experts))
    shard, what, virtual, schedule = np.array(combinations, dtype=np.int64).reshape(-1, 4)[combination].T
    ones = np.ones(len(combination), dtype=np.int64)
    columns = {
        "pipeline": degrees.pipeline * ones,
        "virtual": virtual,
        "replicate": degrees.replicate // shard,
        "shard": shard,
        "shard_what": what,
        "context": degrees.context * ones,
        "tensor": degrees.tensor * ones,
        "sequence_parallel": (degrees.tensor > 1 and profile.other.divides_stream) * ones,
        "expert": np.array(experts, dtype=np.int64)[expert_place],
        "micro_sequences": micro.astype(np.int64),
        "recompute": recompute.astype(np.int64),
        "schedule": schedule,
    }
    possible = may_share_out[combination, expert_place] & ~_gathers_a_shared_table(w, columns)
    refused[INCOMPATIBLE_SPLITS] += int((~possible).sum())
    columns = {name: column[possible] for name, column in columns.items()}
    useful = constraints.has_micro_sequences | ~_outgrows_caches(w, columns, profile)
    refused[MICRO_BATCH_TOO_LONG] += int((~useful).sum())
    return _Kept(values={name: column[useful] for name, column in columns.items()}, refused=refused)


def _gathers_a_shared_table(w: Workload, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mask of layouts whose stages share an output matrix that each gathers: INCOMPATIBLE."""
    apart = (columns["virtual"] > 1) & (columns["shard"] > 1) & (w.heads_in_all > 1)
    return apart & (columns["shard_what"] >= SHARDED_STATES.index("gradients"))


def _outgrows_caches(w: Workload, columns: Mapping[str, np.ndarray], profile: SoftwareProfile) -> np.ndarray:
    """Mask of micro-batches that exceed a processor's caches; never where each micro-batch gathers parameters."""
    tokens = columns["micro_sequences"] * w.sequence
    gathers = (columns["shard_what"] == SHARDED_STATES.index("parameters")) & (columns["pipeline"] == 1)
    return (tokens > profile.cpu_cache_tokens * columns["context"]) & (columns["micro_sequences"] > 1) & ~gathers


def _micros(w: Workload, degrees: Layout, constraints: Constraints) -> _Kept[list[int]]:
    """Micro-batch sizes to enumerate: the divisors of a replica's share of the batch, and where two of them are far
    apart some between them, with which the last micro-batches have a sequence less."""
    part = ceil(w.batch_sequences / degrees.replicate)
    if constraints.micro_sequences_exactly:
        return _Kept(values=[constraints.micro_sequences_exactly])
    if requested := constraints.knobs.get("micro_sequences"):
        return _Kept(values=[min(int(requested), part)])
    every = without_gaps(part)
    useful = [m for m in every if m == 1 or m * w.sequence <= LONGEST_MICRO_TOKENS * degrees.context]
    return _Kept(values=useful, refused=Counter({MICRO_BATCH_TOO_LONG: len(every) - len(useful)}))


def _splits(degrees: Layout, constraints: Constraints) -> list[tuple[int, str]]:
    """Pairs (shard degree, what it splits); the remaining factor of the data-parallel degree is `replicate`."""
    requested = constraints.knobs.get("shard_what")
    whats = [str(requested)] if requested else ["optimizer", "parameters"]
    shards = [constraints.degrees.shard] if constraints.degrees else divisors(degrees.replicate)
    return [(shard, what) for shard in shards for what in (whats if shard > 1 else ["nothing"])]


def _orders(w: Workload, pipeline: int, constraints: Constraints, sends: SendModel) -> _Kept[list[tuple[int, str]]]:
    """Chunks of layers on a device and the schedule of the pipeline."""
    if pipeline == 1:
        return _Kept(values=[(1, "1f1b")])
    refused: Counter[str] = Counter()
    requested, requested_chunks = constraints.knobs.get("schedule"), constraints.virtual_stages
    found = [(1, "1f1b"), (1, "zero-bubble")] if pipeline > 1 else []
    for virtual in range(2, min(MOST_VIRTUAL_STAGES, w.layers // pipeline) + 1):
        if w.layers % (pipeline * virtual) and (w.layers + 2) % (pipeline * virtual):
            refused[CHUNKS_UNEVEN] += 1
        else:
            found.append((virtual, "interleaved"))
    if requested == "gpipe" or sends == "ahead":
        found.append((1, "gpipe"))
    else:
        refused[GPIPE_NEEDLESS] += 1
    kept = [(v, s) for v, s in found if requested in (None, s) and requested_chunks in (None, v)]
    if kept or not constraints.degrees:
        return _Kept(values=kept, refused=refused)
    # A person may ask for chunks that do not divide evenly, if there are layers for them.
    chunks = requested_chunks or (2 if requested == "interleaved" else 1)
    if chunks * pipeline > w.layers:
        refused[TOO_FEW_LAYERS] += 1
        return _Kept(values=[], refused=refused)
    named = (chunks, str(requested or ("interleaved" if chunks > 1 else "1f1b")))
    return _Kept(values=[named], refused=refused)


def _pinned(constraints: Constraints, knob: str, names: Sequence[str]) -> list[int]:
    requested = constraints.knobs.get(knob)
    return [names.index(str(requested))] if requested else list(range(len(names)))


@cache
def _clash(pipeline: int, shard: int, context: int, tensor: int, what: str, schedule: str) -> bool:
    """Whether INCOMPATIBLE forbids it; axes count as there (2) or not (1)."""
    plain = Layout(pipeline=pipeline, shard=shard, context=context, tensor=tensor)
    split = "optimizer" if what == "nothing" else what
    return not is_possible(replace(plain, shard_what=split, schedule=schedule))


def without_gaps(share: int) -> list[int]:
    """The divisors of a share and its half, rounded up, the smallest first. Where none lies between a power of two and
    the next one, there is the size that divides the share most evenly into as few micro-batches as that next one would.
    """
    sizes = {*divisors(share), ceil(share / 2)}
    for most in (1 << bits for bits in range(1, share.bit_length())):
        if not any(most // 2 < size <= most for size in sizes):
            sizes.add(ceil(share / ceil(share / most)))
    return sorted(sizes)


def divisors(number: int) -> list[int]:
    """All divisors, the smallest first."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _nothing_left(w: Workload, devices: int, constraints: Constraints, refused: Counter[str]) -> str:
    if constraints.degrees:
        order = (
            TOO_FEW_LAYERS,
            LAYERS_JOINED,
            HEADS_INDIVISIBLE,
            STATES_PASS_ON,
            SEQUENCE_INDIVISIBLE,
            BATCH_TOO_SMALL,
            INCOMPATIBLE_SPLITS,
        )
        reason = next(reason for reason in order if refused[reason])
        return f"the layout named under [layout] cannot carry this model and batch ({reason}); change it"
    return (
        f"no layout of {counted(devices, 'device')} carries {counted(w.batch_sequences, 'sequence')} a step, "
        f"{counted(w.layers, 'layer')} and {counted(w.heads, 'head')}; raise train.batch_tokens to "
        f"{devices * w.sequence} or more, or take fewer devices"
    )


def experts_and_ranks(w: Workload, degrees: Layout) -> int:
    """The number whose divisors `expert` may be: what divides the experts and the ranks that may share them out. In
    `degrees`, `replicate` stands for all data-parallel ranks, sharded or not."""
    if not w.experts:
        return 1
    ranks = degrees.replicate * degrees.context
    return gcd(w.experts, ranks if w.expert_ranks == "copies" else ranks * degrees.tensor)


@cache
def _may_share_out(
    expert_ranks: ExpertRanks, replicate: int, shard: int, shard_what: int, context: int, expert: int
) -> bool:
    """Whether the ranks of such a layout can share out experts so: where plait runs it, by the list of what excludes
    what."""
    what = "parameters" if SHARDED_STATES[shard_what] == "parameters" else "optimizer"
    layout = Layout(replicate=replicate, shard=shard, shard_what=what, context=context, expert=expert)
    return expert == 1 or expert_ranks == "any" or is_possible(layout)
