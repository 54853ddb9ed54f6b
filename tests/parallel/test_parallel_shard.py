"""Whatever `shard` splits, alone and beside other strands, the steps are those of one plain process: to 1e-10."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.checkpoint.manifest import tensor_names
from plait.checkpoint.store import verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from plait.launch.values.job import Job
from plait.layout import Layout, is_possible
from tests.matrix import few_fast
from tests.parallel.precision import gradients_of, squared_errors
from tests.parallel.shard_entries import alone_with
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny

STEPS = 3
BAR = 1e-10
LR = 0.01
Case = dict[str, Any]
Launch = Callable[[str, Any, int], dict[int, dict[str, Any]]]

SHAPES = {
    # Rows that no number of ranks divides, and for four ranks a norm of 6 rows: 2, 2, 2 and none.
    "plain": ("model.width=24", "model.heads=4", "model.qk_norm=true", "model.tied=false"),
    "tied": ("model.positions=learned", "model.bias=all", "model.tied=true", "model.layers=4"),
}
STAGES = {"plain": [1, 1], "tied": [3, 1]}
"""An odd and an even number of buckets beside the weight that both ends of a tied model hold."""
SPLITS = ("optimizer", "master-weights", "gradients", "parameters")


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Run an entry of shard_entries on so many ranks."""
    server = RanksOf("tests.parallel.shard_entries")

    def run(entry: str, argument: Any, world_size: int) -> dict[int, dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}
        job = Job(entry=entry, argument=json.dumps(argument), world_size=world_size, threads=1)
        server.run(job, on_message=lambda message: told.__setitem__(message.rank, dict(message.values)))
        return told

    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny run of each shape."""
    made = {name: tmp_path_factory.mktemp(name) for name in SHAPES}
    for name, folder in made.items():
        make_tiny(folder, *SHAPES[name], precision="float64")
    return made


def layouts(world_size: int, shape: str) -> list[dict[str, Any]]:
    """Those with a `shard`, where two kinds of sums meet as well: over `shard` and over others with the same rows."""
    return {
        2: [{"shard": 2}],
        3: [{"shard": 3}],
        4: [
            {"shard": 4},
            {"replicate": 2, "shard": 2},
            {"shard": 2, "context": 2},
            {"shard": 2, "tensor": 2},
            {"pipeline": 2, "shard": 2, "stage_layers": STAGES[shape]},
            {"pipeline": 2, "shard": 2, "stage_layers": STAGES[shape], "schedule": "gpipe"},
        ],
    }[world_size]


@pytest.mark.parametrize("shape", few_fast(SHAPES, "plain"))
@pytest.mark.parametrize("world_size", few_fast([2, 3, 4], 3))
def test_every_split_takes_one_process_s_steps(launch: Launch, folders, world_size: int, shape: str) -> None:
    """With 7 sequences and at most 2 at a time: unequal rows on each rank, and some micro-batches without any."""
    shared = {"folder": str(folders[shape]), "name": f"of-{world_size}", "steps": STEPS, "plan": {"micro_sequences": 2}}
    wanted = alone_with(shared)
    cases = [
        {**shared, "layout": {**layout, "shard_what": split}}
        for layout in layouts(world_size, shape)
        for split in SPLITS
        if is_possible(Layout(**{**layout, "shard_what": split}))
    ]
    launch("take_steps", cases, world_size)
    for number, case in enumerate(cases):
        check(case, number, world_size, wanted)


def test_the_next_layer_s_weights_travel_under_a_layer_s_arithmetic(launch: Launch, folders) -> None:
    case = {"folder": str(folders["tied"]), "name": "ahead", "layout": {"shard": 2, "shard_what": "parameters"}}
    launch("look_ahead", {**case, "plan": {"micro_sequences": 7}}, 2)
    for rank in range(2):
        noted = json.loads((folders["tied"] / f"ahead-{rank}.json").read_text())
        assert noted == {"forward": [[1], [2], [3], []], "backward": [[2], [1], [0], []]}


def test_split_parameters_travel_from_rank_to_rank_and_find_room(launch: Launch, folders) -> None:
    case = {"folder": str(folders["tied"]), "name": "heard", "layout": {"shard": 3, "shard_what": "parameters"}}
    launch("listen", {**case, "plan": {"micro_sequences": 7}}, 3)
    for rank in range(3):
        noted = json.loads((folders["tied"] / f"heard-{rank}.json").read_text())
        assert noted, "nothing travelled"
        bursts = [noted[at : at + 4] for at in range(0, len(noted), 4)]
        assert all(burst == ["irecv", "irecv", "isend", "isend"] for burst in bursts), bursts


TABLE = 280 * 24
"""Numbers of a vocabulary table of "plain"."""
IN_TURN = {"shard": 2, "shard_what": "parameters"}
PIPED = {"pipeline": 2, "shard": 2, "shard_what": "parameters", "stage_layers": STAGES["plain"]}


def weighed(launch: Launch, folder: Path, layout: dict[str, Any], world_size: int) -> dict[int, list[list[Any]]]:
    """Messages of a step of several micro-batches in bf16."""
    case = {"folder": str(folder), "name": "weighed", "layout": layout}
    told = launch("weigh", {**case, "plan": {"micro_sequences": 2, "precision": "bf16"}}, world_size)
    return {rank: found["noted"] for rank, found in told.items()}


def test_the_head_is_a_unit_of_its_own_and_what_lasts_is_gathered_once_a_step(launch: Launch, folders) -> None:
    """The head under the last layer and in the products' precision; its gradient is the first that is summed."""
    forward = ["gather layers.0", "gather layers.1"]
    backward = ["gather layers.1", "sum head", "gather layers.0", "sum layers.1", "sum layers.0", "sum "]
    for noted in weighed(launch, folders["plain"], IN_TURN, 2).values():
        found = [f"{kind} {unit}" for kind, unit, *_ in noted]
        assert found == ["gather ", *forward, "gather head", *backward, *forward, *backward]
        sizes = {(kind, unit): (numbers, size // numbers) for kind, unit, numbers, size in noted}
        assert sizes["gather", "head"] == (TABLE, 2) and sizes["sum", "head"] == (TABLE, 4)
        assert sizes["gather", ""] == (TABLE + 24, 4), "the embedding's rows enter the stream as they are kept"
        assert sizes["gather", "layers.0"][1] == 2 and sizes["sum", "layers.0"][1] == 4


def test_with_split_gradients_or_master_weights_the_first_forward_alone_gathers(launch: Launch, folders) -> None:
    backward = ["sum head", "sum layers.1", "sum layers.0", "sum "]
    for what, sums in (("gradients", [*backward, *backward]), ("master-weights", backward)):
        for noted in weighed(launch, folders["plain"], {**IN_TURN, "shard_what": what}, 2).values():
            found = [f"{kind} {unit}" for kind, unit, *_ in noted]
            assert found == ["gather ", "gather layers.0", "gather layers.1", "gather head", *sums]


@pytest.mark.parametrize(("what", "sums"), few_fast([("parameters", 2), ("master-weights", 1)], ("master-weights", 1)))
def test_a_pipeline_gathers_each_weight_once_a_step(launch: Launch, folders, what: str, sums: int) -> None:
    """And sums each gradient after each of two micro-batches, or once a step as well."""
    for rank, noted in weighed(launch, folders["plain"], {**PIPED, "shard_what": what}, 4).items():
        units = sorted(["", "layers.0"] if rank < 2 else ["", "layers.1", "head"])
        assert sorted(unit for kind, unit, *_ in noted if kind == "gather") == units
        assert sorted(unit for kind, unit, *_ in noted if kind == "sum") == sorted(sums * units)


@pytest.mark.parametrize("shape", SHAPES)
def test_rounded_weights_do_not_outlive_their_layer(launch: Launch, folders, shape: str) -> None:
    # With 48 and 8 tokens no activation is as large as a weight.
    case = {"folder": str(folders[shape]), "name": "kept", "layout": {"shard": 2, "shard_what": "parameters"}}
    told = launch(
        "keep_for_backward", {**case, "plan": {"micro_sequences": 7, "shares": [6, 1], "precision": "bf16"}}, 2
    )
    for rank in range(2):
        assert told[rank]["rounded"] == 0 < told[rank]["kept"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", few_fast([{"shard": 2}, {"replicate": 2, "shard": 2}], {"shard": 2}))
def test_16_bit_shards_are_as_near_to_float64_as_one_16_bit_process(
    launch: Launch, folders, shape: str, layout: dict[str, Any]
) -> None:
    """The norms' weights are rounded in addition, which is why it may be a little farther."""
    bf16 = {"micro_sequences": 2, "precision": "bf16"}
    shared = {"folder": str(folders[shape]), "steps": 1, "layout": {}}
    wanted = alone_with({**shared, "plan": {"micro_sequences": 2}})
    plain = alone_with({**shared, "plan": bf16})
    case = {**shared, "name": f"bf16-{len(layout)}", "plan": bf16, "layout": {**layout, "shard_what": "parameters"}}
    launch("take_steps", [case], world := 2 ** len(layout))
    exact, alone = gradients_of(wanted), gradients_of(plain)
    errors = squared_errors(folders[shape], f"{case['name']}-0", world, exact)
    own = {name: float((alone[name] - exact[name]).square().sum()) for name in exact}
    assert errors.keys() == own.keys()
    assert 0 < sum(errors.values()) < 2 * sum(own.values())


def check(case: Case, number: int, world_size: int, wanted: dict[str, Tensor]) -> None:
    """Each rank's scalars and all that it holds, and that each number has one owner, who agrees with its copies."""
    owned: dict[str, int] = defaultdict(int)
    largest = max(float(value.abs().max()) for key, value in wanted.items() if key.startswith("gradient|"))
    # A key bias' true gradient is zero: what is small beside everything else is measured against that.
    floors = {"gradient": 1e-6 * largest, "weight": LR, "held": LR}
    for rank in range(world_size):
        found = load_file(Path(case["folder"]) / f"{case['name']}-{number}-rank-{rank}.safetensors")
        for key, value in found.items():
            kind, name, offset, owner = key.split("|") if "|" in key else ("", key, "", "")
            whole = part = whole_of(wanted, kind, name)
            for dim, first in enumerate(map(int, offset.split(",")) if offset else ()):
                part = part.narrow(dim, first, value.shape[dim])
            worst = float((value - part).abs().max()) / max(float(whole.abs().max()), floors.get(kind, 0))
            assert worst < BAR, f"{case['layout']}: {key} on rank {rank} is off by {worst:.1e}"
            owned[f"{kind}|{name}"] += value.numel() if owner == "owned" else 0
    for key in (key for key in wanted if key.startswith(("gradient|", "weight|"))):
        kind, name, *_ = key.split("|")
        assert owned[f"{kind}|{name}"] == wanted[key].numel(), f"{case['layout']}: {name} has not one owner"


def whole_of(found: dict[str, Tensor], kind: str, name: str) -> Tensor:
    if not kind:
        return found[name]
    (key,) = (key for key in found if key.startswith(f"{kind}|{name}|"))
    return found[key]


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    manifest = verify_checkpoint(checkpoint)
    names = [name for name in tensor_names(manifest) if not name.startswith("rng/")]
    return {name: read_tensor(checkpoint, manifest, name) for name in names}


def saved(launch: Launch, folder: Path, layout: dict[str, Any], *, old: Path | None, new: str, steps: int) -> Path:
    case = {"folder": str(folder), "layout": layout, "old": str(old) if old else None, "new": str(folder / new)}
    ranks = 1
    for axis in ("replicate", "shard", "tensor", "context"):
        ranks *= layout.get(axis, 1)
    launch("restore_and_save", {**case, "steps": steps}, ranks)
    (found,) = (folder / new).iterdir()
    return found


OTHERS = {
    "split-optimizer": {"shard": 3},
    "split-parameters": {"shard": 4, "shard_what": "parameters"},
    "hybrid": {"replicate": 2, "shard": 2, "shard_what": "parameters"},
    "copies": {"replicate": 2},
}


@pytest.mark.parametrize("first", few_fast(["split-optimizer", "hybrid"], "hybrid"))
def test_other_layouts_restore_every_bit(launch: Launch, folders, first: str) -> None:
    folder = folders["plain"]
    old = saved(launch, folder, OTHERS[first], old=None, new=f"{first}-first", steps=3)
    for name, layout in OTHERS.items():
        new = saved(launch, folder, layout, old=old, new=f"{first}-{name}", steps=0)
        mine, theirs = tensors(new), tensors(old)
        assert mine.keys() == theirs.keys() and {"adam_step", "tokens"} < mine.keys()
        assert any(key.startswith("adam_m/") and bool(value.any()) for key, value in mine.items())
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name


@pytest.mark.slow
def test_sgd_s_momentum_goes_on_under_any_layout(launch: Launch, tmp_path: Path) -> None:
    make_tiny(tmp_path, *SHAPES["plain"], "optimizer.kind=sgd", "optimizer.lr=0.1", precision="float64")
    whole = tensors(saved(launch, tmp_path, {}, old=None, new="whole", steps=5))
    assert {name.partition("/")[0] for name in whole} == {"model", "sgd_momentum", "tokens"}
    half = saved(launch, tmp_path, OTHERS["split-optimizer"], old=None, new="half", steps=2)
    for name, layout in {**OTHERS, "tensor": {"tensor": 2}}.items():
        rest = tensors(saved(launch, tmp_path, layout, old=half, new=f"rest-{name}", steps=3))
        assert rest.keys() == whole.keys()
        for key, value in whole.items():
            torch.testing.assert_close(rest[key], value, rtol=BAR, atol=BAR, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["split-optimizer", "hybrid"])
def test_going_on_gives_the_bits_of_never_having_stopped(launch: Launch, folders, name: str) -> None:
    folder, layout = folders["plain"], OTHERS[name]
    whole = saved(launch, folder, layout, old=None, new=f"whole-{name}", steps=5)
    half = saved(launch, folder, layout, old=None, new=f"half-{name}", steps=2)
    rest = saved(launch, folder, layout, old=half, new=f"rest-{name}", steps=3)
    assert (rest / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
