"""`plait.spread` in one process: the numbers of a plain loop, whatever the data are, and a resume to the bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import plait
from plait.errors import PlaitError
from tests.report.trace_rules import check_trace


def model_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))


def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def examples(count: int = 20) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, generator=generator), number % 2) for number in range(count)]


def test_steps_are_those_of_a_plain_loop() -> None:
    model = model_of()
    model[1].p = 0.0  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    run = plait.spread(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_sum=loss_sum, clip=0.3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for batch in run.batches(examples(), batch=5, epochs=3):
        loss = run.step(batch)
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(batch[0]), batch[1])
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        optimizer.step()
        assert loss.dim() == 0 and float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert run.steps == 12
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_accumulation_changes_no_gradient() -> None:
    found = []
    for accumulate in (1, 3):
        model = model_of().double()
        model[1].p = 0.0  # type: ignore[union-attr]
        data = [(x.double(), y) for x, y in examples(10)]
        run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum, accumulate=accumulate)
        for batch in run.batches(data, batch=10, order="given"):
            run.step(batch)
        found.append(run.gradients())
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-14)


def losses_of(folder: Path | None, *, stop: int | None, resume: Path | None = None) -> tuple[list[float], list[Tensor]]:
    """Losses of a run with dropout, momentum and a scheduler; saved after `stop` steps, or resumed and run to the
    end."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)
    run = plait.spread(model, optimizer, loss_sum=loss_sum, schedulers=[scheduler], seed=9)
    if resume:
        run.resume(resume)
    found = []
    for _ in range(2):  # two calls of run.batches, as in a loop over epochs
        for batch in run.batches(examples(), batch=4):
            found.append(float(run.step(batch)))
            if run.steps == stop and folder:
                run.save(folder)
                return found, []
    return found, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, stop: int) -> None:
    whole, weights = losses_of(None, stop=None)
    first, _ = losses_of(tmp_path / "saved", stop=stop)
    rest, resumed = losses_of(None, stop=None, resume=tmp_path / "saved")
    assert first + rest == whole
    assert len(whole) == 10
    assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True))


def test_a_saved_folder_holds_the_newest_step_alone(tmp_path: Path) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_sum=loss_sum)
    for batch in run.batches(examples(), batch=10):
        run.step(batch)
        run.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_resume_that_does_not_fit_says_why(tmp_path: Path) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match="holds no saved state"):
        run.resume(tmp_path)
    run.save(tmp_path)
    other = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2))
    run = plait.spread(other, torch.optim.SGD(other.parameters(), lr=0.1), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match="resume with the model that was saved"):
        run.resume(tmp_path)
    (tmp_path / "step-0" / "model.safetensors").write_bytes(b"no")
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match="cannot be read"):
        run.resume(tmp_path)


