"""What a training program makes of its devices: the shares of their rates that it reaches, what it hides behind
arithmetic, what it costs the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.machines.cluster import Cluster
from plait.planner.calibration.constants import constant, constant_fields
from plait.planner.calibration.factors import UNCALIBRATED, Calibration
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.other_programs import PLAIT_ITSELF, OtherProgram

_DEFAULTS = constant_fields("software_profile")
PROCESS_BYTES = constant("process_bytes")
"""Bytes of a worker's process on a processor beside its tensors."""
PROCESSOR_FLASH_SHARE = constant("processor_flash_share")
"""`SoftwareProfile.flash_share` on processors, as a share of the rate of large products."""

CPU_CACHE_TOKENS = int(constant("cached_tokens"))
"""Tokens of a micro-batch on a processor beyond which it outgrows the caches and is no faster."""

SendModel = Literal["by share", "ahead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareProfile:
    """The efficiency of one training program; every share lies between 0 and 1.

    The defaults (calibration/constants.toml) are physical readings and what published runs have in common; the profiles
    of other programs, fitted over whole families of their runs, are in planner/problem/program_profiles.py.
    """

    name: str
    calibration: Calibration = UNCALIBRATED
    """Factors of computing (device_time.py) and of messages (step_time.py) that earlier runs on the same machines
    taught."""
    speed: float = _DEFAULTS["speed"]
    """Speed of the software relative to the cost model: the one scalar that is fitted to a measurement."""
    product_share: float = _DEFAULTS["product_share"]
    """Share of the rate of the largest single products that a long run with real data holds."""
    fp8_share: float = _DEFAULTS["fp8_share"]
    """Share of the device's fp8 rate that is left after casts, scales and the products that stay in bf16."""
    flash_share: float = _DEFAULTS["flash_share"]
    """Share of the 16-bit peak that a fused attention kernel reaches forward, heads 128 wide, long sequence."""
    flash_lag: float = _DEFAULTS["flash_lag"]
    """How far the attention kernel lags on devices faster than an A100: 0 not at all, 1 no faster than there."""
    stream_bytes: float = _DEFAULTS["stream_bytes"]
    """Memory traffic of a layer's forward pass per token and unit of width: norms, residuals, dropout, casts."""
    inner_bytes: float = _DEFAULTS["inner_bytes"]
    """Memory traffic of the forward pass per token and unit of the feedforward's width: activation and gate."""
    score_bytes: float = _DEFAULTS["score_bytes"]
    """Traffic per attention score of the forward pass where attention is not fused, in 16 bits; in float32 twice it."""
    routed_bytes: float = _DEFAULTS["routed_bytes"]
    """Memory traffic of the forward pass per token, expert that it goes to and unit of width: sorting tokens by
    expert and back."""
    expert_share: float = _DEFAULTS["expert_share"]
    """Share of the linear layers' rate that grouped products of many experts reach."""
    logit_bytes: float = _DEFAULTS["logit_bytes"]
    """Traffic per logit, forward and backward: the loss in float32."""
    layer_kernels: float = _DEFAULTS["layer_kernels"]
    """Kernels that the host launches for one layer's forward pass; the backward pass launches twice as many."""
    sparse_kernels: float = _DEFAULTS["sparse_kernels"]
    """Launches' worth of host time that a layer of experts costs beside them: routing, and waiting for its counts."""
    launch_s: float = _DEFAULTS["launch_s"]
    """Host time to launch one kernel."""
    launch_mode: Literal["ahead", "blocking", "replayed alone"] = "ahead"
    """Whether the host launches ahead of the device, or waits for each kernel to end; or launches ahead but for a
    device that works alone, which replays recorded steps."""
    clock: Literal["throttled", "as measured"] = "throttled"
    """Whether a device that takes much power is slower in a long run than its `achievable` share says; "as measured":
    not where steps have shown that it keeps its clock."""
    gap_s: float = _DEFAULTS["gap_s"]
    """Time on the device between one kernel's last work and the next one's first."""
    micro_s: float = _DEFAULTS["micro_s"]
    """Host time that each micro-batch costs beside its kernels."""
    step_s: float = _DEFAULTS["step_s"]
    """Time that each step costs regardless of its size: the optimizer's launches, the norm, the data, the log."""
    hides_tensor: float = _DEFAULTS["hides_tensor"]
    """Share of the tensor axis' communication that runs under arithmetic."""
    hides_context: float = _DEFAULTS["hides_context"]
    hides_pipeline: float = _DEFAULTS["hides_pipeline"]
    send_model: SendModel = "by share"
    """How messages between stages are priced: `hides_pipeline` of each hidden, or, where they travel while the next
    micro-batch is computed, by who waits for which."""
    hides_gradients: float = _DEFAULTS["hides_gradients"]
    """Share of the backward pass that gradient sums may run under."""
    hides_updates: float = _DEFAULTS["hides_updates"]
    """Share of the forward pass that gathers of updated parameters may run under."""
    cpu_carries_messages: bool = False
    """Whether the processor that computes also carries what stages send each other."""
    keeps_tied_table_once: bool = False
    """Whether, in a pipeline with a tied head, only the last rank keeps the table and sends the first rank the rows of
    a step's tokens. It applies only where no other rank holds the table."""
    hides_parameters: float = _DEFAULTS["hides_parameters"]
    """Share of the arithmetic that gathers of sharded parameters may run under."""
    lasting_weights: Literal["for each pass", "by the layout", "once a step"] = "for each pass"
    """How often sharded weights are gathered: "by the layout" once a step where it splits gradients or master weights;
    "once a step" those, too, that stay gathered anyway, vocabulary tables and all of them in a pipeline."""
    hides_scatters: bool = True
    """Whether reduce-scatters of sharded parameters' gradients may run under arithmetic, too."""
    hides_experts: float = _DEFAULTS["hides_experts"]
    """Share of the tokens' way to experts on other nodes that runs under arithmetic."""
    expert_sends: Literal["once a node", "once an expert"] = "once a node"
    """How often a token travels to experts that lie on one other node (expert_traffic.py, Note [once a node])."""
    selective_kept: float = _DEFAULTS["selective_kept"]
    """Share of a layer's activations that selective recomputation keeps, attention's scores aside."""
    layers_ahead: float = _DEFAULTS["layers_ahead"]
    """Layers whose sharded parameters lie gathered at once."""
    stream_held_bytes: float = _DEFAULTS["stream_held_bytes"]
    """Kept for the backward pass per token and unit of width by norms and products' inputs (10 with dropout)."""
    gradient_bytes: int = _DEFAULTS["gradient_bytes"]
    """Bytes of one gradient as it is kept, and as it is summed over ranks unless `gradient_transfer` halves that."""
    frees_gradients: bool = False
    """Whether gradients are freed by each update; those summed over copies lie in flat buckets all the time."""
    gradient_transfer: Literal["float32", "bf16"] = "float32"
    """The numbers in which gradients travel; float32 stands for those in which they are kept."""
    stage_transfer: Literal["float32", "bf16", "as multiplied"] = "as multiplied"
    """The numbers that the stages of a pipeline send each other."""
    weight_bytes: int = _DEFAULTS["weight_bytes"]
    """Bytes of a weight as a rank keeps it to compute with; 0: as it is multiplied. In 4 bytes it is the optimizer's
    own, which else keeps another one."""
    gathered_table_bytes: float = _DEFAULTS["gathered_table_bytes"]
    """Bytes of a gathered weight of a vocabulary table where parameters are sharded; 0: half of one that is multiplied,
    as where tables are gathered one at a time and for a part of the step."""
    rounded_weights: Literal["of no layer", "of all layers"] = "of no layer"
    """The layers whose rounded weights are kept from the forward to the backward pass."""
    head_gradient: Literal["among the others", "in the loss"] = "among the others"
    """Where the head's gradient is computed: with the other gradients, or in the loss, concurrently with those."""
    update_bytes: float = _DEFAULTS["update_bytes"]
    """Memory traffic of AdamW per parameter that a rank updates."""
    state_bytes: int = _DEFAULTS["state_bytes"]
    """Bytes of AdamW's state per parameter: float32 master weight and two moments."""
    logit_copies_bytes: float = _DEFAULTS["logit_copies_bytes"]
    """Memory held per logit at the loss: 16-bit, float32 copy and its gradient."""
    logits_at_once: float = inf
    """Largest number of logits held at a time; infinite where all of a micro-batch exist at once."""
    fixed_bytes: float = _DEFAULTS["fixed_bytes"]
    """Memory of the allocator besides the model's tensors: communication buffers, workspaces."""
    outside_bytes: float = _DEFAULTS["outside_bytes"]
    """Memory outside the program's allocator: the device's context, kernels, communication buffers."""
    shards_over: Literal["shard", "shard and context"] = "shard and context"
    """The ranks among which sharded states are split."""
    other: OtherProgram = PLAIT_ITSELF
    """Things that the program does and plait does not."""
    memory_model: Literal["by share", "followed"] = "by share"
    """How bytes are found: from shares and formulas that many programs obey, or by following plait's own step on
    processors from tensor to tensor."""

    cpu_cache_tokens: float = inf
    """Tokens of a micro-batch beyond which it outgrows a processor's caches and is no faster; infinite on GPUs and
    TPUs."""

    @property
    def gradient_message_bytes(self) -> int:
        """Bytes of one gradient on its way."""
        return 2 if self.gradient_transfer == "bf16" else self.gradient_bytes

    def stage_message_bytes(self, multiplied: int) -> int:
        """Bytes of one number between stages, where products multiply numbers of this many."""
        return {"float32": 4, "bf16": 2}.get(self.stage_transfer, multiplied)

    def state_bytes_with(self, moments: int) -> int:
        """Bytes of optimizer state per parameter with this many float32 moments, AdamW having two."""
        return self.state_bytes - 4 * (2 - moments)

    def update_bytes_with(self, moments: int) -> float:
        """Memory traffic of an update per parameter: each moment is read and written in float32."""
        return self.update_bytes - 8 * (2 - moments)

    @property
    def uncompiled(self) -> SoftwareProfile:
        """This program with layers that are not compiled: each operation is a kernel and passes over memory."""
        return replace(self, launch_mode="ahead", **constant_fields("software_profile_uncompiled"))

    def for_cluster(self, cluster: Cluster) -> SoftwareProfile:
        """The profile of the same program on this cluster.

        On processors the kernels are others, memory outside the tensors is only the process itself, and torch waits
        for the reduce-scatters of sharded parameters. Where a probe timed messages, each one is simulated.
        """
        here = replace(self, send_model="ahead") if cluster.measured else self
        if any(island.device.kind != "cpu" for island in cluster.islands):
            return here
        return replace(
            here,
            product_share=_DEFAULTS["product_share"],
            flash_share=PROCESSOR_FLASH_SHARE,
            logit_bytes=_DEFAULTS["logit_bytes"],
            launch_s=_DEFAULTS["launch_s"],
            launch_mode="ahead",
            step_s=_DEFAULTS["step_s"],
            fixed_bytes=0.0,
            outside_bytes=PROCESS_BYTES,
            memory_model="followed",
            keeps_tied_table_once=self.gradient_transfer == "float32",
            cpu_carries_messages=True,
            hides_scatters=False,
            cpu_cache_tokens=CPU_CACHE_TOKENS,
        )


def splits_weights(c: Candidates, profile: SoftwareProfile) -> NDArray[np.bool_]:
    """Mask of candidates whose ranks hold rows of the weights and gather the others'. Other programs that split
    gradients hold all weights."""
    return c.is_fully_sharded if profile.lasting_weights == "for each pass" else c.gathers_weights


def keeps_weights_gathered(c: Candidates, profile: SoftwareProfile) -> NDArray[np.bool_]:
    """Mask of candidates that split weights and keep all layers gathered from a step's first forward to its last
    backward."""
    lasts = (c.pipeline > 1) & (profile.lasting_weights == "once a step") | ~c.is_fully_sharded
    return splits_weights(c, profile) & lasts & (profile.lasting_weights != "for each pass")


# plait's own: no measurement of it went in yet but what its code does (loss in pieces, sums under the backward pass,
# shards over their own axis alone); its kernels are torch's, so it reaches with them what other torch programs do.
PLAIT_PROFILE = SoftwareProfile(
    name="plait",
    shards_over="shard",
    head_gradient="in the loss",
    frees_gradients=True,
    rounded_weights="of all layers",
    # Tables and pipelines are gathered once a step as well; priced as if they were not, so a little too dear.
    lasting_weights="by the layout",
    stage_transfer="float32",
    expert_sends="once an expert",
    launch_mode="replayed alone",
    clock="as measured",
    **constant_fields("software_profile_plait"),
)
