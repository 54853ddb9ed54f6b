"""A step of one to four ranks, however its sequences are shared, is the step of one plain process: to 1e-12."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.layout import Layout
from plait.model.matmul import has_onednn
from plait.parallel.communicator import ONE_PROCESS
from plait.planner.plan import HostShare, Plan
from plait.recipe.schema import RunConfig
from plait.trainer.assemble import Assembly, assemble, make_autocast, make_runners, weight_casts
from plait.trainer.state import TrainState
from plait.trainer.step import WeightCasts
from tests.matrix import few_fast
from tests.plans import changed
from tests.trainer.rank_entries import steps_taken
from tests.trainer.tiny import SEQUENCES, make_tiny, put

STEPS = 2
UNEVEN = {1: [7], 2: [6, 1], 3: [1, 4, 2], 4: [2, 1, 3, 1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def run(folder: Path) -> tuple[RunConfig, Plan]:
    return make_tiny(folder, precision="float64")


def alone(run: tuple[RunConfig, Plan], **changes: Any) -> Assembly:
    """The reference: one process that never heard of a mesh, all sequences in one micro-batch."""
    config, plan = run
    plan = changed(plan, **{"micro_sequences": SEQUENCES, **changes})
    return assemble(config, plan, sums=ONE_PROCESS, stages=())


def case(workers: int, documents: str, shares: str) -> dict[str, Any]:
    wanted: dict[str, Any] = {"documents": documents, "micro_sequences": 2, "steps": STEPS}
    return wanted if shares == "even" else {**wanted, "shares": UNEVEN[workers]}


CASES = [("mask", "even"), ("mask", "uneven"), ("join", "uneven")]


def error(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference, measured against the largest number of the same tensor."""
    assert found.keys() == reference.keys()
    return max(
        float((found[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        for name, wanted in reference.items()
    )


@pytest.mark.parametrize("workers", few_fast([1, 2, 3, 4], 3))
def test_any_number_of_ranks_takes_the_reference_s_step(run_ranks, run, folder: Path, workers: int) -> None:
    cases = [case(workers, documents, shares) for documents, shares in CASES]
    cases.append({**cases[1], "mutant": "mean of means"})
    run_ranks("take_steps", json.dumps({"folder": str(folder), "cases": cases}), workers)
    for number, (documents, _) in enumerate(CASES):
        reference = steps_taken(alone(run, documents=documents), STEPS)
        for rank in range(workers):
            found = load_file(folder / f"case-{number}-rank-{rank}.safetensors")
            assert error(found, reference) < 1e-12, f"{CASES[number]} on rank {rank}"
    mutant = load_file(folder / "case-3-rank-0.safetensors")
    wrong = error(mutant, steps_taken(alone(run, documents="mask"), STEPS))
    assert wrong < 1e-12 if workers == 1 else wrong > 1e-3, "the comparison would not see a mean of means"


def test_masking_documents_changes_the_gradient(run) -> None:
    masked, joined = (steps_taken(alone(run, documents=documents), 1) for documents in ("mask", "join"))
    assert error(masked, joined) > 1e-3


def test_a_step_is_gradient_descent_on_the_mean_over_all_tokens(run) -> None:
    """Against autograd on the whole batch, written out as anybody would."""
    assembly = alone(run, documents="join")
    (micro,) = assembly.loader.micros(0)
    (model,) = assembly.model.chunks
    mean = F.cross_entropy(model.logits(model(micro.inputs)), micro.targets.flatten())
    wanted = dict(zip(dict(model.named_parameters()), torch.autograd.grad(mean, list(model.parameters())), strict=True))
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in wanted.values()]))
    _, scalars = assembly.step(TrainState())
    assert float(scalars.norm) == pytest.approx(float(norm), rel=1e-12)
    assert float(scalars.totals[0] / scalars.totals[1]) == pytest.approx(mean.item(), rel=1e-12)
    factor = min(1.0, 1.0 / float(norm))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name] * factor, rtol=1e-5, atol=1e-12)


def test_clipping_is_by_the_global_norm(run) -> None:
    _, plan = run
    free, held = (alone(run, optimizer=replace(plan.job.optimizer, clip=clip)) for clip in (None, 0.25))
    before, after = steps_taken(free, 1), steps_taken(held, 1)
    gradients = [name for name in before if name.startswith("grad/")]
    assert float(before["norm-0"]) == float(after["norm-0"]) > 0.5
    clipped = torch.linalg.vector_norm(torch.stack([after[name].norm() for name in gradients]))
    assert float(clipped) == pytest.approx(0.25, rel=1e-5)
    ratio = 0.25 / float(before["norm-0"])
    for name in gradients:  # one factor for all: the direction stays
        torch.testing.assert_close(after[name], before[name] * ratio, rtol=1e-5, atol=0)