class Squares(Dataset[tuple[Tensor, int]]):
    """A data set by position."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(position)), position % 2


class Streamed(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from (Squares()[position] for position in range(20))


def columns() -> tuple[Tensor, Tensor]:
    return torch.arange(20.0).unsqueeze(1).repeat(1, 4), torch.arange(20) % 2


def whole_batches() -> Iterator[tuple[Tensor, Tensor]]:
    inputs, labels = columns()
    yield from zip(inputs.split(5), labels.split(5), strict=True)


@pytest.mark.parametrize(
    ("data", "batch"),
    [
        (Squares(), 5),
        ([Squares()[position] for position in range(20)], 5),
        (columns(), 5),
        (TensorDataset(*columns()), 5),
        (DataLoader(Squares(), batch_size=5, shuffle=True), None),
        (DataLoader(Squares(), batch_size=5), None),
        (Streamed(), 5),
        (DataLoader(Streamed(), batch_size=5), None),
        (whole_batches(), None),
        ((Squares()[position] for position in range(20)), 5),
    ],
)
def test_any_data_give_each_example_once(data: Any, batch: int | None) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    seen: list[float] = []
    for inputs, labels in run.batches(data, batch=batch):
        assert inputs.shape == (5, 4) and labels.shape == (5,)
        seen += inputs[:, 0].tolist()
        run.step((inputs, labels))
    assert sorted(seen) == list(map(float, range(20)))
    assert run.steps == 4


def test_processes_of_a_loader_that_cannot_be_forked_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of()
    for loader, told in (
        (DataLoader(Squares(), batch_size=5, num_workers=2, multiprocessing_context="spawn"), 1),
        (DataLoader(Squares(), batch_size=5, num_workers=2), 0),
        (DataLoader(Squares(), batch_size=5), 0),
    ):
        run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
        for _ in range(2):
            run.batches(loader)
        assert capsys.readouterr().out.count("the DataLoader's processes are not used") == told


def test_processes_of_a_loader_make_what_a_thread_makes() -> None:
    """Random examples, in the same order and with the same numbers."""
    found = []
    for processes in (0, 2):
        model = model_of()
        run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_sum=loss_sum)
        loader = DataLoader(Noisy(), batch_size=5, shuffle=True, num_workers=processes)
        found.append([batch[0] for batch in run.batches(loader, epochs=2)])
    assert len(found[0]) == len(found[1]) == 8
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Noisy(Squares):
    """A data set that draws a random number for each example."""

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return torch.rand(4) + position, position % 2


class NoisyTogether(Noisy):
    """The same, read several at a time."""

    def __getitems__(self, positions: list[int]) -> list[tuple[Tensor, int]]:
        return [self[position] for position in positions]


@pytest.mark.parametrize("data", [Noisy(), NoisyTogether()])
def test_random_data_do_not_depend_on_what_is_read_with_them(data: Any) -> None:
    model = model_of()
    found = []
    for batch in (5, 10):
        run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
        found.append(torch.cat([share[0] for share in run.batches(data, batch=batch, order="given")]))
    assert torch.equal(*found)


def test_random_data_are_the_same_after_a_resume(tmp_path: Path) -> None:
    def inputs(stop: int | None, resume: bool) -> list[Tensor]:
        model = model_of()
        run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
        if resume:
            run.resume(tmp_path)
        found = []
        for batch in run.batches(Noisy(), batch=5, epochs=2):
            found.append(batch[0].clone())
            run.step(batch)
            if run.steps == stop:
                run.save(tmp_path)
                break
        return found

    whole, first, rest = inputs(None, resume=False), inputs(3, resume=False), inputs(None, resume=True)
    assert len(whole) == 8
    assert all(torch.equal(one, other) for one, other in zip(whole, first + rest, strict=True))


def test_evaluation_is_the_mean_over_all_examples_without_dropout() -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    data = examples(19)
    found = run.evaluate(data, batch=4)
    assert model.training
    inputs, labels = torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
    model.eval()
    assert float(found) == pytest.approx(float(F.cross_entropy(model(inputs), labels)), rel=1e-6)


def test_several_models_and_losses_as_in_a_gan() -> None:
    torch.manual_seed(2)
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    plain = copy.deepcopy((generator, critic))

    def critic_loss(models: Any, batch: Tensor) -> tuple[Tensor, int]:
        made = models[0](batch[:, :3]).detach()
        return F.softplus(-models[1](batch)).sum() + F.softplus(models[1](made)).sum(), len(batch)

    def generator_loss(models: Any, batch: Tensor) -> tuple[Tensor, int]:
        return F.softplus(-models[1](models[0](batch[:, :3]))).sum(), len(batch)

    optimizers = (torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.SGD(generator.parameters(), lr=0.1))
    run = plait.spread((generator, critic), optimizers, loss_sum=(critic_loss, generator_loss))
    for batch in run.batches(torch.randn(8, 4), batch=4):
        losses = run.step(batch)
        assert losses.shape == (2,)
        for loss, number in ((critic_loss, 1), (generator_loss, 0)):
            total, count = loss(plain, batch)
            gradients = torch.autograd.grad(total / count, list(plain[number].parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(plain[number].parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
    for one, other in zip((generator, critic), plain, strict=True):
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


def mean_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def constant_count(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return loss_sum(model, batch)[0], 1


def contrastive(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    output = model(batch[0])
    return (output @ output.T).sum(), len(output)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (mean_loss, "returns a mean"),
        (constant_count, "counts of two halves"),
        (contrastive, "examples depend on each other"),
        (lambda model, batch: loss_sum(model, batch)[0], "return \\(sum of losses, count\\)"),
        (lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="none"), 4), "add .sum"),
        (lambda model, batch: (loss_sum(model, batch)[0].item(), 4), "as the sum of losses"),
        (lambda model, batch: (loss_sum(model, batch)[0].detach(), len(batch[1])), "does not depend on a weight"),
    ],
)
def test_a_loss_that_is_no_sum_is_told(loss: Any, sentence: str) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss)
    with pytest.raises(PlaitError, match=sentence):
        for batch in run.batches(examples(), batch=4):
            run.step(batch)


def test_a_random_loss_that_is_a_sum_is_taken() -> None:
    model = model_of()

    def noisy(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return loss_sum(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=noisy)
    for batch in run.batches(examples(), batch=4):
        run.step(batch)
    assert run.steps == 5


def test_a_layer_that_is_replaced_later_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match="has been added, removed or replaced"):
        for batch in run.batches(examples(), batch=4):
            run.step(batch)
            model[1] = nn.Linear(8, 2)


@pytest.mark.parametrize("change", ["unfreeze", "new group"])
def test_weights_that_begin_to_be_trained_later_are_told(change: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    run = plait.spread(model, optimizer, loss_sum=loss_sum)
    with pytest.raises(PlaitError, match=r"(since|did not at) plait\.spread"):
        for batch in run.batches(examples(), batch=4):
            run.step(batch)
            if change == "new group":
                optimizer.add_param_group({"params": list(model[2].parameters())})
            else:
                model[1].bias.requires_grad_()
    assert run.steps == 1


def test_counts_may_be_weights_below_one() -> None:
    def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        weights = torch.full_like(losses, 0.01)
        return (losses * weights).sum(), weights.sum()

    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_sum=weighted)
    plain = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_sum=loss_sum)
    assert float(run.evaluate(examples())) == pytest.approx(float(plain.evaluate(examples())), rel=1e-5)
    model.eval()
    (batch,) = run.batches(examples(), batch=20)
    assert float(run.step(batch)) == pytest.approx(float(plain.evaluate(examples())), rel=1e-5)


@pytest.mark.parametrize("position", [2, 7])  # of the first batch, and of one that is read ahead
def test_a_fault_of_a_data_set_does_not_look_like_its_end(position: int) -> None:
    class Ending(Squares):
        def __getitem__(self, at: int) -> tuple[Tensor, int]:
            return super().__getitem__(next(iter(())) if at == position else at)

    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    with pytest.raises(RuntimeError, match="StopIteration"):
        for share in run.batches(Ending(), batch=5, order="given"):
            run.step(share)


def test_weights_that_share_memory_are_saved_and_come_back(tmp_path: Path) -> None:
    def views(fill: float) -> nn.Module:
        model, memory = nn.Module(), torch.full((5, 6), fill)
        model.left, model.right = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
        model.register_buffer("seen", memory.view(-1)[:4])
        return model

    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        return (batch @ model.left.T).sum() + (batch @ model.right.T).sum(), len(batch)

    model, again = views(2.0), views(0.0)
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss)
    run.save(tmp_path)
    plait.spread(again, torch.optim.SGD(again.parameters(), lr=0.1), loss_sum=loss).resume(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_a_timeline_tells_where_steps_spend_their_time(tmp_path: Path) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    for batch in run.batches(examples(), batch=5):
        run.step(batch)
    run.timeline(tmp_path / "trace.json")
    head, *spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert head["args"] == {"name": "the only worker"}
    names = ["wait for data", "forward and backward", "wait for sums", "update"]
    assert [(span["name"], span["args"]["step"]) for span in spans] == [(n, step) for step in range(4) for n in names]
    assert spans[0]["ts"] == 0.0
    for one, following in pairwise(spans):
        assert one["dur"] >= 0 and one["ts"] + one["dur"] <= following["ts"] + 1e-3
    with pytest.raises(PlaitError, match="cannot be written"):
        run.timeline(tmp_path)


def test_steps_are_recorded_in_detail_from_a_call_on(tmp_path: Path) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    for number, batch in enumerate(run.batches(examples(), batch=5)):
        if number == 1:
            run.record_steps(tmp_path / "steps.json", 2)
        run.step(batch)
    trace = json.loads((tmp_path / "steps.json").read_text())
    check_trace(trace)
    spans = [(one["args"]["step"], one["name"]) for one in trace["traceEvents"] if one["ph"] == "X"]
    assert spans == [(step, name) for step in (2, 3) for name in STEP_SPANS]
    run.record_steps(tmp_path / "steps.html", 1)
    for batch in run.batches(examples(), batch=20):
        run.step(batch)
    assert "Recorded by the program itself." in (tmp_path / "steps.html").read_text()
    with pytest.raises(PlaitError, match="1 to 50 steps, not 0"):
        run.record_steps(tmp_path / "steps.json", 0)


STEP_SPANS = ("forward 1", "backward 1", "rest of the gradient sums", "optimizer update")


@pytest.mark.parametrize("damage", ["{}", "[]", "no JSON", '{"format": 1, "steps": "3"}', "another file"])
def test_a_damaged_state_is_told(tmp_path: Path, damage: str) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    run.save(tmp_path)
    path = tmp_path / "step-0" / "state.json"
    path.write_text(path.read_text().replace('"model"', '"../model"') if damage == "another file" else damage)
    with pytest.raises(PlaitError, match="cannot be read"):
        run.resume(tmp_path)


def test_a_step_saved_again_is_never_lost(tmp_path: Path) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    run.save(tmp_path)
    (tmp_path / "step-0").rename(tmp_path / "step-0.before")  # as if ended between the two renames
    run.resume(tmp_path)
    run.save(tmp_path)
    run.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaitError, match="could not save"):
        run.save(tmp_path / "file")


def refusals() -> list[tuple[Any, str]]:
    spread: Any = plait.spread  # what no type checker lets through comes, too
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    lazy = nn.LazyLinear(3)
    sparse = nn.Embedding(5, 3, sparse=True)
    return [
        (lambda: spread(model, torch.optim.LBFGS(model.parameters()), loss_sum=loss_sum), "LBFGS calls the loss"),
        (lambda: spread(model, other, loss_sum=loss_sum), "that no model has"),
        (lambda: spread(model, (sgd, other), loss_sum=(loss_sum,) * 3), "one loss for each optimizer"),
        (lambda: spread(lazy, sgd, loss_sum=loss_sum), "has no shape yet"),
        (lambda: spread(sparse, sgd, loss_sum=loss_sum), "sparse gradients"),
        (lambda: spread(model, sgd, loss_sum=loss_sum, clip=0.0), "clip = 0.0"),
        (lambda: spread(model, sgd, loss_sum=loss_sum, layout="tensor"), "not possible for modules of"),
        (lambda: spread(model, sgd, loss_sum=loss_sum, precision="fp8"), "precision"),
        (lambda: spread(model, sgd, loss_sum=loss_sum, bucket=3), "takes no bucket; did you mean bucket_mib"),
        (lambda: spread(nn.DataParallel(model), sgd, loss_sum=loss_sum), "model.module"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(10))
def test_what_cannot_be_carried_is_refused_in_words(number: int) -> None:
    call, sentence = refusals()[number]
    with pytest.raises(PlaitError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("data", "asked", "sentence"),
    [
        (examples(3), {"batch": 4}, "take a smaller batch"),
        (examples(), {}, "need a batch"),
        (examples(), {"batch": 4, "batch_per_worker": 4}, "one of the two"),
        (examples(), {"batch": 0}, "batch = 0"),
        (examples(), {"batch": 4, "shares": [1, 2]}, "one positive number for each"),
        (3, {"batch": 4}, "no data to read batches from"),
        ((x for x in examples()), {"batch": 10, "epochs": 2}, "read only once"),
    ],
)
def test_data_that_do_not_do_are_told(data: Any, asked: dict[str, Any], sentence: str) -> None:
    model = model_of()
    run = plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum)
    with pytest.raises(PlaitError, match=sentence):
        for batch in run.batches(data, **asked):
            run.step(batch)


def test_an_optimizer_of_ones_own_and_a_scheduler_are_saved(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    run = plait.spread(model, optimizer, loss_sum=loss_sum, schedulers=[scheduler])
    for batch in run.batches(examples(), batch=4):
        run.step(batch)
    run.save(tmp_path)
    again = model_of(seed=4)
    optimizer_again = torch.optim.Adafactor(again.parameters(), lr=0.05)
    scheduler_again = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_again, 10)
    run_again = plait.spread(again, optimizer_again, loss_sum=loss_sum, schedulers=[scheduler_again])
    run_again.resume(tmp_path)
    assert scheduler_again.get_last_lr() == scheduler.get_last_lr()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer_again.state[other][key])), key
