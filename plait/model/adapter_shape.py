"""The shape of a low-rank adapter (LoRA, Hu et al. 2021): the linear layers that have one, its rank and its scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from typing import Any, Literal, get_args

from plait.errors import PlaitError

AdapterTarget = Literal[
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.o",
    "feedforward.gate",
    "feedforward.up",
    "feedforward.down",
]
SavedModule = Literal["embedding", "head"]
"""The vocabulary's tables, which may be trained whole beside adapters (PEFT's modules_to_save)."""
AdapterVariant = Literal["lora", "rslora"]
"""The divisor of alpha in the scale: the rank, or its root (Kalajdzievski 2023), with which large ranks keep
learning."""

Quantization = Literal["none", "nf4", "int8"]
"""The storage of layers' frozen matrices: in their compute dtype, or in blocks of four or eight bits
(quantization.py)."""
BLOCK = 64
"""Numbers per block."""
QUANTIZED_BLOCK_BYTES: Mapping[Quantization, int] = {"nf4": BLOCK // 2 + 1, "int8": BLOCK + 4}
"""Bytes per block: its codes, and its scale in eight bits or in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Two small weights A and B for each target's weight W: x @ W.T becomes x @ W.T + scale · (x @ A.T) @ B.T. Only
    these and `modules_to_save` are trained; all other weights of the model are frozen.

    Raises PlaitError for values that no adapter can have.
    """

    rank: int
    alpha: float
    targets: tuple[AdapterTarget, ...]
    variant: AdapterVariant = "lora"
    quantization: Quantization = "none"
    """Applies to all frozen matrices in layers, with an adapter or without (QLoRA)."""
    modules_to_save: tuple[SavedModule, ...] = ()
    """Tables that are trained whole, and stored with the adapter. A tied head is part of the embedding."""
    dropout: float = 0.0
    """The probability with which a number of what an adapter reads is zero in training (dropout.py)."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise PlaitError(f"an adapter's rank is {self.rank!r}; choose a whole number of at least 1")
        if not (self.alpha > 0 and isfinite(self.alpha)):
            raise PlaitError(f"an adapter's alpha is {self.alpha}; choose a number above 0")
        if self.variant not in get_args(AdapterVariant):
            raise PlaitError(f'an adapter\'s variant is {self.variant!r}; choose "lora" or "rslora"')
        if self.quantization not in get_args(Quantization):
            raise PlaitError(f'frozen weights are in {self.quantization!r}; choose "none", "nf4" or "int8"')
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise PlaitError("an adapter needs linear layers to adapt, each named once; name at least one")
        for target in self.targets:
            if target not in get_args(AdapterTarget):
                raise PlaitError(
                    f"an adapter's target is {target!r}, which is not a linear layer; choose among "
                    + ", ".join(get_args(AdapterTarget))
                )

        if not 0 <= self.dropout < 1:
            raise PlaitError(f"an adapter's dropout is {self.dropout}; choose a number from 0 to below 1")
        if unknown := set(self.modules_to_save) - set(get_args(SavedModule)):
            raise PlaitError(f"modules_to_save has {min(unknown)!r}; choose among {', '.join(get_args(SavedModule))}")

    @property
    def scale(self) -> float:
        """The factor of the product of the two weights."""
        return self.alpha / (self.rank if self.variant == "lora" else sqrt(self.rank))


def adapter_from(values: Mapping[str, Any]) -> AdapterShape:
    """The adapter's shape from parsed JSON."""
    lists = {name: tuple(values[name]) for name in ("targets", "modules_to_save") if name in values}
    return AdapterShape(**{**values, **lists})


def adapter_values(adapter: AdapterShape) -> dict[str, Any]:
    """Plain values for JSON, without the fields that earlier versions lack where they are not used."""
    values = asdict(adapter)
    later = {"quantization": "none", "modules_to_save": (), "dropout": 0.0}
    return {name: value for name, value in values.items() if name not in later or value != later[name]}


def check_adapter_in(
    adapter: AdapterShape | None,
    linear: Sequence[AdapterTarget],
    smaller_side: Callable[[AdapterTarget], int],
    head: Literal["tied", "untied"],
) -> None:
    """Raise PlaitError for an adapter on layers that a model lacks, with a rank above the smaller side of one, or with
    a separate head where it is tied; `linear` lists the model's linear layers."""
    if adapter and head == "tied" and "head" in adapter.modules_to_save:
        raise PlaitError('this model\'s head is tied to its embedding; write modules_to_save = ["embedding"]')
    for target in adapter.targets if adapter else ():
        if target not in linear:
            raise PlaitError(f"this model has no {target} to adapt; choose among {', '.join(linear)}")
        if adapter and adapter.rank > (smaller := smaller_side(target)):
            raise PlaitError(
                f"an adapter of rank {adapter.rank} is larger than the layer {target} allows: its smaller "
                f"side is {smaller}; choose a rank of at most {smaller}"
            )
