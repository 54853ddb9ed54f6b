"""Which rectangle of which weight each rank holds: a pure function of layout and shape.

Note [same box, same sum]: ranks that hold the same rectangle of a weight always see different work: other sequences,
other tokens of a sequence, or another use of the weight (an embedding that is also the head). So the gradient of a
rectangle is the sum over all ranks that hold it, for every mix of parallelisms, and each rectangle is counted once
in a norm and written once to a checkpoint by one of its holders.

Note [one table a rank]: heads in the middle and prediction ahead need the vocabulary's tables on more than two stages,
and a rank with several stages may need one on several of them. The first of its parts that needs it holds it, and the
others compute with that very weight: its gradient is complete when that part's last backward pass is, for a
micro-batch passes the later stages first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

from plait.layout import AXES, Layout, equal_share
from plait.model.names import expert_of, layer_of
from plait.model.shape import ModelPart, ModelShape, weight_sizes, whole_model
from plait.model.weights import describe_weight, holds_weight, is_trained, tables_used

AN_EXPERT = "layers.0.feedforward.experts.0.up.weight"
"""Any expert's weight: all are held alike."""

Range = tuple[int, int]
"""(first index, length) of a range along one dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a global tensor of shape `shape`: `extent` numbers along each dim, from `offset` on."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return prod(self.extent)


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box(shape=tuple(shape), offset=(0,) * len(shape), extent=tuple(shape))


def model_parts_of(shape: ModelShape, layout: Layout, pipeline: int) -> tuple[ModelPart, ...]:
    """The parts of the model that a coordinate of the pipeline holds, in the model's order."""
    if not layout.stage_layers:
        return (whole_model(shape),)
    stages = len(layout.stage_layers)
    first = [sum(layout.stage_layers[:stage]) for stage in range(stages)]
    parts: list[ModelPart] = []
    for stage in range(pipeline, stages, layout.pipeline):
        layers = tuple(range(first[stage], first[stage] + layout.stage_layers[stage]))
        part = ModelPart(embeds=stage == 0, layers=layers, ends=stage == stages - 1)
        held = frozenset[str]().union(*(tables_used(one, shape) for one in parts))
        parts.append(replace(part, borrows=tuple(sorted(held & tables_used(part, shape)))))
    return tuple(parts)


def weight_boxes(shape: ModelShape, layout: Layout, coordinates: Mapping[str, int]) -> dict[str, Box]:
    """The box of each weight on the rank at these coordinates, as the pipeline and tensor axes split the model, and
    `expert` its experts, in the model's order."""
    parts = model_parts_of(shape, layout, coordinates["pipeline"])
    index = layout.expert_index(layout.rank(coordinates))
    return {
        name: cut_box(name, shape, layout.tensor, coordinates["tensor"])
        for name in weight_sizes(shape)
        if any(holds_weight(part, name, shape) for part in parts) and holds_expert(name, shape, layout, index)
    }


def holds_expert(name: str, shape: ModelShape, layout: Layout, index: int) -> bool:
    """Whether a rank with this part of the experts has a weight, if its stage does; all have what is no expert's."""
    expert = expert_of(name)
    if expert is None or not is_shared_out(name, layout):
        return True
    first, count = equal_share(shape.size_of("experts"), layout.expert, index)
    return first <= expert < first + count


def is_shared_out(name: str, layout: Layout) -> bool:
    """Whether ranks that see different tokens hold a weight apart: an expert's where `expert` groups them."""
    return layout.expert > 1 and expert_of(name) is not None


def cut_box(name: str, shape: ModelShape, tensor: int, index: int) -> Box:
    """Box of a weight on rank `index` of the tensor axis. Dims of heads are cut between heads, other dims anywhere."""
    weight = describe_weight(name, shape)
    sizes, dim = weight.sizes, weight.cut
    if dim is None or tensor == 1:
        return whole_box(sizes)
    layer = layer_of(name)
    shape = shape if layer is None else shape.at(layer)
    match weight.dims[dim]:
        case "delta_keys" | "delta_values" | "delta_heads" if shape.delta is not None:
            each = sizes[dim] // shape.delta.key_heads
            first, length = (each * number for number in equal_share(shape.delta.key_heads, tensor, index))
        case "heads" | "queries" | "query_heads" | "key_value_heads":
            each = sizes[dim] // shape.heads
            first, length = (each * number for number in equal_share(shape.heads, tensor, index))
        case "kv_heads":
            first, length = (shape.head_width * number for number in kv_heads_of(shape, tensor, index))
        case _:
            first, length = equal_share(sizes[dim], tensor, index)
    offset, extent = [0] * len(sizes), list(sizes)
    offset[dim], extent[dim] = first, length
    return Box(shape=sizes, offset=tuple(offset), extent=tuple(extent))


def kv_heads_of(shape: ModelShape, tensor: int, index: int) -> Range:
    """The key/value heads that rank `index` of `tensor` holds.

    Each rank holds its own; where there are more ranks than heads, several ranks hold the same one; where query groups
    would be separated between ranks, each holds all of them.
    """
    needs = [_kv_heads_needed(shape, *equal_share(shape.heads, tensor, rank)) for rank in range(tensor)]
    torn = any(one != other and sum(one) > other[0] for one, other in pairwise(needs))
    return (0, shape.kv_heads) if torn else needs[index]


