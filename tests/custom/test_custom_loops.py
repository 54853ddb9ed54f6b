"""Loops of people's own have the numbers of plain torch, and proofs see what goes wrong in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import plait
from plait.errors import PlaitError
from plait.launch.values.job import Job
from tests.custom.kind import mlp, numbers, squared
from tests.matrix import few_fast
from tests.shared_ranks import RanksOf

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.loops_entries")


def told_by(server: RanksOf, entry: str, ranks: int, argument: str = "") -> dict[str, Any]:
    return told_by_all(server, entry, ranks, argument)[0]


def told_by_all(server: RanksOf, entry: str, ranks: int, argument: str = "") -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    job = Job(entry=entry, argument=argument, world_size=ranks, threads=1)
    server.run(job, on_message=lambda message: found.__setitem__(message.rank, dict(message.values)))
    return found


WAYS = [(layout, ranks) for layout in ("replicate", "shard optimizer") for ranks in (2, 3)]


@pytest.mark.parametrize(("layout", "ranks"), few_fast(WAYS, ("replicate", 3)))
def test_batches_that_a_program_makes_between_steps_are_shared(server: RanksOf, layout: str, ranks: int) -> None:
    assert told_by(server, "replay", ranks, layout)["error"] < TOLERANCE


def test_unlike_batches_are_told(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match=r"worker 1 gave run\.share another batch than worker 0"):
        told_by(server, "unlike_batches", 2)


@pytest.mark.parametrize("ranks", few_fast([1, 2, 3], 2))
def test_a_state_goes_from_batch_to_batch(server: RanksOf, ranks: int) -> None:
    assert told_by(server, "carried", ranks)["error"] < TOLERANCE


@pytest.mark.parametrize("ranks", few_fast([1, 2, 3], 2))
def test_float16_is_scaled_as_by_torch(server: RanksOf, ranks: int) -> None:
    told = told_by(server, "half", ranks)
    assert told["error"] < 1e-3
    assert told["skipped"] >= 1
    assert told["scale"] == told["wanted_scale"]


def test_the_scale_of_losses_goes_on_after_a_resume(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(plait.spread(model, optimizer, loss_sum=squared, precision="fp16"))
    huge = torch.full((4, 5), 1.0), torch.full((4, 3), 1e5)
    for _ in range(3):
        runs[0].step(huge)
    runs[0].save(tmp_path)
    runs[1].resume(tmp_path)
    assert runs[1]._taker.scale.factor == runs[0]._taker.scale.factor == 2.0**13


@pytest.mark.parametrize("ranks", few_fast([2, 3], 3))
def test_metrics_are_exact_on_any_number_of_workers(server: RanksOf, ranks: int) -> None:
    assert told_by(server, "metrics", ranks) == {"error": pytest.approx(0, abs=TOLERANCE), "right": 0, "n": 13}


@pytest.mark.parametrize("layout", few_fast(["replicate", "shard optimizer", "shard parameters"], "shard optimizer"))
def test_a_rate_that_follows_a_loss_is_saved(server: RanksOf, tmp_path: Path, layout: str) -> None:
    rates = told_by(server, "plateau", 2, f"{layout}:{tmp_path / 'kept'}")["rates"]
    assert len(rates) == 4
    assert rates[3] == rates[2] < 0.5


@pytest.mark.parametrize(("kind", "ok"), [("AdamW", True), ("reversed", False)])
def test_a_proof_compares_an_update(server: RanksOf, kind: str, ok: bool) -> None:
    told = told_by(server, "stale_update", 2, kind)
    assert told["ok"] == ok
    assert ok or "after an update" in told["text"]


@pytest.mark.parametrize(("kind", "ok"), [("gathers", True), ("forgets", False)])
def test_a_proof_sees_a_loss_across_the_batch(server: RanksOf, kind: str, ok: bool) -> None:
    assert told_by(server, "contrast", 2, kind)["ok"] == ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"additive": "maybe"}, 'additive = "maybe" is unknown'),
        ({"precision": "fp8"}, 'choose "auto", "float32", "bf16" or "fp16"'),
    ],
)
def test_unknown_choices_are_told(options: dict[str, Any], words: str) -> None:
    model, spread = mlp(), plait.spread
    with pytest.raises(PlaitError, match=words):
        spread(model, torch.optim.SGD(model.parameters()), loss_sum=squared, **options)


def test_losses_are_chosen_by_their_numbers() -> None:
    models = (nn.Linear(5, 3), nn.Linear(5, 3))
    optimizers = tuple(torch.optim.SGD(one.parameters(), lr=0.1) for one in models)
    losses = tuple(lambda both, batch, k=k: squared(both[k], batch) for k in range(2))
    run = plait.spread(models, optimizers, loss_sum=losses)
    batch = torch.randn(4, 5), torch.randn(4, 3)
    before = [one.weight.detach().clone() for one in models]
    assert run.step(batch, losses=[1]).shape == ()
    assert torch.equal(models[0].weight, before[0])
    assert not torch.equal(models[1].weight, before[1])
    assert run.step(batch, losses=[1, 0]).shape == (2,)
    with pytest.raises(PlaitError, match=r"losses = \[2\]; give some of \[0, 1\]"):
        run.step(batch, losses=[2])


def test_several_pairs_need_the_same_number_for_each_part() -> None:
    model = mlp()

    def loss_sum(net: Any, batch: Any) -> Any:
        pair = squared(net, batch)
        return (pair,) * (1 + (len(batch[0]) > 2))

    run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match="another number of pairs for parts of a batch"):
        run.step((torch.randn(4, 5), torch.randn(4, 3)))


def test_a_mean_among_several_pairs_is_found() -> None:
    model = mlp()

    def loss_sum(net: Any, batch: Any) -> Any:
        total, count = squared(net, batch)
        return (total, count), (total / count, len(batch[0]))

    run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match="loss_sum returns a mean"):
        for batch in run.batches(numbers(5), batch=6):
            run.step([one.float() for one in batch])


def test_draws_in_updates_and_after_proofs_are_alike_on_all_workers(server: RanksOf) -> None:
    told = told_by_all(server, "noisy_updates", 2)
    assert told[0] == told[1]
    assert told[0]["drawn"][0] == told[0]["drawn"][1]


@pytest.mark.parametrize("when", ["in a step", "on one worker"])
def test_pairs_that_come_and_go_are_told(server: RanksOf, when: str) -> None:
    with pytest.raises(PlaitError, match=r"pairs \(sum, count\) that loss_sum returns is . here and . elsewhere"):
        told_by(server, "unlike_pairs", 2, when)


def test_examples_of_a_stream_come_together_over_the_batch(server: RanksOf) -> None:
    one, two = (told_by(server, "mixed_stream", ranks)["losses"] for ranks in (1, 2))
    assert two == pytest.approx(one, abs=TOLERANCE)


def test_a_proof_leaves_a_persons_functions_and_optimizers_alone() -> None:
    called: list[int] = []

    class Wrapping(torch.optim.Optimizer):
        """Takes an optimizer, not parameters."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model = mlp().double()
    run = plait.spread(
        model, Wrapping(torch.optim.SGD(model.parameters(), lr=0.1)), loss_sum=squared,
        before_update=lambda gradients: called.append(len(gradients)),
    )  # fmt: skip
    for batch in run.batches(numbers(5), batch=6):
        verdict = run.verify(batch)
        assert verdict.ok
        assert "so updates were not compared" in str(verdict)
    assert called == []


