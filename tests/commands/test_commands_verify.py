"""`plait verify`: what is shrunk and what stays, how errors are judged, what is refused, what is remembered."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file, save_file

from plait.commands.verify import verify
from plait.commands.verifying.gradient_check import check_new_layout
from plait.commands.verifying.reference import reference_tensors
from plait.commands.verifying.small_model import (
    requested_layout,
    requested_shares,
    shrunk_layout,
    shrunk_plan,
    shrunk_shape,
)
from plait.data.preparation.synthetic import write_synthetic
from plait.errors import PlaitError
from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job, JobResult
from plait.layout import Layout
from plait.model.names import DIMS
from plait.model.shape import ModelShape
from plait.partition.boxes import kv_heads_of
from plait.planner.plan import Plan
from plait.planner.search.validity import check_shares
from plait.proof import FLOAT64_TOLERANCES, Verdict, compare_tensor_files, weight_text
from plait.recipe.load import parse_config
from plait.recipe.schema import RunConfig
from plait.screen.terminal import TerminalScreen
from plait.workers import ENTRIES, ForkedWorkers, OnMessage
from plait.working_folder import CURRENT_FOLDER
from tests.plans import changed

LARGE = ModelShape(
    layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, vocabulary=128256, sequence=8192
)
CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "tried"}})
RECIPE = """
[data]
files = "nothing.txt"
[model]
layers = 4
width = 64
heads = 4
[train]
sequence = 32
batch_tokens = 256
"""


class Nobody:
    """Workers that must not be needed."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        raise AssertionError(f"{job.entry} was started")


