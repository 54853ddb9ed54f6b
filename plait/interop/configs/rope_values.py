"""Rotary positions in config.json, in the forms of transformers 4 and transformers 5, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, Fields, head_width_of
from plait.interop.configs.values import ConfigValues, count_of, flag_of, number_of, require
from plait.interop.configs.window_values import FULL, SLIDING
from plait.model.rope_scaling import RopeScaling, WindowRope, yarn_table_scale
from plait.model.shape import ModelShape

USUAL_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
_MOVED = ("llama3", "yarn", "longrope")
"""Types with an original_max_position_embeddings, which may be outside their table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """How a family describes its rotary positions."""

    theta: float = 10_000.0
    """rope_theta if config.json has none."""
    kinds: tuple[str, ...] = USUAL_KINDS
    renamed: Mapping[str, str] | None = None
    """Older names of a type."""
    share: float = 0.0
    """partial_rotary_factor if config.json has none; 0: the family rotates whole heads only."""
    grows: bool = False
    """Whether queries grow with the position (llama_4_scaling_beta)."""
    table: Mapping[str, Any] | None = None
    """rope_parameters where config.json has none; None: positions are not stretched there."""


def rotary(own: RopeRules) -> ConfigPart:
    """One rotary base for all layers."""

    def read(values: ConfigValues) -> Fields:
        base, scaling, table = rope_of_config(values, own)
        return {
            "rope_theta": base,
            "rope": scaling,
            **({"rotary_width": _rotary_width(values, table, own)} if own.share else {}),
            **(_growth(values, table) if own.grows else {}),
        }

    def write(shape: ModelShape) -> Fields:
        extra: dict[str, Any] = {}
        if own.share:
            extra["partial_rotary_factor"] = _share_of(shape)
        if own.grows:
            extra |= {
                "llama_4_scaling_beta": shape.query_growth,
                "original_max_position_embeddings": shape.query_growth_after
                or (shape.rope.original_sequence if shape.rope else 0)
                or shape.sequence,
            }
        beside = {key: value for key, value in extra.items() if key == "partial_rotary_factor"}
        return {**_written(shape, extra), **beside}

    keys = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
    return ConfigPart(keys=(*keys, *(["partial_rotary_factor"] if own.share else [])), read=read, write=write)


def rotary_by_kind(*, theta: float, window_theta: float, window_key: str = "") -> ConfigPart:
    """A rotary base for layers with a window and one for the others (Gemma 3, OLMo 3): tables within rope_parameters,
    or the older rope_theta, rope_scaling and `window_key`."""

    def read(values: ConfigValues) -> Fields:
        everywhere, windowed = _tables_by_kind(values)
        beside = values.get("rope_theta")
        if beside is not None and windowed.get("rope_theta") is None and not window_key and beside != window_theta:
            raise PlaitError(
                f"rope_theta in config.json is {beside!r:.40}, but transformers 5 uses {window_theta:g} for layers "
                "with a window; write both into rope_parameters"
            )
        base = _one_theta(everywhere, beside, theta)
        own = _one_theta(windowed, values.get(window_key) if window_key else None, window_theta)
        scaling, window_scaling = (_scaling_by_kind(table, values) for table in (everywhere, windowed))
        same = (own, window_scaling) == (base, scaling)
        window_rope = None if same else WindowRope(theta=own, scaling=window_scaling)
        return {"rope_theta": base, "rope": scaling, "window_rope": window_rope}

    def write(shape: ModelShape) -> Fields:
        own = shape.window_rope or WindowRope(theta=shape.rope_theta, scaling=shape.rope)
        older = None if shape.rope is None else _written_table(shape.rope)
        tables = {
            FULL: {**_written_table(shape.rope), "rope_theta": shape.rope_theta},
            SLIDING: {**_written_table(own.scaling), "rope_theta": own.theta},
        }
        beside = {window_key: own.theta} if window_key else {}
        return {"rope_parameters": tables, "rope_theta": shape.rope_theta, **beside, "rope_scaling": older}

    keys = ("rope_parameters", "rope_scaling", "rope_theta", *([window_key] if window_key else []))
    return ConfigPart(keys=keys, read=read, write=write)


