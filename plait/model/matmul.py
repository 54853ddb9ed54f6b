"""How float32 matrices are multiplied: on processors by torch's default library (MKL on x86) or by oneDNN, on CUDA
devices in float32 or TF32. A process selects one of the two, for its own device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from plait.accelerator import has_cuda_kernels

MatmulLibrary = Literal["default", "onednn"]
_SWITCH: dict[str, MatmulLibrary] = {"none": "default", "bf16": "onednn"}
"""torch's values of the switch. "bf16" allows oneDNN to round to bfloat16 where that is faster on a processor; where it
is not, oneDNN multiplies in true float32, and only there a plan takes it (planner/derive/arithmetic.py)."""


def select_matmul_library(library: MatmulLibrary) -> None:
    """Multiply float32 matrices by this library from now on, in this process."""
    _switch().fp32_precision = next(value for value, name in _SWITCH.items() if name == library)


def select_matmul_precision(precision: Literal["float32", "tf32"]) -> None:
    """Multiply float32 matrices on CUDA devices so from now on, in this process; each choice undoes the other, and what
    a container's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE says.

    By the call that sets torch's old switch and its new one: where they disagree each product raises an error.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def selected_matmul_library() -> MatmulLibrary:
    """The library that multiplies float32 matrices in this process."""
    return _SWITCH.get(_switch().fp32_precision, "default")


def _switch() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set by the module's own class


def precision_is_set() -> bool:
    """Whether this process has been told how processors multiply float32 matrices, by any of torch's switches."""
    return _switch().fp32_precision != "none"


@contextmanager
def matmul_library(library: MatmulLibrary) -> Iterator[None]:
    """Multiply by this library within the block."""
    before = selected_matmul_library()
    select_matmul_library(library)
    try:
        yield
    finally:
        select_matmul_library(before)


def default_library_name() -> str:
    """The common name of torch's default library on this machine."""
    return "MKL" if torch.backends.mkl.is_available() else "torch's own products"


def has_onednn() -> bool:
    """Whether this torch was built with oneDNN, and the processor is one that it runs on."""
    return torch.backends.mkldnn.is_available()


def product_in_float32(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in float32 although both have 16 bits: [..., m, k] by [..., k, n]; of wider numbers the plain product. Has
    no gradient."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.dtype == wide:
        return x @ y
    if not has_cuda_kernels(x.device):
        return x.to(wide) @ y.to(wide)
    return torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=wide).unflatten(0, x.shape[:-2])


# Note [attention keeps the default library]: torch's attention on processors multiplies blocks of some 32 numbers, for
# which oneDNN makes a program each; it took 1.1 to 1.7 times as long forward, and up to 3 times as long backward. So
# where oneDNN is selected, rows long enough go another way, in large blocks (blocked_attention.py).
def attend_by_default_library(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """attend(q, k, v), whose products and whose gradient's products are the default library's, whichever is
    selected."""
    if q.device.type != "cpu" or selected_matmul_library() == "default":
        return attend(q, k, v)
    with matmul_library("default"):
        mixed = attend(*_AfterBackward.apply(q, k, v))  # type: ignore[misc]
    return _BeforeBackward.apply(mixed)  # type: ignore[return-value]


class _BeforeBackward(torch.autograd.Function):
    """The identity behind attention: its gradient comes just before that of attention."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        select_matmul_library("default")
        return grads[0]


class _AfterBackward(torch.autograd.Function):
    """The identity in front of attention: its gradient comes just after that of attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        select_matmul_library("onednn")
        return grads
