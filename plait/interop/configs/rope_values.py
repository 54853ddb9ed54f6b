"""Rotary positions in config.json, as transformers 4 and as transformers 5 say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.values import ConfigValues, count_of, flag_of, number_of
from plait.model.rope_scaling import RopeScaling, yarn_table_scale


def rope_of_config(values: ConfigValues, default_theta: float) -> tuple[float, RopeScaling | None, ConfigValues]:
    """theta, how frequencies are stretched, and the table that says so: from `rope_parameters` (transformers 5),
    `rope_scaling` and `rope_theta` (4). Raises PlaitError for what plait does not compute, and for tables that
    disagree."""
    newer, older = _table(values, "rope_parameters"), _table(values, "rope_scaling")
    rope = older or newer  # as in transformers, which drops rope_parameters where rope_scaling stands beside it
    theta = _theta(values, rope, default_theta)
    if older and newer:
        _refuse_unlike(values, newer, older, theta)
    for table in (rope, values):
        share = table.get("partial_rotary_factor")
        if share is not None and (isinstance(share, bool) or share != 1):
            raise PlaitError(
                f"config.json turns {share!s:.40} of each head (partial_rotary_factor); plait turns whole heads only"
            )
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return theta, None, rope
    if kind not in ("linear", "llama3", "yarn"):
        raise PlaitError(
            f"rotary positions of type {kind!r} in config.json are none that plait computes: default, linear, llama3, "
            "yarn; take a model with one of these"
        )
    return theta, _scaling(kind, rope, values), rope


def _table(values: ConfigValues, key: str) -> dict[str, Any]:
    """One of both tables, with the name that transformers 5 gives the type; empty where config.json has none."""
    table = {} if values.get(key) is None else values[key]
    if not isinstance(table, Mapping):
        raise PlaitError(f"{key} in config.json is not a table of keys and values; correct it")
    if any(isinstance(value, Mapping) for value in table.values()):
        raise PlaitError("config.json has other rotary positions in each kind of layer, which plait does not compute")
    kept = {
        name: value
        for name, value in table.items()
        if name not in ("type", "rope_type") and (value is not None or name == "truncate")
    }
    return {**kept, "rope_type": str(table.get("rope_type") or table.get("type") or "default")} if table else {}


def _theta(values: ConfigValues, rope: ConfigValues, default: float) -> float:
    """rope_theta; raises PlaitError where the table has another than the file's root, which transformers 4 reads."""
    said = [number_of(table, "rope_theta") for table in (rope, values) if table.get("rope_theta") is not None]
    if len(set(said)) > 1:
        raise PlaitError(
            f"rope_theta in config.json is {said[0]:g} in its table of rotary positions and {said[1]:g} beside it, and "
            "transformers 4 and 5 do not take the same one; remove the wrong one"
        )
    return said[0] if said else default


def _refuse_unlike(values: ConfigValues, newer: ConfigValues, older: ConfigValues, theta: float) -> None:
    """Raise PlaitError where a config.json has both tables and they are not one: transformers 4 and 5 would read
    another model each."""
    for key in sorted({*newer, *older} - {"rope_theta"}, key=lambda one: (one != "rope_type", one)):
        if newer.get(key) != older.get(key):
            raise PlaitError(
                f"rope_parameters and rope_scaling in config.json disagree: {key} is {newer.get(key)!r:.40} in the one "
                f"and {older.get(key)!r:.40} in the other; keep the one that is right, with a rope_theta beside it"
            )
    if newer.get("rope_theta", theta) == theta:
        return
    if older.get("rope_theta") is None and values.get("rope_theta") is None:
        raise PlaitError(
            "rope_theta in config.json stands in rope_parameters alone, which transformers does not read where "
            "rope_scaling stands beside it; write all into rope_parameters, and take rope_scaling out"
        )
    raise PlaitError(
        f"rope_theta in config.json is {newer['rope_theta']!r:.40} in rope_parameters and {theta} beside rope_scaling; "
        "take out the one that is wrong"
    )


def _scaling(kind: str, rope: ConfigValues, values: ConfigValues) -> RopeScaling:
    factor = number_of(rope, "factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    known = {"original": original or values["max_position_embeddings"]}
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_sequence=count_of(known, "original"),
            low_frequency=number_of(rope, "low_freq_factor"),
            high_frequency=number_of(rope, "high_freq_factor"),
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_sequence=count_of(known, "original"),
        beta_fast=number_of({"beta_fast": rope.get("beta_fast") or 32}, "beta_fast"),
        beta_slow=number_of({"beta_slow": rope.get("beta_slow") or 1}, "beta_slow"),
        whole_pairs="yes" if flag_of(rope, "truncate", default=True) else "no",
        table_scale=_yarn_scale(rope, factor),
    )


def _yarn_scale(rope: ConfigValues, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return number_of(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = [1 + number_of(rope, key) * (yarn_table_scale(factor) - 1) for key in ("mscale", "mscale_all_dim")]
        return scales[0] / scales[1]
    return yarn_table_scale(factor)