def rotary_proportional(*, theta: float, window_theta: float, share: float) -> ConfigPart:
    """Gemma 4's: in layers without a window, of any head width, a share of each head's pairs turns. Both tables are in
    rope_parameters; transformers reads no older form."""

    def read(values: ConfigValues) -> Fields:
        for key in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
            require(values, key, (None,))
        tables = values.get("rope_parameters")
        if tables is None:
            tables = {
                FULL: {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share},
                SLIDING: {"rope_type": "default", "rope_theta": window_theta},
            }
        everywhere, windowed = _tables_by_kind({"rope_parameters": tables})
        missing = not everywhere or (not windowed and SLIDING in (values.get("layer_types") or (SLIDING,)))
        if missing or any(table and table.get("rope_theta") is None for table in (everywhere, windowed)):
            raise PlaitError(
                "rope_parameters in config.json lacks a table for full_attention or sliding_attention, or a rope_theta "
                "in one; bring the config.json of these weights"
            )
        window_rope = WindowRope(
            theta=number_of(windowed or everywhere, "rope_theta"), scaling=_proportional(windowed or everywhere)
        )
        base, scaling = number_of(everywhere, "rope_theta"), _proportional(everywhere)
        same = (window_rope.theta, window_rope.scaling) == (base, scaling)
        return {"rope_theta": base, "rope": scaling, "window_rope": None if same else window_rope}

    def write(shape: ModelShape) -> Fields:
        own = shape.window_rope or WindowRope(theta=shape.rope_theta, scaling=shape.rope)
        tables = {
            FULL: {**_written_table(shape.rope), "rope_theta": shape.rope_theta},
            SLIDING: {**_written_table(own.scaling), "rope_theta": own.theta},
        }
        return {"rope_parameters": tables}

    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    return ConfigPart(keys=keys, read=read, write=write)


def _proportional(table: ConfigValues) -> RopeScaling | None:
    named = _named({name: one for name, one in table.items() if one is not None})
    if named["rope_type"] != "proportional":
        _refuse_share(named)
        return _scaling(named["rope_type"], named, {}, ("default", "proportional"))
    share = number_of({"partial_rotary_factor": named.get("partial_rotary_factor", 1.0)}, "partial_rotary_factor")
    if share > 1:
        raise PlaitError(f"partial_rotary_factor in config.json is {share:g}; it should be at most 1")
    factor = number_of({"factor": named.get("factor", 1.0)}, "factor")
    return RopeScaling(kind="proportional", factor=factor, rotated_share=share)


def _tables_by_kind(values: ConfigValues) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of layers without a window and of those with one."""
    tables, older = values.get("rope_parameters"), values.get("rope_scaling")
    for key, table in (("rope_parameters", tables), ("rope_scaling", older)):
        if table is not None and not isinstance(table, Mapping):
            raise PlaitError(f"{key} in config.json is not a table of keys and values; correct it")
    inner = {key: {} if one is None else one for key, one in (tables or {}).items()}
    for key, table in inner.items():
        if key not in (FULL, SLIDING) or not isinstance(table, Mapping):
            raise PlaitError(
                f"rope_parameters in config.json has {key!r:.40} next to full_attention and sliding_attention; this "
                "family has tables for these two only; correct it"
            )
    if older and "rope_type" not in older:
        raise PlaitError(
            "rope_scaling in config.json has no rope_type, without which transformers 5 ignores it; add it"
        )
    found = dict(inner.get(FULL, {}))
    for key, value in (older or {}).items():
        if key in found and found[key] != value and not (key == "rope_type" and found[key] == "default"):
            raise PlaitError(
                f"rope_parameters and rope_scaling in config.json disagree: {key} is {found[key]!r:.40} in one and "
                f"{value!r:.40} in the other; keep the one that is right"
            )
        found[key] = value
    return found, dict(inner.get(SLIDING, {}))


def _one_theta(table: ConfigValues, beside: object, default: float) -> float:
    said = [one for one in (table.get("rope_theta"), beside) if one is not None]
    thetas = {number_of({"rope_theta": one}, "rope_theta") for one in said}
    if len(thetas) > 1:
        raise PlaitError(
            f"rope_theta in config.json is {said[0]} in its table of rotary positions and {said[1]} outside it; "
            "remove the wrong one"
        )
    return thetas.pop() if thetas else default


def _scaling_by_kind(table: ConfigValues, values: ConfigValues) -> RopeScaling | None:
    named = _named({name: one for name, one in table.items() if one is not None})
    _refuse_share(named)
    if not flag_of(named, "truncate", default=True):
        raise PlaitError("truncate in config.json is False, which transformers ignores in tables by kind of layer")
    inside = {**values, "original_max_position_embeddings": None}
    return _scaling(named.get("rope_type", "default"), named, inside, USUAL_KINDS)


def rope_of_config(values: ConfigValues, rules: RopeRules) -> tuple[float, RopeScaling | None, ConfigValues]:
    """theta, the scaling of frequencies, and the table with it: from `rope_parameters` (transformers 5), or
    `rope_scaling` and `rope_theta` (4). Raises PlaitError for what plait does not compute, and for tables that
    disagree."""
    newer, older = (_table(values, key, rules.renamed or {}) for key in ("rope_parameters", "rope_scaling"))
    if rules.table is not None and values.get("rope_parameters") is None and not older:
        newer = dict(rules.table)
    rope = older or newer  # as in transformers, which drops rope_parameters if there is a rope_scaling, too
    theta = _theta(values, rope, rules.theta)
    if older and newer:
        _refuse_unlike(values, newer, older, theta)
    if not rules.share:
        for table in (rope, values):
            _refuse_share(table)
    return theta, _scaling(rope.get("rope_type", "default"), rope, values, rules.kinds), rope


def _refuse_share(table: ConfigValues) -> None:
    share = table.get("partial_rotary_factor")
    if share is not None and (isinstance(share, bool) or share != 1):
        raise PlaitError(
            f"config.json rotates {share!s:.40} of each head (partial_rotary_factor); in this family plait rotates "
            "only whole heads"
        )


def _rotary_width(values: ConfigValues, rope: ConfigValues, rules: RopeRules) -> int:
    """Number of a head's elements that are rotated; 0: all."""
    said = [
        table["partial_rotary_factor"] for table in (rope, values) if table.get("partial_rotary_factor") is not None
    ]
    shares = {number_of({"partial_rotary_factor": one}, "partial_rotary_factor") for one in said}
    if len(shares) > 1:
        raise PlaitError(
            f"partial_rotary_factor in config.json is {said[0]} in its table of rotary positions and {said[1]} "
            "outside it; remove the wrong one"
        )
    share, head_width = shares.pop() if shares else rules.share, head_width_of(values)
    width = int(head_width * share)
    if width % 2 or not 0 < width <= head_width:
        raise PlaitError(
            f"partial_rotary_factor in config.json is {share:g}, which leaves {width} of a head's {head_width} numbers "
            "to rotate; plait rotates an even number of them"
        )
    return 0 if width == head_width else width


