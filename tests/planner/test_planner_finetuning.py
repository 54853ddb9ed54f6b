"""What fine-tuning leaves open follows published rules, never the machine; what cannot be tuned is one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.data.samples.sizes import CorpusSizes, LengthCounts
from plait.errors import PlaitError
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import ModelShape, linear_layers
from plait.planner.derive.adapters import named_targets
from plait.planner.derive.model_size import CorpusFacts
from plait.planner.derive.published_rules import (
    finetuning_lr,
    finetuning_warmup_steps,
    preference_numbers,
    rank_for_tokens,
)
from plait.planner.plan import Plan
from plait.recipe.finetune import FinetuneObjective, FinetuneSection
from plait.recipe.schema import RunConfig
from tests.planner.machines import CHATS, EIGHT_H100, LAPTOP, SERVER, SMOLLM2, planned, recipe

GPT2 = replace(
    SMOLLM2, kv_heads=9, norm="layernorm", activation="gelu", positions="learned", bias="all", learned_positions=8192
)


def tuned(folder: Path, *overrides: str, method: str = "lora") -> RunConfig:
    (folder / "base").mkdir(exist_ok=True)
    return recipe(folder, "model.from=base", f"finetune.method={method}", *overrides)


def adapter_of(plan: Plan) -> AdapterShape:
    assert plan.job.shape.adapter is not None
    return plan.job.shape.adapter


def reasons(plan: Plan, about: str) -> str:
    [found] = [reason for reason in plan.reasons if about in reason]
    return found


def test_lora_learns_ten_times_as_fast_as_all_weights_do(tmp_path: Path) -> None:
    full, lora = (planned(tuned(tmp_path, method=way), CHATS, LAPTOP) for way in ("full", "lora"))
    assert full.job.optimizer.lr == finetuning_lr("full") == 2e-5
    assert lora.job.optimizer.lr == pytest.approx(10 * full.job.optimizer.lr)
    assert (full.job.optimizer.weight_decay, lora.job.optimizer.weight_decay) == (0.1, 0.0)
    assert full.job.shape.adapter is None and full.job.base_fingerprint == lora.job.base_fingerprint == "f1"
    assert "Schulman 2025" in reasons(lora, "peak learning rate 0.0002")
    assert "Llama 2" in reasons(full, "peak learning rate 2e-05")


def test_qlora_is_lora_beside_few_bits(tmp_path: Path) -> None:
    lora, qlora = (planned(tuned(tmp_path, method=way), CHATS, LAPTOP) for way in ("lora", "qlora"))
    assert adapter_of(qlora) == replace(adapter_of(lora), quantization="nf4")
    assert qlora.job.optimizer == lora.job.optimizer and qlora.job.steps == lora.job.steps
    assert "frozen matrices in nf4: 4.12 bits a number, 52" in reasons(qlora, "frozen matrices")
    eight = planned(tuned(tmp_path, "finetune.quantization=int8", method="qlora"), CHATS, LAPTOP)
    assert adapter_of(eight).quantization == "int8"


def test_what_qlora_does_not_go_with_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match='quantization is QLoRA\'s; write method = "qlora", or take quantization out'):
        tuned(tmp_path, "finetune.quantization=int8")
    with pytest.raises(PlaitError, match=r'has nothing to update: finetune.method = "qlora" trains adapters alone'):
        planned(tuned(tmp_path, "optimizer.kind=muon", method="qlora"), CHATS, LAPTOP)


def test_tables_are_trained_whole_where_they_are_named(tmp_path: Path) -> None:
    plain, saved = (
        planned(tuned(tmp_path, *more), CHATS, LAPTOP) for more in ((), ('finetune.modules_to_save=["lm_head"]',))
    )
    assert adapter_of(saved) == replace(adapter_of(plain), modules_to_save=("embedding",))
    assert "embedding, which is the head as well: trained whole, 28.3M weights" in reasons(saved, "trained whole")
    with pytest.raises(PlaitError, match=r'"norm" is not a table of the vocabulary; choose among embed_tokens and lm'):
        planned(tuned(tmp_path, 'finetune.modules_to_save=["norm"]'), CHATS, LAPTOP)
    with pytest.raises(PlaitError, match=r"modules_to_save is LoRA's; write method = .lora., or take modules_to_save"):
        tuned(tmp_path, 'finetune.modules_to_save=["lm_head"]', method="full")


def test_a_step_holds_so_many_examples_and_the_run_three_epochs(tmp_path: Path) -> None:
    full, lora = (planned(tuned(tmp_path, "train.sequence=256", method=way), CHATS, LAPTOP) for way in ("full", "lora"))
    assert full.batch_tokens == pytest.approx(64 * 45, rel=0.15) and lora.batch_tokens == pytest.approx(
        32 * 45, rel=0.15
    )
    assert str(lora.job.budget) == "3 epochs"
    assert 3 * 90_000 / lora.batch_tokens <= lora.job.steps < 3 * 90_000 / lora.batch_tokens + 2
    assert lora.job.optimizer.warmup_steps == finetuning_warmup_steps(lora.job.steps) == 10
    long = replace(CHATS, train_tokens=10_000_000, documents=100)
    assert planned(tuned(tmp_path, "train.sequence=256"), long, LAPTOP).job.batch_sequences == 32


@pytest.mark.parametrize(
    ("objective", "named", "numbers"),
    [
        ("simpo", {}, (2.0, 1.0)),
        ("simpo", {"beta": 4.0}, (4.0, 2.0)),
        ("simpo", {"margin": 0.3}, (2.0, 0.3)),
        ("dpo", {}, (0.1, 0.05)),
    ],
)
def test_beta_and_margin_may_be_left_open(
    objective: FinetuneObjective, named: dict[str, float], numbers: tuple[float, float]
) -> None:
    section = FinetuneSection(method="full", objective=objective, **named)  # type: ignore[arg-type]
    assert preference_numbers(section) == numbers


@pytest.mark.parametrize("method", ["full", "lora"])
def test_no_rule_asks_how_many_workers_there_are(tmp_path: Path, method: str) -> None:
    said = {}
    for workers in (1, 4):
        plan = planned(tuned(tmp_path, f"run.workers={workers}", method=method), CHATS, SERVER)
        assert plan.world_size == workers
        said[workers] = (
            plan.job.optimizer,
            plan.job.batch_sequences,
            plan.job.sequence,
            plan.job.steps,
            plan.job.shape,
            plan.job.budget,
        )
    assert said[1] == said[4]
    other = planned(tuned(tmp_path, "train.precision=float32", method=method), CHATS, EIGHT_H100)
    assert said[1] == (
        other.job.optimizer,
        other.job.batch_sequences,
        other.job.sequence,
        other.job.steps,
        other.job.shape,
        other.job.budget,
    )


SHORT: LengthCounts = tuple((length, length // 3, 39) for length in range(20, 71))
"""Lengths, tokens before the first answer, and how many chats: as long on average as those of CHATS."""


def whole(*longer: tuple[int, int, int]) -> CorpusFacts:
    return replace(CHATS, layout="whole", sizes=CorpusSizes(examples=((*SHORT, *longer),), heldout=((50, 9, 100),)))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_short_chats_fill_several_windows_a_step_whatever_the_workers(tmp_path: Path, method: str) -> None:
    plans = [
        planned(tuned(tmp_path, f"run.workers={workers}", method=method), whole(), SERVER) for workers in (1, 2, 4)
    ]
    assert len({(one.job.sequence, one.job.batch_sequences, one.job.steps, one.job.optimizer) for one in plans}) == 1
    plan = plans[0]
    assert (plan.job.sequence, plan.job.batch_sequences) == ({"full": 384, "lora": 192}[method], 8)
    assert plan.batch_tokens == pytest.approx({"full": 64, "lora": 32}[method] * 45, rel=0.15)
    assert "examples are short, and a step has 8 such windows" in reasons(plan, f"sequence {plan.job.sequence}: ")
    assert float(reasons(plan, "windows ").split()[1].rstrip("%")) > 95


def test_windows_of_short_chats_hold_the_longest_one(tmp_path: Path) -> None:
    one_long = planned(tuned(tmp_path), whole((900, 30, 1)), LAPTOP)
    assert (one_long.job.sequence, one_long.job.batch_sequences) == (960, 2)
    beyond = planned(tuned(tmp_path), whole((1500, 30, 1)), LAPTOP)
    assert (beyond.job.sequence, beyond.job.batch_sequences) == (1536, 1)
    dropped = planned(tuned(tmp_path, "data.overlong=drop"), whole((1500, 30, 1)), LAPTOP)
    assert (dropped.job.sequence, dropped.job.batch_sequences) == (192, 8)
    cut = planned(tuned(tmp_path, "data.overlong=cut"), whole((1500, 30, 1)), LAPTOP)
    assert cut.job.sequence == 1024, "a shorter window would cut more of it"


@pytest.mark.slow
def test_named_windows_and_batches_of_short_chats_are_kept(tmp_path: Path) -> None:
    named = planned(tuned(tmp_path, "train.sequence=512"), whole(), LAPTOP)
    assert (named.job.sequence, named.job.batch_sequences) == (512, 3)
    small = planned(tuned(tmp_path, "train.batch_tokens=512"), whole(), LAPTOP)
    assert (small.job.sequence, small.job.batch_sequences) == (128, 4)
    large = planned(tuned(tmp_path, "train.batch_tokens=16384"), whole(), LAPTOP)
    assert (large.job.sequence, large.job.batch_sequences) == (1024, 16)


def test_a_model_grows_by_the_tokens_that_were_added_to_its_tokenizer(tmp_path: Path) -> None:
    added = replace(CHATS, vocabulary=49_155, added_tokens=20)
    plan = planned(tuned(tmp_path, method="full"), added, LAPTOP)
    assert plan.job.shape == replace(
        planned(tuned(tmp_path, method="full"), CHATS, LAPTOP).job.shape, vocabulary=49_155
    )
    assert "3 rows for tokens that were added" in reasons(plan, "vocabulary 49155: ")
    refused = {
        "lora": (added, "adapters leave the embedding as it is, so that new tokens.*write finetune.modules_to_save"),
        "full": (replace(added, added_tokens=2), "has 49155 entries and the model 49152: it is not the model's own"),
    }
    for method, (facts, words) in refused.items():
        with pytest.raises(PlaitError, match=words) as caught:
            planned(tuned(tmp_path, method=method), facts, LAPTOP)
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_the_rank_grows_with_what_there_is_to_learn(tmp_path: Path) -> None:
    few = adapter_of(planned(tuned(tmp_path), CHATS, LAPTOP))
    assert few == AdapterShape(rank=16, alpha=32.0, targets=linear_layers(SMOLLM2), variant="lora")
    many = replace(CHATS, train_tokens=40_000_000, documents=100_000)
    assert adapter_of(planned(tuned(tmp_path, "train.budget=20 steps"), many, LAPTOP)).rank == 128  # of at most 192
    assert [rank_for_tokens(tokens, 1000, 4096) for tokens in (0, 40_000, 100_000, 10**9)] == [16, 32, 64, 256]
    assert rank_for_tokens(10**9, 1000, 100) == 64


def test_named_numbers_are_kept(tmp_path: Path) -> None:
    keys = ("finetune.rank=8", "finetune.alpha=3.5", "finetune.variant=rslora", 'finetune.targets=["attention", "up"]')
    named = planned(tuned(tmp_path, *keys, "optimizer.lr=1e-3", "optimizer.warmup_steps=1"), CHATS, LAPTOP)
    targets = ("attention.q", "attention.k", "attention.v", "attention.o", "feedforward.up")
    assert adapter_of(named) == AdapterShape(rank=8, alpha=3.5, targets=targets, variant="rslora")
    assert (named.job.optimizer.lr, named.job.optimizer.warmup_steps) == (1e-3, 1)
    usual = adapter_of(planned(tuned(tmp_path, "finetune.variant=rslora"), CHATS, LAPTOP))
    assert usual.scale == pytest.approx(AdapterShape(rank=16, alpha=32.0, targets=("attention.q",)).scale)


@pytest.mark.parametrize(
    ("names", "shape", "meant"),
    [
        (["q_proj", "v_proj"], SMOLLM2, ("attention.q", "attention.v")),
        (["down", "gate"], SMOLLM2, ("feedforward.gate", "feedforward.down")),
        (["attention.o", "feedforward"], GPT2, ("attention.o", "feedforward.up", "feedforward.down")),
        (["c_attn"], GPT2, ("attention.q", "attention.k", "attention.v")),
        (["all-linear"], GPT2, linear_layers(GPT2)),
    ],
)
def test_targets_may_have_peft_names(names: list[str], shape: ModelShape, meant: tuple[str, ...]) -> None:
    assert named_targets(names, shape) == meant


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (('finetune.targets=["q_prj"]',), r'"q_prj" matches no linear layer of this model; did you mean "q_proj"\?'),
        (('finetune.targets=["lm_head"]',), '"lm_head" matches no linear layer.*There are attention.q, '),
        (("finetune.rank=200",), r"finetune.rank = 200 is above the 192 of attention.k's smaller side.*at most 192"),
        (("finetune.method=full", "finetune.rank=8"), 'finetune is not usable: rank is LoRA\'s; write method = "lora"'),
        (("finetune.method=auto", "finetune.variant=rslora"), "variant is LoRA's"),
        (("finetune.method=dora",), 'finetune.method is not usable: it should be "full", "lora" or "qlora" or "auto"'),
        (("finetune.targets=[]",), "finetune.targets is not usable"),
        (("finetune.rnk=8",), r"finetune.rnk is not a key of the recipe; did you mean finetune.rank\?"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlaitError, match=words) as caught:
        planned(tuned(tmp_path, *overrides), CHATS, LAPTOP)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_there_must_be_a_model_to_tune(tmp_path: Path, method: str) -> None:
    with pytest.raises(
        PlaitError, match=f'finetune.method = "{method}" tunes a model that is trained already; name it'
    ):
        planned(recipe(tmp_path, f"finetune.method={method}"), replace(CHATS, base=None), LAPTOP)


def test_without_the_section_a_model_is_trained_on_as_before(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    plan = planned(recipe(tmp_path, "model.from=base", "train.budget=100 steps"), CHATS, LAPTOP)
    assert plan.job.shape.adapter is None and not any("Llama 2" in reason for reason in plan.reasons)


def test_text_without_documents_has_a_batch_too(tmp_path: Path) -> None:
    assert planned(tuned(tmp_path), replace(CHATS, documents=0), LAPTOP).job.batch_sequences == 32


def test_muon_has_nothing_to_update_beside_adapters(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r'optimizer.kind = "muon" has nothing to update: .* write finetune.method'):
        planned(tuned(tmp_path, "optimizer.kind=muon", "finetune.rank=1"), CHATS, LAPTOP)
    whole = planned(tuned(tmp_path, "optimizer.kind=muon", method="full"), CHATS, LAPTOP).job.optimizer
    assert whole.kind == "muon" and whole.lr == whole.adamw_lr == finetuning_lr("full")
