"""Times of a layer, the head and the update on a cluster's slowest device.

They are measured where the cluster was probed, else computed by the formulas of roofline.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from plait.machines.cluster import Cluster
from plait.machines.measured import MeasuredDevice, Measurements
from plait.planner.calibration.constants import constant
from plait.planner.problem.candidates import Candidates, Counts, Reals
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import micro_batches_per_step
from plait.planner.problem.trained_weights import (
    dequantized_parameters,
    dropped_numbers,
    local_target_sizes,
    trained_layer_parameters,
)
from plait.planner.problem.workload import Workload
from plait.planner.step_time import measured_compute
from plait.planner.step_time.device_rates import DeviceRates, device_rates
from plait.planner.step_time.roofline import LayerTime, head_time, layer_time, local_tokens, product_s

ZEROING = constant("zeroing_over_adding")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Seconds of layers, head and optimizer on the slowest device of a cluster, which every other device waits for."""

    workload: Workload
    profile: SoftwareProfile
    rates: DeviceRates
    measured: MeasuredDevice | None
    """Measurements of the slowest device; None where nothing was measured."""

    def layer_time(self, candidates: Candidates) -> LayerTime:
        """Seconds of an average layer for one micro-batch."""
        if self.measured is None:
            once = layer_time(self.workload, self.rates, self.profile, candidates)
        else:
            once = _measured_layer_time(self.workload, self.measured, candidates)
        factor = self.profile.calibration.compute
        return LayerTime(**{field.name: getattr(once, field.name) * factor for field in fields(LayerTime)})

    def head_s(self, candidates: Candidates) -> Reals:
        """Seconds of the head and the loss for one micro-batch, forward and backward."""
        return self._head_s(candidates) * self.profile.calibration.compute

    def update_s(self, weights: Reals) -> Reals:
        """Seconds of the optimizer's update of `weights` parameters, and of other work once per step."""
        return self._update_s(weights) * self.profile.calibration.compute

    def product_s(self, rows: Any, inner: Any, columns: Any, number: Any) -> Reals:
        """Seconds of this many products of rows × inner by inner × columns."""
        if self.measured is None:
            once = product_s(self.rates, rows, inner, columns, flops=self.rates.linear_flops, batch=number)
        else:
            once = number * measured_compute.measured_product_s(self.measured, rows, inner, columns)
        return once * self.profile.calibration.compute

    def _head_s(self, candidates: Candidates) -> Reals:
        if self.measured is None:
            return np.add(*head_time(self.workload, self.rates, self.profile, candidates))
        w, tokens = self.workload, local_tokens(self.workload, candidates)
        entries = w.vocabulary / candidates.tensor
        embedding = measured_compute.embedding_s(self.measured, tokens, w.width, entries)
        head = measured_compute.head_s(self.measured, tokens, w.width, entries)
        head = head * (1 + (w.logit_passes - 1) * measured_compute.logits_share(w.width))
        # A probe times the gradients of both tables.
        if not w.head_learns:
            head = head * measured_compute.frozen_head_share(w.width)
        if not w.embedding_learns:
            embedding = embedding * measured_compute.frozen_embedding_share(tokens, entries)
        # In a pipeline the first stage looks tokens up, and it has no head.
        return head + np.where(candidates.pipeline == 1, embedding, 0.0)

    def _update_s(self, weights: Reals) -> Reals:
        traffic = self.profile.update_bytes_with(self.workload.layer_moments)
        if self.measured is None:
            return weights * traffic / self.rates.stream_bytes_per_s + self.profile.step_s
        # A probe times AdamW; SGD's update is limited by memory traffic as well, and has less of it.
        return measured_compute.update_s(self.measured, weights) * (traffic / self.profile.update_bytes)


