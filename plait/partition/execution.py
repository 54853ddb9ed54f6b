"""What a worker executes of a plan: all that parallelism needs to know, and nothing of why it was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plait.devices import DeviceName
from plait.layout import Layout
from plait.model.shape import ModelShape

Precision = Literal["float32", "bf16", "fp16", "float64"]
"""bf16 and fp16 compute in 16 bits from float32 weights, fp16 with a scale of losses; float64 is for proofs."""
MatmulPrecision = Literal["float32", "tf32"]
"""In what float32 matrices are multiplied on CUDA devices: TF32 rounds each factor to 10 bits of mantissa for the
tensor cores; sums stay float32."""
MatmulBackend = Literal["default", "onednn"]
"""The library by which processors multiply float32 matrices: torch's default (MKL on x86), or oneDNN; attention of
short rows keeps the default."""
Compile = Literal["off", "blocks"]
"""Whether torch.compile compiles each layer."""
GradientTransfer = Literal["float32", "bf16"]
"""The numbers in which gradients travel between ranks that sum them."""
StageTransfer = Literal["float32", "bf16"]
"""The numbers in which the stream and its gradients travel between a pipeline's stages; "float32" stands for the
stream's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArithmetic:
    """In which numbers, and by which kernels, a run computes and sends."""

    precision: Precision
    compile: Compile
    gradient_transfer: GradientTransfer = "float32"
    stage_transfer: StageTransfer = "float32"
    deterministic: bool = True
    """Whether GPUs use only kernels that give the same bits each time."""
    matmul_precision: MatmulPrecision = "float32"
    """Where `precision` is float32: in what its matrices are multiplied."""
    matmul_backend: MatmulBackend = "default"
    """The library by which processors multiply float32 matrices; chosen by measurement, kept when a run resumes."""
    host_backends: Mapping[str, MatmulBackend] = field(default_factory=dict[str, MatmulBackend])
    """The library of hosts that take another one than `matmul_backend`, by the digest of their machine."""
    orthogonalized_in: Precision = "float32"
    """Precision in which Muon orthogonalizes matrices: in float32 and fp16 runs float32 or bf16, the one that the
    devices multiply faster. fp16's range is too narrow for gradients without their scale."""
    matmul_flops: float | None = None
    """FLOP/s of the run's matrix products on one device, as measured; None where not measured."""
    matmul_error: float | None = None
    """Largest relative error of those products against float64; None where not measured."""

    @property
    def orthogonalization_precision(self) -> Precision:
        """The numbers in which Muon orthogonalizes matrices."""
        return self.orthogonalized_in if self.precision in ("float32", "fp16") else self.precision

    @property
    def product_precision(self) -> Precision | MatmulPrecision:
        """The numbers in which matrices are multiplied."""
        return self.precision if self.matmul_precision == "float32" else self.matmul_precision


WholeUpdates = Literal["none", "hidden matrices"]
"""The weights whose update is a function of the whole matrix (Muon), not of each number by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One model split over ranks by one layout, and the arithmetic that computes it."""

    layout: Layout
    shape: ModelShape
    device: DeviceName
    arithmetic: RunArithmetic
    whole_updates: WholeUpdates = "none"
    """Where ranks split gradients, such weights have buckets apart from those that are updated number by number."""
