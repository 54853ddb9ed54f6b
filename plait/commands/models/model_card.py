"""The model card of an export: what the model was trained from and on. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.checkpoint.manifest import Manifest
from plait.model.shape import parameter_count
from plait.planner.plan import Plan
from plait.planner.problem.model_words import without_objectives
from plait.recipe.schema import RunConfig
from plait.units import format_count
from plait.version import __version__


def model_card(config: RunConfig, plan: Plan, manifest: Manifest, licences: Sequence[str], *, answers: str = "") -> str:
    """README.md in Markdown; training files are listed by name, without their paths. `answers` says how
    answers of a chat end."""
    tokens = manifest.step * plan.batch_tokens
    base = config.model.from_
    name = None if base is None else base if base.startswith("hub:") else Path(base).name
    origin = f"the weights of {name}" if name else f"weights drawn from seed {config.run.seed}"
    shape = without_objectives(plan.job.shape)  # what an export has
    lines = [
        "---",
        "library_name: transformers",
        "---",
        "",
        f"# {config.run.name}",
        "",
        f"A language model of {format_count(parameter_count(shape))} parameters, trained by plait {__version__} "
        f"from {origin}:",
        "",
        f"- {manifest.step:,} steps of {plan.job.batch_sequences} × {plan.job.sequence} tokens, "
        f"{format_count(tokens)} in all",
        f"- text: {', '.join(_texts(config))}",
        f"- {_optimizer_text(plan)}, precision {plan.arithmetic.precision}, layout {plan.placement.layout}",
        "",
    ]
    lines += [answers, ""] if answers else []
    if licences:
        licence = f"Files of the licence that {name} came with: {', '.join(licences)}."
    else:
        licence = "No licence came with what it was trained from; its owner decides."
    return "\n".join([*lines, licence]) + "\n"


def _texts(config: RunConfig) -> list[str]:
    files = config.data.files
    sources = [files] if isinstance(files, str) else files
    return [Path(one if isinstance(one, str) else one.path).name for one in sources]


def _optimizer_text(plan: Plan) -> str:
    optimizer = plan.job.optimizer
    name = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}[optimizer.kind]
    beside = f" (AdamW's, for what is no hidden matrix: {optimizer.adamw_lr:g})" if optimizer.adamw_lr else ""
    return f"{name}, peak learning rate {optimizer.lr:g}{beside}"
