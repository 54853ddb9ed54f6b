"""Windows of attention in config.json, in the forms of the families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.errors import PlaitError
from plait.interop.configs.parts import ConfigPart, Fields, fixed, layers_of
from plait.interop.configs.values import ConfigValues, count_of, flag_of
from plait.model.shape import ModelShape

NO_WINDOWS = fixed(windows=())
SLIDING, FULL = "sliding_attention", "full_attention"


def window_of_all() -> ConfigPart:
    """One window for all layers, or none."""

    def read(values: ConfigValues) -> Fields:
        if values.get("sliding_window") is None:
            return {"windows": ()}
        return {"windows": (count_of(values, "sliding_window"),) * layers_of(values)}

    return ConfigPart(
        keys=("sliding_window",),
        read=read,
        write=lambda shape: {"sliding_window": max(shape.windows, default=0) or None},
    )


def window_of_some_or_all() -> ConfigPart:
    """Mistral's: a window for all layers, or for those named in layer_types (transformers calls such a model
    ministral)."""
    everywhere = window_of_all()

    def read(values: ConfigValues) -> Fields:
        if values.get("layer_types") is None or values.get("sliding_window") is None:
            return everywhere.read(values)
        return {"windows": _by_kind(values)}

    def write(shape: ModelShape) -> Fields:
        mixed = any(shape.windows) and not all(shape.windows)
        return {**everywhere.write(shape), **({"layer_types": _kinds(shape)} if mixed else {})}

    return ConfigPart(keys=("sliding_window", "layer_types"), read=read, write=write)


def window_by_kind(usual: Callable[[int], bool]) -> ConfigPart:
    """A window for the layers that layer_types names, by default for those for which `usual` is true."""

    def read(values: ConfigValues) -> Fields:
        return {"windows": _by_kind(values, [usual(layer) for layer in range(layers_of(values))])}

    def write(shape: ModelShape) -> Fields:
        return {"sliding_window": max(shape.windows, default=0) or shape.sequence, "layer_types": _kinds(shape)}

    return ConfigPart(keys=("sliding_window", "layer_types"), read=read, write=write)


def window_by_period() -> ConfigPart:
    """Gemma 3's: a window for all layers except every sixth, or by layer_types."""

    def read(values: ConfigValues) -> Fields:
        every = count_of(values, "sliding_window_pattern")
        return {"windows": _by_kind(values, [(layer + 1) % every > 0 for layer in range(layers_of(values))])}

    part = window_by_kind(lambda layer: True)
    return ConfigPart(keys=(*part.keys, "sliding_window_pattern"), read=read, write=part.write)


def window_but_last() -> ConfigPart:
    """Gemma 4's: a window for all layers except every sixth and the last, or by layer_types."""

    def read(values: ConfigValues) -> Fields:
        layers = layers_of(values)
        found = _by_kind(values, [(layer + 1) % 6 > 0 and layer + 1 < layers for layer in range(layers)])
        if found and found[-1]:
            raise PlaitError(
                "layer_types in config.json gives the last layer a window, and transformers computes it without one; "
                "correct it to full_attention"
            )
        return {"windows": found}

    part = window_by_kind(lambda layer: True)
    return ConfigPart(keys=part.keys, read=read, write=part.write)


def window_if_used(*, of_all: bool = False) -> ConfigPart:
    """Qwen's: use_sliding_window, then the layers that layer_types names, or those from max_window_layers on; or, with
    `of_all`, all layers."""

    def read(values: ConfigValues) -> Fields:
        kinds = values.get("layer_types")
        if not flag_of(values, "use_sliding_window") or values.get("sliding_window") is None:
            if not of_all:
                _refuse_turned_off(kinds)
            return {"windows": ()}
        if of_all:
            return {"windows": (count_of(values, "sliding_window"),) * layers_of(values)}
        if kinds is not None:
            return {"windows": _by_kind(values)}
        first = values["max_window_layers"]
        if type(first) is not int:
            raise PlaitError(f"max_window_layers in config.json is {first!r:.40}; it should be a whole number")
        return {"windows": _by_kind(values, [layer >= first for layer in range(layers_of(values))])}

    def write(shape: ModelShape) -> Fields:
        window = max(shape.windows, default=0)
        said = {"use_sliding_window": bool(window), "sliding_window": window or None}
        if of_all:
            return said
        full = [layer for layer in range(shape.layers) if not shape.window_of(layer)]
        return {**said, "max_window_layers": max(full, default=-1) + 1, "layer_types": _kinds(shape)}

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return ConfigPart(keys=keys, read=read, write=write)


def window_where_not_rotated() -> ConfigPart:
    """SmolLM3's: use_sliding_window, then the layers that layer_types names, or those without positions."""

    def read(values: ConfigValues) -> Fields:
        if not flag_of(values, "use_sliding_window") or values.get("sliding_window") is None:
            _refuse_turned_off(values.get("layer_types"))
            return {"windows": ()}
        if values.get("layer_types") is None:
            raise PlaitError(
                "config.json has use_sliding_window but no layer_types; name the layers with a window there"
            )
        return {"windows": _by_kind(values)}

    def write(shape: ModelShape) -> Fields:
        window = max(shape.windows, default=0)
        return {"use_sliding_window": bool(window), "sliding_window": window or None, "layer_types": _kinds(shape)}

    return ConfigPart(keys=("use_sliding_window", "sliding_window", "layer_types"), read=read, write=write)


def _refuse_turned_off(kinds: object) -> None:
    if isinstance(kinds, list) and SLIDING in kinds:
        raise PlaitError(
            "layer_types in config.json names sliding_attention, and use_sliding_window or sliding_window turns it "
            "off; make them agree"
        )


def _by_kind(values: ConfigValues, usual: Sequence[bool] = ()) -> tuple[int, ...]:
    """The window of each layer by layer_types, by default by `usual`; empty if no layer has one."""
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if one else FULL for one in usual]
    number = layers_of(values)
    if not isinstance(kinds, list) or len(kinds) != number or any(str(kind) not in (SLIDING, FULL) for kind in kinds):
        raise PlaitError(
            f"layer_types in config.json is not a list of {number} entries, each full_attention or "
            "sliding_attention; correct it"
        )
    if SLIDING not in kinds:
        return ()
    window = count_of(values, "sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _kinds(shape: ModelShape) -> list[str]:
    return [SLIDING if shape.window_of(layer) else FULL for layer in range(shape.layers)]
