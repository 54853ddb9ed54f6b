"""`plait.Muon`: plait's Muon as a torch optimizer, for users' own programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plait.accelerator import is_accelerator
from plait.errors import PlaitError
from plait.parallel.orthogonalize import RMS_OF_ADAMW, orthogonalize
from plait.partition.matrix_owners import BATCH_NUMBERS

OrthogonalizedIn = Literal["auto", "bf16", "float32"]


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for matrices between hidden layers, scaled to the size of AdamW's updates (Liu et al.
    2025), so that AdamW's learning rates and weight decay carry over. Embeddings, heads, norms and biases belong to
    AdamW, a second optimizer.

    Nesterov's momentum, five Newton-Schulz iterations, decoupled weight decay. A weight with more than two dims, as
    a convolution's, counts as a matrix with one row for each index of its first dim. `orthogonalized_in` "auto" is
    float64 for float64 weights, else bf16 on GPUs and float32 on processors; with "bf16" the updates are those of
    `torch.optim.Muon(…, adjust_lr_fn="match_rms_adamw")`. Of weights that torch shards (DTensors, as of FSDP2) each
    rank gathers the whole matrices, a batch at a time, and updates its part; all ranks must then call `step`. Raises
    PlaitError for a weight that is no matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        orthogonalized_in: OrthogonalizedIn = "auto",
    ) -> None:
        for name, value, most in (("lr", lr, 1e6), ("weight_decay", weight_decay, 1e6), ("momentum", momentum, 1.0)):
            if not 0 <= value < most:
                raise PlaitError(f"plait.Muon: {name} = {value}; give a number of 0 or more, momentum below 1")
        if orthogonalized_in not in ("auto", "bf16", "float32"):
            raise PlaitError(
                f'plait.Muon: orthogonalized_in = "{orthogonalized_in}" is unknown; choose "auto", "bf16" or "float32"'
            )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "orthogonalized_in": orthogonalized_in,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add weights with separate options."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() < 2 or not parameter.is_floating_point():
                self.param_groups.pop()
                raise PlaitError(
                    f"plait.Muon updates matrices, and it was given a weight of shape {tuple(parameter.shape)} and "
                    f"{parameter.dtype}; give norms, biases and embeddings to a second optimizer, such as AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every weight that has a gradient; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            averaged = [self._averaged(p, group["momentum"]) for p in learning]
            for p in learning:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            for some in _batches(learning):
                dtype = _dtype(learning[some[0]], group["orthogonalized_in"])
                stack = torch.stack([_lying(_whole(averaged[number].to(dtype)).flatten(1)) for number in some])
                for number, result in zip(some, orthogonalize(stack), strict=True):
                    p, sides = learning[number], _sides(learning[number])
                    update = (result.T if sides[0] > sides[1] else result).reshape(p.shape).to(p.dtype)
                    _local(p).add_(_part_of(update, p), alpha=-group["lr"] * RMS_OF_ADAMW * max(sides) ** 0.5)
        return loss

    def _averaged(self, parameter: Tensor, momentum: float) -> Tensor:
        """The gradient after Nesterov's momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def _sides(weight: Tensor) -> tuple[int, int]:
    """Rows and columns of a weight as a matrix."""
    return weight.shape[0], prod(weight.shape[1:])


def _batches(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of weights with the same sides, dtype and device, in batches of at most BATCH_NUMBERS elements."""
    alike: dict[Any, list[int]] = {}
    for number, one in enumerate(weights):
        alike.setdefault((*sorted(_sides(one)), one.dtype, one.device), []).append(number)
    for (small, large, *_), some in alike.items():
        many = max(1, BATCH_NUMBERS // max(1, small * large))
        yield from (some[first : first + many] for first in range(0, len(some), many))


def _lying(matrix: Tensor) -> Tensor:
    """The matrix, transposed if it has more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which torch may keep a part on each rank; all of these must call it then."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every rank has whole, the part that this one keeps of `like`."""
    if not _is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, placements).to_local()


def _is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, whose module takes half a second to import: where it is not imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _dtype(parameter: Tensor, requested: OrthogonalizedIn) -> torch.dtype:
    if requested == "auto":
        if parameter.dtype == torch.float64:
            return torch.float64
        return torch.bfloat16 if is_accelerator(parameter.device) else torch.float32
    return torch.bfloat16 if requested == "bf16" else torch.float32