def test_sums_by_names_that_depend_on_data(server: RanksOf) -> None:
    one, three = (told_by(server, "sums_by_class", ranks) for ranks in (1, 3))
    assert three == {"names": one["names"], "mean": pytest.approx(one["mean"], abs=TOLERANCE)}


def test_rows_of_unlike_shapes_are_told(server: RanksOf) -> None:
    with pytest.raises(PlaitError, match=r"run\.gather: worker . has rows of shape \[.\]"):
        told_by(server, "unlike_rows", 2)


class Following(nn.Module):
    """A buffer that each forward pass assigns anew, as an average of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return self.inside(x)


@pytest.mark.parametrize("pairs", [1, 2])
def test_counting_moves_no_buffer(pairs: int) -> None:
    model = Following()

    def loss_sum(net: Any, batch: Any) -> Any:
        pair = squared(net, batch)
        return (pair,) * pairs

    run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=loss_sum, accumulate=2)
    for _ in range(3):
        run.step((torch.randn(4, 5), torch.randn(4, 3)))
    assert float(model.passes) == 6


class FromFile(Dataset[Any]):
    """A data set that each process opens for itself."""

    file: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> Tensor:
        return self.file[position]


def open_file(process: int) -> None:
    info: Any = get_worker_info()
    info.dataset.file = torch.arange(float(len(info.dataset)))


def test_processes_of_a_loader_begin_as_torchs_do() -> None:
    model = nn.Linear(1, 1)
    run = plait.spread(model, torch.optim.SGD(model.parameters()), loss_sum=squared)
    loader = DataLoader(FromFile(), batch_size=5, num_workers=2, worker_init_fn=open_file)
    assert [batch.tolist() for batch in run.batches(loader)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
