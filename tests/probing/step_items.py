"""A whole step added up from what a probe measured, to hold against a step that was run."""

from __future__ import annotations

import numpy as np

from plait.machines.measured import MeasuredDevice
from plait.model.shape import ModelShape, parameter_count
from plait.planner.step_time import measured_compute
from plait.probing.request import ProbedModel, layer_products


def step_items_s(
    device: MeasuredDevice, shape: ModelShape, *, sequence: int, sequences: int, n_microbatches: int = 1
) -> dict[str, float]:
    """Seconds of one worker's whole step, item by item: `n_microbatches`, each of so many `sequences`."""
    inputs = ProbedModel(shape=shape, sequence=sequence, sequences=sequences)
    rows, inner, columns = np.array(layer_products(inputs), dtype=np.float64).T
    products = measured_compute.measured_product_s(device, rows, inner, columns) + measured_compute.measured_product_s(
        device, rows, columns, inner, form="input"
    )
    products = products + measured_compute.measured_product_s(device, columns, rows, inner, form="weight")
    size = sequences, sequence, shape.heads, shape.head_width
    layer = {
        "products": products.sum(),
        "attention": measured_compute.attention_s(device, *size, "forward")
        + measured_compute.attention_s(device, *size, "backward"),
        "stream": measured_compute.stream_s(device, inputs.tokens, shape.width, shape.ffn, "forward")
        + measured_compute.stream_s(device, inputs.tokens, shape.width, shape.ffn, "backward"),
    }
    numbers, ends = parameter_count(shape), (inputs.tokens, shape.width, shape.vocabulary)
    each = {
        **{name: shape.layers * seconds for name, seconds in layer.items()},
        "head": measured_compute.head_s(device, *ends),
        "embedding": measured_compute.embedding_s(device, *ends),
    }
    once = {
        "accumulate": (n_microbatches - 1) * measured_compute.accumulate_s(device, numbers),
        "update": measured_compute.update_s(device, numbers),
    }
    return {name: float(seconds) for name, seconds in ({n: n_microbatches * s for n, s in each.items()} | once).items()}