def _kv_heads_needed(shape: ModelShape, first: int, queries: int) -> Range:
    """The key/value heads that a range of query heads attends to."""
    group = shape.heads // shape.kv_heads
    first_kv = first // group
    return first_kv, (first + queries - 1) // group + 1 - first_kv


def ranks_holding(shape: ModelShape, layout: Layout, name: str, box: Box) -> tuple[int, ...]:
    """All ranks that hold this rectangle of a weight, in order: Note [same box, same sum]."""
    tensors = [index for index in range(layout.tensor) if cut_box(name, shape, layout.tensor, index) == box]
    pipelines = [
        index
        for index in range(layout.pipeline)
        if any(holds_weight(part, name, shape) for part in model_parts_of(shape, layout, index))
    ]
    places = product(pipelines, range(layout.replicate), range(layout.shard), range(layout.context), tensors)
    ranks = (layout.rank(dict(zip(AXES, place, strict=True))) for place in places)
    return tuple(rank for rank in ranks if holds_expert(name, shape, layout, layout.expert_index(rank)))


def ranks_sharing(shape: ModelShape, layout: Layout, name: str, box: Box, shard: int) -> tuple[int, ...]:
    """The holders that update the same elements as the one at coordinate `shard` of the shard axis: those there, too,
    and of an expert those that keep the same part of it."""
    apart = layout.expert_replicas if is_shared_out(name, layout) else 1
    holders = ranks_holding(shape, layout, name, box)
    return tuple(rank for rank in holders if layout.coordinates(rank)["shard"] // apart == shard // apart)


def ranks_splitting(layout: Layout, name: str, rank: int) -> tuple[int, ...]:
    """The ranks, `rank` among them, over which `shard` splits a weight that this rank holds, or its gradients and
    moments: those of the axis that hold it."""
    here = layout.coordinates(rank)
    apart = layout.expert_replicas if is_shared_out(name, layout) else 1
    return tuple(layout.rank({**here, "shard": at}) for at in range(here["shard"] % apart, layout.shard, apart))


def all_expert_splits(layout: Layout) -> list[tuple[int, ...]]:
    """Every set of several ranks over which `shard` splits experts, in the order in which all ranks create process
    groups; none where these are those of all other weights."""
    if layout.expert == 1 or layout.expert_shards == 1:
        return []
    return sorted({ranks_splitting(layout, AN_EXPERT, rank) for rank in range(layout.world_size)})


def all_sharing_sets(shape: ModelShape, layout: Layout) -> list[tuple[int, ...]]:
    """Every set of ranks in the job that shares a weight that learns, in the order in which all ranks create process
    groups."""
    found: set[tuple[int, ...]] = set()
    # Copies, and parts of sequences, hold the same, but for their experts.
    copies = -(-layout.expert // (layout.shard * layout.context))
    parts = layout.context if layout.expert > 1 else 1
    for place in product(*(range(n) for n in (layout.pipeline, copies, layout.shard, parts, layout.tensor))):
        here: dict[str, int] = dict(zip(AXES, place, strict=True))
        pipeline, shard = here["pipeline"], here["shard"]
        firsts = _layers_of_each_kind(shape, layout, pipeline)
        for name, box in weight_boxes(shape, layout, here).items():
            if is_trained(name, shape) and (layer_of(name) is None or layer_of(name) in firsts):  # layers are alike
                found.add(ranks_sharing(shape, layout, name, box, shard))
    return sorted(found)


def _layers_of_each_kind(shape: ModelShape, layout: Layout, pipeline: int) -> set[int]:
    """A layer of each kind in each of a coordinate's stages, and those for prediction ahead."""
    found: set[int] = set()
    for part in model_parts_of(shape, layout, pipeline):
        found |= set({shape.layer_kind(layer): layer for layer in part.layers}.values())
        found |= set(range(shape.layers, shape.all_layers) if part.ends else ())
    return found


def boxes_of_range(box: Box, first: int, last: int) -> Iterator[tuple[Box, int]]:
    """Elements `first` to `last` of a flattened box of one or two dims, as boxes of whole and partial rows. Each box
    comes with the flat index of its first element, in the numbering of `first`."""
    if first >= last:
        return
    width = box.extent[-1]
    row, column = divmod(first, width)
    if column or last - first < width:
        end = min(last, (row + 1) * width)
        yield _rows(box, row, column, 1, end - first), first
        yield from boxes_of_range(box, end, last)
        return
    rows = (last - first) // width
    yield _rows(box, row, 0, rows, width), first
    yield from boxes_of_range(box, first + rows * width, last)


def _rows(box: Box, row: int, column: int, rows: int, columns: int) -> Box:
    if len(box.extent) == 1:
        return replace(box, offset=(box.offset[0] + column,), extent=(columns,))
    return replace(box, offset=(box.offset[0] + row, box.offset[1] + column), extent=(rows, columns))
