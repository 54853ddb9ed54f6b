"""Derives how many tokens a model knows: all that the tokenizer has, also where a trained model has fewer."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Literal

from plait.errors import PlaitError
from plait.model.shape import ModelShape
from plait.planner.derive.derived import Derived
from plait.recipe.finetune import FinetuneMethod
from plait.units import counted


def fitting_vocabulary(requested: int | Literal["auto"], entries: int) -> int:
    """Of a new model, for a tokenizer of this many entries; raises PlaitError where fewer are requested."""
    if requested == "auto":
        return ceil(entries / 64) * 64
    if requested < entries:
        raise PlaitError(
            f"the tokenizer has {entries} entries, more than model.vocabulary = {requested}; "
            f'choose at least {entries}, or "auto"'
        )
    return requested


def grown_shape(
    shape: ModelShape, entries: int, added: int, method: FinetuneMethod | Literal["auto"]
) -> Derived[ModelShape]:
    """A trained model's shape with rows for all of the tokenizer's entries, of which the last `added` were added to it
    after it was trained. Raises PlaitError where the others are more than the model has, and for adapters, beside which
    new rows could not learn."""
    new, has = entries - shape.vocabulary, f"the tokenizer has {entries} entries and the model {shape.vocabulary}"
    if new <= 0:
        return Derived(value=shape)
    if new > added:
        raise PlaitError(
            f"{has}: it is not the model's own; take data.tokenizer out, or name the tokenizer that the model was "
            "trained with"
        )
    if method == "lora":
        raise PlaitError(
            f"{has}: adapters leave the embedding as it is, so that new tokens would never be learnt; write "
            'finetune.method = "full", or take the added tokens out of the tokenizer'
        )
    reason = (
        f"vocabulary {entries}: {counted(new, 'row')} for tokens that were added to the tokenizer, each the mean of "
        f"the model's {shape.vocabulary} at first (Hewitt 2021)"
    )
    return Derived(value=replace(shape, vocabulary=entries), reasons=(reason,))
