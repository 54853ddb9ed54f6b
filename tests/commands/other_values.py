"""Every key of the recipe with another value than the base recipe's: keep it complete."""

from __future__ import annotations

from pathlib import Path

from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig

BASE = """
[data]
files = "text.txt"

[model]
size = "1M"

[train]
budget = "100 steps"

[layout]
pipeline = 2
shard = 2
"""

OTHER_VALUES = {
    "run.name": "another",
    "run.seed": "2",
    "run.devices": "[1]",
    "run.workers": "4",
    "run.threads": "1",
    "model.from": ".",
    "finetune.method": "lora",
    "finetune.rank": "2",
    "finetune.alpha": "3.0",
    "finetune.targets": '["attention"]',
    "finetune.variant": "rslora",
    "finetune.modules_to_save": '["embed_tokens"]',
    "finetune.dropout": "0.1",
    "finetune.quantization": "int8",
    "finetune.objective": "dpo",
    "finetune.beta": "0.5",
    "finetune.label_smoothing": "0.1",
    "finetune.reference": "none",
    "finetune.margin": "0.7",
    "model.size": "3M",
    "model.layers": "3",
    "model.width": "256",
    "model.heads": "8",
    "model.kv_heads": "2",
    "model.head_width": "64",
    "model.key_value_rank": "16",
    "model.query_rank": "24",
    "model.rope_head_width": "8",
    "model.value_head_width": "12",
    "model.ffn": "100",
    "model.vocabulary": "5000",
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.positions": "learned",
    "model.rope_theta": "500000.0",
    "model.bias": "all",
    "model.qk_norm": "true",
    "model.tied": "false",
    "model.experts": "8",
    "model.experts_per_token": "3",
    "model.shared_experts": "1",
    "model.expert_ffn": "40",
    "model.expert_every": "2",
    "model.dense_layers": "1",
    "model.expert_groups": "2",
    "model.expert_groups_chosen": "1",
    "model.router": "softmax",
    "model.router_scale": "2.5",
    "model.router_normalize": "false",
    "model.expert_balance": '["bias", "sequence"]',
    "model.expert_balance_rate": "0.5",
    "model.expert_balance_weight": "0.5",
    "model.router_z_weight": "0.001",
    "model.expert_capacity": "1.25",
    "model.auxiliary_heads": "[2]",
    "model.auxiliary_head_weight": "0.5",
    "model.predict_ahead": "1",
    "model.predict_ahead_weight": "0.1",
    "data.files": '[{path = "text.txt", weight = 1.0}, {path = "more.jsonl", weight = 2.0, field = "body"}]',
    "data.tokenizer": "gpt2",
    "data.holdout": "0.1",
    "data.mask_documents": "true",
    "data.format": "chat",
    "data.overlong": "drop",
    "data.chat_template": "chatml",
    "data.bad_records": "0.25",
    "train.budget": "200 steps",
    "train.sequence": "64",
    "train.batch_tokens": "65536",
    "train.precision": "bf16",
    "train.compile": "off",
    "train.deterministic": "true",
    "train.matmul_backend": "onednn",
    "train.gradient_transfer": "bf16",
    "train.stage_transfer": "bf16",
    "balance.every": "10 steps",
    "layout.shares": "[14, 10]",
    "layout.devices": "all",
    "optimizer.kind": "sgd",
    "optimizer.lr": "0.0123",
    "optimizer.adamw_lr": "0.0077",
    "optimizer.warmup_steps": "1",
    "optimizer.weight_decay": "0.3",
    "optimizer.betas": "[0.8, 0.9]",
    "optimizer.momentum": "0.8",
    "optimizer.clip": "never",
    "optimizer.schedule": "wsd",
    "layout.pipeline": "3",
    "layout.replicate": "2",
    "layout.shard": "4",
    "layout.context": "2",
    "layout.tensor": "2",
    "layout.expert": "2",
    "layout.shard_what": "parameters",
    "layout.stage_layers": "[1, 3]",
    "layout.virtual_stages": "2",
    "layout.schedule": "gpipe",
    "layout.recompute": "full",
    "layout.micro_sequences": "5",
    "checkpoint.every": "7 steps",
    "checkpoint.keep": "5",
    "checkpoint.keep_for": "3 hours",
    "recover.mode": "never",
    "recover.state_every": "never",
    "recover.give_up_after": "5",
    "plan.objective": "cheapest",
    "plan.deadline": "3 days",
    "plan.max_cost": "500",
    "plan.min_tokens_per_s": "1000",
    "report.every": "9 steps",
    "report.evaluate": "13 steps",
    "report.choices": "choices.jsonl",
    "report.to": '["csv", "wandb"]',
    "report.samples": "3",
    "report.prompt": "Once",
}

TUNED = ("model.size=auto", "model.from=.", "layout.pipeline=1")
LORA = (*TUNED, "finetune.method=lora")
BESIDE = {
    "model.from": ("model.size=auto",),
    "finetune.method": TUNED,
    **dict.fromkeys(
        (
            "finetune.rank",
            "finetune.alpha",
            "finetune.targets",
            "finetune.variant",
            "finetune.modules_to_save",
            "finetune.dropout",
        ),
        LORA,
    ),
    "finetune.quantization": (*TUNED, "finetune.method=qlora"),
    "finetune.objective": (*TUNED, "finetune.method=full"),
    **dict.fromkeys(
        ("finetune.beta", "finetune.label_smoothing", "finetune.reference"),
        (*TUNED, "finetune.method=full", "finetune.objective=dpo"),
    ),
    "finetune.margin": (*TUNED, "finetune.method=full", "finetune.objective=simpo"),
    **{key: ("model.experts=8",) for key in OTHER_VALUES if key.startswith(("model.expert_", "model.router"))},
    **dict.fromkeys(
        ("model.query_rank", "model.rope_head_width", "model.value_head_width"), ("model.key_value_rank=16",)
    ),
    **dict.fromkeys(("model.experts_per_token", "model.shared_experts", "model.dense_layers"), ("model.experts=8",)),
    "model.expert_groups": ("model.experts=8", "model.expert_groups_chosen=1"),
    "model.expert_groups_chosen": ("model.experts=8", "model.expert_groups=2"),
    "model.expert_balance_weight": ("model.experts=8", "model.expert_balance=sequence"),
    "model.auxiliary_head_weight": ("model.auxiliary_heads=[2]",),
    "model.predict_ahead_weight": ("model.predict_ahead=1",),
    "layout.expert": ("model.experts=8", "layout.replicate=2", "layout.shard=1"),
    "optimizer.kind": ("optimizer.lr=0.1",),
    "optimizer.adamw_lr": ("optimizer.kind=muon",),
    "optimizer.momentum": ("optimizer.kind=sgd", "optimizer.lr=0.1"),
}
"""What the base recipe must have, too, for a key to have its other value."""


def base_recipe(folder: Path, key: str | None = None) -> RunConfig:
    """The recipe that the one of `changed_recipe` differs from in one key."""
    return _recipe(folder, *BESIDE.get(key or "", ()))


def changed_recipe(folder: Path, key: str) -> RunConfig:
    return _recipe(folder, *BESIDE.get(key, ()), f"{key}={OTHER_VALUES[key]}")


def _recipe(folder: Path, *overrides: str) -> RunConfig:
    (folder / "base.toml").write_text(BASE)
    for name in ("text.txt", "more.jsonl"):
        (folder / name).write_text("text")
    return load_recipe(folder / "base.toml", overrides)