def _share_of(shape: ModelShape) -> float:
    width = shape.rotary_width or shape.head_width
    share = width / shape.head_width
    return share if int(shape.head_width * share) == width else (width + 0.5) / shape.head_width


def _growth(values: ConfigValues, rope: ConfigValues) -> Fields:
    beta = rope.get("llama_4_scaling_beta")
    if beta is None or isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1e6:
        raise PlaitError(
            f"llama_4_scaling_beta in config.json's rope_parameters is {beta!r:.40}; it should be at least 0"
        )
    moved = rope.get("rope_type", "default") in _MOVED
    beside = values.get("original_max_position_embeddings") if moved else None
    after = beside or rope.get("original_max_position_embeddings")
    after = values.get("max_position_embeddings") if after is None and moved else after
    after = count_of({"original_max_position_embeddings": after}, "original_max_position_embeddings")
    return {"query_growth": float(beta), "query_growth_after": after if beta else 0}


def _table(values: ConfigValues, key: str, renamed: Mapping[str, str]) -> dict[str, Any]:
    """One of the two tables, with the type under the name of transformers 5; empty if config.json has none."""
    table = {} if values.get(key) is None else values[key]
    if not isinstance(table, Mapping):
        raise PlaitError(f"{key} in config.json is not a table of keys and values; correct it")
    if any(isinstance(value, Mapping) for value in table.values()):
        raise PlaitError(
            "config.json has separate rotary positions for kinds of layers, which plait does not support in this family"
        )
    named = _named({name: one for name, one in table.items() if one is not None or name == "truncate"})
    return {**named, "rope_type": renamed.get(named["rope_type"], named["rope_type"])} if table else {}


