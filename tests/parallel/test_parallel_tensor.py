"""`tensor` gives one process' losses, gradients and weights, whatever does not divide."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.launch.values.job import Job, Message
from plait.layout import Layout, equal_share
from plait.model.shape import ModelShape
from plait.parallel.tensor import kv_places, stream_rows
from plait.partition.boxes import kv_heads_of, weight_boxes
from tests.matrix import few_fast
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny

Told = dict[int, list[dict[str, Any]]]
"""What each rank told of each case."""
RunCases = Callable[..., Told]

ORIGIN = {"pipeline": 0, "replicate": 0, "shard": 0, "context": 0, "tensor": 0}
# No size but the heads' is a multiple of 2, 3 or 4.
LLAMA = ModelShape(layers=2, width=20, heads=12, kv_heads=12, head_width=4, ffn=29, vocabulary=283, sequence=5)
GPT2 = replace(LLAMA, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True)
QWEN = replace(LLAMA, bias="qkv", qk_norm=True, tied=True)
RELU = replace(LLAMA, activation="relu2", bias="all")


def case(shape: ModelShape, heads: int, kv_heads: int, layout: dict[str, str] | None = None, **plan: Any) -> Any:
    """A case as JSON values."""
    return {"shape": replace(shape, heads=heads, kv_heads=kv_heads).to_dict(), "layout": layout or {}, "plan": plan}


CASES = {
    2: [
        case(LLAMA, 4, 2),
        case(GPT2, 6, 6),
        case(QWEN, 6, 3, documents="join"),  # a rank's queries 0 1 2 meet the heads 0 0 1
        case(RELU, 4, 1, {"recompute": "full"}),
        case(QWEN, 4, 2, {"recompute": "selective"}),
    ],
    3: [
        case(LLAMA, 6, 2),  # the ranks' queries meet the heads 0 0, 0 1 and 1 1
        case(GPT2, 6, 3),
        case(RELU, 6, 1, documents="join"),
    ],
    4: [
        case(QWEN, 12, 6),  # three queries a rank, in groups of two
        case(LLAMA, 8, 2, {"recompute": "selective"}),
        case(GPT2, 4, 4),
    ],
}


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> RunCases:
    """Run an entry of tensor_entries on so many ranks, over micro-batches of ten tokens in rows of five."""
    folder = tmp_path_factory.mktemp("tensor")
    make_tiny(folder, precision="float64", sequence=5, micro_sequences=2)
    server = RanksOf("tests.parallel.tensor_entries")

    def run(entry: str, ranks: int, cases: list[Any]) -> Told:
        told: Told = {rank: [] for rank in range(ranks)}

        def hear(message: Message) -> None:
            told[message.rank].append(dict(message.values))

        argument = json.dumps({"folder": str(folder), "cases": cases})
        job = Job(entry=entry, argument=argument, world_size=ranks, threads=1)
        server.run(job, on_message=hear)
        return told

    return run


@pytest.mark.parametrize("ranks", few_fast(CASES, 2))
def test_any_shape_gives_the_numbers_of_one_process(ranks: int, run_cases: RunCases) -> None:
    told = run_cases("compare", ranks, CASES[ranks])
    for rank, outcomes in told.items():
        assert len(outcomes) == len(CASES[ranks])
        for asked, outcome in zip(CASES[ranks], outcomes, strict=True):
            shape = ModelShape.from_dict(asked["shape"])
            places = weight_boxes(shape, Layout(tensor=ranks), {**ORIGIN, "tensor": rank})
            assert outcome["units"] == [[name, [*box.offset], [*box.extent]] for name, box in places.items()]
            assert list(outcome["grads"]) == list(outcome["weights"]) == list(places)
            worst = max(outcome["grads"], key=lambda name: outcome["grads"][name])
            assert outcome["grads"][worst] < 1e-10, (worst, asked)
            assert max(outcome["weights"].values()) < 1e-9, asked
            assert max(outcome["totals"], outcome["evaluated"], outcome["norm"]) < 1e-12, asked


def test_between_layers_each_rank_has_its_rows_and_a_part_of_the_norms_gradient(run_cases: RunCases) -> None:
    told = run_cases("look_inside", 4, [case(LLAMA, 4, 4)])
    (first, *others) = (outcome for (outcome,) in told.values())
    assert all(outcome["rows"] == [3] for outcome in (first, *others))
    assert [outcome["reports"] for outcome in (first, *others)] == [True, False, False, False]
    assert first["totals"][1] > 0 and all(outcome["totals"] == [0, 0] for outcome in others)
    assert sum(outcome["own"] for outcome in (first, *others)) == pytest.approx(first["wanted"], rel=1e-12)
    for outcome in (first, *others):
        assert outcome["summed"] == pytest.approx(first["wanted"], rel=1e-12)
        assert outcome["own"] != pytest.approx(first["wanted"], rel=1e-6)


def test_half_precision_stays_near_one_process(run_cases: RunCases) -> None:
    told = run_cases("compare", 2, [case(GPT2, 6, 6, precision="bf16"), case(QWEN, 6, 3, precision="float32")])
    for half, single in told.values():
        # The true gradient of a key's bias is zero: all that is there is rounding.
        errors = [[e for name, e in one["grads"].items() if not name.endswith("k.bias")] for one in (half, single)]
        assert 1e-9 < half["totals"] < 1e-3 and max(errors[0]) < 0.05
        assert half["evaluated"] < 1e-3 and single["evaluated"] < 1e-5
        # The sums of losses may agree to the last bit; gradients that did would mean that nothing was split.
        assert single["totals"] < 1e-5 and 0 < max(errors[1]) < 1e-4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(6, 2, 3), (6, 3, 2), (12, 6, 4), (8, 2, 4), (4, 1, 4), (6, 6, 3), (12, 4, 6), (10, 5, 2), (12, 3, 2), (7, 7, 3)],
)
def test_every_query_meets_its_own_key_and_value_head(heads: int, kv_heads: int, ranks: int) -> None:
    shape = replace(LLAMA, heads=heads, kv_heads=kv_heads)
    for rank in range(ranks):
        first, queries = equal_share(heads, ranks, rank)
        first_kv, held = kv_heads_of(shape, ranks, rank)
        places = kv_places(shape, ranks, rank)
        given = tuple(range(held)) if places is None else places
        # What attention does with fewer key/value heads than queries: each serves as many consecutive ones.
        assert queries % len(given) == 0
        met = [first_kv + given[query * len(given) // queries] for query in range(queries)]
        assert met == [query * kv_heads // heads for query in range(first, first + queries)]


def test_only_torn_groups_cost_a_copy_of_keys_and_values() -> None:
    for heads, kv_heads, ranks in ((8, 4, 2), (8, 2, 4), (8, 1, 4), (6, 6, 3)):
        shape = replace(LLAMA, heads=heads, kv_heads=kv_heads)
        assert all(kv_places(shape, ranks, rank) is None for rank in range(ranks))
    shape = replace(LLAMA, heads=6, kv_heads=2)
    assert [kv_places(shape, 3, rank) for rank in range(3)] == [(0,), None, (1,)]
    shape = replace(LLAMA, heads=6, kv_heads=3)
    assert [kv_places(shape, 2, rank) for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]


def test_rows_are_rounded_up_to_equal_parts() -> None:
    assert [stream_rows(rows, 4) for rows in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert stream_rows(7, 1) == 7
