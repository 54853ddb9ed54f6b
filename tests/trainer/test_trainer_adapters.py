"""Training an adapter: what its checkpoints hold, what they bring back, and that it is what others would train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from plait.checkpoint.manifest import tensor_names
from plait.checkpoint.store import verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from plait.data.loader import IGNORED_TARGET, Micro
from plait.errors import PlaitError, RunFailed
from plait.interop.base_model import BaseModel, read_base_model
from plait.model.adapters import merge_adapters
from plait.model.gpt import GPT
from plait.model.init import first_value
from plait.model.linear import Linear
from plait.model.weights import is_trained, trained_parameter_count, trained_weights
from plait.parallel.communicator import ONE_PROCESS
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.checkpointing.persist import load_weights, restore
from plait.trainer.optimizer.optim import learning_rate
from plait.trainer.state import TrainState
from tests.matrix import few_fast
from tests.trainer.adapted import make_adapted

STEPS = 50
Ready = tuple[RunConfig, Plan, PreTrainedModel]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def ready(folder: Path) -> Ready:
    return make_adapted(folder)


def saved(run_ranks, folder: Path, workers: int, *, old: Path | None, new: str, steps: int) -> Path:
    asked = {"folder": str(folder), "old": str(old) if old else None, "new": str(folder / new), "steps": steps}
    run_ranks("restore_and_save", json.dumps(asked), workers)
    (found,) = (folder / new).iterdir()
    return found


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    manifest = verify_checkpoint(checkpoint)
    names = [name for name in tensor_names(manifest) if not name.startswith("rng/")]
    return {name: read_tensor(checkpoint, manifest, name) for name in names}


def alone(config: RunConfig, plan: Plan) -> Assembly:
    return assemble(config, plan, sums=ONE_PROCESS, stages=())


def test_a_checkpoint_holds_the_adapter_alone_and_names_its_base(run_ranks, folder: Path, ready: Ready) -> None:
    _, plan, _ = ready
    checkpoint = saved(run_ranks, folder, 2, old=None, new="two", steps=3)
    found, names = tensors(checkpoint), trained_weights(plan.job.shape)
    assert found.keys() == {"tokens", "adam_step"} | {
        f"{kind}/{name}" for kind in ("model", "adam_m", "adam_v") for name in names
    }
    assert sum(found[f"model/{name}"].numel() for name in names) == trained_parameter_count(plan.job.shape)
    assert all(bool(found[f"model/{name}"].any()) for name in names)
    model = verify_checkpoint(checkpoint).model
    assert model == json.loads(json.dumps(plan.job.shape.to_dict() | {"base": plan.job.base_fingerprint}))


@pytest.mark.slow
def test_one_worker_goes_on_with_what_two_saved(run_ranks, folder: Path, ready: Ready) -> None:
    config, plan, _ = ready
    half = saved(run_ranks, folder, 2, old=None, new="half", steps=3)
    same = saved(run_ranks, folder, 1, old=half, new="same", steps=0)
    assert all(torch.equal(value, tensors(half)[name]) for name, value in tensors(same).items())
    # The next loss: of one process that never stopped, and of one that goes on from two.
    whole, resumed = alone(config, plan), alone(config, plan)
    state = TrainState()
    for _ in range(3):
        state, _ = whole.step(state)
    _, wanted = whole.step(state)
    state = restore(resumed, half, verify_checkpoint(half), ONE_PROCESS)
    _, scalars = resumed.step(state)
    for assembly in (whole, resumed):
        assembly.loader.close()
    assert scalars.totals[1] == wanted.totals[1] > 0
    assert float(scalars.totals[0]) == pytest.approx(float(wanted.totals[0]), rel=1e-6)


@pytest.mark.parametrize("workers", few_fast([1, 2], 2))
def test_going_on_gives_the_bits_of_never_having_stopped(run_ranks, folder: Path, ready: Ready, workers: int) -> None:
    whole = saved(run_ranks, folder, workers, old=None, new=f"whole-{workers}", steps=5)
    half = saved(run_ranks, folder, workers, old=None, new=f"half-{workers}", steps=2)
    rest = saved(run_ranks, folder, workers, old=half, new=f"rest-{workers}", steps=3)
    assert (rest / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()


def test_another_base_is_refused(run_ranks, folder: Path, ready: Ready, tmp_path: Path) -> None:
    config, plan, model = ready
    checkpoint = saved(run_ranks, folder, 1, old=None, new="once", steps=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.001)
        model.save_pretrained(tmp_path / "other")
        for weight in model.parameters():
            weight.div_(1.001)
    with pytest.raises(RunFailed, match="is not the one that this run was planned with; bring that one back"):
        alone(config, replace(plan, job=replace(plan.job, base=str(tmp_path / "other"))))
    other = alone(config, replace(plan, job=replace(plan.job, base_fingerprint="")))
    with pytest.raises(PlaitError, match="this checkpoint has base"):
        restore(other, checkpoint, verify_checkpoint(checkpoint), ONE_PROCESS)
    other.loader.close()


def test_a_model_begins_as_its_base_and_merged_computes_the_same(run_ranks, folder: Path, ready: Ready) -> None:
    config, plan, model = ready
    assembly = alone(config, plan)
    assembly.loader.close()
    (ours,) = assembly.model.chunks
    tokens = torch.randint(280, (2, 8))
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits.flatten(0, 1)
        torch.testing.assert_close(ours.logits(ours(tokens)), wanted, rtol=1e-4, atol=1e-5)
        checkpoint = saved(run_ranks, folder, 1, old=None, new="merged", steps=6)
        load_weights(ours, checkpoint, verify_checkpoint(checkpoint))
        merged = merge_adapters(ours)
        assert merged.shape.adapter is None and all(p.requires_grad for p in merged.parameters())
        changed = ours.logits(ours(tokens))
        assert float((changed - wanted).abs().max()) > 1e-3
        torch.testing.assert_close(merged.logits(merged(tokens)), changed, rtol=1e-4, atol=1e-5)
        layer = ours.get_submodule("layers.1.feedforward.down")
        assert isinstance(layer, Linear) and layer.lora_a is not None and layer.lora_b is not None
        exact = layer.weight.double() + layer.scale * layer.lora_b.double() @ layer.lora_a.double()
        assert torch.equal(merged.get_parameter("layers.1.feedforward.down.weight"), exact.float())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("documents", few_fast(["mask", "join"], "mask"))
def test_fifty_steps_are_those_of_a_plain_loop(tmp_path: Path, method: str, documents: str) -> None:
    planned = {"adapter": None} if method == "full" else {}
    config, plan, model = make_adapted(tmp_path, documents=documents, steps=STEPS, **planned)
    assert plan.job.optimizer.clip is not None
    ours, source = alone(config, plan), alone(config, plan)
    theirs = PlainLoop(model, plan, read_base_model(Path(plan.job.base)), config.run.seed)
    state, losses = TrainState(), list[float]()
    for step in range(STEPS):
        wanted = theirs.step(source.loader.micros(state.position), step)
        state, scalars = ours.step(state)
        losses.append(float(scalars.totals[0] / scalars.totals[1]))
        assert losses[-1] == pytest.approx(wanted, rel=1e-4), step
    assert losses[-1] < losses[0] - 0.1, "it learned"
    for assembly in (ours, source):
        assembly.loader.close()


class PlainLoop:
    """Training as people write it with torch and transformers: a mean over a step's tokens, torch's own clipping and
    AdamW."""

    def __init__(self, model: PreTrainedModel, plan: Plan, base: BaseModel, seed: int) -> None:
        self.model, self.plan = model.train(), plan
        if plan.job.shape.adapter is not None:
            for weight in model.parameters():
                weight.requires_grad_(False)
            for name in trained_weights(plan.job.shape):
                if name.endswith("lora_a"):
                    self._adapt(name.removesuffix(".lora_a"), base, seed)
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        decays = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        others = [weight for name, weight in named if not (weight.ndim == 2 and "embed" not in name)]
        self.weights = [*decays, *others]
        optimizer = plan.job.optimizer
        groups = [
            {"params": decays, "weight_decay": optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=1e-8)

    def _adapt(self, layer: str, base: BaseModel, seed: int) -> None:
        path = base.places[f"{layer}.weight"].stored.name.removesuffix(".weight")
        parent, _, last = path.rpartition(".")
        inner = self.model.get_submodule(path)
        assert isinstance(inner, nn.Linear) and self.plan.job.shape.adapter is not None
        first = first_value(f"{layer}.lora_a", self.plan.job.shape, seed)
        setattr(self.model.get_submodule(parent), last, PlainLora(inner, first, self.plan.job.shape.adapter.scale))

    def step(self, micros: list[Micro], step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.plan.job.optimizer, step, self.plan.job.steps)
        self.optimizer.zero_grad()
        tokens = sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in micros)
        total = 0.0
        for micro in micros:
            logits = self.model(
                input_ids=micro.inputs, position_ids=micro.positions, attention_mask=seen_by(micro), use_cache=False
            ).logits
            targets = micro.targets.flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED_TARGET, reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.weights, self.plan.job.optimizer.clip or 0.0)
        self.optimizer.step()
        return total / tokens


class PlainLora(nn.Module):
    """A linear layer with an adapter, as PEFT computes it."""

    def __init__(self, inner: nn.Linear, first: Tensor, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale
        self.lora_a, self.lora_b = nn.Parameter(first), nn.Parameter(torch.zeros(inner.out_features, len(first)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


def seen_by(micro: Micro) -> Tensor:
    """Which tokens each token attends to, [B, 1, T, T]: itself and the earlier ones of its document."""
    rows, tokens = micro.inputs.shape
    earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if micro.lengths is None:
        return earlier.expand(rows, 1, tokens, tokens)
    lengths = torch.tensor(micro.lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(rows, tokens)
    return (earlier & (document[:, :, None] == document[:, None, :]))[:, None]


def test_only_the_adapter_asks_for_gradients(ready: Ready) -> None:
    _, plan, _ = ready
    model = GPT(plan.job.shape)
    assert all(weight.requires_grad == is_trained(name, plan.job.shape) for name, weight in model.named_parameters())
