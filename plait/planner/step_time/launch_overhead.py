"""What launching kernels from the host costs, beside the work of the kernels."""

from __future__ import annotations

import numpy as np

from plait.planner.calibration.constants import constant
from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates, Reals
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_time import DeviceTime

OVERLAP_SHARPNESS = constant("overlap_sharpness")
"""Device and host time combine as (device ** p + host ** p) ** (1 / p) with this p."""

FUSED_SOFTMAX_MATRICES = 4
"""Matrices of scores that Megatron-LM's fused masked softmax takes at a time."""
UNFUSED_SOFTMAX_KERNELS = constant("softmax_kernels")
"""What a masked softmax in single steps launches more than one in one kernel, as means of a forward pass and half a
backward one: casts, scale, mask, copies. Fitted on the even half of vTrain's and BLOOM's rows."""

ADAPTER_KERNELS = 3
"""An adapter's two products, and the addition to the layer's result."""


def launch_overhead_s(device_time: DeviceTime, candidates: Candidates, layers: Reals, device_s: Reals) -> Reals:
    """Additional seconds per micro-batch because the host launches kernels more slowly than the device runs them."""
    profile, workload, c = device_time.profile, device_time.workload, candidates
    passes = 3 + (c.recompute == RECOMPUTE_MODES.index("full"))
    sparse = workload.moe_layers / workload.layers
    kernels = profile.layer_kernels + 4 * (c.tensor > 1) + _unfused_softmax_kernels(workload, c)
    kernels = kernels + ADAPTER_KERNELS * len(workload.adapter_targets)
    if device_time.measured is not None:  # in what was timed already
        return np.zeros(len(c))
    host = layers * passes * (kernels + sparse * profile.sparse_kernels) * profile.launch_s + profile.micro_s
    if profile.launch_mode == "replayed alone":
        alone = (c.devices == 1) & (c.recompute == RECOMPUTE_MODES.index("none")) & (workload.moe_layers == 0)
        host = np.where(alone, 0.0, host)
    device = device_s + layers * passes * kernels * profile.gap_s
    if profile.launch_mode == "blocking":
        return device + host - device_s
    return (device**OVERLAP_SHARPNESS + host**OVERLAP_SHARPNESS) ** (1 / OVERLAP_SHARPNESS) - device_s


def _unfused_softmax_kernels(workload: Workload, candidates: Candidates) -> Reals:
    """Additional kernels per layer where attention is not fused and the fused masked softmax does not apply.

    It takes four matrices of scores at a time (Megatron-LM, `FusedScaleMaskSoftmax.is_kernel_available`).
    """
    matrices = candidates.micro_sequences * workload.heads // candidates.tensor
    return np.where(
        (workload.attention == "unfused") & (matrices % FUSED_SOFTMAX_MATRICES > 0), UNFUSED_SOFTMAX_KERNELS, 0.0
    )
