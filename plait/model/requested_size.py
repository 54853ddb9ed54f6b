"""The shape of a model of any size: a named size's own, and for every other number of parameters one by rule."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any, NoReturn

import numpy as np

from plait.errors import PlaitError
from plait.model.shape import ModelShape, parameter_count
from plait.model.sizes import MODEL_SIZES, explicit_shape, named_shape
from plait.units import format_count, parse_count

ASPECT_RATIOS = {1e6: 32, 1e8: 64, 1e9: 64, 7e9: 128}
"""Width divided by layers at some numbers of parameters, as published models of these sizes have it (GPT-3: Brown et
al. 2020, table 2.1; Llama: Touvron et al. 2023, table 2). The loss hardly depends on it (Kaplan et al. 2020,
2001.08361, figure 5)."""
NEAR, SIZE_TOLERANCE = 1.03, 1.2
"""Factors by which a shape may miss the number of parameters that was asked for: as good as exact, and at most."""
TIED_BELOW_PARAMETERS = 10**9
"""Below it the head shares the embedding's weight, which would be a large part of the model."""
MOST_LAYERS = 1000


def shape_of_size(size: str, *, vocabulary: int, sequence: int, **explicit: Any) -> ModelShape:
    """The shape of a size such as "7B" or "2.6B" for a vocabulary and a longest sequence; explicit fields win.

    Raises PlaitError for a size that no shape has, and for fields that contradict each other.
    """
    if name := named_size(size):
        return named_shape(name, vocabulary=vocabulary, sequence=sequence, **explicit)
    return shape_for(parse_count(size), vocabulary=vocabulary, sequence=sequence, **explicit)


def parameters_of_size(size: str, *, vocabulary: int) -> int:
    """About how many parameters a size has: of a named one counted at this vocabulary, else what the size says."""
    if name := named_size(size):
        return parameter_count(named_shape(name, vocabulary=vocabulary, sequence=1024))
    return parse_count(size)


def named_size(size: str) -> str:
    """The name in MODEL_SIZES of a size, also of one written as "7b" or "7000M"; empty for any other size."""
    return next((name for name in MODEL_SIZES if parse_count(name) == parse_count(size)), "")


def shape_for(parameters: int, *, vocabulary: int, sequence: int, **explicit: Any) -> ModelShape:
    """The shape of about this many parameters, embeddings included: of the shapes NEAR that number the one whose ratio
    of width to layers is the most usual (ASPECT_RATIOS). Raises PlaitError where no shape comes near.

    Explicit fields are kept, and the others follow from them: with `layers` named, the width makes the size.
    """
    if "layers" not in explicit and (explicit.get("dense_layers") or explicit.get("expert_every", 1) != 1):
        raise PlaitError(
            "a size by its number of parameters needs experts in every layer; name model.layers and model.width in "
            "place of model.size"
        )
    usual = _usual_aspect(parameters)

    def distance(candidate: tuple[ModelShape, int]) -> tuple[float, float]:
        shape, count = candidate
        missed = abs(log(count / parameters))
        return (missed if missed > log(NEAR) else 0.0), abs(log(shape.width / shape.layers / usual))

    fields = {"tied": parameters < TIED_BELOW_PARAMETERS, "vocabulary": vocabulary, "sequence": sequence} | explicit
    best = min(_shapes_of(parameters, fields), key=distance)
    if distance(best)[0] > log(SIZE_TOLERANCE):
        _refuse_size(parameters, best[1], fields)
    return best[0]


def _refuse_size(parameters: int, nearest: int, fields: dict[str, Any]) -> NoReturn:
    named = " and ".join(f"{key} = {fields[key]}" for key in ("layers", "width") if key in fields)
    raise PlaitError(
        f"no shape with a vocabulary of {fields['vocabulary']}{' and ' if named else ''}{named} has about "
        f'{format_count(parameters)} parameters; choose model.size = "{format_count(nearest)}", the nearest, or '
        f"{f'leave out {named}' if named else 'another model.vocabulary'}"
    )


def _shapes_of(parameters: int, fields: dict[str, Any]) -> list[tuple[ModelShape, int]]:
    """For each width that the fields allow, the shape with the number of layers that comes nearest to a number of
    parameters, and its own number; raises PlaitError where the fields allow no width."""
    shapes: list[tuple[ModelShape, int]] = []
    refusal: PlaitError | None = None
    for width in [fields["width"]] if "width" in fields else _usual_widths():
        try:
            shapes.append(_shape_of_width(parameters, fields | {"width": width}))
        except PlaitError as error:  # heads, for example, that do not divide this width
            refusal = error
    if not shapes and refusal:
        raise refusal
    return shapes


def _shape_of_width(parameters: int, fields: dict[str, Any]) -> tuple[ModelShape, int]:
    one, two = (explicit_shape(**(fields | {"layers": layers})) for layers in (1, 2))
    first = parameter_count(one)
    each = parameter_count(two) - first
    fitting = 1 + round((parameters - first) / each)
    layers = fields.get("layers", min(MOST_LAYERS, max(1, fitting)))
    return replace(one, layers=layers), first + (layers - 1) * each


def _usual_widths() -> list[int]:
    """Widths that an even number of heads of 32, 64 or 128 numbers makes up."""
    return [*range(64, 512, 64), *range(512, 2048, 128), *range(2048, 65537, 256)]


def _usual_aspect(parameters: float) -> float:
    """Width divided by layers at this many parameters, between the ASPECT_RATIOS on a line in logarithms."""
    sizes, ratios = np.log(list(ASPECT_RATIOS)), np.log(list(ASPECT_RATIOS.values()))
    return exp(np.interp(log(parameters), sizes, ratios))