class Tampering:
    """Workers whose rank 1 comes to other numbers."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(self, workers: ForkedWorkers) -> None:
        self._workers = workers

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        result = self._workers.run(job, on_message)
        file = Path(json.loads(job.argument)["folder"]) / "rank-1.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if name.startswith("gradient/layers.1.attention.o.weight/"))
        save_file({**tensors, name: tensors[name] * 1.001}, file)
        return result


@pytest.fixture(scope="module")
def workers() -> Iterator[ForkedWorkers]:
    with ForkServer(ENTRIES) as server:
        yield ForkedWorkers(server)


def screen(out: io.StringIO | None = None) -> TerminalScreen:
    return TerminalScreen(Console(file=out or io.StringIO(), width=200))


def asked(**layout: object) -> RunConfig:
    values = {"data": {"files": "none"}, "run": {"name": "tried"}, "model": {"layers": 6, "width": 64, "heads": 4}}
    return parse_config({**values, "train": {"sequence": 32}, "layout": layout})


@pytest.mark.parametrize(
    ("large", "small"), [((4, 2), (2, 1)), ((8, 8), (1, 1)), ((3, 9, 9, 3), (1, 2, 2, 1)), ((1, 1), (1, 1))]
)
def test_unequal_stages_stay_unequal(large: tuple[int, ...], small: tuple[int, ...]) -> None:
    assert shrunk_layout(Layout(pipeline=2, stage_layers=large)).stage_layers == small


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (32, 4), (32, 1), (24, 3), (48, 6)])
def test_heads_fall_on_ranks_as_the_large_models_do(heads: int, kv_heads: int, tensor: int) -> None:
    large, layout = replace(LARGE, heads=heads, kv_heads=kv_heads), Layout(tensor=tensor)
    small = shrunk_shape(large, layout)
    assert small.heads % tensor == 0 and small.width <= 128
    assert (small.kv_heads < small.heads) == (kv_heads < heads)
    assert (small.kv_heads == 1) == (kv_heads == 1)

    def kind(shape: ModelShape) -> tuple[bool, bool]:
        first, last = (kv_heads_of(shape, tensor, index) for index in (0, tensor - 1))
        return first == last, shape.kv_heads % tensor == 0

    assert kind(small) == kind(large)


def test_what_makes_a_run_fragile_is_always_in() -> None:
    for layout in (Layout(replicate=2), Layout(pipeline=4, stage_layers=(1, 2, 1, 1)), Layout(shard=2, context=4)):
        plan = shrunk_plan(CONFIG, LARGE, layout)
        assert layout.data_parallel_degree == 1 or len(set(plan.sequences_per_replica)) == 2
        assert (
            max(plan.sequences_per_replica) > 2 * plan.placement.micro_sequences
            and max(plan.sequences_per_replica) % plan.placement.micro_sequences
        )
        assert plan.job.documents == "mask" and plan.arithmetic.precision == "float64"
        assert plan.job.sequence % (2 * layout.context) == 0 or layout.context == 1
        assert plan.job.shape.vocabulary % 2 and plan.job.optimizer.clip


@pytest.mark.parametrize("pipeline", [1, 4])
@pytest.mark.parametrize("shares", [(3, 1), (11, 5), (700, 300, 24), (1, 1000), (31, 33, 32), (1, 1, 1, 90)])
def test_unequal_shares_stay_unequal_and_nobody_goes_without(shares: tuple[int, ...], pipeline: int) -> None:
    layout = Layout(replicate=len(shares), pipeline=pipeline, stage_layers=(1,) * pipeline if pipeline > 1 else ())
    plan = shrunk_plan(CONFIG, LARGE, layout, shares)
    small, batch = plan.placement.shares, plan.job.batch_sequences
    assert sum(small) == batch and min(small) >= 1 and len(set(small)) > 1
    for (large_one, small_one), (large_other, small_other) in product(zip(shares, small, strict=True), repeat=2):
        assert large_one <= large_other or small_one >= small_other, "who had more has no less"
    spare = sum(count * batch < sum(shares) for count in shares)
    for had, has in zip(shares, small, strict=True):
        assert abs(has - had * batch / sum(shares)) <= 1 + spare


def test_a_recipe_s_shares_are_proven_in_proportion() -> None:
    config = asked(replicate=2, shares=[30, 10])
    plan = shrunk_plan(config, *requested_layout(config), requested_shares(config))
    assert plan.placement.shares == (7, 2) and plan.placement.micro_sequences == 2
    equal = asked(replicate=2)
    assert shrunk_plan(equal, *requested_layout(equal), requested_shares(equal)).placement.shares == ()


@pytest.mark.parametrize(
    ("batch", "layout", "sentence"),
    [
        (16, {"replicate": 2, "shares": [10, 5]}, r"add up to 15, and a step has 16 sequences .*; change a share, or"),
        (16, {"replicate": 2, "shard": 2, "shares": [11, 5]}, r"should be 4 numbers, one for each of replicate 2 × "),
        (16, {"tensor": 2, "shares": [11, 5]}, r"should be 1 number, .*; change the shares or the degrees, or leave"),
    ],
)
def test_shares_that_do_not_deal_out_a_step_are_refused(batch: int, layout: dict[str, object], sentence: str) -> None:
    config = asked(**layout)
    config = config.model_copy(update={"train": config.train.model_copy(update={"batch_tokens": batch * 32})})
    with pytest.raises(PlaitError, match=sentence):
        requested_layout(config)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(PlaitError, match=r"layout.shares = \[16, 0\] leave a worker nothing to do; give each at least"):
        check_shares((16, 0), Layout(replicate=2), 16)
    check_shares((15, 1), Layout(replicate=2), 16)
    check_shares((), Layout(replicate=2), 16)


def test_the_reference_is_one_plain_process(tmp_path: Path) -> None:
    plan = shrunk_plan(CONFIG, LARGE, Layout(tensor=2))
    folder = write_synthetic(tmp_path, vocabulary=plan.job.shape.vocabulary, sequence=plan.job.sequence, seed=1)
    threads = torch.get_num_threads()
    found = reference_tensors(
        CONFIG, replace(plan, job=replace(plan.job, corpus=str(folder))), "gradients", tmp_path / "routing"
    )
    torch.set_num_threads(threads)
    assert not dist.is_initialized()
    assert found["sums/norm"] > 0 and all(torch.isfinite(tensor).all() for tensor in found.values())


def test_names_in_words() -> None:
    assert weight_text("layers.3.attention.o.weight") == "layer 3's attention output weight"
    assert weight_text("layers.0.feedforward_norm.bias") == "layer 0's feed-forward norm bias"
    assert weight_text("embed.tokens.weight") == "the token embedding"
    assert all(weight_text(pattern.replace("*", "1")) for pattern in DIMS)
    assert weight_text("layers.2.feedforward.experts.11.up.weight") == "layer 2's expert 11's input weight"


WEIGHT = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)


def judged(folder: Path, *ranks: dict[str, torch.Tensor]) -> Verdict:
    save_file({"gradient/head.weight/0,0/own": WEIGHT}, folder / "reference.safetensors")
    files = [folder / f"rank-{number}.safetensors" for number in range(len(ranks))]
    for file, tensors in zip(files, ranks, strict=True):
        save_file(tensors, file)
    return compare_tensor_files(
        folder / "reference.safetensors", files, Layout(replicate=len(ranks)), lr=0.1, tolerances=FLOAT64_TOLERANCES
    )


def test_parts_that_fit_together_pass(tmp_path: Path) -> None:
    top, below = WEIGHT[:3].clone(), WEIGHT[3:].clone()
    verdict = judged(tmp_path, {"gradient/head.weight/0,0/own": top}, {"gradient/head.weight/3,0/own": below})
    assert verdict.ok and verdict.largest("gradient") == 0


@pytest.mark.parametrize(
    ("place", "who", "values", "remark"),
    [
        ("3,0", "own", WEIGHT[3:] + 1e-8, ""),
        ("3,0", "own", WEIGHT[3:] * torch.nan, ""),
        ("3,0", "copy", WEIGHT[3:], "no rank owns"),
        ("2,0", "own", WEIGHT[2:], "2 ranks own"),
    ],
)
def test_what_is_off_missing_or_counted_twice_fails(
    tmp_path: Path, place: str, who: str, values: torch.Tensor, remark: str
) -> None:
    top = {"gradient/head.weight/0,0/own": WEIGHT[:3].clone()}
    verdict = judged(tmp_path, top, {f"gradient/head.weight/{place}/{who}": values.clone()})
    assert not verdict.ok
    assert remark in str(verdict.worst[0]) and "the head's weight" in str(verdict.worst[0])
    assert '"ok": false' in verdict.to_json()


def test_a_copy_that_went_its_own_way_fails(tmp_path: Path) -> None:
    own, copy = ({f"gradient/head.weight/0,0/{who}": WEIGHT + off} for who, off in (("own", 0), ("copy", 1)))
    assert not judged(tmp_path, own, copy).ok


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"tensor": 3}, r"layout.tensor = 3 does not divide 4 heads; choose one of 1, 2, 4"),
        ({"context": 3}, r"layout.context = 3 .* train.sequence is 32; choose a multiple of 6"),
        ({"pipeline": 7}, r"a pipeline of 7 stages .* the model has 6; lower layout.pipeline"),
        (
            {"pipeline": 2, "shard": 2, "shard_what": "parameters", "schedule": "zero-bubble"},
            r"zero-bubble .* choose layout.shard_what",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_a_sentence(layout: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        requested_layout(asked(**layout))


def test_degrees_that_are_not_named_are_one() -> None:
    _, layout = requested_layout(asked(tensor=2))
    assert layout == Layout(tensor=2)
    _, layout = requested_layout(asked(pipeline=2, stage_layers=[4, 2]))
    assert layout.stage_layers == (4, 2) and layout.world_size == 2


@pytest.mark.slow
def test_here_compares_in_float32(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    out = io.StringIO()
    assert verify(
        tmp_path / "small.toml", ["layout.tensor=2", "train.precision=bf16"], where="here", screen=screen(out)
    )
    told = out.getvalue()
    assert (
        "tensor 2 on 2 × " in told
        and "in float32" in told
        and "in bf16 two runs on one device differ by" in told
        and "proven" in told
    )


def a_plan(layout: Layout) -> Plan:
    shape = replace(LARGE, layers=4, width=64, heads=4, kv_heads=4, head_width=16, ffn=96, vocabulary=96, sequence=32)
    return changed(shrunk_plan(CONFIG, shape, layout), shape=shape, fingerprint={"name": "a test's"})


def test_a_new_layout_is_checked_once(tmp_path: Path, workers: ForkedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, plan = io.StringIO(), a_plan(Layout(shard=2))
    check_new_layout(CONFIG, plan, workers, screen(out))
    assert "checked  the layout's gradients" in out.getvalue()
    assert len(list((tmp_path / ".plait" / "verified").iterdir())) == 1
    check_new_layout(CONFIG, plan, Nobody(), screen())
    check_new_layout(CONFIG, a_plan(Layout()), Nobody(), screen())
    with pytest.raises(AssertionError, match="was started"):
        check_new_layout(
            CONFIG, replace(plan, machines=replace(plan.machines, fingerprint={"name": "another"})), Nobody(), screen()
        )
    with pytest.raises(AssertionError, match="was started"):
        check_new_layout(CONFIG, replace(plan, placement=replace(plan.placement, shares=(8, 1))), Nobody(), screen())


def test_a_layout_that_differs_stops_the_run_and_is_not_remembered(
    tmp_path: Path, workers: ForkedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = r"layer 1's attention output weight, gradient is off by 1e-03; .* \(--no-check trains all the same\)"
    with pytest.raises(PlaitError, match=sentence):
        check_new_layout(CONFIG, a_plan(Layout(tensor=2)), Tampering(workers), screen())
    assert not (tmp_path / ".plait").exists()
