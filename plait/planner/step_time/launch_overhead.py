"""What launching kernels from the host costs, beside the work of the kernels."""

from __future__ import annotations

import numpy as np

from plait.planner.calibration.constants import constant
from plait.planner.problem.candidates import RECOMPUTE_MODES, Candidates, Reals
from plait.planner.problem.other_programs import unfused_softmax_kernels
from plait.planner.step_time.device_time import DeviceTime

OVERLAP_SHARPNESS = constant("overlap_sharpness")
"""Device and host time combine as (device ** p + host ** p) ** (1 / p) with this p."""

ADAPTER_KERNELS = 3
"""An adapter's two products, and the addition to the layer's result."""


def launch_overhead_s(device_time: DeviceTime, candidates: Candidates, layers: Reals, device_s: Reals) -> Reals:
    """Additional seconds per micro-batch because the host launches kernels more slowly than the device runs them."""
    profile, workload, c = device_time.profile, device_time.workload, candidates
    passes = 3 + (c.recompute == RECOMPUTE_MODES.index("full"))
    sparse = workload.moe_layers / workload.layers
    unfused = workload.attention != "flash"
    softmax = unfused_softmax_kernels(c.micro_sequences * workload.heads // c.tensor) if unfused else 0.0
    kernels = profile.layer_kernels + 4 * (c.tensor > 1) + softmax
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