def test_a_gradient_that_is_not_finite_reaches_no_weight_on_any_rank(run_ranks, run, folder: Path) -> None:
    told = run_ranks("meet_a_bad_gradient", str(folder), 2)
    assert all(told[rank]["finite"] == [True, False, True] for rank in (0, 1))
    assert all(set(told[rank]["counts"]) == {2} for rank in (0, 1)), "a step that was left out counted as an update"
    first, bad, last = (
        [load_file(folder / f"after-{number}-rank-{rank}.safetensors") for rank in (0, 1)] for number in range(3)
    )
    for name in first[0]:
        assert torch.equal(first[0][name], bad[0][name]) and torch.equal(first[1][name], bad[1][name]), name
        assert torch.equal(last[0][name], last[1][name]) and torch.isfinite(last[0][name]).all(), name
    assert any(not torch.equal(bad[0][name], last[0][name]) for name in bad[0])


def test_bf16_runs_on_a_cpu_and_is_close(run) -> None:
    exact, rough = (steps_taken(alone(run, precision=precision), 1) for precision in ("float32", "bf16"))
    assert all(rough[name].dtype == torch.float32 for name in rough if name.startswith(("grad/", "weight/")))
    assert float(rough["totals-0"][0]) == pytest.approx(float(exact["totals-0"][0]), rel=5e-3)
    assert float(rough["norm-0"]) == pytest.approx(float(exact["norm-0"]), rel=3e-2)
    assert float(rough["totals-0"][0]) != float(exact["totals-0"][0])


class CountedCasts(TorchDispatchMode):
    """Counts what is cast to bfloat16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_weights_are_cast_once_a_step_and_gradients_keep_their_bits(run) -> None:
    """Note [casts of a step]: three micro-batches, whose weights of this shape are one of each layer."""
    _, plan = run
    assembly = alone(run, precision="bf16", micro_sequences=3)
    micros = assembly.loader.micros(0)
    weight = tuple(assembly.model.chunks[0].get_parameter("layers.0.feedforward.down.weight").shape)
    found: dict[WeightCasts, tuple[int, list[Tensor]]] = {}
    for casts in get_args(WeightCasts):
        runner, _ = make_runners(assembly.model, make_autocast("bf16", assembly.device), casts=casts)
        with CountedCasts() as counted:
            totals = runner(micros)
        grads = [unit.parameter.grad for unit in assembly.model.units]
        found[casts] = counted.shapes.count(weight), [totals, *(grad.clone() for grad in grads if grad is not None)]
    assert len(micros) == 3 and found["each micro-batch"][0] == 3 * plan.job.shape.layers
    assert found["each step"][0] == plan.job.shape.layers
    assert all(map(torch.equal, found["each micro-batch"][1], found["each step"][1]))


def test_casts_are_kept_only_where_a_step_holds_them_anyway(run) -> None:
    _, plan = run
    half = replace(plan, arithmetic=replace(plan.arithmetic, precision="bf16"))
    assert weight_casts(half) == "each step" and weight_casts(plan) == "each micro-batch"
    for layout in (Layout(recompute="full"), Layout(shard=2, shard_what="parameters")):
        assert weight_casts(changed(half, layout=layout)) == "each micro-batch"


@pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")
def test_hosts_that_multiply_by_unlike_libraries_take_the_reference_s_step(run_ranks, folder: Path, run) -> None:
    """Rank 0 by oneDNN, rank 1 by the default: equal weights on both, and float32's rounding from one process."""
    config, plan = run
    hosts = tuple(HostShare(name=name, workers=1, threads=1, machine=name) for name in ("here", "there"))
    unlike = {"matmul_backend": "onednn", "host_backends": {"there": "default"}}
    mixed = changed(plan, **unlike, precision="float32", layout=Layout(replicate=2), hosts=hosts)
    own = folder / "mixed"
    own.mkdir()
    put(own, config, mixed)
    told = run_ranks("take_mixed_steps", json.dumps({"folder": str(own), "cases": [case(2, "mask", "even")]}), 2)
    assert [told[rank]["library"] for rank in (0, 1)] == ["onednn", "default"]
    one, other = (load_file(own / f"case-0-rank-{rank}.safetensors") for rank in (0, 1))
    weights = [name for name in one if name.startswith("weight/")]
    assert weights and all(torch.equal(one[name], other[name]) for name in weights)
    reference = steps_taken(alone(run, documents="mask", precision="float32"), STEPS)
    assert error({name: one[name] for name in weights}, {name: reference[name] for name in weights}) < 1e-4