def device_time_of(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> DeviceTime:
    """The slowest device's times, by the clock where the cluster was measured."""
    slowest = min(
        cluster.islands, key=lambda i: device_rates(i.device, workload.precision, profile, i.speed).linear_flops
    )
    return DeviceTime(
        workload=workload,
        profile=profile,
        rates=device_rates(slowest.device, workload.precision, profile, slowest.speed),
        measured=slowest_device(cluster.measured) if was_measured(workload, cluster) else None,
    )


def was_measured(workload: Workload, cluster: Cluster) -> bool:
    """Whether the cluster was probed in the precision of this workload."""
    return cluster.measured is not None and cluster.measured.precision == workload.precision and not workload.experts


def slowest_device(measured: Measurements | None) -> MeasuredDevice | None:
    """The host whose slowest worker is the slowest of all."""
    return min(measured.devices, key=lambda device: min(device.rates)) if measured else None


READ_MATRIX_ADDITIONS = 0.6
"""How long reading a number of a quantized matrix takes, over adding one gradient to another: 0.4 ns to 0.7 ns on one
thread of an AMD EPYC (model/quantization.py)."""


DROP_ADDITIONS = 5.0
"""How long hashing a number and dropping it takes, over adding one gradient to another (model/dropout.py)."""


def _measured_layer_time(w: Workload, measured: MeasuredDevice, candidates: Candidates) -> LayerTime:
    tokens, tensor = local_tokens(w, candidates), candidates.tensor
    ffn = w.ffn / tensor
    products = [
        *_attention_products(w, tokens, tensor),
        (tokens, w.width, ffn, w.feedforward_matrices - 1),
        (tokens, ffn, w.width, 1),
    ]
    forward = backward = np.zeros(len(candidates))
    for tall, inner, columns, times in products:
        forward = forward + times * measured_compute.measured_product_s(measured, tall, inner, columns)
        backward = backward + times * measured_compute.measured_product_s(measured, tall, columns, inner, form="input")
        if not w.is_frozen:
            backward = backward + times * measured_compute.measured_product_s(
                measured, columns, tall, inner, form="weight"
            )
    there, back = _measured_adapter_times(w, measured, candidates)
    reading = READ_MATRIX_ADDITIONS * measured_compute.accumulate_s(measured, dequantized_parameters(w, candidates)[0])
    # Cut sequences: each rank has its queries, and all that they look back on.
    rows = candidates.micro_sequences / candidates.context
    size = rows, w.sequence, w.heads / tensor, w.kernel_width
    streamed = tokens / np.where(candidates.sequence_parallel > 0, tensor, 1), w.width, w.ffn
    micros = micro_batches_per_step(w, candidates)
    # Gradients that are summed over ranks are added to zeros in their buckets; others stay where the first one is.
    summed = (candidates.devices > candidates.pipeline * candidates.tensor) & ~candidates.gathers_weights
    passes = np.where(summed, micros + ZEROING, micros - 1.0) / micros
    added = passes * measured_compute.accumulate_s(measured, np.add(*trained_layer_parameters(w, candidates)))
    return LayerTime(
        products=forward + there + reading,
        products_backward=backward + back + reading,
        scores=measured_compute.attention_s(measured, *size, "forward"),
        scores_backward=measured_compute.attention_s(measured, *size, "backward"),
        stream=measured_compute.stream_s(measured, *streamed, "forward"),
        stream_backward=measured_compute.stream_s(measured, *streamed, "backward") + added,
    )


def _attention_products(w: Workload, tokens: Reals, tensor: Counts) -> list[tuple[Any, Any, Any, int]]:
    """Rows, inner and columns of the products of one layer's attention, and how many of them are alike."""
    if w.latent is None:
        heads, keys = w.heads * w.head_width / tensor, np.maximum(w.kv_heads / tensor, 1.0) * w.head_width
        return [(tokens, w.width, heads, 1), (tokens, w.width, keys, 2), (tokens, heads, w.width, 1)]
    shares = {True: tensor, False: 1}
    return [
        (tokens / shares[cut == "rows"], inner / shares[cut == "inner"], columns / shares[cut == "columns"], 1)
        for inner, columns, cut in w.latent.products
    ]


def _measured_adapter_times(w: Workload, measured: MeasuredDevice, candidates: Candidates) -> tuple[Reals, Reals]:
    """Seconds of the products of one layer's adapters, and of adding their results to those of the layers beside them:
    forward, and for the gradients. An addition of gradients, which a probe times, reads and writes as much."""
    tokens, rank = local_tokens(w, candidates), float(w.adapter_rank)
    there = back = np.zeros(len(candidates))
    for inputs, outputs in local_target_sizes(w, candidates):
        for inner, columns in ((inputs, rank), (rank, outputs)):
            there = there + measured_compute.measured_product_s(measured, tokens, inner, columns)
            back = back + measured_compute.measured_product_s(measured, tokens, columns, inner, form="input")
            back = back + measured_compute.measured_product_s(measured, columns, tokens, inner, form="weight")
        there = there + measured_compute.accumulate_s(measured, tokens * outputs)
        back = back + measured_compute.accumulate_s(measured, tokens * inputs)
    dropping = DROP_ADDITIONS * measured_compute.accumulate_s(measured, tokens * dropped_numbers(w, candidates)[0])
    return there + dropping, back + 2 * dropping