def _named(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the type under the name of transformers 5."""
    kept = {name: one for name, one in table.items() if name not in ("type", "rope_type")}
    return {**kept, "rope_type": str(table.get("rope_type") or table.get("type") or "default")}


def _theta(values: ConfigValues, rope: ConfigValues, default: float) -> float:
    """rope_theta; raises PlaitError if the table disagrees with the file's top level, which transformers 4 reads."""
    said = [number_of(table, "rope_theta") for table in (rope, values) if table.get("rope_theta") is not None]
    if len(set(said)) > 1:
        raise PlaitError(
            f"rope_theta in config.json is {said[0]:g} in its table of rotary positions and {said[1]:g} outside it; "
            "transformers 4 and 5 use different ones; remove the wrong one"
        )
    return said[0] if said else default


def _refuse_unlike(values: ConfigValues, newer: ConfigValues, older: ConfigValues, theta: float) -> None:
    """Raise PlaitError if a config.json has both tables and they disagree: transformers 4 and 5 would read different
    models."""
    for key in sorted({*newer, *older} - {"rope_theta"}, key=lambda one: (one != "rope_type", one)):
        if newer.get(key) != older.get(key):
            raise PlaitError(
                f"rope_parameters and rope_scaling in config.json disagree: {key} is {newer.get(key)!r:.40} in one "
                f"and {older.get(key)!r:.40} in the other; keep the right one, with a rope_theta outside it"
            )
    if newer.get("rope_theta", theta) == theta:
        return
    if older.get("rope_theta") is None and values.get("rope_theta") is None:
        raise PlaitError(
            "rope_theta in config.json is only in rope_parameters, which transformers ignores if there is a "
            "rope_scaling; write everything into rope_parameters, and remove rope_scaling"
        )
    raise PlaitError(
        f"rope_theta in config.json is {newer['rope_theta']!r:.40} in rope_parameters and {theta} beside rope_scaling; "
        "remove the wrong one"
    )


def _scaling(kind: str, rope: ConfigValues, values: ConfigValues, kinds: Sequence[str]) -> RopeScaling | None:
    """How a table of this type scales frequencies; None: not at all."""
    if kind not in kinds:
        raise PlaitError(
            f"rotary positions of type {kind!r} in config.json are not supported; "
            f"use a model with one of these: {', '.join(kinds)}"
        )
    if kind == "default":
        return None
    if kind == "longrope":
        return _longrope(rope, values)
    factor = number_of(rope, "factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "dynamic":
        return RopeScaling(kind="dynamic", factor=factor)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_sequence=_original(rope, values),
            low_frequency=number_of(rope, "low_freq_factor"),
            high_frequency=number_of(rope, "high_freq_factor"),
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_sequence=_original(rope, values),
        beta_fast=number_of({"beta_fast": rope.get("beta_fast") or 32}, "beta_fast"),
        beta_slow=number_of({"beta_slow": rope.get("beta_slow") or 1}, "beta_slow"),
        whole_pairs="yes" if flag_of(rope, "truncate", default=True) else "no",
        table_scale=_yarn_scale(rope, factor),
    )


def _original(rope: ConfigValues, values: ConfigValues) -> int:
    """original_max_position_embeddings: outside the table, in it, or the longest sequence."""
    key = "original_max_position_embeddings"
    return count_of({key: values.get(key) or rope.get(key) or values["max_position_embeddings"]}, key)


def _longrope(rope: ConfigValues, values: ConfigValues) -> RopeScaling:
    original = _original(rope, values)
    longest = count_of(values, "max_position_embeddings")
    factor = longest / original if rope.get("factor") is None else number_of(rope, "factor")
    if rope.get("attention_factor") is not None:
        scale = number_of(rope, "attention_factor")
    elif original == 1:
        raise PlaitError("original_max_position_embeddings in config.json is 1, but longrope needs more than 1")
    else:
        scale = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_sequence=original,
        table_scale=scale,
        short_factors=_factors(rope, "short_factor"),
        long_factors=_factors(rope, "long_factor"),
    )


def _factors(rope: ConfigValues, key: str) -> tuple[float, ...]:
    found = rope.get(key)
    if not isinstance(found, list) or not found:
        raise PlaitError(f"{key} in config.json is {found!r:.40}; it should be a list of numbers above 0")
    return tuple(number_of({key: one}, key) for one in found)


def _yarn_scale(rope: ConfigValues, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return number_of(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = [1 + number_of(rope, key) * (yarn_table_scale(factor) - 1) for key in ("mscale", "mscale_all_dim")]
        return scales[0] / scales[1]
    return yarn_table_scale(factor)


def _written(shape: ModelShape, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Both forms: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` of 4."""
    table = {**_written_table(shape.rope), **extra}
    if shape.latent and shape.latent.mscale_all_dim:
        table["mscale_all_dim"] = shape.latent.mscale_all_dim
    theta = {"rope_theta": shape.rope_theta}
    older = None if shape.rope is None and "llama_4_scaling_beta" not in extra else table
    beside = {}
    if shape.rope is not None and shape.rope.kind == "longrope":  # Phi 3's class has its own there
        beside["original_max_position_embeddings"] = shape.rope.original_sequence
    return {"rope_parameters": {**table, **theta}, **theta, "rope_scaling": older, **beside}


def _written_table(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    table: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in _MOVED:
        table["original_max_position_embeddings"] = scaling.original_sequence
    if scaling.kind == "proportional":
        table["partial_rotary_factor"] = scaling.rotated_share
    if scaling.kind == "llama3":
        table |= {"low_freq_factor": scaling.low_frequency, "high_freq_factor": scaling.high_frequency}
    if scaling.kind == "yarn":
        table |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        table |= {"attention_factor": scaling.table_scale, "truncate": scaling.whole_pairs == "yes"}
    if scaling.kind == "longrope":
        table |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        table["attention_factor"] = scaling.table_scale
    return table
